"""Which ids hold which characters: against the definition, on real tokenizers, however the ids were cut into chunks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnloom.render.detokenize import IncrementalDecoder
from turnloom.render.spans import TokenSpans
from turnloom.testing import corpus
from turnloom.testing.tokenizers import qwen_tokenizer, smollm2_tokenizer
from turnloom.tokenizer import HFTokenizer

PIECES = ["<tool_call>", "\n", '{"name": "ls", "arguments": {}}', "</tool_call>", "你好", "🙂🏳️‍🌈", "naïve ", "word ", "  ", "\x00"]
TOKENIZERS = {"qwen2.5": qwen_tokenizer, "smollm2": smollm2_tokenizer, "phi3": lambda: corpus.load("trl/phi3")}


def fed(tokenizer: HFTokenizer, tokens: list[int], rng: random.Random) -> TokenSpans:
    spans, decoder, at = TokenSpans(tokenizer), IncrementalDecoder(tokenizer), 0
    while at < len(tokens):
        step = rng.randint(1, 12)
        chunk = tokens[at : at + step]
        spans.add(chunk, decoder.feed(chunk))
        at += step
    spans.add([], decoder.finish())
    return spans


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12), seed=st.integers(0, 2**32 - 1))
def test_a_span_holds_the_characters_and_no_token_less_would(name: str, pieces: list[str], seed: int) -> None:
    tokenizer, rng, text = TOKENIZERS[name](), random.Random(seed), "".join(pieces)
    tokens: list[int] = []
    rest = text
    while rest:
        cut = rng.randint(1, 9)
        tokens += tokenizer.encode_plain(rest[:cut]) if rng.random() < 0.5 else tokenizer.encode(rest[:cut])
        rest = rest[cut:]
    text = tokenizer.decode(tokens)
    spans = fed(tokenizer, tokens, rng)
    start = rng.randrange(len(text))
    end = rng.randint(start + 1, len(text))
    first, last = spans.of(start, end)
    before, through = tokenizer.decode(tokens[:first]), tokenizer.decode(tokens[:last])
    assert 0 <= first < last <= len(tokens)
    assert text.startswith(before.rstrip("�"))
    assert len(before.rstrip("�")) <= start, "nothing of the span comes before it"
    assert text.startswith(through), "no character is cut in two"
    assert len(through) >= end, "all of it is inside"
    assert len(tokenizer.decode(tokens[: last - 1]).rstrip("�")) < end, "the last token is needed"


def test_the_tokens_of_a_call_are_those_between_its_tags() -> None:
    tokenizer = qwen_tokenizer()
    parts = ["I look.\n", '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>', "\ndone"]
    tokens = [tokenizer.encode(part) for part in parts]
    spans = fed(tokenizer, [t for part in tokens for t in part], random.Random(1))
    start = len(parts[0])
    assert spans.of(start, start + len(parts[1])) == (len(tokens[0]), len(tokens[0]) + len(tokens[1]))
    assert spans.of(3, 3) == (0, 0)


def test_byte_tokens_of_a_character_cut_by_a_chunk() -> None:
    tokenizer = corpus.load("trl/phi3")
    tokens = tokenizer.encode_plain("鬱" * 20)
    spans, decoder = TokenSpans(tokenizer), IncrementalDecoder(tokenizer)
    for at in range(0, len(tokens), 10):
        spans.add(tokens[at : at + 10], decoder.feed(tokens[at : at + 10]))
    spans.add([], decoder.finish())
    assert [spans.of(i, i + 1) for i in range(20)] == [(3 * i, 3 * i + 3) for i in range(20)]
