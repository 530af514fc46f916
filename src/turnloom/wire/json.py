"""Reading and writing JSON at the wire: fast where it can be, exact in integers, and forgiving of what JavaScript writes.

What the model wrote is never parsed on its way out: `spliced` puts it into the bytes as it stands.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import orjson

from turnloom.errors import BadRequest

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL)
"""One escape of a JSON string, or the two of a surrogate pair."""

_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
"""Every integer that orjson rounds to a double, those outside -2**63..2**64-1, has as many digits."""


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body, its integers exact. Raises BadRequest.

    JavaScript clients cut strings between the halves of a surrogate pair; such a
    lone half becomes U+FFFD, since no tokenizer can encode it.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if b"\\u" not in body:
            raise BadRequest(f"the request body is not valid JSON: {error}") from error
        value = _read_slowly(body)
    else:
        if _LONG in body.translate(_ZEROS):
            value = _read_slowly(body)
    if not isinstance(value, dict):
        raise BadRequest("the request body must be a JSON object")
    return value


def _read_slowly(body: bytes) -> Any:
    try:
        return _whole(json.loads(body.decode(), parse_constant=_no_constant, parse_int=_integer, parse_float=_finite))
    except RecursionError as error:
        raise BadRequest("the request body nests JSON too deep") from error
    except ValueError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _integer(text: str) -> int:
    _finite(text)
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]}… is beyond what a double holds")
    return value


def _whole(value: Any) -> Any:
    """The value with every lone surrogate replaced."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(v) for v in value]
    if isinstance(value, dict):
        return {_whole(k): _whole(v) for k, v in value.items()}
    return value


def text_of(value: Any) -> str:
    """JSON text of a parsed value, key order kept. Raises BadRequest for nesting deeper than 254 levels."""
    try:
        try:
            return orjson.dumps(value).decode()
        except orjson.JSONEncodeError:
            return orjson.dumps(_long_integers_spelled(value)).decode()
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise BadRequest("the request nests JSON deeper than 254 levels") from error


def _long_integers_spelled(value: Any) -> Any:
    """The value with every integer that orjson refuses, for its length, as its digits."""
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64:
        return spliced(str(value))
    if isinstance(value, list):
        return [_long_integers_spelled(v) for v in value]
    if isinstance(value, dict):
        return {k: _long_integers_spelled(v) for k, v in value.items()}
    return value


def whole_text(text: str) -> str:
    """JSON text that any strict reader takes: lone surrogates, and the escapes of them, as U+FFFD; every other character as it is."""
    if "\\u" in text:
        text = _ESCAPE.sub(lambda found: "\\ufffd" if found["lone"] else found[0], text)
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def spliced(text: str) -> orjson.Fragment:
    """A value for `write` that is JSON text already, and stands in its output as it is."""
    return orjson.Fragment(text)


def write(value: Any) -> bytes:
    """JSON bytes. Lone surrogates in model output are written as U+FFFD, and integers of any length as their digits."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return orjson.dumps(_long_integers_spelled(_whole(value)))
