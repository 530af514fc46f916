"""Turns token ids into text as they come. Pure; never splits a character and never looks further back than a few tokens.

A token may hold part of a character, so text is given out only when no later
token can change it. There are two kinds of vocabulary:

- Byte-level: a decoder shows a character whose bytes are not all there as
  U+FFFD, so a run of at most three of them at the end waits.
- Byte-fallback (SentencePiece): one token a byte, and a decoder shows a run of byte
  tokens as characters when all of it is UTF-8, as one U+FFFD a byte when any of it is not.
  So the tokens of an unfinished character wait, and are decoded when it is whole.

A decoder that treats the first token of a text in its own way (many drop
its leading space) is always asked with the tokens before the new ones.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping

from turnloom.render.contract import Tokenizer

_REPLACEMENT = "�"
_PENDING = 3
"""The most U+FFFD that an unfinished character of four bytes can show as."""

_KEPT = 8
"""Tokens and characters of context: enough that a character which began before them cannot matter to what follows."""


class IncrementalDecoder:
    """Text of a growing sequence of ids.

    The pieces of `feed` and `finish`, joined, are `tokenizer.decode` of all ids
    for every byte-level tokenizer, invalid UTF-8 included. For a byte-fallback
    one they are so where every run of byte tokens is UTF-8; in another run the characters
    before the first wrong byte stand, and each byte from there on is one U+FFFD.

    A byte-fallback tokenizer is one with `byte_tokens`: id -> value of the tokens that are one byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: Mapping[int, int] = tokenizer.byte_tokens
        self._window: list[int] = []
        self._sent = 0
        """Characters of the window's text that have been given out."""
        self._held: list[int] = []
        """Byte tokens of a character that is not whole yet."""
        self._broken = False
        """Whether the run of byte tokens being read is known not to be UTF-8."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that `token_ids` complete; may be empty."""
        new = [int(index) for index in token_ids]
        return self._feed_bytes(new) if self._bytes else self._decode(new)

    def finish(self) -> str:
        """What is left: the U+FFFD of a character that never became whole. Ready for another text afterwards."""
        rest = self._tokenizer.decode(self._window)[self._sent :] + _REPLACEMENT * len(self._held)
        self._window, self._sent, self._held, self._broken = [], 0, [], False
        return rest

    def _feed_bytes(self, token_ids: list[int]) -> str:
        pieces: list[str] = []
        whole: list[int] = []
        for index in token_ids:
            if index not in self._bytes:
                if self._held:
                    pieces += self._decode(whole), self._give_up()
                    whole = []
                self._broken = False
                whole.append(index)
            elif self._broken:
                pieces.append(_REPLACEMENT)
            else:
                self._held.append(index)
                complete = _complete(bytes(self._bytes[held] for held in self._held))
                if complete:
                    whole += self._held
                    self._held = []
                elif complete is None:
                    pieces += self._decode(whole), self._give_up()
                    whole, self._broken = [], True
        return "".join(pieces) + self._decode(whole)

    def _give_up(self) -> str:
        """The held tokens as bytes that are no character. They stay as context, so that what follows is not the first of a text."""
        held, self._held = self._held, []
        self._window += held
        self._sent = len(self._tokenizer.decode(self._window))
        return _REPLACEMENT * len(held)

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        self._window += token_ids
        text = self._tokenizer.decode(self._window)
        pending = self._pending(text)
        new = text[self._sent : len(text) - pending]
        self._sent = max(self._sent, len(text) - pending)
        self._shrink(text, pending)
        return new

    def _shrink(self, text: str, pending: int) -> None:
        """Forget tokens that cannot matter any more: those before a tail that decodes to the same end of the text."""
        if len(self._window) <= 2 * _KEPT or self._sent != len(text) - pending:
            return
        keep = _KEPT
        while keep < len(self._window):
            tail = self._tail(keep)
            shorter = self._tokenizer.decode(tail)
            if len(shorter) >= _KEPT and text.endswith(shorter[-_KEPT:]) and self._pending(shorter) == pending:
                self._window, self._sent = tail, len(shorter) - pending
                return
            keep *= 2

    def _tail(self, keep: int) -> list[int]:
        """The last `keep` tokens of the window, without those that go on with a character of bytes begun before them."""
        return from_a_character(self._window[-keep:], self._bytes)

    def _pending(self, text: str) -> int:
        """How many U+FFFD at the end may still become something else."""
        return 0 if self._bytes else min(_PENDING, len(text) - len(text.rstrip(_REPLACEMENT)))


def from_a_character(token_ids: list[int], byte_tokens: Mapping[int, int]) -> list[int]:
    """The ids without the first ones that go on with a character of byte tokens begun before them."""
    first = next((place for place, index in enumerate(token_ids) if not 0x80 <= byte_tokens.get(index, 0) < 0xC0), 0)
    return token_ids[first:]


def _complete(found: bytes) -> bool | None:
    """Whether these bytes are a whole character, or only the beginning of one; None when they are neither."""
    try:
        return bool(codecs.utf_8_decode(found, "strict", False)[1])
    except UnicodeDecodeError:
        return None
