"""Reading the fields of a request body: each function checks one thing and names the field that is wrong."""

from __future__ import annotations

import base64
import binascii
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from turnloom.errors import BadRequest
from turnloom.wire.contract import MAX_STOP_CHARS, MAX_STOPS, Reading

MAX_MESSAGES = 20_000
MAX_PARTS = 4096
"""Parts of one message, or of one tool result."""
MAX_TOOLS = 4096
MAX_MODEL = 256
"""Characters of a model's name, which every piece of a stream repeats."""


def string(fields: Mapping[str, Any], key: str, where: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"{at(where, key)}: must be a string")
    return value


def optional_string(fields: Mapping[str, Any], key: str, where: str) -> str:
    """ "" where the field is absent or null."""
    return "" if fields.get(key) is None else string(fields, key, where)


def boolean(fields: Mapping[str, Any], key: str, default: bool) -> bool:
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{key}: must be true or false")
    return value


def positive(fields: Mapping[str, Any], key: str, where: str = "") -> int | None:
    """An integer of at least 1; None where the field is absent or null. JSON has one kind of number: 8.0 is 8."""
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"{at(where, key)}: must be an integer of at least 1")
    return value


def items(value: Any, where: str, most: int) -> list[Any]:
    """The list at `where`; empty where it is absent or null."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest(f"{where}: must be a list")
    return at_most(most, value, where)


def objects(value: Any, where: str, most: int) -> list[dict[str, Any]]:
    """As `items`, of JSON objects."""
    found = items(value, where, most)
    for i, item in enumerate(found):
        if not isinstance(item, dict):
            raise BadRequest(f"{where}.{i}: must be an object")
    return found


def at_most(most: int, values: list[Any], where: str) -> list[Any]:
    if len(values) > most:
        raise BadRequest(f"{where}: has {len(values)} items; at most {most} are supported")
    return values


def stops(value: Any, where: str) -> tuple[str, ...]:
    """Stop strings: one, or a list of them."""
    found = [value] if isinstance(value, str) else items(value, where, MAX_STOPS)
    for i, each in enumerate(found):
        if not isinstance(each, str) or not each:
            raise BadRequest(f"{where}.{i}: must be a string that is not empty")
        if len(each) > MAX_STOP_CHARS:
            raise BadRequest(f"{where}.{i}: has {len(each)} characters; at most {MAX_STOP_CHARS} are supported")
    return tuple(found)


def only(refs: Iterable[str]) -> str:
    """The one reference among those that parts of a message carry; "" where there is none, or they contradict each other."""
    found = {ref for ref in refs if ref}
    return found.pop() if len(found) == 1 else ""


def image(reading: Reading, media_type: str, data: str, where: str) -> str:
    """The placeholder of an image that came as base64 `data`, or by address where that is empty. Raises BadRequest where refused.

    The media type is the client's word, so only its plain characters are repeated.
    """
    if reading.images == "refuse":
        raise BadRequest(
            f"{where}: images and files are not supported, this model reads text only; leave it out, "
            "or have the gateway put a placeholder in its place (--images placeholder)"
        )
    kind = "".join(c for c in media_type if c.isascii() and (c.isalnum() or c in "/+.-"))[:40] or "image"
    return f"[{kind}, {_size(data)}not shown]"


def _size(data: str) -> str:
    try:
        return f"{len(base64.b64decode(data, validate=True))} bytes, " if data else ""
    except (binascii.Error, ValueError):
        return ""


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def shown(value: Any) -> str:
    """A value as an error shows it: what is long or deep is cut."""
    return _REPR.repr(value)


def at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
