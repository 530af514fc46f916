"""What callers send: the bytes of a request, and JSON values that are to be written again. It knows no dialect."""

from __future__ import annotations

import math
from typing import Any

from aiohttp import web

from turnloom.errors import BadRequest, BodyTooLarge

MAX_BODY = 32 * 2**20
"""Bytes; the limit of Anthropic's own Messages API."""

MAX_DEPTH = 64
"""Lists and objects inside each other in what a caller has us keep."""


async def read_body(http: web.Request) -> bytes:
    """The whole body, decompressed. Raises BodyTooLarge, and BadRequest where it is not what its headers say."""
    try:
        return await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"the request body is larger than {MAX_BODY} bytes") from error
    except web.RequestPayloadError as error:
        http.content.feed_eof()  # else the server reads on, to skip the rest, and meets the same error outside any handler
        encoding = http.headers.get("Content-Encoding")
        why = f"it is not valid {encoding!r}, as its Content-Encoding says" if encoding else "it is cut off or badly framed"
        raise BadRequest(f"the request body cannot be read: {why}") from error


def check_json(value: Any, depth: int = 0) -> None:
    """Raises ValueError for what some reader of our JSON could not hold: NaN, integers beyond 64 bits, deep nesting, other types."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError("an integer is outside 64 bits; write it as a string")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("NaN and infinity are not JSON")
    elif isinstance(value, list | tuple):
        for item in value:
            check_json(item, depth + 1)
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            key.encode()
            check_json(item, depth + 1)
    else:
        raise ValueError(f"a {type(value).__name__} is not JSON")
