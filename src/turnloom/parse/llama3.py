"""What Llama 3.1 to 3.3 write: a reply that is nothing but `{"name": …, "parameters": {…}}`, or calls after `<|python_tag|>`.

Several objects are separated by `;`, blanks or newlines. Bare ones are calls only
if nothing else stands in the reply, which its end alone shows: until then they
wait. After the tag each call comes out when it is complete, and what follows the
last is text. `<|python_tag|>name.call(key="value", …)` is read where it is plain
values by name (strings, numbers, lists, objects); other code after the tag is malformed.

A reply that starts with `{` and a key but is no call at all (an answer in JSON)
leaves a record only where it has the members of a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from turnloom.parse import strict_json
from turnloom.parse.body import Attempt, undeclared
from turnloom.parse.contract import Parser
from turnloom.parse.format import Format, ReasoningTags
from turnloom.parse.json_calls import Keys, read_object
from turnloom.parse.lfm2 import NOTATION, SYNTAX, call
from turnloom.parse.literal import Cursor
from turnloom.parse.nesting import JSON, Nesting
from turnloom.parse.reader import Reader, State, before_newline, ready
from turnloom.types import CallStatus, Tool

_TAG = "<|python_tag|>"
_KEYS = Keys()
_BETWEEN = " \t\r\n;"
_BARE = re.compile(r'[ \t\r\n]{0,256}\{[ \t\r\n]{0,256}["}]')
_MAY_BE_BARE = re.compile(r"[ \t\r\n]{0,256}(?:\{[ \t\r\n]{0,256})?")
_OBJECT = re.compile(r"[ \t\r\n;]{0,256}\{")
_CODE = re.compile(r"[ \t\r\n]{0,256}(?P<name>[A-Za-z_][\w.\-]{0,255})\.call(?=\()")
_MAY_BE_EITHER = re.compile(r"[ \t\r\n;]{0,256}|[ \t\r\n]{0,256}[A-Za-z_][\w.\-]{0,264}")


class Llama3Parser(Reader):
    """A `Parser` for one turn. Knows no reasoning."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._state: State = self._lead if tools else self._text
        self._bare = False
        self._items: list[tuple[int, int]] = []
        """Where the bare objects start and end, in the block."""
        self._value: Nesting | None = None
        self._value_at = 0
        self._size = 0
        """Characters in the block."""
        self._fault = CallStatus.INVALID_JSON

    # Text.

    def _lead(self, window: str) -> int:
        """The beginning of the reply, where an object needs no tag."""
        if _BARE.match(window):
            self._begin(self._at, bare=True)
            self._state = self._objects
        elif not _MAY_BE_BARE.fullmatch(window):
            self._state = self._text
        return 0

    def _text(self, window: str) -> int:
        start = self._skip_newlines(window)
        if not self._tools:
            self._emit(window[start:])
            return len(window)
        at = window.find(_TAG, start)
        stop = before_newline(window, start, at if at >= 0 else ready(window, start, (_TAG,)))
        self._emit(window[start:stop])
        if at < 0:
            return stop
        self._begin(self._at + at, bare=False, lead=window[stop:at])
        self._add(_TAG)
        self._state = self._tagged
        return at + len(_TAG)

    def _begin(self, at: int, *, bare: bool, lead: str = "") -> None:
        self._open(at, (lead, "", ""))
        self._bare, self._items, self._value, self._size = bare, [], None, 0

    def _add(self, text: str) -> None:
        self._keep(text)
        self._size += len(text)

    # Objects, bare or after the tag.

    def _tagged(self, window: str) -> int:
        """After the tag: objects or code?"""
        if _OBJECT.match(window):
            self._state = self._objects
        elif _CODE.match(window):
            self._state = self._code
        elif not _MAY_BE_EITHER.fullmatch(window):
            self._lose(CallStatus.MALFORMED)
        return 0

    def _objects(self, window: str) -> int:
        if self._value is None:
            bare = window.lstrip(_BETWEEN)
            if bare and bare[0] != "{":
                return self._other(window)
            if bare:
                self._value, self._value_at = Nesting(JSON), self._size + len(window) - len(bare)
            self._add(window[: len(window) - len(bare)])
            return len(window) - len(bare) or self._follow(window)
        return self._follow(window)

    def _follow(self, window: str) -> int:
        assert self._value is not None
        rest = self._value.feed(window)
        used = len(window) - len(rest or "")
        self._add(window[:used])
        if self._value.broken:
            self._lose(CallStatus.INVALID_JSON)
        elif self._value.ended:
            self._value = None
            self._end_object()
        return used

    def _end_object(self) -> None:
        if self._bare:
            self._items.append((self._value_at, self._size))
            return
        raw = self._raw()
        attempt = read_object(raw[self._value_at :], self._tools, _KEYS)
        self._close(raw, [attempt])
        self._newlines = int(attempt.status is CallStatus.OK)
        self._open(self._start_at + len(raw))
        self._size = 0

    def _other(self, window: str) -> int:
        """Something that is no object comes next."""
        self._keep(window)
        if self._bare:
            self._end_bare(alone=False)
            self._state = self._text
        else:
            self._leave()
        return len(window)

    def _leave(self) -> None:
        """The calls after the tag are over; separators behind the last are text again."""
        raw, self._pieces = self._raw(), []
        self._give_back(raw)
        self._state = self._text

    def _end_bare(self, *, alone: bool) -> None:
        """The bare objects are over. `alone`: nothing else stands in the reply."""
        raw = self._raw()
        stop = len(raw) if alone else self._items[-1][1]
        self._give_back(raw[stop:])
        raw = raw[:stop]
        read = [replace(read_object(raw[start:end], self._tools, _KEYS), end=end) for start, end in self._items]
        shown = [_is_call(raw[start:end]) for start, end in self._items]
        if not alone or not all(shown):
            broken = [replace(attempt, status=CallStatus.MALFORMED) if attempt.status is CallStatus.OK else attempt for attempt in read]
            read = [attempt for attempt, is_call in zip(broken, shown, strict=True) if is_call]
        self._pieces = []
        if read:
            self._close(raw, read)
        else:
            self._emit(raw)

    # Code after the tag.

    def _code(self, window: str) -> int:
        if self._value is None:
            found = _CODE.match(window)
            assert found is not None
            self._add(window[: found.end()])
            self._value, self._value_at = Nesting(SYNTAX), self._size
            return found.end()
        rest = self._value.feed(window)
        used = len(window) - len(rest or "")
        self._add(window[:used])
        if self._value.ended:
            self._end_code()
        return used

    def _end_code(self) -> None:
        raw = self._raw()
        found = _CODE.match(raw, len(_TAG))
        assert found is not None
        name = found["name"]
        try:
            attempt = call(Cursor(NOTATION, raw, self._value_at), name, self._tools)
        except ValueError:
            attempt = undeclared(name, self._tools) or Attempt(CallStatus.MALFORMED, name)
        self._close(raw, [attempt])
        self._newlines, self._state = int(attempt.status is CallStatus.OK), self._text

    # What is no call.

    def _lose(self, status: CallStatus) -> None:
        """The block cannot be a call: it is text, and so is the rest of the reply."""
        self._before(False)
        self._emit(self._raw())
        self._fault, self._state = status, self._lost

    def _lost(self, window: str) -> int:
        self._emit(window)
        self._keep(window)
        return len(window)

    def _end_of_output(self, held: str) -> None:
        if self._state == self._lost:
            self._note(self._fault)
            self._state = self._text
        elif self._pieces and self._value is None and self._bare:
            self._end_bare(alone=True)
            self._state = self._text
        elif self._pieces and self._value is None and not self._raw().startswith(_TAG):
            self._leave()
        elif self._pieces:
            self._add(held)
            self._fail(self._raw(), CallStatus.UNCLOSED)
            self._state = self._text
        else:
            self._emit(held)


def _is_call(text: str) -> bool:
    """Has the object a name and arguments, or is no object to be told from one?"""
    try:
        keys = {member.key for member in strict_json.members(text)}
    except ValueError:
        return True
    return "name" in keys or bool(keys & {"arguments", "parameters"})


def _build(tools: Sequence[Tool], reasoning_open: bool, reasoning: ReasoningTags | None) -> Parser:
    return Llama3Parser(tools)


_SHOWN = '{"name": function name, "parameters":'


def _taught(template: str) -> bool:
    """Functionary has the tag as well, for code; its calls are tagged functions."""
    return _SHOWN in template or (_TAG in template and "<function=" not in template)


FORMAT = Format("llama3", _taught, _build)
