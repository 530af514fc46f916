"""Law 8 at the place where ids become a reply: nothing that was sampled vanishes, whatever it is and however it comes."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.subjects import subject_of
from turnloom.engine.contract import Chunk
from turnloom.gateway.output import Output
from turnloom.parse.format import THINK
from turnloom.parse.formats import parser_factory
from turnloom.types import Finish, FinishReason, Text, Tool, floats, ids
from turnloom.wire.reply import ReplyBuilder

TOOLS = (Tool("ls", "List", "{}"),)
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
PIECES = (
    "word ",
    "\n",
    "你好",
    "🙂🏳️‍🌈",
    "  ",
    "<tool_call>",
    "</tool_call>",
    CALL,
    CALL.replace("ls", "nope"),
    "<think>",
    "</think>",
    '{"a": "',
)
laws = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def read(name: str, form: str, seed: int, pieces: list[str]) -> tuple[Output, str]:
    """The output of ids that spell the pieces, special tokens among them, in chunks; and the text of all but what ended it."""
    subject, rng = subject_of(name), random.Random(seed)
    tokenizer, ends = subject.tokenizer, sorted(subject.renderer.end_ids)
    inner = sorted(tokenizer.special_ids - subject.renderer.end_ids)
    said: list[int] = []
    for piece in pieces:
        at = 0
        while at < len(piece):
            cut = rng.randint(1, 9)
            said += tokenizer.encode(piece[at : at + cut], start=False)
            at += cut
        if rng.random() < 0.2:
            said.append(rng.choice([*inner, *ends]))
    text = tokenizer.decode(_without_trailing(said, subject.renderer.end_ids))
    end = rng.choice(ends) if rng.random() < 0.7 else None
    sampled = said if end is None else [*said, end]
    parser = parser_factory(form, tokenizer.chat_template, reasoning=form != "none")(TOOLS, False)
    output = Output(tokenizer, parser, ReplyBuilder("t", "c"), end_ids=subject.renderer.end_ids)
    at = 0
    while at < len(sampled):
        step = rng.randint(1, 9)
        output.feed(Chunk(ids(sampled[at : at + step]), floats([-0.5] * len(sampled[at : at + step]))))
        at += step
    output.feed(Chunk(ids(), floats(), Finish(FinishReason.LENGTH if end is None else FinishReason.STOP, end)))
    output.close()
    assert output.ids.tolist() == sampled
    return output, text


def _without_trailing(tokens: list[int], ends: frozenset[int]) -> list[int]:
    kept = list(tokens)
    while kept and kept[-1] in ends:
        kept.pop()
    return kept


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "trl/phi3", "trl/gemma4"])
@laws
@given(seed=st.integers(0, 2**32 - 1), pieces=st.lists(st.sampled_from(PIECES), max_size=10))
def test_without_a_parser_the_reply_is_the_decoded_text(name: str, seed: int, pieces: list[str]) -> None:
    output, text = read(name, "none", seed, pieces)
    assert output.message().text == text


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2", "trl/phi3"])
@laws
@given(seed=st.integers(0, 2**32 - 1), pieces=st.lists(st.sampled_from(PIECES), max_size=10))
def test_with_one_only_framing_is_left_out(name: str, seed: int, pieces: list[str]) -> None:
    """Words, reasoning and the text of every call that parsed, in the order of the output; a broken call is words."""
    output, text = read(name, "hermes", seed, pieces)
    message, good = output.message(), [record for record in output.calls if record.status == "ok"]
    assert len(message.calls) == len(good)
    rest, at = [], 0
    for record in good:
        assert text[record.start : record.end] == record.raw
        rest.append(text[at : record.start])
        at = record.end
    rest.append(text[at:])
    words = message.reasoning + "".join(part.text for part in message.parts if isinstance(part, Text))
    framing = re.compile("|".join((THINK.opener, THINK.closer, "\n")))
    assert sorted(framing.sub("", words)) == sorted(framing.sub("", "".join(rest)))
