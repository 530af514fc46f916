"""The incremental part that parsers share: windows of unread text in, runs of text and reasoning and calls out. Knows no format.

A parser is a set of states. A state looks at a window of unread text, says what
becomes of its beginning (text, reasoning, framing, a block that is kept) and
returns how much of it that was. What a state uses nothing of waits for more
text. Work is linear in the characters fed as long as only so much waits as is bounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from turnloom.parse.body import Attempt
from turnloom.parse.contract import CallEvent, ParseEvent, ReasoningDelta, TextDelta
from turnloom.types import CallRecord, CallStatus, Tool

SLICE = 2048
"""Characters looked at together: bounds what is copied when a state hands the rest to the next."""

State = Callable[[str], int]


class Reader(ABC):
    """A `Parser` whose states its subclasses give."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.records: list[CallRecord] = []
        self.framing = 0
        """Characters so far that no event carries."""
        self._tools = {tool.name: tool for tool in tools}
        self._state: State = self._idle
        self._at = 0
        """Characters used so far."""
        self._held = ""
        self._input: deque[str] = deque()
        self._events: list[ParseEvent] = []
        self._run: list[str] = []
        """Text or reasoning that makes the next event."""
        self._run_reasoning = False
        self._pieces: list[str] = []
        """The block being kept, from `_start_at` on."""
        self._start_at = 0
        self._ahead = ("", "", "")
        """What waits before the block: framing, text and framing if its first call parses, else text."""
        self._newlines = 0
        """How many newlines, if they come next, are framing."""

    def feed(self, text: str) -> list[ParseEvent]:
        self._give(text)
        self._read()
        return self._take()

    def finish(self) -> list[ParseEvent]:
        """The end of the output. A second call gives nothing."""
        while self._held or self._pieces:
            held, self._held = self._held, ""
            self._end_of_output(held)
            self._read()
        return self._take()

    @abstractmethod
    def _end_of_output(self, held: str) -> None:
        """Say what becomes of what waits and of the block that is kept. What is given back is read on."""

    def _idle(self, window: str) -> int:
        raise NotImplementedError

    def _read(self) -> None:
        while self._input:
            window, self._held = self._held + self._input.popleft(), ""
            state = self._state
            used = state(window)
            self._at += used
            if self._state == state and not used:
                self._held = window
            else:
                self._give(window[used:])

    def _take(self) -> list[ParseEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _give(self, text: str) -> None:
        """Put text in front of what waits."""
        self._input.extendleft(text[i : i + SLICE] for i in reversed(range(0, len(text), SLICE)))

    # What becomes of a character: text, reasoning, framing, or part of a call.

    def _emit(self, text: str, *, reasoning: bool = False) -> None:
        if not text:
            return
        if reasoning != self._run_reasoning:
            self._flush()
            self._run_reasoning = reasoning
        self._run.append(text)

    def _frame(self, text: str) -> None:
        self.framing += len(text)

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

    def _flush(self) -> None:
        if self._run:
            text, self._run = "".join(self._run), []
            self._events.append(ReasoningDelta(text) if self._run_reasoning else TextDelta(text))

    # A block.

    def _open(self, at: int, lead: tuple[str, str, str] = ("", "", "")) -> None:
        """What is kept from here on is a block that starts at the offset `at` of the output."""
        self._start_at, self._pieces, self._ahead = at, [], lead

    def _keep(self, text: str) -> None:
        self._pieces.append(text)

    def _raw(self) -> str:
        return "".join(self._pieces)

    def _give_back(self, text: str) -> None:
        """The end of the block, `text`, is none of it."""
        self._give(text)
        self._at -= len(text)

    def _close(self, raw: str, attempts: Sequence[Attempt]) -> None:
        """The block is over and is `raw`: its good calls are events, the rest of it is text. The last attempt takes what is left."""
        self._before(attempts[0].status is CallStatus.OK)
        start = 0
        for index, attempt in enumerate(attempts):
            end = len(raw) if index == len(attempts) - 1 else attempt.end
            text = raw[start:end]
            record = CallRecord(attempt.status, attempt.name, text, self._start_at + start, self._start_at + end)
            self.records.append(record)
            if attempt.status is CallStatus.OK:
                self._flush()
                self._events.append(CallEvent(attempt.name, attempt.arguments, record, attempt.written))
            else:
                self._emit(text)
            start = end
        self._pieces = []

    def _fail(self, raw: str, status: CallStatus, name: str = "") -> None:
        self._close(raw, [Attempt(status, name)])

    def _before(self, good: bool) -> None:
        """What becomes of what waits before the block."""
        (head, text, tail), self._ahead = self._ahead, ("", "", "")
        for waiting, framing in ((head, good), (text, False), (tail, good)):
            if waiting and framing:
                self._frame(waiting)
            else:
                self._emit(waiting)

    def _note(self, status: CallStatus, name: str = "") -> None:
        """The block is over and its text is out already."""
        raw, self._pieces = self._raw(), []
        self.records.append(CallRecord(status, name, raw, self._start_at, self._start_at + len(raw)))


def find_tag(window: str, tags: tuple[str, ...], start: int = 0) -> tuple[int, str]:
    """Where the first of the tags stands, and which; (-1, "") where none does."""
    found = [(at, tag) for tag in tags if (at := window.find(tag, start)) >= 0]
    return min(found, default=(-1, ""))


def ready(window: str, start: int, tags: tuple[str, ...]) -> int:
    """Where what could still become one of the tags starts, or the end."""
    first = {tag[0] for tag in tags}
    at = max(start, len(window) - max(map(len, tags), default=1) + 1)
    while at < len(window):
        if window[at] in first and any(tag.startswith(window[at:]) for tag in tags):
            return at
        at += 1
    return len(window)


def before_newline(window: str, start: int, stop: int) -> int:
    """`stop`, less one newline before it that is not before `start`."""
    return stop - 1 if stop > start and window[stop - 1] == "\n" else stop
