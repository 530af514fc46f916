"""The scanner for output in tags: reasoning first, then text with blocks of calls, each behind a tag of its own.

Which tags is data (`ReasoningTags`, `Markup`). What is a tag here:

- the reasoning opener only as the first thing in the output, blanks aside; the closer only while reasoning
  is open. With the opener in the prompt the output starts in reasoning, and an opener written again is framing.
- a block's opening tag only in visible text and only when tools are declared; where blocks are not bare, only
  inside a section.
- a section's opening tag with a block right after it, blanks aside; without one it is a broken attempt at a call.
  Its closing tag right after a call that parsed, blanks aside.

Framing, which no event carries: the reasoning tags; one newline before each
and one after the opener; two after the closer (templates write `</think>`, a blank
line, the answer); a section's tags, where the call beside them parsed; one
newline before and one after those, and before and after a block whose first or
last call parsed; the tags that a format writes around its text.

Text and reasoning leave as soon as they cannot be part of a tag or of framing.
Work is linear in the characters fed, however they are cut. Knows no body format.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.parse.body import Attempt, Body, Broken, Ended, printable
from turnloom.parse.contract import Parser
from turnloom.parse.format import Build, ReasoningTags
from turnloom.parse.markup import Markup
from turnloom.parse.reader import Reader, State, before_newline, find_tag, ready
from turnloom.types import CallStatus, Tool

_BLANK = " \t\r\n"
_TOOL_CALL = Markup()


class TagParser(Reader):
    """A `Parser` for one turn. With `reasoning` None there are no reasoning tags, even with the opener in the prompt."""

    def __init__(
        self,
        tools: Sequence[Tool],
        reasoning_open: bool,
        reasoning: ReasoningTags | None,
        bodies: Sequence[type[Body]],
        markup: Markup = _TOOL_CALL,
    ) -> None:
        super().__init__(tools)
        self.markup = markup
        self._opens, self._closes = markup.section_opens, markup.section_closes
        self._bodies = tuple(bodies) if tools else ()
        self._think_open, self._think_close = (reasoning.opener, reasoning.closer) if reasoning else ("", "")
        self._reasoning = reasoning is not None and reasoning_open
        self._state: State = self._first if reasoning else self._text
        self._in_section = False
        self._after_call = False
        """Only blanks since a call that parsed."""
        # The block being read.
        self._ends: tuple[str, ...] = ()
        """The tags that end it once it is broken."""
        self._body: Body | None = None
        self._fault = CallStatus.MALFORMED
        self._restart = False

    # Reasoning and text.

    def _first(self, window: str) -> int:
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
            text = blanks.removesuffix("\n")
            self._emit(text, reasoning=self._reasoning)
            return len(text)
        self._state = self._think if self._reasoning else self._text
        return 0

    def _think(self, window: str) -> int:
        start = self._skip_newlines(window)
        end = window.find(self._think_close, start)
        stop = before_newline(window, start, end if end >= 0 else ready(window, start, (self._think_close,)))
        self._emit(window[start:stop], reasoning=True)
        if end < 0:
            return stop
        self._frame(window[stop : end + len(self._think_close)])
        self._state, self._reasoning, self._newlines = self._text, False, 2
        return end + len(self._think_close)

    def _text(self, window: str) -> int:
        start = self._skip_newlines(window)
        tags = self._tags()
        at, tag = find_tag(window, tags, start)
        if tag and tag in self.markup.framing:
            self._show(window[start:at])
            self._frame(tag)
            return at + len(tag)
        if tag and tag in self._closes:
            return self._close_section(window[start:at], tag, at + len(tag))
        stop = at if tag else ready(window, start, tags)
        stop = before_newline(window, start, stop) if self._bodies else stop
        self._show(window[start:stop])
        if not tag:
            return stop
        self._begin(self._section if tag in self._opens else self._opened, tag, self._at + at, (window[stop:at], "", ""))
        return at + len(tag)

    def _tags(self) -> tuple[str, ...]:
        """What may be a tag in visible text, as things stand."""
        if not self._bodies:
            return self.markup.framing
        blocks = (self.markup.open,) if self.markup.bare or self._in_section else ()
        closes = self._closes if self._after_call or self._in_section else ()
        return blocks + self._opens + closes + self.markup.framing

    def _show(self, text: str) -> None:
        """Visible text."""
        self._after_call = self._after_call and not text.strip(_BLANK)
        self._emit(text)

    def _begin(self, state: State, tag: str, at: int, lead: tuple[str, str, str]) -> None:
        self._open(at, lead)
        self._keep(tag)
        self._state, self._body, self._after_call = state, None, False
        self._ends = (self.markup.close,) if self.markup.close else ()

    def _close_section(self, before: str, tag: str, end: int) -> int:
        framing = self._after_call and not before.strip(_BLANK)
        text = before.removesuffix("\n") if framing else before + tag
        self._emit(text)
        self._frame((before + tag)[len(text) :])
        self._in_section, self._after_call, self._newlines = False, False, int(framing)
        return end

    # One block.

    def _section(self, window: str) -> int:
        """After a section's opening tag: is there a block?"""
        rest = window.lstrip(_BLANK)
        blanks = len(window) - len(rest)
        self._keep(window[:blanks])
        if rest.startswith(self.markup.open):
            section, (before, _, _) = self._raw(), self._ahead
            tag = section.rstrip(_BLANK)
            inner = section[len(tag) :].removeprefix("\n")
            head, inner = section[: len(section) - len(inner)], inner.removesuffix("\n")
            lead = (before + head, inner, section[len(head) + len(inner) :])
            self._begin(self._opened, self.markup.open, self._start_at + len(section), lead)
            self._in_section = True
            return blanks + len(self.markup.open)
        if not self.markup.open.startswith(rest):
            raw = self._raw()
            self._ends = tuple(closer for opener, closer in self.markup.sections if raw.startswith(opener))
            self._break(raw, CallStatus.MALFORMED, restart=True)
        return blanks

    def _opened(self, window: str) -> int:
        """After a block's opening tag: which body is it?"""
        rest = window.lstrip(_BLANK)
        blanks = len(window) - len(rest)
        self._keep(window[:blanks])
        for body in self._bodies:
            if rest and rest.startswith(body.opener):
                self._state, self._body = self._inside, body(sum(map(len, self._pieces)))
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

    def _end(self, ended: Ended) -> None:
        """The block is over by its body's own word."""
        assert self._body is not None
        raw = self._raw()
        self._give_back(raw[ended.end :])
        raw = raw[: ended.end]
        attempts = self._body.decode(raw, self._tools) if ended.status is None else [Attempt(ended.status, self._name())]
        self._close(raw, attempts)
        good = attempts[-1].status is CallStatus.OK
        self._state, self._newlines, self._after_call = self._text, int(good), good
        if good and self.markup.again:
            self._state = self._behind

    def _behind(self, window: str) -> int:
        """Right behind a call, where the next may follow without a tag."""
        assert self.markup.again is not None
        decided = self.markup.again(window)
        if decided:
            self._begin(self._opened, "", self._at, ("", "", ""))
        elif decided is not None:
            self._state = self._text
        return 0

    def _break(self, raw: str, status: CallStatus, *, restart: bool) -> None:
        """The block cannot become a call: what there is of it is text, and so is what comes until it ends."""
        if restart and not self._ends:
            # No tag ends it, so it is its opening tag and no more.
            tag = raw.rstrip(_BLANK)
            self._give_back(raw[len(tag) :])
            self._fail(tag, status, self._name())
            self._state = self._text
            return
        self._before(False)
        self._emit(raw)
        self._pieces = [raw]
        self._state, self._fault, self._restart = self._broken, status, restart

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
            self._note(status, self._name())
            self._state = self._text
        return stop

    def _name(self) -> str:
        return printable(self._body.name) if self._body is not None else ""

    def _end_of_output(self, held: str) -> None:
        if self._state == self._broken:
            self._emit(held)
            self._keep(held)
            self._note(CallStatus.UNCLOSED if self._ends else self._fault, self._name())
            self._state = self._text
        elif self._pieces:
            self._keep(held)
            ended = self._body.finish() if self._body is not None else None
            if ended is not None:
                self._end(ended)
            else:
                self._fail(self._raw(), CallStatus.UNCLOSED, self._name())
                self._state = self._text
        else:
            self._emit(held, reasoning=self._reasoning)


def tagged(*bodies: type[Body], markup: Markup = _TOOL_CALL) -> Build:
    """How a format whose blocks have one of these bodies between these tags makes its parser."""

    def build(tools: Sequence[Tool], reasoning_open: bool, reasoning: ReasoningTags | None) -> Parser:
        return TagParser(tools, reasoning_open, reasoning, bodies, markup)

    return build
