"""Whether the values of a record are of the types that its dataclass names. Pure: it reads annotations, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

Fits = Callable[[Any], bool]

LARGEST_FLOAT = 2**1023


def check_types(record: Any) -> None:
    """Raises ValueError, which names the field, for a dataclass that holds what it cannot. Whole numbers may stand for floats."""
    kind: Any = type(record)
    for name, fits in _fields(kind):
        if not fits(getattr(record, name)):
            raise ValueError(f"its {name} cannot be {repr(getattr(record, name))[:80]}")


@cache
def _fields(kind: Any) -> tuple[tuple[str, Fits], ...]:
    return tuple((name, _fits(hint)) for name, hint in get_type_hints(kind).items())


@cache
def _fits(hint: Any) -> Fits:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint is float:
        return lambda value: type(value) is float or (type(value) is int and abs(value) < LARGEST_FLOAT)
    if hint in (int, str, bool, NoneType):
        return lambda value: type(value) is hint
    if origin is Literal:
        return lambda value: type(value) is str and value in args
    if origin in (Union, UnionType):
        either = tuple(_fits(each) for each in args)
        return lambda value: any(fits(value) for fits in either)
    if origin is tuple:
        inner = _fits(args[0])
        return lambda value: type(value) is tuple and all(map(inner, value))
    if origin is Mapping:
        key, held = _fits(args[0]), _fits(args[1])
        return lambda value: type(value) is dict and all(key(k) and held(v) for k, v in value.items())
    if hasattr(hint, "__dataclass_fields__"):
        fields = _fields(hint)
        return lambda value: type(value) is hint and all(fits(getattr(value, name)) for name, fits in fields)
    if origin is np.ndarray or issubclass(hint, Enum):
        return lambda value: isinstance(value, origin or hint)
    raise TypeError(f"records hold no {hint}")
