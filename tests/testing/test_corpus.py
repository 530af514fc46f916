"""The corpus: every entry loads, renders, and keeps control tokens apart from text."""

from __future__ import annotations

import itertools

import pytest

from turnloom.errors import ConfigError, RenderError
from turnloom.testing.corpus import ENTRIES, entry, load
from turnloom.tokenizer import HFTokenizer

CONTENTS = ["hi", [{"type": "text", "text": "hi"}]]
TOOL = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL}}]


def rendered(tokenizer: HFTokenizer, **kwargs: object) -> str:
    """A short conversation as text or as blocks, with tools or without: some templates take only the one, some only the other."""
    for content, tools in itertools.product(CONTENTS, (None, TOOLS)):
        said = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
        try:
            text = tokenizer.apply_template(said, tools, generation_prompt=True, **kwargs)
        except RenderError:
            continue
        if "hi" in text:
            return text
    raise AssertionError(f"{tokenizer.name} renders neither text nor blocks")


def test_the_corpus_is_large_and_its_names_are_its_own() -> None:
    assert sum(entry.source == "trl" for entry in ENTRIES) >= 37
    assert sum(entry.source == "llama.cpp" for entry in ENTRIES) >= 10
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    with pytest.raises(ConfigError, match="no template 'trl/qwen9'"):
        entry("trl/qwen9")


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES])
def test_every_entry_renders_with_control_tokens_of_one_id(name: str) -> None:
    tokenizer = load(name)
    assert load(name) is tokenizer
    assert tokenizer.chat_template
    assert tokenizer.eos_ids
    for spelling, index in tokenizer.control_tokens.items():
        assert tokenizer.encode(spelling) == [index], spelling
        assert tokenizer.decode([index]) == spelling
    text = rendered(tokenizer, **entry(name).template_kwargs)
    assert set(tokenizer.encode(text)) & set(tokenizer.control_tokens.values())
    assert not set(tokenizer.encode_plain(text)) & set(tokenizer.control_tokens.values())
