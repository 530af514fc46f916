"""The scanner for output in tags: reasoning first, then text with calls, each between tags of its own.

Which tags is data (`ReasoningTags`, `Markup`). What is a tag here:

- the reasoning opener only as the first thing in the output, blanks aside; the closer only while reasoning
  is open. With the opener in the prompt the output starts in reasoning, and an opener written again is framing.
- a call's opening tag only in visible text and only when tools are declared; where calls are not bare, only
  inside a section.
- a section's opening tag with a call right after it, blanks aside; without one it is a broken attempt at a call.
  Its closing tag right after a call that parsed, blanks aside.

Framing, which no event carries: the reasoning tags; one newline before each
and one after the opener; two after the closer (templates write `</think>`, a blank
line, the answer); a section's tags, where the call beside them parsed; one
newline before and one after those and a call that parsed.

Text and reasoning leave as soon as they cannot be part of a tag or of framing.
Work is linear in the characters fed, however they are cut. Knows no body format.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from turnloom.parse.body import Body, Broken, Ended, printable
from turnloom.parse.contract import CallEvent, ParseEvent, Parser, ReasoningDelta, TextDelta
from turnloom.parse.format import Build, ReasoningTags
from turnloom.parse.markup import Markup, before_newline, find_tag, ready
from turnloom.types import CallRecord, CallStatus, Tool

_SLICE = 2048
"""Characters looked at together: bounds what is copied when a state hands the rest to the next."""

_BLANK = " \t\r\n"
_TOOL_CALL = Markup()

_State = Callable[[str], int]
"""Looks at a window of unread text and returns how much of it is used; the rest waits unless the state changed."""


class TagParser:
    """A `Parser` for one turn. With `reasoning` None there are no reasoning tags, even with the opener in the prompt."""

    def __init__(
        self,
        tools: Sequence[Tool],
        reasoning_open: bool,
        reasoning: ReasoningTags | None,
        bodies: Sequence[type[Body]],
        markup: Markup = _TOOL_CALL,
    ) -> None:
        self.records: list[CallRecord] = []
        self.markup = markup
        self._opens, self._closes = markup.section_opens, markup.section_closes
        self._tools = {tool.name: tool for tool in tools}
        self._bodies = tuple(bodies) if tools else ()
        self._events: list[ParseEvent] = []
        self._run: list[str] = []
        """Text or reasoning that makes the next event."""
        self._run_reasoning = False
        self._input: deque[str] = deque()
        self._held = ""
        self._at = 0
        """Characters used so far."""
        self._newlines = 0
        """How many newlines, if they come next, are framing."""
        self._think_open, self._think_close = (reasoning.opener, reasoning.closer) if reasoning else ("", "")
        self._reasoning = reasoning is not None and reasoning_open
        self._state: _State = self._start if reasoning else self._text
        self._in_section = False
        self._after_call = False
        """Only blanks since a call that parsed."""
        # The block being read, from its opening tag on.
        self._start_at = 0
        self._lead = ""
        """What waits before the block: framing if the call parses, but for its `_lead_text`."""
        self._lead_text = ""
        self._ends: tuple[str, ...] = ()
        """The tags that end the block once it is broken."""
        self._pieces: list[str] = []
        self._size = 0
        self._body: Body | None = None
        self._fault = CallStatus.MALFORMED
        self._restart = False

    def feed(self, text: str) -> list[ParseEvent]:
        self._give(text)
        self._read()
        return self._take()

    def finish(self) -> list[ParseEvent]:
        """The end of the output. A second call gives nothing."""
        while self._held or self._pieces:
            self._end_of_output()
            self._read()
        return self._take()

    def _take(self) -> list[ParseEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _give(self, text: str) -> None:
        """Put text in front of what waits."""
        self._input.extendleft(text[i : i + _SLICE] for i in reversed(range(0, len(text), _SLICE)))

    def _read(self) -> None:
        while self._input:
            window, self._held = self._held + self._input.popleft(), ""
            state = self._state
            used = state(window)
            self._at += used
            rest = window[used:]
            if self._state == state:
                self._held = rest
            else:
                self._give(rest)

    # What comes out.

    def _emit(self, text: str, *, reasoning: bool = False) -> None:
        if reasoning != self._run_reasoning:
            self._flush()
            self._run_reasoning = reasoning
        if text:
            self._run.append(text)

    def _flush(self) -> None:
        if self._run:
            text, self._run = "".join(self._run), []
            self._events.append(ReasoningDelta(text) if self._run_reasoning else TextDelta(text))

    # Reasoning and text.

    def _start(self, window: str) -> int:
        """Nothing but blanks so far."""
        rest = window.lstrip()
        blanks = window[: len(window) - len(rest)]
        if rest.startswith(self._think_open):
            self._emit(blanks.removesuffix("\n"), reasoning=self._reasoning)
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
        self._emit(window[start:end].removesuffix("\n"), reasoning=True)
        self._state, self._reasoning, self._newlines = self._text, False, 2
        return end + len(self._think_close)

    def _text(self, window: str) -> int:
        start = self._skip_newlines(window)
        tags = self._tags()
        at, tag = find_tag(window, tags, start)
        stop = before_newline(window, start, at if tag else ready(window, start, tags)) if tags else len(window)
        if tag in self._closes:
            return self._close_section(window[start:at], tag, at + len(tag))
        self._show(window[start:stop])
        if not tag:
            return stop
        self._open(self._section if tag in self._opens else self._opened, tag, self._at + at, window[stop:at])
        return at + len(tag)

    def _tags(self) -> tuple[str, ...]:
        """What may be a tag in visible text, as things stand."""
        if not self._bodies:
            return ()
        calls = (self.markup.open,) if self.markup.bare or self._in_section else ()
        return calls + self._opens + (self._closes if self._after_call or self._in_section else ())

    def _show(self, text: str) -> None:
        """Visible text."""
        self._after_call = self._after_call and not text.strip(_BLANK)
        self._emit(text)

    def _open(self, state: _State, tag: str, at: int, lead: str) -> None:
        self._state, self._start_at, self._lead, self._lead_text, self._after_call = state, at, lead, "", False
        self._ends = (self.markup.close,)
        self._keep(tag)

    def _close_section(self, before: str, tag: str, end: int) -> int:
        framing = self._after_call and not before.strip(_BLANK)
        self._emit(before.removesuffix("\n") if framing else before + tag)
        self._in_section, self._after_call, self._newlines = False, False, int(framing)
        self._state = self._resumed
        return end

    def _resumed(self, window: str) -> int:
        """Text again: what follows in the same window is looked at anew."""
        self._state = self._text
        return 0

    def _skip_newlines(self, window: str) -> int:
        skipped = 0
        while self._newlines and skipped < len(window):
            if window[skipped] != "\n":
                self._newlines = 0
                break
            skipped += 1
            self._newlines -= 1
        return skipped

    # One block.

    def _section(self, window: str) -> int:
        """After a section's opening tag: is there a call?"""
        rest = window.lstrip(_BLANK)
        blanks = len(window) - len(rest)
        self._keep(window[:blanks])
        if rest.startswith(self.markup.open):
            section = self._raw()
            self._pieces, self._size = [], 0
            inner = section[len(section.rstrip(_BLANK)) :].removeprefix("\n").removesuffix("\n")
            self._open(self._opened, self.markup.open, self._start_at + len(section), self._lead + section)
            self._lead_text, self._in_section = inner, True
            return blanks + len(self.markup.open)
        if not self.markup.open.startswith(rest):
            raw = self._raw()
            self._ends = tuple(closer for opener, closer in self.markup.sections if raw.startswith(opener))
            self._break(raw, CallStatus.MALFORMED, restart=True)
        return blanks

    def _opened(self, window: str) -> int:
        """After a call's opening tag: which body is it?"""
        rest = window.lstrip(_BLANK)
        blanks = len(window) - len(rest)
        self._keep(window[:blanks])
        for body in self._bodies:
            if rest.startswith(body.opener):
                self._state, self._body = self._inside, body(self._size)
                return blanks
        if not any(body.opener.startswith(rest) for body in self._bodies):
            self._break(self._raw(), self._bodies[0].fault, restart=True)
        return blanks

    def _inside(self, window: str) -> int:
        assert self._body is not None
        self._keep(window)
        verdict = self._body.feed(window)
        if isinstance(verdict, Ended):
            self._end(verdict)
        elif isinstance(verdict, Broken):
            raw = self._raw()
            self._give_back(raw[verdict.at :])
            self._break(raw[: verdict.at], verdict.status, restart=verdict.restart)
        return len(window)

    def _broken(self, window: str) -> int:
        """Text for certain; only its end is looked for: its closing tag, else its section's, else another opening."""
        opens = self._opens
        if self.markup.bare or self._in_section:
            opens += (self.markup.open,)
        tags = self._ends + self._closes + (opens if self._restart else ())
        at, tag = find_tag(window, tags)
        if tag in self._ends:
            stop, status = at + len(tag), self._fault
        elif tag:
            stop, status = at, CallStatus.UNCLOSED if tag in opens else self._fault
        else:
            stop, status = ready(window, 0, tags), None
        self._emit(window[:stop])
        self._keep(window[:stop])
        if status is not None:
            self._record(status)
        return stop

    def _end(self, ended: Ended) -> None:
        """The block is over by its body's own word."""
        assert self._body is not None
        raw = self._raw()
        block = raw[: ended.end]
        self._pieces = [block]
        self._give_back(raw[ended.end :])
        if ended.status is not None:
            self._fail(ended.status)
            return
        decoded = self._body.decode(block, self._tools)
        if decoded.status is not CallStatus.OK:
            self._fail(decoded.status, decoded.name)
            return
        self._emit(self._lead_text)
        record = self._record(decoded.status, decoded.name)
        self._flush()
        self._events.append(CallEvent(decoded.name, decoded.arguments, record, decoded.written))
        self._newlines, self._after_call = 1, True

    def _fail(self, status: CallStatus, name: str | None = None) -> None:
        """The block was no call: all of it is text."""
        self._emit(self._lead)
        self._emit(self._raw())
        self._record(status, name)

    def _break(self, raw: str, status: CallStatus, *, restart: bool) -> None:
        """The block cannot become a call: what there is of it is text, and so is what comes until it ends."""
        self._emit(self._lead)
        self._emit(raw)
        self._pieces = [raw]
        self._state, self._fault, self._restart = self._broken, status, restart

    def _record(self, status: CallStatus, name: str | None = None) -> CallRecord:
        """Close the block: `_pieces` is exactly it."""
        raw = self._raw()
        if name is None:
            name = printable(self._body.name) if self._body is not None else ""
        record = CallRecord(status, name, raw, self._start_at, self._start_at + len(raw))
        self.records.append(record)
        self._state, self._pieces, self._size, self._body = self._text, [], 0, None
        return record

    def _end_of_output(self) -> None:
        held, self._held = self._held, ""
        if self._state == self._broken:
            self._emit(held)
            self._keep(held)
            self._record(CallStatus.UNCLOSED)
        elif self._pieces:
            self._keep(held)
            ended = self._body.finish() if self._body is not None else None
            if ended is not None:
                self._end(ended)
            else:
                self._fail(CallStatus.UNCLOSED)
        else:
            self._emit(held, reasoning=self._reasoning)

    def _raw(self) -> str:
        return "".join(self._pieces)

    def _keep(self, text: str) -> None:
        self._pieces.append(text)
        self._size += len(text)

    def _give_back(self, text: str) -> None:
        self._give(text)
        self._at -= len(text)


def tagged(*bodies: type[Body], markup: Markup = _TOOL_CALL) -> Build:
    """How a format whose calls have one of these bodies between these tags makes its parser."""

    def build(tools: Sequence[Tool], reasoning_open: bool, reasoning: ReasoningTags | None) -> Parser:
        return TagParser(tools, reasoning_open, reasoning, bodies, markup)

    return build
