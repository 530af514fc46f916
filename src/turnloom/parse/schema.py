"""Typing of a parameter that was written as bare text, by the tool's JSON Schema. Does not validate.

The rule, for a text and the types its schema allows:

- only strings allowed, or the schema says nothing: the text itself, less one framing newline on each side
  in a format that frames its values so;
- else, when the text is strict JSON of an allowed type other than string: that JSON, spelled as written;
- else, when a string is allowed: the text as above;
- else, `True`, `False` and `None` where a boolean or null is allowed: chat templates print those values so;
- else it cannot be read, and the call is malformed. A string in the place of a number would be a repair.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from turnloom.parse import strict_json

STRING = frozenset({"string"})

PRINTED = {"True": "true", "False": "false", "None": "null"}
_TYPES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_MAX_DEPTH = 32


def load(parameters: str) -> Mapping[str, object]:
    """A tool's schema; empty where it is not the JSON text of an object."""
    try:
        schema = json.loads(parameters)
    except (ValueError, RecursionError):
        return {}
    return schema if isinstance(schema, dict) else {}


def types_of(parameter: str, root: Mapping[str, object]) -> frozenset[str]:
    """The JSON types that the tool schema `root` allows for one parameter; strings where it does not say."""
    properties = root.get("properties")
    schema = properties.get(parameter) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = root.get("additionalProperties")
    return _Types(root).of(schema, 0) or STRING


def encode(text: str, allowed: frozenset[str], *, framed: bool = True) -> str | None:
    """The JSON text of the value that `text` is, by the module's rule. None: it cannot be read."""
    string = unframe(text) if framed else text
    if allowed == STRING:
        return strict_json.quote(string)
    bare = text.strip(" \t\n\r")
    if _allows(strict_json.kind(bare), bare, allowed):
        return bare
    if "string" in allowed:
        return strict_json.quote(string)
    printed = PRINTED.get(bare)
    return printed if printed and strict_json.kind(printed) in allowed else None


def unframe(text: str) -> str:
    """`text` less at most one newline on each side."""
    return text.removeprefix("\n").removesuffix("\n")


def _allows(kind: str | None, text: str, allowed: frozenset[str]) -> bool:
    if kind is None or kind == "string":
        return False
    if kind == "integer":
        return "integer" in allowed or "number" in allowed
    if kind == "number" and "number" not in allowed:
        return "integer" in allowed and float(text).is_integer()
    return kind in allowed


class _Types:
    """One walk over a schema. Each reference is followed once, so a schema that names itself ends."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        self._followed: set[str] = set()

    def of(self, schema: object, depth: int) -> frozenset[str] | None:
        """None: the schema does not say."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        found = _own_types(schema)
        if found is None and isinstance(schema.get("$ref"), str):
            found = self._ref(str(schema["$ref"]), depth)
        for word in ("anyOf", "oneOf"):
            if found is None and isinstance(schema.get(word), list):
                found = frozenset[str]().union(*(self._or_string(choice, depth) for choice in schema[word]))
        if found is None and isinstance(schema.get("allOf"), list):
            for part in schema["allOf"]:
                types = self.of(part, depth + 1)
                found = found & types if found and types else found or types
        return found | {"null"} if found and schema.get("nullable") is True else found

    def _or_string(self, schema: object, depth: int) -> frozenset[str]:
        found = self.of(schema, depth + 1)
        return STRING if found is None else found

    def _ref(self, ref: str, depth: int) -> frozenset[str] | None:
        if ref in self._followed:
            return frozenset()
        self._followed.add(ref)
        return self.of(_resolve(ref, self._root), depth + 1)


def _own_types(schema: Mapping[object, object]) -> frozenset[str] | None:
    """What enum, const or type say, or the words that only one type has."""
    if isinstance(values := schema.get("enum"), list):
        return frozenset(strict_json.kind_of(value) for value in values)
    if "const" in schema:
        return frozenset({strict_json.kind_of(schema["const"])})
    if (named := schema.get("type")) is not None:
        names = named if isinstance(named, list) else [named]
        return frozenset(str(name).lower() for name in names) & _TYPES or None
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else None


def _resolve(ref: str, root: Mapping[str, object]) -> object:
    """The schema that a local JSON pointer (`#/$defs/Name`) names, or None."""
    schema: object = root
    head, *steps = ref.split("/")
    if head != "#":
        return None
    for step in steps:
        schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema
