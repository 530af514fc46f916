"""Strict JSON (RFC 8259) that keeps the writer's spelling. Never repairs and never re-serialises.

Python's `json` with its extensions refused: NaN, Infinity and -Infinity are
errors. So is what the next reader could not hold: nesting deeper than MAX_DEPTH,
which would exhaust its stack, and a number beyond the doubles, which it would
refuse or read as infinity. Any other number keeps its spelling, however long.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

MAX_DEPTH = 200
"""Objects and arrays inside each other."""

_BLANK = re.compile(r"[ \t\n\r]*")
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"-?[0-9]+")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError("a number is beyond what a double holds")
    return value


# An integer becomes a float as well: int() refuses more than 4,300 digits, and the value is only looked at for its type.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=_finite, parse_float=_finite)


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an object. `text` is the value as it was written."""

    key: str
    value: object
    text: str


def members(text: str) -> list[Member]:
    """The members of the one object that `text` is, in order, duplicates kept. Raises ValueError for anything else."""
    _check_depth(text)
    found: list[Member] = []
    at = _expect(text, blank(text, 0), "{")
    if text[at : at + 1] != "}":
        while True:
            key, end = _DECODER.raw_decode(text, at)
            if not isinstance(key, str):
                raise ValueError("a key is not a string")
            start = _expect(text, blank(text, end), ":")
            value, end = _DECODER.raw_decode(text, start)
            found.append(Member(key, value, text[start:end]))
            at = blank(text, end)
            if text[at : at + 1] != ",":
                break
            at = blank(text, at + 1)
    if _expect(text, at, "}") != len(text):
        raise ValueError("text after the object")
    return found


def is_object(text: str) -> bool:
    try:
        members(text)
    except ValueError:
        return False
    return True


def kind(text: str) -> str | None:
    """The JSON Schema type of the one value that `text` is (no blanks around it), or None when it is not JSON.

    A number written with a fraction or an exponent is a `number`, even where it is integral.
    """
    try:
        _check_depth(text)
        value, end = _DECODER.raw_decode(text)
    except ValueError:
        return None
    if end != len(text):
        return None
    if isinstance(value, float):
        return "integer" if _INTEGER.fullmatch(text) else "number"
    return kind_of(value)


def kind_of(value: object) -> str:
    """The JSON Schema type of a decoded value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def quote(text: str) -> str:
    """The JSON string that holds `text`; encodable as UTF-8 whatever `text` is."""
    return escape_surrogates(json.dumps(text, ensure_ascii=False))


def spell(values: Mapping[str, str]) -> str:
    """The object whose members' values are these texts; encodable as UTF-8 whatever they are."""
    return escape_surrogates("{" + ", ".join(f"{quote(key)}: {value}" for key, value in values.items()) + "}")


def escape_surrogates(text: str) -> str:
    """JSON text with each lone surrogate spelled as its escape: the same value, and encodable as UTF-8."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def blank(text: str, at: int) -> int:
    """The index after the blanks that stand at `at`."""
    found = _BLANK.match(text, at)
    assert found is not None
    return found.end()


def _expect(text: str, at: int, char: str) -> int:
    """The index after `char` and the blanks that follow it."""
    if not text.startswith(char, at):
        raise ValueError(f"expected {char!r} at {at}")
    return blank(text, at + 1)


def _check_depth(text: str) -> None:
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return
    depth = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "{[":
            depth += 1
        elif found[0] in "}]":
            depth -= 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
