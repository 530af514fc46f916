"""Pieces of JSON Schema 2020-12, in the words that the dialects' schemas are written in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turnloom.wire.contract import MAX_STOP_CHARS, MAX_STOPS

Schema = dict[str, Any]

READ_PAST = "x-read-past"
"""Marks what is good to send but not insisted on: a value of another shape counts as absent."""

EMPTY: tuple[Any, ...] = ("", 0, False, [], {})

ANY: Schema = {}
NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
BOOLEAN: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
OBJECT: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 1}
JSON_SCHEMA: Schema = {"type": "object", "description": "A JSON Schema; nested at most 254 levels deep."}


@dataclass(frozen=True, slots=True)
class Shapes:
    """One dialect's schemas. `events` says in words what its stream holds."""

    request: Schema
    reply: Schema
    events: str
    count: Schema
    models: Schema
    model: Schema
    error: Schema


def said(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def maybe(schema: Schema) -> Schema:
    """null counts as absent."""
    return {"anyOf": [schema, NULL]} if not isinstance(schema.get("type"), str) else {**schema, "type": [schema["type"], "null"]}


def loose(schema: Schema) -> Schema:
    return {**schema, READ_PAST: True}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def is_(*values: Any) -> Schema:
    return {"const": values[0]} if len(values) == 1 else {"enum": list(values)}


def listed(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, **({"minItems": least} if least else {})}


def record(fields: dict[str, Schema], *required: str) -> Schema:
    """An object that has at least the `required` fields; all of them where none is named."""
    return {"type": "object", "properties": fields, "required": list(required or fields)}


def some(fields: dict[str, Schema]) -> Schema:
    """An object that may have these fields."""
    return {"type": "object", "properties": fields}


def tagged(kind: str, fields: dict[str, Schema], *optional: str, tag: str = "type") -> Schema:
    """An object whose `tag` is `kind`; each field is required but the optional ones."""
    return record({tag: is_(kind), **fields}, tag, *(name for name in fields if name not in optional))


def refused(why: str, *accepted: Any) -> Schema:
    """A field that may be sent with nothing in it."""
    return {"enum": [None, *accepted], "description": f"Refused with a 400: {why}."}


def with_text(parts: Schema, filled: Schema) -> Schema:
    """Content in which something must be said: a string that is not empty, or parts of which one is."""
    return either(SOME_TEXT, {**parts, "contains": filled})


STOPS = said(
    maybe(either({**SOME_TEXT, "maxLength": MAX_STOP_CHARS}, listed({**SOME_TEXT, "maxLength": MAX_STOP_CHARS}, MAX_STOPS))),
    "The reply ends before one of them.",
)
SAMPLED = "Sampling parameters are read past: the session pins them. So are all fields that are not named here."
NOT_FORCED = "A call cannot be forced: that is refused with a 400."
