"""How deep and how large JSON is, told from its bytes before any of it is parsed. It decides nothing about what it says.

The scan is linear in the bytes whatever they are, and takes memory for one block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from turnloom.errors import BadRequest

_BLOCK = 1 << 17
_QUOTE, _COMMA, _SLASH, _OPEN, _CLOSE, _LOWER = b'",\\{}'[0], 0x2C, 0x5C, 0x7B, 0x7D, 0x20
"""`[` and `]` become `{` and `}` with the bit that makes ASCII letters lower case."""


def check_shape(body: bytes, *, depth: int, values: int) -> None:
    """Raises BadRequest where `body` nests lists and objects deeper than `depth`, or holds more than `values` JSON values.

    A value is a string, a number, a word, a list or an object; an empty list or
    object may count as two. Of bytes that are no JSON only the limits are said to
    hold: whoever parses them finds the rest.
    """
    level, found, in_string, start = 0, 1, 0, 0
    bytes_ = np.frombuffer(body, np.uint8)
    while start < len(bytes_):
        marks, escaped = _marks(bytes_[start : start + _BLOCK])
        outside, in_string = _outside_strings(marks, in_string)
        opens, commas = (outside | _LOWER) == _OPEN, outside == _COMMA
        levels = np.cumsum(opens.view(np.int8) - ((outside | _LOWER) == _CLOSE).view(np.int8), dtype=np.int32)
        if len(levels):
            if level + int(levels.max()) > depth:
                raise BadRequest(f"the request body nests JSON deeper than {depth} levels; at most {depth} are supported")
            level += int(levels[-1])
        found += int(np.count_nonzero(opens)) + int(np.count_nonzero(commas))
        if found > values:
            raise BadRequest(f"the request body holds more than {values} JSON values; at most {values} are supported")
        start += _BLOCK + escaped


def _marks(block: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], bool]:
    """(the quotes, commas and brackets of a block without escaped ones, whether the byte after the block is escaped)."""
    near = (block | _LOWER) - np.uint8(_OPEN)  # 0, 1 and 2 for `{`, `\` and `}`
    at = np.flatnonzero((near < 3) | (block == _QUOTE) | (block == _COMMA))
    marks = block[at]
    slashes = np.flatnonzero(marks == _SLASH)
    if not len(slashes):
        return marks, False
    places = at[slashes]
    if (joined := np.diff(places) == 1).any():  # of a run of backslashes every other one escapes what follows it
        number = np.arange(len(places))
        begins = np.concatenate(([True], ~joined))
        escaping = ((number - np.maximum.accumulate(np.where(begins, number, 0))) & 1) == 0
        slashes, places = slashes[escaping], places[escaping]
    escaped_next = int(places[-1]) + 1 == len(block)
    if escaped_next:
        slashes, places = slashes[:-1], places[:-1]
    followed = slashes + 1 < len(marks)
    after, place_after = slashes[followed] + 1, places[followed] + 1
    kept = np.ones(len(marks), bool)
    kept[after[at[after] == place_after]] = False
    return marks[kept], escaped_next


def _outside_strings(marks: npt.NDArray[np.uint8], in_string: int) -> tuple[npt.NDArray[np.uint8], int]:
    """(the marks that stand in no string, 1 where a string goes on after the last of them). Only quotes begin and end strings."""
    if not len(marks):
        return marks, in_string
    odd = np.cumsum(marks == _QUOTE, dtype=np.uint8) & 1  # wraps at 256, which is even
    return marks[odd == in_string], in_string ^ int(odd[-1])
