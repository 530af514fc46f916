"""Reads a GGUF file's metadata and rebuilds its BPE tokenizer. Never touches the weights.

The format (little-endian): `GGUF`, u32 version, u64 tensor count, u64 pair
count, then pairs of key, u32 type and value; a string is u64 length and UTF-8;
an array is u32 element type, u64 count and the elements. The `gguf` package
makes an array view of every element and needs 4 s for a vocabulary of 49,152;
reading the pairs straight through needs a tenth of one.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turnloom.errors import ConfigError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of `tokenizer.ggml.token_type`; the last three mark an added token. 5 is an unused one, 6 a byte."""

_SPLIT = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_DIGITS = ("smollm", "command-r", "starcoder", "refact")
"""Pre-tokenizers that cut off every digit, then split as GPT-2 does."""

_NORMALIZED = ("qwen2", "qwen35", "command-r")
"""Those whose published tokenizer first composes characters (NFC)."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What SentencePiece writes for a space."""


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        raw = self.data[self.at : self.at + size]
        if len(raw) != size:
            raise ValueError("it is cut off")
        self.at += size
        return raw.decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("<I"), self.scalar("<Q")
            if inner in _SCALARS:
                form = f"<{count}{_SCALARS[inner][1]}"
                values = list(struct.unpack_from(form, self.data, self.at))
                self.at += struct.calcsize(form)
                return values
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is not known")
        return self.scalar(_SCALARS[kind])


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key and value of the header. Raises ConfigError when it is not a readable GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data)
            if data[:4] != b"GGUF":
                raise ValueError("it does not start with GGUF")
            reader.at = 4
            version = reader.scalar("<I")
            if version not in (2, 3):
                raise ValueError(f"version {version} is not known")
            reader.scalar("<Q")
            pairs: dict[str, Any] = {}
            for _ in range(reader.scalar("<Q")):
                key = reader.string()
                pairs[key] = reader.value(reader.scalar("<I"))
            return pairs
    except (OSError, ValueError, struct.error, MemoryError) as error:
        raise ConfigError(f"cannot read {path} as a GGUF file: {error}") from error


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """`tokenizer` is a `tokenizers.Tokenizer`; `special` maps `bos_token` and the like to spellings."""

    tokenizer: Any
    chat_template: str
    special: dict[str, str]
    eos_ids: frozenset[int]


def read_tokenizer(path: Path, *, renamed: Mapping[str, str] = MappingProxyType({})) -> GgufTokenizer:
    """The tokenizer inside a GGUF file, `renamed` tokens under another spelling. Raises ConfigError when it cannot be rebuilt exactly."""
    pairs = read_metadata(path)
    try:
        tokens, types = pairs["tokenizer.ggml.tokens"], pairs["tokenizer.ggml.token_type"]
    except KeyError as error:
        raise ConfigError(f"{path} has no {error.args[0]}; give a Hugging Face tokenizer directory") from error
    tokens = [renamed.get(token, token) for token in tokens] if renamed else tokens
    special = {
        f"{name}_token": tokens[pairs[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in pairs
    }
    ends = (pairs.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return GgufTokenizer(
        tokenizer=_build(path, pairs, tokens, types),
        chat_template=pairs.get("tokenizer.chat_template", ""),
        special=special,
        eos_ids=frozenset(end for end in ends if end is not None),
    )


def _build(path: Path, pairs: dict[str, Any], tokens: list[str], types: list[int]) -> Any:
    from tokenizers import AddedToken

    kind, pre = pairs.get("tokenizer.ggml.model"), pairs.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and pre in (*_SPLIT, *_DIGITS, "gpt-2"):
        tokenizer = _byte_level(pre, tokens, _merges(pairs))
    elif kind == "gemma4":
        tokenizer = _byte_fallback(tokens, _merges(pairs), prefix=False)
    elif kind == "llama" and pairs.get("tokenizer.ggml.scores"):
        merges = _merges_by_score(tokens, types, pairs["tokenizer.ggml.scores"])
        tokenizer = _byte_fallback(tokens, merges, prefix=pairs.get("tokenizer.ggml.add_space_prefix", True))
    else:
        raise ConfigError(f"{path} holds a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}; give a Hugging Face tokenizer directory")
    strips = _takes_spaces_after(pairs)
    added = [
        AddedToken(token, special=mark != USER_DEFINED, normalized=False, rstrip=strips(token))
        for index, (token, mark) in enumerate(zip(tokens, types, strict=True))
        if mark in (UNKNOWN, CONTROL, USER_DEFINED) and token != f"[PAD{index}]"  # rows of the embedding that no token has
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _merges(pairs: dict[str, Any]) -> list[tuple[str, str]]:
    found = (merge.split(" ", 1) for merge in pairs["tokenizer.ggml.merges"])
    return [(left, right) for left, right in found]


def _byte_level(pre: str, tokens: list[str], merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = []
    if pre in _SPLIT:
        splits.append(pre_tokenizers.Split(Regex(_SPLIT[pre]), "isolated"))
    elif pre in _DIGITS:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLIT))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_fallback(tokens: list[str], merges: list[tuple[str, str]], *, prefix: bool) -> Any:
    """SentencePiece's BPE as the published tokenizers of Llama 2 and Gemma write it. `prefix`: a text starts with a space of its own."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return tokenizer


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores highest: each cut of a piece in two pieces is a merge, ranked by it."""
    pieces = {token: score for token, mark, score in zip(tokens, types, scores, strict=True) if mark in (NORMAL, USER_DEFINED)}
    place = {token: index for index, token in enumerate(tokens)}
    found = [
        (-score, place[piece[:cut]], place[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _takes_spaces_after(pairs: dict[str, Any]) -> Callable[[str], bool]:
    """Whether a control token swallows the white space after it. The format has no field for it; llama.cpp too goes by the model's name."""
    if re.search("phi-?3", pairs.get("general.name", ""), re.IGNORECASE):
        return lambda token: token not in ("<unk>", "<s>", "<|endoftext|>")
    return lambda token: False
