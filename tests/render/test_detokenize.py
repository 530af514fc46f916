"""Incremental decoding equals decoding at once, whatever the ids and however they come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnloom.render.detokenize import IncrementalDecoder
from turnloom.testing.corpus import load
from turnloom.testing.tokenizers import qwen_tokenizer, smollm2_tokenizer
from turnloom.tokenizer import HFTokenizer

BUILDERS = [qwen_tokenizer, smollm2_tokenizer]
BYTE_FALLBACK = ["trl/phi3", "trl/gemma4"]
TRICKY = "aé你🙂𝔘 \n\ufffd\u200d🏴☠️"


@pytest.fixture(scope="module", params=BUILDERS, ids=["qwen2.5", "smollm2"])
def tokenizer(request: pytest.FixtureRequest) -> HFTokenizer:
    return request.param()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def fragments(tokenizer: HFTokenizer) -> list[int]:
    """Ids whose token is no whole character."""
    return [index for index in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([index])]


def decoded(tokenizer: HFTokenizer, token_ids: Sequence[int], sizes: Sequence[int]) -> tuple[str, list[str]]:
    decoder, pieces, at = IncrementalDecoder(tokenizer), [], 0
    for size in sizes:
        pieces.append(decoder.feed(token_ids[at : at + size]))
        at += size
    pieces.append(decoder.feed(token_ids[at:]))
    return "".join(pieces) + decoder.finish(), pieces


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_pieces_join_to_the_whole(tokenizer: HFTokenizer, fragments: list[int], data: st.DataObject) -> None:
    any_id = st.integers(0, tokenizer.vocab_size + 300)
    token_ids = data.draw(st.lists(st.one_of(st.sampled_from(fragments), any_id), max_size=60))
    sizes = data.draw(st.lists(st.integers(0, 40), max_size=60))
    assert decoded(tokenizer, token_ids, sizes)[0] == tokenizer.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.one_of(st.sampled_from(TRICKY), st.characters(exclude_categories=["Cs"])), max_size=60))
def test_no_character_is_ever_split(tokenizer: HFTokenizer, text: str) -> None:
    token_ids = tokenizer.encode_plain(text)
    whole, pieces = decoded(tokenizer, token_ids, [1] * len(token_ids))
    expected = tokenizer.decode(token_ids)
    assert whole == expected
    assert sum(piece.count("\ufffd") for piece in pieces) <= expected.count("\ufffd")


def test_text_is_given_out_as_soon_as_it_is_certain(tokenizer: HFTokenizer) -> None:
    token_ids = tokenizer.encode_plain("plain words, one by one")
    assert decoded(tokenizer, token_ids, [1] * len(token_ids))[1][:-1] == [tokenizer.decode([index]) for index in token_ids]


def test_control_tokens_are_kept(tokenizer: HFTokenizer) -> None:
    end = tokenizer.control_tokens["<|im_end|>"]
    assert IncrementalDecoder(tokenizer).feed([end]) == "<|im_end|>"


def test_the_window_stays_small_in_a_long_run_of_broken_bytes(tokenizer: HFTokenizer, fragments: list[int]) -> None:
    seen: list[int] = []

    class Watched:
        byte_tokens = tokenizer.byte_tokens

        def decode(self, token_ids: Sequence[int]) -> str:
            seen.append(len(token_ids))
            return tokenizer.decode(token_ids)

    decoder = IncrementalDecoder(Watched())  # type: ignore[arg-type]
    for index in (fragments * 10)[:2000]:
        decoder.feed([index])
    assert max(seen) <= 40


WORDS = st.one_of(
    st.sampled_from(["hello ", " world", "\n", "🦀🦞", "🧑‍🚀", "𓀀𓁐", "日本語", "ไทย", "مرحبا", "\ufffd", "é", " "]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
PIECES = st.lists(st.tuples(WORDS, st.booleans()), max_size=25)
"""Parts of a text, each with whether its tokens are its bytes."""


def spelled(tokenizer: HFTokenizer, pieces: Sequence[tuple[str, bool]]) -> list[int]:
    token_of = {value: index for index, value in tokenizer.byte_tokens.items()}
    token_ids: list[int] = []
    for text, as_bytes in pieces:
        token_ids += [token_of[byte] for byte in text.encode()] if as_bytes and token_of else tokenizer.encode_plain(text)
    return token_ids


@pytest.mark.parametrize("name", [*BYTE_FALLBACK, "qwen2.5", "smollm2"])
@settings(max_examples=200, deadline=None)
@given(pieces=PIECES, sizes=st.lists(st.integers(0, 30), max_size=60), single=st.booleans())
def test_text_is_the_same_whatever_its_tokens_and_chunks(name: str, pieces: list[tuple[str, bool]], sizes: list[int], single: bool) -> None:
    tokenizer = load(name) if name in BYTE_FALLBACK else dict(zip(["qwen2.5", "smollm2"], BUILDERS, strict=True))[name]()
    token_ids = spelled(tokenizer, pieces)
    assert decoded(tokenizer, token_ids, [1] * len(token_ids) if single else sizes)[0] == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", BYTE_FALLBACK)
def test_a_character_of_byte_tokens_is_given_out_by_its_last(name: str) -> None:
    tokenizer = load(name)
    token_ids = spelled(tokenizer, [("x", False), ("🦀🦞", True), ("y", False)])
    assert [piece for piece in decoded(tokenizer, token_ids, [1] * len(token_ids))[1] if piece] == ["x", "🦀", "🦞", "y"]


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_wrong_byte_loses_nothing_around_it(name: str, data: st.DataObject) -> None:
    tokenizer = load(name)
    token_of = {value: index for index, value in tokenizer.byte_tokens.items()}
    before, wrong = data.draw(st.sampled_from(["", "🦀", "日本"])), data.draw(st.sampled_from([b"\xff", b"\x80", b"\xf0\x9f", b"\xe3\x81"]))
    token_ids = spelled(tokenizer, [("x", False), (before, True)]) + [token_of[byte] for byte in wrong] + tokenizer.encode_plain("yes")
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=20))
    assert decoded(tokenizer, token_ids, sizes)[0] == f"x{before}{chr(0xFFFD) * len(wrong)}yes"


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@pytest.mark.parametrize("run", ["🦀".encode(), "日".encode(), "é".encode(), b"\xff", b"\xe3\x81", b"\xffa"], ids=repr)
def test_the_window_stays_small_in_a_long_run_of_byte_tokens(name: str, run: bytes) -> None:
    tokenizer, seen = load(name), [0]
    token_of = {value: index for index, value in tokenizer.byte_tokens.items()}

    class Watched:
        byte_tokens = tokenizer.byte_tokens

        def decode(self, token_ids: Sequence[int]) -> str:
            seen.append(len(token_ids))
            return tokenizer.decode(token_ids)

    decoder = IncrementalDecoder(Watched())  # type: ignore[arg-type]
    token_ids = [token_of[byte] for byte in run * 500]
    text = "".join(decoder.feed([index]) for index in token_ids) + decoder.finish()
    assert text == tokenizer.decode(token_ids)
    assert max(seen) <= 72
