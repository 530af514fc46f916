"""Reads a GGUF file's metadata and rebuilds its byte-level BPE tokenizer. Never touches the weights.

The format (little-endian): `GGUF`, u32 version, u64 tensor count, u64 pair
count, then pairs of key, u32 type and value; a string is u64 length and UTF-8;
an array is u32 element type, u64 count and the elements. The `gguf` package
makes an array view of every element and needs 4 s for a vocabulary of 49,152;
reading the pairs straight through needs a tenth of one.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnloom.errors import ConfigError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of `tokenizer.ggml.token_type` that mark an added token; 1 is a normal one, 5 unused, 6 a byte."""

_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


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


def read_tokenizer(path: Path) -> GgufTokenizer:
    """The tokenizer inside a GGUF file. Raises ConfigError for a kind that cannot be rebuilt exactly."""
    pairs = read_metadata(path)
    try:
        tokens, types = pairs["tokenizer.ggml.tokens"], pairs["tokenizer.ggml.token_type"]
    except KeyError as error:
        raise ConfigError(f"{path} has no {error.args[0]}; give a Hugging Face tokenizer directory") from error
    special = {
        f"{name}_token": tokens[pairs[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in pairs
    }
    ends = (pairs.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return GgufTokenizer(
        tokenizer=_build_bpe(path, pairs, tokens, types),
        chat_template=pairs.get("tokenizer.chat_template", ""),
        special=special,
        eos_ids=frozenset(end for end in ends if end is not None),
    )


def _build_bpe(path: Path, pairs: dict[str, Any], tokens: list[str], types: list[int]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind, pre = pairs.get("tokenizer.ggml.model"), pairs.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in ("smollm", "qwen2"):
        raise ConfigError(f"{path} holds a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}; give a Hugging Face tokenizer directory")
    merges = [tuple(merge.split(" ", 1)) for merge in pairs["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    if pre == "smollm":
        splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        tokenizer.normalizer = normalizers.NFC()
        splits = [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer
