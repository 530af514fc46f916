"""Which ids of an output a part of its text comes from. Pure; keeps one mark a chunk and decodes again only where it is asked."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from turnloom.render.contract import Tokenizer
from turnloom.render.detokenize import IncrementalDecoder, from_a_character

_CONTEXT = 16
"""Ids before a chunk that may take part in its first character."""


class TokenSpans:
    """Told what each chunk of ids added to the text, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._tokens, self._chars = [0], [0]
        """Marks: so many ids gave out so many characters."""

    def add(self, token_ids: Sequence[int], text: str) -> None:
        self._ids += token_ids
        self._tokens.append(len(self._ids))
        self._chars.append(self._chars[-1] + len(text))

    def of(self, start: int, end: int) -> tuple[int, int]:
        """The ids [first, last) that hold the characters [start, end), those that reach over an edge too."""
        if start >= end:
            return (0, 0)
        # A character of several tokens is given out by the last of them: the first is the one after what came before.
        first = min(self._giving(start), self._giving(start - 1) + 1) if start else 0
        return first, self._giving(end - 1) + 1

    def _giving(self, char: int) -> int:
        """The index of the id that gave out this character."""
        mark = bisect_right(self._chars, char)
        if mark == len(self._chars):
            return len(self._ids) - 1
        low, high = self._tokens[mark - 1], self._tokens[mark]
        return bisect_left(range(low, high - 1), True, key=lambda token: self._given(low, token + 1) + self._chars[mark - 1] > char) + low

    def _given(self, low: int, high: int) -> int:
        """How many characters the ids [low, high) give out after those before them."""
        decoder = IncrementalDecoder(self._tokenizer)
        decoder.feed(from_a_character(self._ids[max(0, low - _CONTEXT) : low], self._tokenizer.byte_tokens))
        return len(decoder.feed(self._ids[low:high]))
