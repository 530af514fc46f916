"""gpt-oss's own vocabulary, o200k_harmony: as our tokenizer, and as the encoding of the `openai-harmony` package.

A test that needs what is not there is skipped and says what to install.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from turnloom.engine.models import built_once, cache_dir, package_files
from turnloom.errors import ConfigError
from turnloom.testing import corpus
from turnloom.testing.vocabularies import O200K_RANKS
from turnloom.tokenizer import HFTokenizer

T = TypeVar("T")


def o200k_tokenizer() -> HFTokenizer:
    """With the ids and the chat template of gpt-oss."""
    return _or_skip(lambda: corpus.load("trl/gptoss"))


@functools.cache
def harmony() -> Any:
    """The package's encoding of gpt-oss. It takes its ranks from a folder that the environment names, and checks their hash."""
    package = pytest.importorskip("openai_harmony", reason="not compared with openai-harmony: pip install openai-harmony")
    ranks = _or_skip(lambda: package_files(O200K_RANKS)[0])
    folder = built_once(cache_dir() / "o200k-ranks-1", lambda new: _copy(ranks, new / "o200k_base.tiktoken"))
    name = "TIKTOKEN_ENCODINGS_BASE"
    before = os.environ.get(name)
    os.environ[name] = str(folder)
    try:
        return package.load_harmony_encoding(package.HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _or_skip(get: Callable[[], T]) -> T:
    try:
        return get()
    except ConfigError as error:
        pytest.skip(f"gpt-oss's vocabulary or chat template is not here: {error}")
