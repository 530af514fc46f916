"""What of an output is text and what only ended it."""

from __future__ import annotations

import pytest

from turnloom.engine.contract import Chunk
from turnloom.gateway.output import Output
from turnloom.parse.formats import parser_factory
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Finish, FinishReason, Tool, floats, ids
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
    kept = [*said, *tokens[: tokens.index(matched) + 1 if matched in tokens else len(tokens)]]
    assert output.ids.tolist() == kept, "every id is kept, to the one that the engine stopped at"
    assert output.surplus == len(said) + len(tokens) - len(kept)


def test_a_reply_cut_off_by_its_length_keeps_a_special_token_as_text() -> None:
    parser = parser_factory("none", TOKENIZER.chat_template)((), False)
    output = Output(TOKENIZER, parser, ReplyBuilder("t", "c"), end_ids=frozenset({END}))
    output.feed(Chunk(ids([SECTION]), floats([-0.5]), Finish(FinishReason.LENGTH)))
    output.close()
    assert output.message().text == "<|vision_end|>"


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_an_attempt_at_a_call_knows_its_tokens(chunk: int) -> None:
    """Whether it parsed or not, and however the ids came."""
    calls = ['<tool_call>\n{"name": "ls", "arguments": {"path": "你好 🙂"}}\n</tool_call>', '<tool_call>\n{"name": broken}\n</tool_call>']
    parts = ["<think>\nHm.\n</think>\n\nI look.\n", calls[0], "\n", calls[1], "\nDone."]
    tokens = [TOKENIZER.encode(part) for part in parts]
    said = [token for part in tokens for token in part]
    parser = parser_factory("hermes", TOKENIZER.chat_template)((Tool("ls", "List", "{}"),), False)
    output = Output(TOKENIZER, parser, ReplyBuilder("t", "c"), end_ids=frozenset({END}))
    for at in range(0, len(said), chunk):
        piece = said[at : at + chunk]
        output.feed(Chunk(ids(piece), floats([-0.5] * len(piece))))
    output.feed(Chunk(ids([END]), floats([-0.5]), Finish(FinishReason.STOP, END)))
    output.close()
    starts = [len([t for part in tokens[:i] for t in part]) for i in (1, 3)]
    assert [(c.status, c.first_token, c.end_token) for c in output.calls] == [
        ("ok", starts[0], starts[0] + len(tokens[1])),
        ("invalid_json", starts[1], starts[1] + len(tokens[3])),
    ]
    assert [TOKENIZER.decode(output.ids[c.first_token : c.end_token].tolist()) for c in output.calls] == calls
