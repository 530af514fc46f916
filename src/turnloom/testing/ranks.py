"""Builds a `tokenizers.Tokenizer` from a tiktoken rank file. Knows no model."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_ranks(file: Path) -> dict[bytes, int]:
    """One token and its rank a line, the token in base64."""
    lines = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def byte_bpe(ranks: dict[bytes, int], split: str, control: Iterable[tuple[str, bool]], *, nfc: bool = False, control_first: int = 0) -> Any:
    """tiktoken's encoding of these ranks and this split, as merges.

    `control`: spellings in the order of their ids, and whether each is marked
    special. They follow the ranks; with `control_first` they come before them,
    and the ranks start at that id.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    spell = _byte_spelling()
    control = list(control)
    vocab = {"".join(spell[byte] for byte in token): rank + control_first for token, rank in ranks.items()}
    if control_first:
        vocab |= {spelling: index for index, (spelling, _) in enumerate(control)}
    merges: list[tuple[str, str]] = []
    whole = True
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = _parts_below(token, rank, ranks)
        if len(parts) == 2:
            merges.append(("".join(spell[byte] for byte in parts[0]), "".join(spell[byte] for byte in parts[1])))
        else:
            whole = False
    # A rank that no pair of lower ranks makes is still taken when a word equals it: that is ignore_merges.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=not whole))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(spelling, special=special, normalized=False) for spelling, special in control])
    return tokenizer


def _parts_below(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """`token` merged as far as ranks below its own go: two parts, when a merge makes it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [(ranks.get(left + right, rank), index) for index, (left, right) in enumerate(itertools.pairwise(parts))]
        lowest, index = min(joined)
        if lowest >= rank:
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


def _byte_spelling() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself when it prints, else the next code point from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}
