"""Turns token ids into text as they come. Pure; never splits a character and never looks further back than a few tokens.

A byte-level token may hold part of a character, so text is given out only when
no later token can change it. What can still change is a run of at most three
U+FFFD at the end: that is how a decoder shows a character whose bytes are not
all there (one U+FFFD for a byte-level decoder, one a byte for a byte-fallback
one). A decoder that treats the first token of a text in its own way (many drop
its leading space) is always asked with the tokens before the new ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnloom.render.contract import Tokenizer

_REPLACEMENT = "�"
_PENDING = 3
"""The most U+FFFD that an unfinished character of four bytes can show as."""

_KEPT = 8
"""Tokens and characters of context: enough that a character which began before them cannot matter to what follows."""


class IncrementalDecoder:
    """Text of a growing sequence of ids.

    The pieces of `feed` and `finish`, joined, are `tokenizer.decode` of all ids
    for every byte-level tokenizer, invalid UTF-8 included. A byte-fallback
    decoder may look differently at a run of byte tokens once an invalid one joins it; text already given
    out then stands, and only that run can differ.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._sent = 0
        """Characters of the window's text that have been given out."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete; may be empty."""
        self._window += [int(index) for index in token_ids]
        text = self._tokenizer.decode(self._window)
        pending = _pending(text)
        new = text[self._sent : len(text) - pending]
        self._sent = max(self._sent, len(text) - pending)
        self._shrink(text, pending)
        return new

    def finish(self) -> str:
        """What is left: the U+FFFD of a character that never became whole. Ready for another text afterwards."""
        text = self._tokenizer.decode(self._window)
        rest = text[self._sent :]
        self._window, self._sent = [], 0
        return rest

    def _shrink(self, text: str, pending: int) -> None:
        """Forget tokens that cannot matter any more: those before a tail that decodes to the same end of the text."""
        if len(self._window) <= 2 * _KEPT or self._sent != len(text) - pending:
            return
        keep = _KEPT
        while keep < len(self._window):
            tail = self._window[-keep:]
            shorter = self._tokenizer.decode(tail)
            if len(shorter) >= _KEPT and text.endswith(shorter[-_KEPT:]) and _pending(shorter) == pending:
                self._window, self._sent = tail, len(shorter) - pending
                return
            keep *= 2


def _pending(text: str) -> int:
    """How many U+FFFD at the end may still become something else."""
    return min(_PENDING, len(text) - len(text.rstrip(_REPLACEMENT)))
