"""Columns of tokens: read-only arrays, and when two records that hold some are equal."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


def ids(values: Iterable[int] | npt.ArrayLike = ()) -> IntArray:
    """A read-only int32 array [n] of token ids. Raises OverflowError outside int32."""
    source = values if isinstance(values, np.ndarray) else np.array(list(values), dtype=np.int64)  # type: ignore[arg-type]
    if source.size and (int(source.min()) < 0 or int(source.max()) > 2**31 - 1):
        raise OverflowError("a token id is outside 0..2**31-1")
    array = np.array(source, dtype=np.int32)
    array.flags.writeable = False
    return array


def floats(values: Iterable[float] | npt.ArrayLike = ()) -> FloatArray:
    """A read-only float32 array [n] of natural-log probabilities."""
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.float32)  # type: ignore[arg-type]
    array.flags.writeable = False
    return array


NO_IDS = ids()
NO_FLOATS = floats()


def same_fields(left: object, right: object) -> bool:
    """Equality of two dataclasses of one type whose fields may be arrays (NaN equals NaN)."""
    for name in left.__slots__:  # type: ignore[attr-defined]
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            if a.dtype != b.dtype or not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
                return False
        elif a != b:
            return False
    return True
