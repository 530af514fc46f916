"""Finds where a bracketed value ends, in pieces of any size. Knows strings and brackets; what the value says is judged elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Syntax:
    """`quotes` open and close strings; `escapes`: a backslash in a string takes the next character with it.

    `foreign` matches one character that the syntax has nowhere outside of strings,
    `unquotable` one that it has nowhere inside of them; empty: there is none.
    """

    quotes: tuple[str, ...]
    escapes: bool
    foreign: str = ""
    unquotable: str = ""
    _outside: re.Pattern[str] = field(init=False)
    _inside: dict[str, re.Pattern[str]] = field(init=False)

    def __post_init__(self) -> None:
        quotes = "|".join(map(re.escape, self.quotes))
        foreign = f"|(?P<bad>{self.foreign})" if self.foreign else "|(?P<bad>(?!))"
        object.__setattr__(self, "_outside", re.compile(rf"{quotes}|[\[\](){{}}]{foreign}"))
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


JSON = Syntax(('"',), True, foreign=r"[^ \t\n\r0-9+\-.eEtrufalsn,:]", unquotable=r"[\x00-\x1f]")


class Nesting:
    """Follows one value from its opening bracket on. Brackets are counted, not paired."""

    def __init__(self, syntax: Syntax) -> None:
        self.broken = False
        """The syntax has no such character at `at`."""
        self.at = 0
        """Characters followed so far: the end of the value once it has ended."""
        self.ended = False
        self.quoted = False
        """`at` is inside a string."""
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
        self.broken, self.ended, self.quoted = broken, not broken, bool(self._quote)
        return window[used:]

    def _step(self, token: str) -> None:
        if self._quote:
            self._quote = "" if token == self._quote else self._quote
        elif token in self._syntax.quotes:
            self._quote = token
        else:
            self._depth += 1 if token in "[({" else -1
