"""An echoed reply names its turn in every dialect: whatever else the client changed, the recorded tokens are gone on from."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import Bench, bench
from tests.support.wires import WIRES
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Turn
from turnloom.wire.refs import as_base64

Json = dict[str, Any]

THOUGHT = "I must look."
REPLY = f'<think>\n{THOUGHT}\n</think>\n\nI look  at\nboth.\n<tool_call>\n{{"name": "read", "arguments": {{"path": "a"}}}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
STRANGER = "f" * 32
ARGUMENTS = '{"all":true,"path":" a "}'


class Client:
    """A client of one dialect that rewrites all of a reply but what it does not understand. `turn` is the first reply's."""

    turn = ""

    def __init__(self, name: str) -> None:
        self.wire = WIRES[name]
        self.anthropic, self.chat, self.responses = name == "anthropic", name == "openai_chat", name == "openai_responses"

    def first(self) -> Json:
        body = self.wire.body("Look.")
        function = {"name": "read", "parameters": SCHEMA}
        if self.anthropic:
            return {**body, "tools": [{"name": "read", "input_schema": SCHEMA}]}
        if self.chat:
            return {**body, "tools": [{"type": "function", "function": function}]}
        if self.responses:
            ask = [{"role": "user", "content": "Look."}]
            return {
                **body,
                "input": ask,
                "tools": [{"type": "function", **function, "strict": False}],
                "include": ["reasoning.encrypted_content"],
            }
        return {**body, "tools": [{"functionDeclarations": [{"name": "read", "parametersJsonSchema": SCHEMA}]}]}

    def next(self, asked: Json, reply: Json, change: Callable[[Client, Any], Any]) -> Json:
        reply = change(self, copy.deepcopy(reply))
        if self.anthropic:
            call_id = reply["content"][-1]["id"]
            given = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "empty"}]}
            return {**asked, "messages": [*asked["messages"], {"role": "assistant", "content": reply["content"]}, given]}
        if self.chat:
            message = reply["choices"][0]["message"]
            given = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "empty"}
            return {**asked, "messages": [*asked["messages"], message, given]}
        if self.responses:
            given = {"type": "function_call_output", "call_id": reply["output"][-1]["call_id"], "output": "empty"}
            return {**asked, "input": [*asked["input"], *reply["output"], given]}
        content = reply["candidates"][0]["content"]
        part = {"functionResponse": {"id": content["parts"][-1]["functionCall"].get("id"), "name": "read", "response": {"output": "empty"}}}
        return {**asked, "contents": [*asked["contents"], content, {"role": "user", "parts": [part]}]}


def respelled(client: Client, reply: Json, text: str = "I look at both.") -> Json:
    """Other arguments, other spacing, no reasoning where the dialect has another opaque field; chat keeps its ids, the others rename."""
    if client.anthropic:
        thinking, said, call = reply["content"]
        changed = {**call, "id": "mine", "input": json.loads(ARGUMENTS)}
        reply["content"] = [{**thinking, "thinking": ""}, {**said, "text": text}, changed]
    elif client.chat:
        message = reply["choices"][0]["message"]
        message.pop("reasoning_content")
        message["content"] = text
        message["tool_calls"][0]["function"]["arguments"] = ARGUMENTS
    elif client.responses:
        _, said, call = reply["output"]
        said["content"][0]["text"] = text
        reply["output"] = [said, {**call, "call_id": "mine", "arguments": ARGUMENTS}]
    else:
        content = reply["candidates"][0]["content"]
        kept = [part for part in content["parts"] if not part.get("thought")]
        kept[0]["text"] = text
        kept[-1]["functionCall"] = {"id": "mine", "name": "read", "args": json.loads(ARGUMENTS)}
        content["parts"] = kept
    return reply


def edited(client: Client, reply: Json) -> Json:
    return respelled(client, reply, "I look at neither.")


def silent(client: Client, reply: Json) -> Json:
    """Without its words beside the call."""
    return respelled(client, reply, "")


def forged(client: Client, reply: Json) -> Json:
    """As respelled, with every opaque field naming a turn that is nobody's."""
    said = json.dumps(respelled(client, reply))
    return dict(json.loads(said.replace(client.turn, STRANGER).replace(as_base64(client.turn), as_base64(STRANGER))))


async def two_turns(name: str, change: Callable[[Client, Any], Any]) -> tuple[list[Turn], Bench]:
    client = Client(name)
    async with bench([REPLY, "Done."], tokenizer=qwen_tokenizer("qwen3")) as b:
        asked = client.first()
        first = await b.post(asked, client.wire.whole)
        assert first.status == 200, first.body
        (client.turn,) = (await b.session()).tree.turns
        second = await b.post(client.next(asked, first.body, change), client.wire.whole)
        assert second.status == 200, second.body
        return list((await b.session()).tree.turns.values()), b


NAMES = ["anthropic", "openai_chat", "openai_responses", "gemini"]


@pytest.mark.parametrize("change", [respelled, silent])
@pytest.mark.parametrize("name", NAMES)
async def test_a_reply_spelled_anew_goes_on_with_the_recorded_tokens(name: str, change: Callable[[Client, Any], Any]) -> None:
    (one, two), b = await two_turns(name, change)
    assert (two.base, two.fork, two.kept) == (one.id, None, one.prompt_len + len(one.output))
    assert two.respelled == 1
    sent = b.engine.requests[1]["input_ids"]
    assert sent[: two.kept] == b.engine.requests[0]["input_ids"] + one.output.tolist()
    assert '"all"' not in b.tokenizer.decode(sent)


@pytest.mark.parametrize("change", [edited, forged])
@pytest.mark.parametrize("name", NAMES)
async def test_other_words_and_forged_references_start_anew(name: str, change: Callable[[Client, Any], Any]) -> None:
    (_, two), b = await two_turns(name, change)
    assert two.base is None
    assert two.respelled == 0
    assert two.fork is not None
    assert two.fork.kind == "history_changed"
    assert THOUGHT not in b.tokenizer.decode(b.engine.requests[1]["input_ids"])


@pytest.mark.parametrize("name", NAMES)
async def test_references_are_read_after_a_restart(name: str, tmp_path: Path) -> None:
    client, store = Client(name), tmp_path / "t.db"
    async with bench([REPLY], tokenizer=qwen_tokenizer("qwen3"), store=store) as b:
        asked = client.first()
        first = await b.post(asked, client.wire.whole)
        key = b.handle.key
    async with bench(["Done."], tokenizer=qwen_tokenizer("qwen3"), store=store) as b:
        body = client.next(asked, first.body, respelled)
        async with b.http.post(f"{b.gateway.url}/s/{key}{client.wire.whole}", json=body) as answer:
            assert answer.status == 200
        _, listed = await b.admin("GET", "/sessions")
        (row,) = [row for row in listed["sessions"] if row["usage"]["turns"]]
        _, row = await b.admin("GET", f"/sessions/{row['id']}")
        assert (row["turns"], row["lineages"], row["forks"]) == (2, 1, {})
