"""The body that GLM 4.5 and later write: a bare name, then keys and values in tags of their own.

`<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` any
number of times, then `</tool_call>`; blanks may stand between the tags. A value
is bare text, typed by `schema`; no newline frames it, and it may hold any of the
tags. A tag ends something only where the whole stays well-formed:

- a value ends at an `</arg_value>` that a whole key with its `<arg_value>`, or the end of the block, follows;
- the block ends at the first `</arg_value></tool_call>` (with no argument, at `</tool_call>`);
- a call inside a value (`<tool_call>NAME` followed by `<arg_key>` or `</tool_call>`) is skipped to its own end;
- any other `</tool_call>` is part of a value if the block does end later. If another call opens right after
  it, or the output is over, it was the end of a malformed block.

A value that holds the full ending without an opening of its own cannot be told
from the end; nor can one that holds the end of a value and a whole key.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import ClassVar

from turnloom.parse.body import TOOL_CLOSE, TOOL_OPEN, Attempt, Broken, Ended
from turnloom.parse.format import Format
from turnloom.parse.tags import tagged
from turnloom.parse.walk import Parameter, TagWalk, typed_call
from turnloom.types import CallStatus, Tool

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class _Prev(Enum):
    """The tag before, if only blanks stand in between."""

    BLOCK = auto()
    HEADER = auto()
    KEY = auto()
    KEY_END = auto()
    VALUE_END = auto()
    OPEN = auto()
    NESTED_END = auto()
    CLOSE = auto()
    OTHER = auto()


class GlmBody(TagWalk):
    """A walk over the tags that keeps where each value starts and ends."""

    opener: ClassVar[str] = ""
    tags: ClassVar[tuple[str, ...]] = (_KEY, _KEY_END, _VALUE, _VALUE_END, TOOL_CLOSE, TOOL_OPEN)

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.name = ""
        self._label = ""
        self._key = ""
        self._prev = _Prev.BLOCK
        self._parameters: list[Parameter] = []
        self._value_end = -1
        self._depth = 0
        self._doubtful = -1
        """The end of the last `</tool_call>` that is not known to be part of a value."""
        self._reopened = -1
        """The start of the last `<tool_call>` with a name."""
        self._restart: Ended | None = None
        """How this block ended, if that `<tool_call>` opens a call."""

    def finish(self) -> Ended | None:
        return Ended(self._doubtful, CallStatus.MALFORMED) if self._doubtful > self._reopened else None

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return typed_call(self.name, [(one.key, raw[one.start : one.end]) for one in self._parameters], tools, framed=False)

    def _labelled(self, label: str | None, window: str, end: int) -> tuple[int, Ended | Broken | None]:
        """A NAME, or a KEY up to its closing tag. One that is empty, too long or ends in a `>` is none."""
        prev, self._prev = self._prev, _Prev.OTHER
        bare = label.strip() if label is not None and not window.startswith(">", end) else ""
        if prev is _Prev.BLOCK and (bare or (label is not None and window.startswith("<", end))):
            self.name, self._prev = bare, _Prev.HEADER
        elif prev is _Prev.KEY and bare and window.startswith("<", end):
            self._key, self._prev = bare, prev
        elif prev is _Prev.OPEN and bare:
            self._prev = prev
        elif prev is not _Prev.OPEN and not self._parameters:
            return end, Broken(self._at + end, CallStatus.MALFORMED, restart=True)
        return end, None

    def _between(self, bare: str, at: int) -> Ended | Broken | None:
        if not bare:
            return None
        if not self._parameters:
            return Broken(at, CallStatus.MALFORMED, restart=True)
        self._prev = _Prev.OTHER
        return None

    def _read_tag(self, tag: str, at: int) -> Ended | Broken | None:
        prev = self._prev
        if not self._parameters and tag not in _FIRST.get(prev, ()):
            return Broken(at, CallStatus.MALFORMED, restart=True)
        if prev is _Prev.OPEN and tag in (_KEY, TOOL_CLOSE) and self._restart is not None:
            return self._restart
        self._prev = _Prev.OTHER
        if tag == _KEY:
            self._open_key(prev)
        elif tag == _KEY_END and prev is _Prev.KEY:
            self._prev = _Prev.KEY_END
        elif tag == _VALUE and prev is _Prev.KEY_END:
            self._open_value(at + len(tag))
        elif tag == _VALUE_END:
            self._prev = _Prev.VALUE_END
            self._value_end = self._value_end if self._depth else at
        elif tag == TOOL_CLOSE:
            return self._end_block(prev, at + len(tag))
        elif tag == TOOL_OPEN:
            self._reopen(prev, at)
        return None

    def _open_key(self, prev: _Prev) -> None:
        if prev is _Prev.OPEN:
            self._depth += 1
        elif self._depth == 0 and prev in (_Prev.HEADER, _Prev.VALUE_END):
            self._label, self._prev = "", _Prev.KEY

    def _open_value(self, start: int) -> None:
        if self._parameters:
            self._parameters[-1].end = self._value_end
        self._parameters.append(Parameter(self._key, start))

    def _end_block(self, prev: _Prev, end: int) -> Ended | None:
        if prev is _Prev.OPEN:
            self._prev = _Prev.NESTED_END
        elif self._depth and prev is _Prev.VALUE_END:
            self._depth -= 1
            self._prev = _Prev.NESTED_END
        elif prev in (_Prev.HEADER, _Prev.VALUE_END):
            if self._parameters:
                self._parameters[-1].end = self._value_end
            return Ended(end)
        elif self._depth == 0 and prev is not _Prev.NESTED_END:
            self._prev, self._doubtful = _Prev.CLOSE, end
        return None

    def _reopen(self, prev: _Prev, at: int) -> None:
        self._label, self._prev, self._reopened, self._restart = "", _Prev.OPEN, at, None
        if prev is _Prev.CLOSE:
            self._restart = Ended(self._doubtful, CallStatus.MALFORMED)
        elif prev is _Prev.VALUE_END and self._depth == 0:
            self._restart = Ended(at, CallStatus.UNCLOSED)


_FIRST = {_Prev.HEADER: (_KEY, TOOL_CLOSE), _Prev.KEY: (_KEY_END,), _Prev.KEY_END: (_VALUE,)}
"""What may stand after a tag as long as no value has started."""

FORMAT = Format("glm", lambda template: TOOL_OPEN in template and _KEY in template, tagged(GlmBody))
