"""One turn, exact, through the real HTTP surface: tests/data/worked_example.json."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.gateways import bench, follow
from turnloom.testing.scripted_engine import Reply

EXAMPLE = json.loads((Path(__file__).parent.parent / "data" / "worked_example.json").read_text("utf-8"))
END = 151645


def request(**more: Any) -> dict[str, Any]:
    fields = {"model": "m", "max_tokens": 256, "system": EXAMPLE["system"], "tools": EXAMPLE["tools"]}
    return copy.deepcopy({**fields, "messages": EXAMPLE["anthropic_messages"], **more})


def scripted() -> Reply:
    return Reply(ids=tuple(EXAMPLE["output_ids"]), logprobs=tuple(EXAMPLE["output_logprobs"]))


@pytest.mark.parametrize("stream", [False, True])
async def test_worked_example(stream: bool) -> None:
    expected = EXAMPLE["expected"]
    second = Reply(text="好的。")
    async with bench([scripted(), second]) as b:
        answer = await b.post(request(stream=stream))
        assert answer.status == 200
        assert b.engine.requests[0]["input_ids"] == EXAMPLE["prompt_ids"]
        assert len(EXAMPLE["prompt_ids"]) == 218

        if stream:
            names = [name for name, _ in answer.events]
            assert names[0] == "message_start"
            assert names[-2:] == ["message_delta", "message_stop"]
            text = "".join(e["delta"]["text"] for n, e in answer.events if n == "content_block_delta")
            final = answer.events[-2][1]
            reply = {"content": [{"type": "text", "text": text}]}
            stop, usage = final["delta"], final["usage"]
        else:
            reply = answer.body
            text = "".join(block["text"] for block in reply["content"])
            stop, usage = reply, reply["usage"]
        assert text == expected["visible_text"]
        assert stop["stop_reason"] == expected["anthropic"]["stop_reason"]
        assert stop["stop_sequence"] is None
        assert {k: usage[k] for k in ("input_tokens", "output_tokens")} == expected["anthropic"]["usage"]

        tree = (await b.session()).tree
        (turn,) = tree.turns.values()
        path = tree.path(tree.node_of[turn.id])[1:]
        assert [tree.nodes[n].message.role for n in path] == expected["path_roles"]
        assert [tree.nodes[n].turn is not None for n in path] == expected["generated"]
        assert len(tree.turns) == expected["turn_count"]
        assert turn.output.tolist() == EXAMPLE["output_ids"]
        np.testing.assert_array_equal(turn.logprobs, np.array(EXAMPLE["output_logprobs"], np.float32))

        await b.post(follow(request(), reply, "谢谢"))
        held = [*EXAMPLE["prompt_ids"], *EXAMPLE["output_ids"]]
        sent = b.engine.requests[1]["input_ids"]
        assert sent[: len(held)] == held
        new = b.tokenizer.encode("\n<|im_start|>user\n谢谢<|im_end|>\n<|im_start|>assistant\n")
        assert sent[len(held) :] == new, "the end-of-turn token stands once, and only what is new follows"


async def test_worked_tool_call() -> None:
    case = EXAMPLE["tool_call_case"]
    async with bench([Reply(text=case["text"])]) as b:
        body = request()
        body["messages"] = body["messages"][:1]
        answer = await b.post(body)
        text, call = answer.body["content"]
        assert text == {"type": "text", "text": case["expected"]["text"]}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "read_file", {"path": "README.md"})
        assert answer.body["stop_reason"] == case["expected"]["anthropic_stop_reason"]
        (turn,) = (await b.session()).tree.turns.values()
        assert b.tokenizer.decode(turn.output.tolist()) == case["text"] + "<|im_end|>"
