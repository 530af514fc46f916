"""Finds where a bracketed value ends, and what must stand behind it, in pieces of any size. What the value says is judged elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from turnloom.parse import strict_json
from turnloom.parse.body import Broken, Ended
from turnloom.types import CallStatus


@dataclass(frozen=True, slots=True)
class Syntax:
    """`quotes` open and close strings; `escapes`: a backslash in a string takes the next character with it.

    `foreign` matches one character that the syntax has nowhere outside of strings,
    `unquotable` one that it has nowhere inside of them; empty: there is none.
    """

    quotes: tuple[str, ...]
    escapes: bool
    brackets: str = "[](){}"
    foreign: str = ""
    unquotable: str = ""
    _outside: re.Pattern[str] = field(init=False)
    _inside: dict[str, re.Pattern[str]] = field(init=False)

    def __post_init__(self) -> None:
        quotes = "|".join(map(re.escape, self.quotes))
        foreign = f"|(?P<bad>{self.foreign})" if self.foreign else "|(?P<bad>(?!))"
        object.__setattr__(self, "_outside", re.compile(f"{quotes}|[{re.escape(self.brackets)}]{foreign}"))
        unquotable = f"|(?P<bad>{self.unquotable})" if self.unquotable else "|(?P<bad>(?!))"
        escapes = r"|\\(?s:.)" if self.escapes else ""
        inside = {quote: re.compile(f"{re.escape(quote)}{escapes}{unquotable}") for quote in self.quotes}
        object.__setattr__(self, "_inside", inside)

    def next(self, quote: str, text: str, at: int) -> re.Match[str] | None:
        """The next thing that counts from `at` on, inside a string of that quote or, with none, outside of strings."""
        return (self._inside[quote] if quote else self._outside).search(text, at)

    def unfinished(self, quote: str, text: str, at: int) -> int:
        """Where what may be the start of such a thing stands at the end of `text`, not before `at`; else the end."""
        if quote and self.escapes:
            return len(text) - 1 if len(text) > at and text[-1] == "\\" else len(text)
        wanted = (quote,) if quote else self.quotes
        return next((i for i in range(max(at, len(text) - 8), len(text)) if any(q.startswith(text[i:]) for q in wanted)), len(text))


JSON = Syntax(('"',), True, "[]{}", foreign=r"[^ \t\n\r0-9+\-.eEtrufalsn,:]", unquotable=r"[\x00-\x1f]")


class Nesting:
    """Follows one value from its opening bracket on. Brackets are counted, not paired."""

    def __init__(self, syntax: Syntax) -> None:
        self.broken = False
        """The syntax has no such character at `at`."""
        self.at = 0
        """Characters followed so far: the end of the value once it has ended."""
        self.ended = False
        self._syntax = syntax
        self._quote = ""
        self._depth = 0
        self._carry = ""

    def feed(self, text: str, start: int = 0) -> str | None:
        """More of the value. None: it goes on. Else the value has ended or is broken, and what comes after `at` is returned.

        `start`: where in the first text fed the value starts; `at` counts from the text's own start.
        """
        window = self._carry + text
        i = start
        while (found := self._syntax.next(self._quote, window, i)) is not None:
            if found["bad"] is not None:
                return self._stop(window, found.start(), broken=True)
            i = found.end()
            self._step(found[0])
            if self._depth == 0 and not self._quote:
                return self._stop(window, i, broken=False)
        i = self._syntax.unfinished(self._quote, window, i)
        self.at += i
        self._carry = window[i:]
        return None

    def _stop(self, window: str, used: int, *, broken: bool) -> str:
        self.at += used
        self.broken, self.ended = broken, not broken
        return window[used:]

    def _step(self, token: str) -> None:
        if self._quote:
            self._quote = "" if token == self._quote else self._quote
        elif token in self._syntax.quotes:
            self._quote = token
        else:
            self._depth += 1 if token in "[({" else -1


class Bracketed:
    """The rest of a block: a value that starts at the offset `start`, then each of `tail` with blanks before it.

    `absent`: there is no value, only the tail.
    """

    def __init__(self, start: int, tail: tuple[str, ...], fault: CallStatus, syntax: Syntax = JSON, *, absent: bool = False) -> None:
        self.start = start
        self._value = Nesting(syntax)
        self._value.ended = absent
        self._fault = fault
        self._tail = list(tail)
        self._at = start
        """What is behind the value is read up to here."""
        self._carry = ""

    @property
    def end(self) -> int:
        return self.start + self._value.at

    def feed(self, text: str) -> Ended | Broken | None:
        if not self._value.ended:
            rest = self._value.feed(text)
            if self._value.broken:
                # What looks like it stands outside of a string may be quoted in one that was not escaped.
                return Broken(self.end, self._fault, restart=False)
            if rest is None:
                return None
            text, self._at = rest, self.end
        window, i = self._carry + text, 0
        while self._tail:
            i = strict_json.blank(window, i)
            if not window.startswith(self._tail[0], i):
                self._carry, self._at = window[i:], self._at + i
                return None if self._tail[0].startswith(self._carry) else Broken(self._at, self._fault, restart=True)
            i += len(self._tail.pop(0))
        return Ended(self._at + i)
