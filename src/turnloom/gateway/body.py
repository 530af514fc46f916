"""What callers send: the bytes of a request, and JSON values that are to be written again. It knows no dialect."""

from __future__ import annotations

import asyncio
import math
import zlib
from typing import Any

import zstandard
from aiohttp import web

from turnloom.errors import BadRequest, BodyTooLarge
from turnloom.gateway.request_limits import DEFAULT_LIMITS, RequestLimits, limits_of
from turnloom.wire.shape import check_shape

MAX_BODY = DEFAULT_LIMITS.body_bytes
"""Bytes, where nobody sets another limit."""

MAX_DEPTH = 64
"""Lists and objects inside each other in what a caller has us keep."""

_INLINE = 64 * 1024
"""A body this large is decompressed and looked through in less than a millisecond; larger ones are in a thread."""

_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_WINDOW = 32 * 2**20
"""Bytes that a zstd frame may have its reader keep."""
_SLICE = 256
"""Compressed bytes that become at most 8 MiB."""


async def read_body(http: web.Request, *, admin: bool = False) -> bytes:
    """The whole body, decompressed, its JSON within the limits but not parsed.

    Raises BodyTooLarge, and BadRequest where it is not what its headers say, comes
    too slowly, or is beyond another limit.
    """
    limits = limits_of(http)
    most = limits.admin_bytes if admin else limits.body_bytes
    encoding = http.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "zstd", *_WBITS):
        raise BadRequest(
            f"the request body is encoded as {encoding[:40]!r}, which is not supported; send gzip, deflate, zstd or plain JSON"
        )
    raw = await _received(http, limits, most)
    if len(raw) <= _INLINE and encoding in ("", "identity"):
        return _looked_through(raw, encoding, limits, most)
    return await asyncio.to_thread(_looked_through, raw, encoding, limits, most)


async def _received(http: web.Request, limits: RequestLimits, most: int) -> bytes:
    if (http.content_length or 0) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in http.content.iter_any():
                body += piece
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError as error:
        http.protocol.close()
        http.content.feed_eof()  # else the server waits for the rest before it closes
        raise BadRequest(f"the request body did not come within {limits.body_seconds:g} s; send it faster, or less") from error
    except web.RequestPayloadError as error:
        http.content.feed_eof()  # else the server reads on, to skip the rest, and meets the same error outside any handler
        raise BadRequest("the request body cannot be read: it is cut off or badly framed") from error
    return bytes(body)


def _looked_through(raw: bytes, encoding: str, limits: RequestLimits, most: int) -> bytes:
    body = decompressed(raw, encoding, most) if encoding not in ("", "identity") else raw
    check_shape(body, depth=limits.depth, values=limits.values)
    return body


def decompressed(raw: bytes, encoding: str, most: int) -> bytes:
    """What `gzip`, `deflate` or `zstd` bytes hold: one member or frame, no more than `most` bytes of it are ever made.

    Raises BodyTooLarge where it holds more, BadRequest where it is not that, is cut off, or more bytes follow it.
    """
    try:
        body, whole = _unzstd(raw, most) if encoding == "zstd" else _inflated(raw, _WBITS[encoding], most)
    except (zlib.error, zstandard.ZstdError) as error:
        raise _not_valid(encoding) from error
    if len(body) > most:
        raise _too_large(most)
    if not whole:
        raise _not_valid(encoding)
    return body


def _inflated(raw: bytes, wbits: int, most: int) -> tuple[bytes, bool]:
    """(at most one byte more than `most`, whether that is all and all is there). Some write `deflate` without zlib's header."""
    bare = wbits == 15 and raw[:1] and raw[0] & 15 != 8
    inflater = zlib.decompressobj(-15 if bare else wbits)
    body = inflater.decompress(raw, most + 1)
    return body, inflater.eof and not inflater.unused_data


def _unzstd(raw: bytes, most: int) -> tuple[bytes, bool]:
    """As `_inflated`. A block of four bytes may hold 128 KiB, so little is given to the reader at a time."""
    inflater = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()
    body, start = bytearray(), 0
    while start < len(raw) and not inflater.eof and len(body) <= most:
        body += inflater.decompress(raw[start : start + _SLICE])
        start += _SLICE
    return bytes(body), inflater.eof and not inflater.unused_data and start >= len(raw)


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {most} bytes")


def _not_valid(encoding: str) -> BadRequest:
    return BadRequest(f"the request body cannot be read: it is not valid {encoding!r}, as its Content-Encoding says")


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
