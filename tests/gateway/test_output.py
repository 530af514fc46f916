"""What of an output is text and what only ended it."""

from __future__ import annotations

import pytest

from turnloom.engine.contract import Chunk
from turnloom.gateway.output import Output
from turnloom.parse.formats import parser_factory
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Finish, FinishReason, floats, ids
from turnloom.wire.reply import ReplyBuilder

TOKENIZER = qwen_tokenizer("qwen2.5")
END, SECTION, BOX = (TOKENIZER.control_tokens[t] for t in ("<|im_end|>", "<|vision_end|>", "<|box_end|>"))
ENDINGS = {
    "the end token": ([END], END, ""),
    "an end token that nothing names": ([END], None, ""),
    "a section's end before it": ([SECTION, END], None, "<|vision_end|>"),
    "two of them before it": ([BOX, SECTION, END], None, "<|box_end|><|vision_end|>"),
    "a special token that nothing names": ([BOX, SECTION], None, "<|box_end|>"),
    "a special token that is named": ([BOX, SECTION], SECTION, "<|box_end|>"),
    "a special token, another named": ([SECTION], END, "<|vision_end|>"),
    "the end token twice": ([END, END], END, ""),
}


@pytest.mark.parametrize(("tokens", "matched", "text"), ENDINGS.values(), ids=ENDINGS)
def test_only_what_ended_the_turn_is_no_text(tokens: list[int], matched: int | None, text: str) -> None:
    parser = parser_factory("none", TOKENIZER.chat_template)((), False)
    output = Output(TOKENIZER, parser, ReplyBuilder("t", "c"), end_ids=frozenset({END}))
    said = TOKENIZER.encode("Done.")
    output.feed(Chunk(ids([*said, *tokens]), floats([-0.5] * (len(said) + len(tokens))), Finish(FinishReason.STOP, matched)))
    output.close()
    assert output.message().text == "Done." + text
    assert output.ids.tolist() == [*said, *tokens], "every sampled id is kept"


def test_a_reply_cut_off_by_its_length_keeps_a_special_token_as_text() -> None:
    parser = parser_factory("none", TOKENIZER.chat_template)((), False)
    output = Output(TOKENIZER, parser, ReplyBuilder("t", "c"), end_ids=frozenset({END}))
    output.feed(Chunk(ids([SECTION]), floats([-0.5]), Finish(FinishReason.LENGTH)))
    output.close()
    assert output.message().text == "<|vision_end|>"
