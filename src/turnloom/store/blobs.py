"""What a record's columns are spelled as. Pure: no IO, and never pickle.

The text of a body is JSON in UTF-8 with surrogates passed through, because what
a model or a client wrote may hold lone surrogates and escaping would join two of
them into another character. NaN and infinities use the spellings of Python's
json. Token columns are little-endian int32, or float32 with every NaN payload
kept.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from turnloom.arrays import FloatArray, IntArray
from turnloom.errors import StoreError

Json = Any
"""What json.loads returns."""

COMPRESS_FROM = 512
"""Bodies of more bytes than this are compressed."""

PLAIN, ZSTD = b"\x00", b"\x01"

LARGEST = 256 * 2**20
"""Bytes of a body's JSON: no more is written, and no more is decompressed, whatever its frame declares."""


def damaged(what: str, error: Exception) -> StoreError:
    """What was stored cannot be read. What is in it may be of any length."""
    words = str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"
    return StoreError(f"a stored {what} damaged: {words if len(words) <= 200 else words[:200] + '…'}")


def pack(value: Json) -> bytes:
    """One flag byte, then JSON, compressed with zstd when that is worth it. Raises StoreError if it is not JSON, or too much of it."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"cannot be stored as JSON: {error}") from error
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > LARGEST:
        raise StoreError(f"cannot be stored: its words take up {len(data)} bytes as JSON, and {LARGEST} is the most")
    return ZSTD + zstandard.compress(data) if len(data) > COMPRESS_FROM else PLAIN + data


def unpack(data: bytes) -> Json:
    """Raises StoreError."""
    try:
        flag, body = data[:1], data[1:]
        if flag == ZSTD:
            body = _decompress(body)
        elif flag != PLAIN:
            raise ValueError(f"unknown flag {flag!r}")
        return json.loads(body.decode("utf-8", "surrogatepass"))
    except (zstandard.ZstdError, ValueError, RecursionError, TypeError, AttributeError) as error:
        raise damaged("body is", error) from error


def _decompress(body: bytes) -> bytes:
    """Memory is taken for what a frame declares, so that is looked at first. `pack` always declares it."""
    size = zstandard.frame_content_size(body)
    if not 0 <= size <= LARGEST:
        raise ValueError(f"it says that it has {size} bytes" if size >= 0 else "it does not say how long it is")
    return zstandard.decompress(body)


def crc(*columns: bytes) -> int:
    """CRC-32 of the columns one after the other."""
    found = 0
    for column in columns:
        found = zlib.crc32(column, found)
    return found


def check_crc(known: int | None, *columns: bytes) -> None:
    """Raises ValueError where the columns are not what was written. `known` is None for those that stores wrote earlier."""
    if known is not None and crc(*columns) != known:
        raise ValueError("it is not, by its checksum, what was written")


def pack_ids(column: IntArray) -> bytes:
    """Raises StoreError as `check_ids` does."""
    check_ids(column)
    return _pack_column(column, np.dtype(np.int32), "<i4")


def unpack_ids(data: bytes) -> IntArray:
    """A read-only int32 array. Raises StoreError."""
    column = _unpack_column(data, np.dtype(np.int32), "<i4")
    if (column < 0).any():
        raise StoreError("a stored token column is damaged: it has an id below 0")
    return column


def pack_floats(column: FloatArray) -> bytes:
    return _pack_column(column, np.dtype(np.float32), "<f4")


def unpack_floats(data: bytes) -> FloatArray:
    """A read-only float32 array."""
    return _unpack_column(data, np.dtype(np.float32), "<f4")


def _pack_column(column: npt.NDArray[Any], native: np.dtype[Any], stored: str) -> bytes:
    check_column(column, native)
    return column.astype(stored, copy=False).tobytes()


def check_ids(column: IntArray) -> None:
    """Raises StoreError for what is no column of token ids."""
    check_column(column, np.dtype(np.int32))
    if (column < 0).any():
        raise StoreError("a token id is never below 0")


def check_column(column: npt.NDArray[Any], native: np.dtype[Any]) -> None:
    if column.dtype != native or column.ndim != 1:
        raise StoreError(f"a token column must be one-dimensional {native}, not {column.ndim}-dimensional {column.dtype}")


def _unpack_column(data: bytes, native: np.dtype[Any], stored: str) -> npt.NDArray[Any]:
    if not isinstance(data, bytes) or len(data) % 4:
        raise StoreError("a stored token column is damaged: it is no whole number of tokens")
    array = np.frombuffer(data, dtype=stored).astype(native, copy=False)
    array.flags.writeable = False
    return array
