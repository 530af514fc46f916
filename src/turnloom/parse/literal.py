"""Values written nearly as JSON, with quotes or keys of another kind: read into JSON text. Never evaluates anything.

Lists in brackets and objects in braces, members separated by commas; strings in
the format's own quotes; every other value is a bare word. A word is strict JSON
(a number, `true`, `false`, `null`), spelled as it is, or one of Python's `True`,
`False` and `None`, which templates print. Nothing else is repaired.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from turnloom.parse import strict_json
from turnloom.parse.schema import PRINTED


@dataclass(frozen=True, slots=True)
class Notation:
    """`string` matches one string with its quotes and `unquote` gives what it holds; `word` matches a bare value, `key` a bare key."""

    string: re.Pattern[str]
    unquote: Callable[[str], str]
    word: re.Pattern[str]
    key: re.Pattern[str]


class Cursor:
    """Reads from one text. Every method raises ValueError where the text is not of the notation."""

    def __init__(self, notation: Notation, text: str, at: int = 0) -> None:
        self.text = text
        self.at = at
        self._notation = notation

    def take(self, char: str) -> bool:
        """`char`, with blanks around it, if it comes next."""
        self.blank()
        if not self.text.startswith(char, self.at):
            return False
        self.at += len(char)
        self.blank()
        return True

    def expect(self, char: str) -> None:
        if not self.take(char):
            raise ValueError(f"expected {char!r} at {self.at}")

    def blank(self) -> None:
        self.at = strict_json.blank(self.text, self.at)

    def match(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def members(self, closer: str, separator: str, value: Callable[[str], str]) -> dict[str, str]:
        """`key separator value` any number of times, up to `closer`. A key twice is an error: which was meant is not ours to choose."""
        found: dict[str, str] = {}
        if self.take(closer):
            return found
        while True:
            key = self.key()
            self.expect(separator)
            if key in found:
                raise ValueError(f"the key {key!r} stands twice")
            found[key] = value(key)
            if self.take(closer):
                return found
            self.expect(",")

    def key(self) -> str:
        if (quoted := self.match(self._notation.string)) is not None:
            return self._notation.unquote(quoted)
        if (bare := self.match(self._notation.key)) is not None:
            return bare.strip()
        raise ValueError(f"no key at {self.at}")

    def value(self, depth: int = 1) -> str:
        """The JSON text of the value that comes next."""
        if depth > strict_json.MAX_DEPTH:
            raise ValueError(f"nested deeper than {strict_json.MAX_DEPTH}")
        if (quoted := self.match(self._notation.string)) is not None:
            return strict_json.quote(self._notation.unquote(quoted))
        if self.take("["):
            return self._list(depth)
        if self.take("{"):
            inner = self.members("}", ":", lambda key: self.value(depth + 1))
            return strict_json.spell(inner)
        word = self.word()
        if word in PRINTED:
            return PRINTED[word]
        if strict_json.kind(word) is None:
            raise ValueError(f"{word[:40]!r} is no value")
        return word

    def word(self) -> str:
        """A bare value as it is written, without the blanks around it."""
        return (self.match(self._notation.word) or "").strip(" \t\r\n")

    def _list(self, depth: int) -> str:
        items: list[str] = []
        if self.take("]"):
            return "[]"
        while True:
            items.append(self.value(depth + 1))
            if self.take("]"):
                return "[" + ", ".join(items) + "]"
            self.expect(",")
