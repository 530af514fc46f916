"""What gpt-oss writes: messages in channels, as OpenAI's harmony format lays down.

`<|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>TYPE<|message|>…<|end|>`.
The prompt ends in `<|start|>assistant`, so the first header may start after it.
The recipient may stand before or after the channel; `<|call|>` and `<|return|>`
end a message as `<|end|>` does, and so does the end of the output, as an engine
takes the last one for itself.

- `analysis` without a recipient is reasoning;
- `final`, `commentary` or no channel without a recipient is text;
- a message to `functions.NAME`, or to a declared tool without that namespace, is a
  call, whatever its channel, when tools are declared. Its body is a JSON object;
  closed and empty it has no arguments. An end token inside a JSON string is part of it.

Framing: headers and end tokens. A header that is none of these is text, and so is
what stands between messages. Only an end token ends a message: other control
tokens inside one are part of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnloom.parse.body import printable
from turnloom.parse.contract import Parser
from turnloom.parse.format import Format, ReasoningTags
from turnloom.parse.json_calls import read_arguments
from turnloom.parse.nesting import JSON, Nesting
from turnloom.parse.reader import Reader, State, ready
from turnloom.types import CallStatus, Tool

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_OPENERS = (_START, _CHANNEL)
_MAX_HEADER = 1024
_NAMESPACE = "functions."

_END = re.compile("|".join(map(re.escape, _ENDS)))
_OPENER = re.compile("|".join(map(re.escape, _OPENERS)))
_HEADER_STOP = re.compile(rf"{re.escape(_MESSAGE)}|\n|{_END.pattern}|(?!\A){re.escape(_START)}")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?P<before>[^<]*)(?:<\|channel\|>(?P<channel>[^<\s]*)(?P<after>[^<]*))?"
    r"(?:<\|constrain\|>(?P<type>[^<]*))?<\|message\|>"
)
_FIRST = re.compile(rf" ?to=|{_OPENER.pattern}|{re.escape(_MESSAGE)}")
_MAY_BE_FIRST = (" to=", "to=", _START, _CHANNEL, _MESSAGE)


class HarmonyParser(Reader):
    """A `Parser` for one turn. With `reasoning_open` the output starts in the body of an analysis message."""

    def __init__(self, tools: Sequence[Tool], reasoning_open: bool) -> None:
        super().__init__(tools)
        self._reasoning = reasoning_open
        """The message being read is reasoning."""
        self._state: State = self._message if reasoning_open else self._first
        self._name = ""
        self._value = Nesting(JSON)
        self._fault = CallStatus.INVALID_JSON

    def _first(self, window: str) -> int:
        """The beginning of the output, where a header needs no opener."""
        if _FIRST.match(window):
            self._open(self._at)
            self._state = self._header
        elif not any(opener.startswith(window) for opener in _MAY_BE_FIRST):
            self._state = self._between
        return 0

    def _between(self, window: str) -> int:
        """Between messages there is nothing, so what there is comes out as text."""
        found = _OPENER.search(window)
        stop = found.start() if found else ready(window, 0, _OPENERS)
        self._emit(window[:stop])
        if found:
            self._open(self._at + stop)
            self._state = self._header
        return stop

    def _header(self, window: str) -> int:
        self._keep(window)
        header = self._raw()
        found = _HEADER_STOP.search(header[:_MAX_HEADER])
        if found is None and len(header) < _MAX_HEADER:
            self._pieces = [header]
            return len(window)
        if found is None or found[0] != _MESSAGE:
            found = _OPENER.match(header)
        stop = found.end() if found else 1
        self._give_back(header[stop:])
        self._pieces = [header[:stop]]
        self._read_header(header[:stop])
        return len(window)

    def _read_header(self, header: str) -> None:
        found = _HEADER.fullmatch(header)
        words = f"{found['before']} {found['after'] or ''} {found['type'] or ''}".split() if found else []
        recipients = [word.removeprefix("to=") for word in words if word.startswith("to=")]
        well_formed = found is not None and len(recipients) <= 1 and len(words) - len(recipients) <= 1
        channel = (found["channel"] or "") if found else ""
        if recipients and self._tools and header.endswith(_MESSAGE):
            self._open_call(recipients[0], well_formed)
        elif found is None and " to=" in header and self._tools and header.endswith(_MESSAGE):
            self._open_call("", False)
        elif well_formed and not recipients and channel in ("", "analysis", "commentary", "final"):
            self._frame(header)
            self._pieces = []
            self._reasoning, self._state = channel == "analysis", self._message
        else:
            self._emit(header)
            self._pieces, self._state = [], self._between

    def _message(self, window: str) -> int:
        found = _END.search(window)
        stop = found.start() if found else ready(window, 0, _ENDS)
        self._emit(window[:stop], reasoning=self._reasoning)
        if found is None:
            return stop
        self._frame(found[0])
        self._reasoning, self._state = False, self._between
        return found.end()

    # A call: its header is kept and leads its raw text.

    def _open_call(self, recipient: str, well_formed: bool) -> None:
        self._name = recipient.removeprefix(_NAMESPACE)
        if well_formed:
            self._state = self._call
        else:
            self._lose(CallStatus.MALFORMED)

    def _call(self, window: str) -> int:
        """The body up to its first character that is no blank."""
        bare = window.lstrip()
        blanks = len(window) - len(bare)
        self._keep(window[:blanks])
        if bare.startswith("{"):
            self._value, self._state = Nesting(JSON), self._arguments
        elif (found := _END.match(bare)) is not None:
            self._keep(found[0])
            self._end_call("{}")
            return blanks + len(found[0])
        elif bare and not any(end.startswith(bare) for end in _ENDS):
            self._lose(CallStatus.INVALID_JSON)
        return blanks

    def _arguments(self, window: str) -> int:
        rest = self._value.feed(window)
        used = len(window) - len(rest or "")
        self._keep(window[:used])
        if self._value.broken:
            self._lose(CallStatus.INVALID_JSON)
        elif self._value.ended:
            self._state = self._closing
        return used

    def _closing(self, window: str) -> int:
        """After the arguments: blanks and an end token."""
        bare = window.lstrip()
        blanks = len(window) - len(bare)
        self._keep(window[:blanks])
        if (found := _END.match(bare)) is not None:
            arguments = self._body()
            self._keep(found[0])
            self._end_call(arguments)
            return blanks + len(found[0])
        if bare and not any(end.startswith(bare) for end in _ENDS):
            self._lose(CallStatus.INVALID_JSON)
        return blanks

    def _body(self) -> str:
        return self._raw().partition(_MESSAGE)[2].strip()

    def _end_call(self, arguments: str) -> None:
        self._close(self._raw(), [read_arguments(self._name, arguments, self._tools)])
        self._reasoning, self._state = False, self._between

    def _lose(self, status: CallStatus) -> None:
        """The message cannot be a call: what there is of it is text, and so is what comes until it ends."""
        self._emit(self._raw())
        if status is CallStatus.INVALID_JSON and self._name not in self._tools:
            status = CallStatus.UNKNOWN_TOOL if self._name else CallStatus.MISSING_NAME
        self._fault, self._state = status, self._lost

    def _lost(self, window: str) -> int:
        found = _END.search(window)
        stop = found.end() if found else ready(window, 0, _ENDS)
        self._emit(window[:stop])
        self._keep(window[:stop])
        if found:
            self._record_lost()
        return stop

    def _record_lost(self) -> None:
        self._note(self._fault, printable(self._name))
        self._reasoning, self._state = False, self._between

    def _end_of_output(self, held: str) -> None:
        if self._state == self._lost:
            self._emit(held)
            self._keep(held)
            self._record_lost()
        elif self._state == self._closing and not held:
            self._end_call(self._body())
        elif self._state == self._header:
            # A header that was cut: nothing says what it would have been.
            self._emit(self._raw() + held)
            self._pieces, self._state = [], self._between
        elif self._pieces:
            self._keep(held)
            self._fail(self._raw(), CallStatus.UNCLOSED, printable(self._name))
            self._state = self._between
        else:
            self._emit(held, reasoning=self._reasoning)


def _build(tools: Sequence[Tool], reasoning_open: bool, reasoning: ReasoningTags | None) -> Parser:
    """Reasoning has a channel of its own here, which is read whatever tags are asked for."""
    return HarmonyParser(tools, reasoning_open)


# Others have channels too (`<|channel>`); only harmony has the token that constrains a body or names the channels so.
FORMAT = Format("harmony", lambda template: "<|channel|>analysis<|message|>" in template, _build)
