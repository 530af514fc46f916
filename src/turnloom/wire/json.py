"""Reading and writing JSON at the wire: fast where it can be, and forgiving of what JavaScript writes."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from turnloom.errors import BadRequest

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises BadRequest.

    JavaScript clients cut strings between the halves of a surrogate pair; such a
    lone half becomes U+FFFD, since no tokenizer can encode it.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        value = _read_slowly(body, error)
    if not isinstance(value, dict):
        raise BadRequest("the request body must be a JSON object")
    return value


def _read_slowly(body: bytes, error: orjson.JSONDecodeError) -> Any:
    if b"\\u" not in body:
        raise BadRequest(f"the request body is not valid JSON: {error}") from error
    try:
        return _whole(json.loads(body, parse_constant=_no_constant))
    except (ValueError, RecursionError) as second:
        raise BadRequest(f"the request body is not valid JSON: {second}") from second


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


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
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        if "ecursion" in str(error):
            raise BadRequest("the request nests JSON deeper than 254 levels") from error
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def whole_text(text: str) -> str:
    """JSON text with the escapes of lone surrogates as U+FFFD, which strict readers refuse otherwise; any other text as it is."""
    return text_of(read_object(text.encode("utf-8", "surrogatepass"))) if _SURROGATE.search(text) else text


def write(value: Any) -> bytes:
    """JSON bytes. Lone surrogates in model output are written as U+FFFD."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return orjson.dumps(_whole(value))
