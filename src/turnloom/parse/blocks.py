"""The scanner for calls that follow an opening tag, with reasoning first: Mistral, Gemma 4, LFM2, Phi-4, Command.

Framing: the reasoning tags, with one newline before each, one after the opener
and two after the closer; the tags that a format writes around its text; one
newline before and one after a block whose first or last call parsed. A block
may hold several calls: each one's raw text goes from where the one before ended.
Reasoning is read only as the first thing in the output, blanks aside; calls only
in visible text and only when tools are declared. Knows no block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnloom.parse.body import Broken, Ended, printable
from turnloom.parse.contract import Parser
from turnloom.parse.format import Build, ReasoningTags
from turnloom.parse.nesting import Nesting, Syntax
from turnloom.parse.reader import Attempt, Reader, State
from turnloom.types import CallRecord, CallStatus, Tool

MAX_HEAD = 512
"""Characters between an opening tag and the value; more than that opens no call."""


@dataclass(frozen=True, slots=True)
class Tags:
    """`closer` empty: the block's own value ends it. `framing`: tags around visible text that nobody should see.

    `again`: what opens a block right behind another one, as a test of the text
    that follows: True, False, or None while that is not decided.
    """

    opener: str
    closer: str
    fault: CallStatus
    framing: tuple[str, ...] = ()
    again: Callable[[str], bool | None] | None = None


class ValueBlock:
    """A block that is an opening tag, a head, one bracketed value, blanks and a closing tag. Subclasses say head and meaning.

    `head` matches everything from the block's first character to the value's
    opening bracket, with the tool's `name` as a group where it is there;
    `unfinished` matches whatever could become that.
    """

    tags: ClassVar[Tags]
    syntax: ClassVar[Syntax]
    head: ClassVar[re.Pattern[str]]
    unfinished: ClassVar[re.Pattern[str]]

    def __init__(self) -> None:
        self.name = ""
        """The tool's name, where the head has it, once it is known."""
        self._start = ""
        self.value_at = -1
        self._value = Nesting(self.syntax)
        self._tail_at = -1
        self._tail = ""
        """What came after the value and the blanks behind it."""

    def feed(self, text: str) -> Ended | Broken | None:
        if self.value_at < 0:
            self._start += text
            # Of bounded length, so this is looked at a bounded number of times.
            start = self._start[:MAX_HEAD]
            found = self.head.match(start)
            if found is None:
                possible = len(self._start) < MAX_HEAD and self.unfinished.fullmatch(start)
                return None if possible else Broken(min(len(self.tags.opener), len(start)), self.tags.fault, restart=True)
            self.value_at, self.name = found.end(), found.groupdict().get("name") or ""
            text = self._start[self.value_at :]
        if not self._value.ended:
            rest = self._value.feed(text)
            if rest is None:
                return None
            if self._value.broken:
                return Broken(self.value_end, self.tags.fault, restart=not self._value.quoted)
            self._tail_at, text = self.value_end, rest
        return self._close(text)

    @property
    def value_end(self) -> int:
        return self.value_at + self._value.at

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        """The calls of the whole block; at least one attempt."""
        raise NotImplementedError

    def _close(self, text: str) -> Ended | Broken | None:
        closer = self.tags.closer
        tail = self._tail + text
        self._tail = tail.lstrip(" \t\r\n") if closer else tail
        self._tail_at += len(tail) - len(self._tail)
        if self._tail.startswith(closer):
            return Ended(self._tail_at + len(closer))
        return None if closer.startswith(self._tail) else Broken(self._tail_at, self.tags.fault, restart=True)


class BlockParser(Reader):
    """A `Parser` for one turn. `again`: what a call may start with right behind another one, a tag's spelling aside."""

    def __init__(self, tools: Sequence[Tool], reasoning_open: bool, reasoning: ReasoningTags | None, block: type[ValueBlock]) -> None:
        super().__init__(tools)
        self._block_type, self._tags = block, block.tags
        self._think_open, self._think_close = (reasoning.opener, reasoning.closer) if reasoning else ("", "")
        self._reasoning = reasoning is not None and reasoning_open
        openers = (self._tags.opener,) if tools else ()
        self._wanted = openers + self._tags.framing
        self._search = re.compile("|".join(map(re.escape, self._wanted)) or "(?!)")
        self._state: State = self._lead if reasoning else self._text
        self._newlines = 0
        """How many newlines, if they come next, are framing."""
        self._framed = False
        """A newline before the block waits: framing if the block's first call parses."""
        self._block: ValueBlock | None = None
        self._fault = self._tags.fault
        self._restart = False

    # Reasoning and text.

    def _lead(self, window: str) -> int:
        """Nothing but blanks so far."""
        rest = window.lstrip()
        blanks = window[: len(window) - len(rest)]
        if rest.startswith(self._think_open):
            text = blanks.removesuffix("\n")
            self._emit(text, reasoning=self._reasoning)
            self._frame(blanks[len(text) :] + self._think_open)
            self._state, self._reasoning, self._newlines = self._think, True, 1
            return len(blanks) + len(self._think_open)
        if self._think_open.startswith(rest):
            ready = blanks.removesuffix("\n")
            self._emit(ready, reasoning=self._reasoning)
            return len(ready)
        self._state = self._think if self._reasoning else self._text
        return 0

    def _think(self, window: str) -> int:
        start = self._skip_newlines(window)
        end = window.find(self._think_close, start)
        if end < 0:
            stop = before_newline(window, start, ready(window, start, (self._think_close,)))
            self._emit(window[start:stop], reasoning=True)
            return stop
        stop = before_newline(window, start, end)
        self._emit(window[start:stop], reasoning=True)
        self._frame(window[stop : end + len(self._think_close)])
        self._state, self._reasoning, self._newlines = self._text, False, 2
        return end + len(self._think_close)

    def _text(self, window: str) -> int:
        start = self._skip_newlines(window)
        found = self._search.search(window, start)
        if found is None:
            stop = ready(window, start, self._wanted)
            stop = before_newline(window, start, stop) if self._tools else stop
            self._emit(window[start:stop])
            return stop
        if found[0] != self._tags.opener:
            self._emit(window[start : found.start()])
            self._frame(found[0])
            return found.end()
        stop = before_newline(window, start, found.start())
        self._emit(window[start:stop])
        self._framed = stop < found.start()
        self._begin(self._at + found.start())
        return found.start()

    def _skip_newlines(self, window: str) -> int:
        skipped = 0
        while self._newlines and skipped < len(window):
            if window[skipped] != "\n":
                self._newlines = 0
                break
            self._frame("\n")
            skipped += 1
            self._newlines -= 1
        return skipped

    # One block.

    def _begin(self, at: int) -> None:
        self._open(at)
        self._block, self._state = self._block_type(), self._inside

    def _inside(self, window: str) -> int:
        assert self._block is not None
        self._keep(window)
        verdict = self._block.feed(window)
        if isinstance(verdict, Ended):
            raw = self._raw()
            self._give_back(raw[verdict.end :])
            self._end(raw[: verdict.end])
        elif isinstance(verdict, Broken):
            self._break(verdict)
        return len(window)

    def _end(self, raw: str) -> None:
        assert self._block is not None
        attempts = self._block.decode(raw, self._tools)
        self._before(attempts[0].status is CallStatus.OK)
        self._close(raw, attempts)
        good = attempts[-1].status is CallStatus.OK
        self._state = self._behind if good and self._tags.again else self._text
        self._newlines = 1 if good and not self._tags.again else 0

    def _before(self, good: bool) -> None:
        """What becomes of the newline before the block."""
        if self._framed:
            self._framed = False
            self._frame("\n") if good else self._emit("\n")

    def _behind(self, window: str) -> int:
        """Right behind a call, where the next may follow without a tag of its own."""
        assert self._tags.again is not None
        decided = self._tags.again(window)
        if decided:
            self._begin(self._at)
        elif decided is not None:
            self._state, self._newlines = self._text, 1
        return 0

    def _break(self, broken: Broken) -> None:
        """The block cannot become a call: what there is of it is text, and so is what comes until it ends."""
        raw = self._raw()
        self._give_back(raw[broken.at :])
        raw = raw[: broken.at]
        self._before(False)
        if broken.restart and not self._tags.closer:
            self._fail(raw, broken.status, self._name())
            self._state = self._text
            return
        self._emit(raw)
        self._pieces = [raw]
        self._state, self._fault, self._restart = self._broken, broken.status, broken.restart

    def _broken(self, window: str) -> int:
        """Text for certain; only its end is looked for."""
        opener, closer = self._tags.opener, self._tags.closer
        close = window.find(closer) if closer else -1
        reopen = window.find(opener, 0, close if close >= 0 else len(window)) if self._restart else -1
        if reopen >= 0:
            stop, status = reopen, CallStatus.UNCLOSED
        elif close >= 0:
            stop, status = close + len(closer), self._fault
        else:
            stop, status = ready(window, 0, (closer, opener)), None
        self._emit(window[:stop])
        self._keep(window[:stop])
        if status is not None:
            self._record_text(status)
        return stop

    def _name(self) -> str:
        return printable(self._block.name) if self._block is not None else ""

    def _record_text(self, status: CallStatus) -> None:
        """Close a block whose text is out already."""
        raw, self._pieces = self._raw(), []
        self.records.append(CallRecord(status, self._name(), raw, self._start_at, self._start_at + len(raw)))
        self._state = self._text

    def _end_of_output(self, held: str) -> None:
        if self._state == self._broken:
            self._emit(held)
            self._keep(held)
            self._record_text(CallStatus.UNCLOSED if self._tags.closer else self._fault)
        elif self._pieces:
            self._before(False)
            self._fail(self._raw(), CallStatus.UNCLOSED, self._name())
            self._state = self._text
        else:
            self._emit(held, reasoning=self._reasoning)


def blocks(block: type[ValueBlock]) -> Build:
    """How a format whose calls are such blocks makes its parser."""

    def build(tools: Sequence[Tool], reasoning_open: bool, reasoning: ReasoningTags | None) -> Parser:
        return BlockParser(tools, reasoning_open, reasoning, block)

    return build


def ready(window: str, start: int, tags: tuple[str, ...]) -> int:
    """Where what could still become one of the tags starts, or the end."""
    longest = max(map(len, tags), default=0)
    tails = range(max(start, len(window) - longest + 1), len(window))
    return next((i for i in tails if any(tag.startswith(window[i:]) for tag in tags)), len(window))


def before_newline(window: str, start: int, stop: int) -> int:
    """`stop`, less one newline before it that is not before `start`."""
    return stop - 1 if stop > start and window[stop - 1] == "\n" else stop
