"""Tools as gpt-oss was taught them: a TypeScript namespace made from JSON schemas. Pure; writes text, never tokens.

The rules are those of the `openai-harmony` package, whose output this equals
character for character (`tests/render/test_harmony.py` compares them on random schemas).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from turnloom.errors import RenderError
from turnloom.types import Tool

_SCALARS = {"number": "number", "integer": "number", "boolean": "boolean"}


def tools_section(tools: Sequence[Tool]) -> str:
    """The `# Tools` section with the namespace `functions`. Raises RenderError when a schema cannot be read or is nested too deeply."""
    lines = ["# Tools", "", "## functions", "", "namespace functions {", ""]
    for tool in tools:
        lines += [f"// {line}" for line in _lines(tool.description)]
        try:
            schema = orjson.loads(tool.parameters) if tool.parameters else None
            takes = "" if schema is None else f"_: {_type(schema, '')}"
        except (orjson.JSONDecodeError, RecursionError) as error:
            raise RenderError(f"the parameters of the tool {tool.name!r} cannot be written for the model: {error}") from error
        lines += [f"type {tool.name} = ({takes}) => any;", ""]
    return "\n".join([*lines, "} // namespace functions"])


def _type(schema: Any, indent: str) -> str:
    """The TypeScript type of a JSON schema; `any` for what has none."""
    if not isinstance(schema, Mapping):
        return "any"
    variants, kind = schema.get("oneOf"), schema.get("type")
    if isinstance(variants, list):
        return "".join(f"\n{indent} | {_nullable(v, indent + '   ')}{_note(_comments(v))}" for v in variants)
    if isinstance(kind, list) and (kinds := [k for k in kind if isinstance(k, str)]):
        return " | ".join("number" if k == "integer" else k for k in kinds)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        return " | ".join(f'"{value}"' for value in _strings(schema.get("enum"))) or "string"
    return _SCALARS.get(kind, "any") if isinstance(kind, str) else "any"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    properties, required = schema.get("properties"), set(_strings(schema.get("required")))
    head = _above(indent, schema.get("description"))
    inner = ""
    for name, value in properties.items() if isinstance(properties, dict) else ():
        inner += _property(name if name in required else f"{name}?", value, indent)
    return f"{head}{{\n{inner}{indent}}}"


def _property(name: str, schema: Any, indent: str) -> str:
    """One property with its comments; `name` carries its question mark."""
    about = schema if isinstance(schema, Mapping) else {}
    title, examples = about.get("title"), about.get("examples")
    text = f"{indent}// {title}\n{indent}//\n" if isinstance(title, str) else ""
    if "oneOf" not in about:
        text += _above(indent, about.get("description"))
    if isinstance(examples, list) and examples:
        text += f"{indent}// Examples:\n" + "".join(f'{indent}// - "{example}"\n' for example in _strings(examples))
    if isinstance(about.get("oneOf"), list):
        return text + _union(name, about, indent)
    default = "" if "oneOf" in about else _note(_default(about))
    return f"{text}{indent}{name}: {_nullable(schema, indent + '    ')},{default}\n"


def _union(name: str, schema: Mapping[str, Any], indent: str) -> str:
    """A property of several types, one a line. Its description goes above, unless the first type says the same."""
    variants, description = schema["oneOf"], schema.get("description")
    first = variants[0].get("description") if variants and isinstance(variants[0], Mapping) else None
    above = "" if description == first else _above(indent, description)
    text = above + "".join(f"{indent}// {note}\n" for note in _default(schema)) + f"{indent}{name}:\n"
    for i, variant in enumerate(variants):
        own = variant if isinstance(variant, Mapping) else {}
        said = own.get("description")
        notes = list(_default(own))
        if isinstance(said, str) and said != description and not (i == 0 and above):
            notes.insert(0, said)
        text += f"{indent} | {_nullable(variant, indent + '   ')}{_note(notes)}\n"
    return f"{text}{indent},\n"


def _nullable(schema: Any, indent: str) -> str:
    written = _type(schema, indent)
    nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{written} | null" if nullable and "null" not in written else written


def _comments(schema: Any) -> Iterator[str]:
    """What stands after a type that is one of several and no property's."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(schema.get("description"), str):
        yield schema["description"]
    if "default" in schema:
        default = schema["default"]
        plain = isinstance(default, str) and not _has_enum(schema)
        yield f'default: "{default}"' if plain else f"default: {_json(default)}"


def _default(schema: Mapping[str, Any]) -> Iterator[str]:
    if "default" in schema:
        default = schema["default"]
        if isinstance(default, str):
            yield f"default: {default}" if _has_enum(schema) else f'default: "{default}"'
        else:
            yield f"default: {_json(default)}"


def _note(comments: Iterable[str]) -> str:
    given = list(comments)
    return f" // {' '.join(given)}" if given else ""


def _above(indent: str, description: Any) -> str:
    return f"{indent}// {description}\n" if isinstance(description, str) else ""


def _has_enum(schema: Mapping[str, Any]) -> bool:
    return isinstance(schema.get("enum"), list) and bool(schema["enum"])


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def _lines(text: str) -> list[str]:
    *ended, last = text.split("\n")
    return [line.removesuffix("\r") for line in ended] + ([last] if last else [])


def _json(value: Any) -> str:
    """Compact JSON; a float's exponent has no plus sign."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_json(key)}:{_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    written = orjson.dumps(value).decode()
    return written.replace("e+", "e") if isinstance(value, float) else written
