"""The body that Qwen3-Coder, Qwen3.5 and Nemotron 3 write, and that is read with no format configured.

`<function=NAME>`, then `<parameter=KEY>VALUE</parameter>` any number of times,
then `</function>`; blanks may stand between the tags. A value is bare text and
may hold any of the tags. A tag ends something only where the whole stays
well-formed:

- a value ends at a `</parameter>` that `<parameter=KEY>` or the end of the block follows;
- the block ends at the first `</parameter></function></tool_call>` (with no parameter, `</function></tool_call>`);
- a function inside a value (`<function=…>` followed by `<parameter=` or `</function>`) is skipped to its own end;
- any other `</tool_call>` is part of a value if the block does end later. If another call opens right after
  it, or the output is over, it was the end of a malformed block.

A value that holds the full ending without an opening of its own cannot be told
from the end; nor can one that holds `</parameter><parameter=KEY>`.
Values are typed by `schema`. Duplicate keys are malformed: which was meant is not ours to choose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from turnloom.parse import schema, strict_json
from turnloom.parse.body import TOOL_CLOSE, TOOL_OPEN, Broken, Decoded, Ended, printable
from turnloom.parse.format import Format
from turnloom.parse.tags import tagged
from turnloom.types import CallStatus, Tool

_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_TAGS = (_PARAMETER_END, _FUNCTION_END, TOOL_CLOSE, _PARAMETER, _FUNCTION, TOOL_OPEN)
_LONGEST = max(len(tag) for tag in _TAGS)
_LABEL = re.compile(r"[^<>\n]*")
_MAX_LABEL = 256


class _Prev(Enum):
    """The tag before, if only blanks stand in between."""

    BLOCK = auto()
    HEADER = auto()
    VALUE_END = auto()
    FUNCTION_END = auto()
    NESTED = auto()
    NESTED_END = auto()
    TOOL_OPEN = auto()
    TOOL_CLOSE = auto()
    OTHER = auto()


_START = frozenset({_Prev.HEADER, _Prev.FUNCTION_END})


@dataclass(slots=True)
class _Parameter:
    key: str
    start: int
    end: int = -1


class XmlBody:
    """A walk over the tags that keeps where each value starts and ends."""

    opener: ClassVar[str] = _FUNCTION
    fault: ClassVar[CallStatus] = CallStatus.MALFORMED

    def __init__(self, at: int) -> None:
        self.name = ""
        self._at = at
        self._carry = ""
        self._prev = _Prev.BLOCK
        self._label: str | None = None
        """A `NAME>` or `KEY>` being read; None between tags."""
        self._parameters: list[_Parameter] = []
        self._value_end = -1
        self._depth = 0
        self._doubtful = -1
        """The end of the last `</tool_call>` that is not known to be part of a value."""
        self._reopened = -1
        """The start of the last `<tool_call>`."""
        self._restart: Ended | None = None
        """How this block ended, if a call opens at that `<tool_call>`."""

    def feed(self, text: str) -> Ended | Broken | None:
        window, self._carry = self._carry + text, ""
        i = 0
        verdict: Ended | Broken | None = None
        while i < len(window) and verdict is None and not self._carry:
            if self._label is not None:
                i, verdict = self._read_label(window, i)
            else:
                i, verdict = self._read(window, i)
        self._at += len(window) - len(self._carry)
        return verdict

    def _read(self, window: str, i: int) -> tuple[int, Ended | Broken | None]:
        """The text up to the next tag, and the tag. Returns where to go on."""
        at = window.find("<", i)
        stop = len(window) if at < 0 else at
        verdict = self._between(window[i:stop], self._at + i)
        if at < 0 or verdict is not None:
            return stop, verdict
        tag = _tag(window, at)
        if tag is None:
            self._carry = window[at:]
            return at, None
        return at + len(tag), self._read_tag(tag, self._at + at)

    def finish(self) -> Ended | None:
        return Ended(self._doubtful, CallStatus.MALFORMED) if self._doubtful > self._reopened else None

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> Decoded:
        if not self.name:
            return Decoded(CallStatus.MISSING_NAME)
        if self.name not in tools:
            return Decoded(CallStatus.UNKNOWN_TOOL, printable(self.name))
        root = schema.load(tools[self.name].parameters)
        written: dict[str, str] = {}
        for parameter in self._parameters:
            value = schema.encode(raw[parameter.start : parameter.end], schema.types_of(parameter.key, root))
            if value is None or parameter.key in written:
                return Decoded(CallStatus.MALFORMED, self.name)
            written[parameter.key] = strict_json.escape_surrogates(value)
        arguments = ", ".join(f"{strict_json.quote(key)}: {value}" for key, value in written.items())
        return Decoded(CallStatus.OK, self.name, "{" + arguments + "}")

    def _between(self, gap: str, at: int) -> Ended | Broken | None:
        """The text between two tags."""
        bare = gap.lstrip()
        if not bare:
            return None
        if self._prev is _Prev.TOOL_OPEN and bare[0] == "{" and self._restart is not None:
            return self._restart
        if self._outside():
            return Broken(at, CallStatus.MALFORMED, restart=True)
        self._prev = _Prev.OTHER
        return None

    def _outside(self) -> bool:
        """No value has started yet, so nothing but the format's own tags may stand here."""
        return not self._parameters and self._prev in _START

    def _read_tag(self, tag: str, at: int) -> Ended | Broken | None:
        prev = self._prev
        if self._outside() and tag not in ((_PARAMETER, _FUNCTION_END) if prev is _Prev.HEADER else (TOOL_CLOSE,)):
            return Broken(at, CallStatus.MALFORMED, restart=True)
        if tag == _FUNCTION and prev is _Prev.TOOL_OPEN and self._restart is not None:
            return self._restart
        self._prev = _Prev.OTHER
        if tag == _FUNCTION:
            self._label, self._prev = "", (_Prev.BLOCK if prev is _Prev.BLOCK else _Prev.NESTED)
        elif tag == _PARAMETER:
            self._open_parameter(prev)
        elif tag == _PARAMETER_END:
            self._prev = _Prev.VALUE_END
            self._value_end = self._value_end if self._depth else at
        elif tag == _FUNCTION_END:
            self._end_function(prev)
        elif tag == TOOL_CLOSE:
            return self._end_block(prev, at + len(tag))
        elif tag == TOOL_OPEN:
            self._reopen(prev, at)
        return None

    def _open_parameter(self, prev: _Prev) -> None:
        if prev is _Prev.NESTED:
            self._depth += 1
        elif self._depth == 0 and prev in (_Prev.HEADER, _Prev.VALUE_END):
            self._label, self._prev = "", prev

    def _end_function(self, prev: _Prev) -> None:
        if prev is _Prev.NESTED:
            self._prev = _Prev.NESTED_END
        elif self._depth and prev is _Prev.VALUE_END:
            self._depth -= 1
            self._prev = _Prev.NESTED_END
        elif prev in (_Prev.HEADER, _Prev.VALUE_END):
            self._prev = _Prev.FUNCTION_END

    def _end_block(self, prev: _Prev, end: int) -> Ended | None:
        if prev is _Prev.FUNCTION_END:
            if self._parameters:
                self._parameters[-1].end = self._value_end
            return Ended(end)
        if self._depth == 0 and prev is not _Prev.NESTED_END:
            self._prev, self._doubtful = _Prev.TOOL_CLOSE, end
        return None

    def _reopen(self, prev: _Prev, at: int) -> None:
        self._prev, self._reopened, self._restart = _Prev.TOOL_OPEN, at, None
        if prev is _Prev.TOOL_CLOSE:
            self._restart = Ended(self._doubtful, CallStatus.MALFORMED)
        elif prev is _Prev.FUNCTION_END:
            self._restart = Ended(at, CallStatus.UNCLOSED)

    def _read_label(self, window: str, i: int) -> tuple[int, Ended | Broken | None]:
        """More of a NAME or KEY. One that is empty, too long or not closed by `>` on its line is none."""
        found = _LABEL.match(window, i)
        assert found is not None
        assert self._label is not None
        end = found.end()
        self._label += window[i:end]
        if end == len(window) and len(self._label) <= _MAX_LABEL:
            return end, None
        label, self._label = self._label, None
        well_formed = window.startswith(">", end) and len(label) <= _MAX_LABEL
        prev, self._prev = self._prev, _Prev.OTHER
        after = end + 1 if well_formed else end
        if prev is _Prev.BLOCK and well_formed:
            self.name, self._prev = label, _Prev.HEADER
        elif prev is _Prev.NESTED:
            self._prev = _Prev.NESTED if well_formed and label else _Prev.OTHER
        elif prev is not _Prev.BLOCK and well_formed and label:
            if self._parameters:
                self._parameters[-1].end = self._value_end
            self._parameters.append(_Parameter(label, self._at + after))
        elif not self._parameters:
            return after, Broken(self._at + after, CallStatus.MALFORMED, restart=True)
        return after, None


def _tag(window: str, at: int) -> str | None:
    """The tag at `at`, else the bare `<`; None when more text could make it a tag."""
    for tag in _TAGS:
        if window.startswith(tag, at):
            return tag
    rest = window[at : at + _LONGEST]
    return None if any(tag.startswith(rest) for tag in _TAGS) else "<"


_TAUGHT = re.compile(r"<tool_call>(?:\\n|\s)*<function=")

FORMAT = Format("qwen3_coder", lambda template: bool(_TAUGHT.search(template)), tagged(XmlBody))
