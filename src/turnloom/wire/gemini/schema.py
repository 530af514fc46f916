"""Google's schema dialect as JSON Schema.

`parameters` and `responseSchema` are written in a subset of OpenAPI 3.0 schemas
(https://ai.google.dev/api/caching#Schema): types in capitals, `nullable`, snake
case allowed, lengths that may be strings. A model is shown JSON Schema whatever
its client wrote, so that one tool is one text. What Google's dialect has no
other word for is left as it is: a plain JSON Schema comes out unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from turnloom.errors import BadRequest
from turnloom.wire import fields

_DEEPEST = 200
_SHOWN = 40
"""Characters of a property's name in a path. A path is spelled for each of a schema's places, so none may be long."""
_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_NAMES = {
    "any_of": "anyOf",
    "additional_properties": "additionalProperties",
    "max_items": "maxItems",
    "min_items": "minItems",
    "max_length": "maxLength",
    "min_length": "minLength",
    "max_properties": "maxProperties",
    "min_properties": "minProperties",
    "prefix_items": "prefixItems",
    "property_ordering": "propertyOrdering",
    "defs": "$defs",
    "ref": "$ref",
}
_COUNTS = frozenset({"maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties"})
_LEFT_OUT = frozenset({"nullable", "propertyOrdering", "example"})


def json_schema(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same schema as JSON Schema, its properties in `propertyOrdering` where that is given.

    Raises BadRequest for a type that there is not, and beyond 200 levels.
    """
    return _schema(schema, where, _DEEPEST)


def _schema(schema: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
    if depth == 0:
        raise BadRequest(f"{where}: nests schemas deeper than {_DEEPEST} levels")
    given = {_NAMES.get(key, key): value for key, value in schema.items()}
    plain: dict[str, Any] = {}
    for key, value in given.items():
        if key in _LEFT_OUT or (key == "format" and value == "enum"):
            continue
        if key == "type":
            if (kind := _type(value, where)) is not None:
                plain[key] = kind
        elif key in _COUNTS:
            plain[key] = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        else:
            plain[key] = _inner(key, value, f"{where}.{key[:_SHOWN]}", depth - 1)
    _order(plain, given.get("propertyOrdering"))
    if "example" in given:
        plain.setdefault("examples", [given["example"]])
    return _nullable(plain) if given.get("nullable") is True else plain


def _inner(key: str, value: Any, where: str, depth: int) -> Any:
    """The value of a keyword that holds schemas, each of them read; of any other as it is."""
    reader = _HOLDERS.get(key)
    return value if reader is None else reader(value, where, depth)


def _one(value: Any, where: str, depth: int) -> Any:
    return _schema(value, where, depth) if isinstance(value, dict) else value


def _several(value: Any, where: str, depth: int) -> Any:
    return [_one(v, f"{where}.{i}", depth) for i, v in enumerate(value)] if isinstance(value, list) else value


def _named(value: Any, where: str, depth: int) -> Any:
    return {k: _one(v, f"{where}.{k[:_SHOWN]}", depth) for k, v in value.items()} if isinstance(value, dict) else value


_HOLDERS: Mapping[str, Callable[[Any, str, int], Any]] = {
    "items": _one,
    "additionalProperties": _one,
    "not": _one,
    "anyOf": _several,
    "oneOf": _several,
    "allOf": _several,
    "prefixItems": _several,
    "properties": _named,
    "$defs": _named,
    "definitions": _named,
}


def _type(value: Any, where: str) -> Any:
    """Google's name of a type in lower case; None for the one that says nothing."""
    if isinstance(value, list):
        return [_type(each, where) for each in value]
    if value == "TYPE_UNSPECIFIED" or value is None:
        return None
    if not isinstance(value, str) or (kind := value.lower()) not in _TYPES:
        raise BadRequest(f"{where}.type: {fields.shown(value)} is no type; use one of {', '.join(sorted(_TYPES))}")
    return kind


def _order(schema: dict[str, Any], ordering: Any) -> None:
    properties = schema.get("properties")
    if isinstance(properties, dict) and isinstance(ordering, list):
        first = {name: properties[name] for name in ordering if isinstance(name, str) and name in properties}
        schema["properties"] = {**first, **{k: v for k, v in properties.items() if k not in first}}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    elif kind is None and isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema
