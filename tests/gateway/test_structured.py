"""Structured output: the engine holds the reply to the schema, and the turn says why it does not train; or a clear 400."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gateways import bench
from tests.support.wires import WIRES, Wire
from turnloom.core.unroll import CONSTRAINED, Training
from turnloom.testing.scripted_engine import ScriptedEngine
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer
from turnloom.tokenizer import HFTokenizer, load_tokenizer
from turnloom.types import Outcome

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
REPLY = '{"b": 1}'
WHOLE = {name: wire for name, wire in WIRES.items() if name != "gemini array"}


def wanted(wire: Wire) -> dict[str, Any]:
    body = wire.body("Count.")
    if wire.name == "anthropic":
        return {**body, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    if wire.name == "openai_chat":
        return {**body, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}
    if wire.name == "openai_responses":
        return {**body, "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}}
    return {**body, "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}}


def scripted(tokenizer: HFTokenizer, backend: str | None) -> ScriptedEngine:
    return ScriptedEngine([REPLY] * 3, tokenizer=tokenizer, end_id=tokenizer.control_tokens["<|im_end|>"], grammar_backend=backend)


@pytest.mark.parametrize("wire", WHOLE.values(), ids=WHOLE)
async def test_the_schema_reaches_the_engine_and_the_turn_does_not_train(wire: Wire) -> None:
    tokenizer = qwen_tokenizer()
    async with bench(engine=scripted(tokenizer, "xgrammar"), tokenizer=tokenizer) as b:
        answer = await b.post(wanted(wire), wire.whole)
        assert wire.said(answer.body) == REPLY
        assert (await b.post(wire.body("Free."), wire.whole)).status == 200
        held, free = b.engine.requests
        assert json.loads(held["sampling_params"]["json_schema"]) == SCHEMA
        assert "json_schema" not in free["sampling_params"]
        first, second = (await b.session()).tree.turns.values()
        assert (first.outcome, json.loads(first.sampling.json_schema), second.sampling.json_schema) == (Outcome.DELIVERED, SCHEMA, "")
        session = await b.session()
        (left_out,) = session.unroll().untrained
        assert (left_out.turn_id, left_out.tokens, left_out.reason) == (first.id, len(first.output), CONSTRAINED)
        assert [s.lineage_id for s in await b.handle.finish()] == [second.id]
        assert len(session.unroll(policy=Training(constrained=True)).samples) == 2


@pytest.mark.parametrize("backend", [None, "none"])
@pytest.mark.parametrize("wire", WHOLE.values(), ids=WHOLE)
async def test_an_engine_without_a_grammar_backend_is_a_clear_400(wire: Wire, backend: str | None) -> None:
    tokenizer = qwen_tokenizer()
    async with bench(engine=scripted(tokenizer, backend), tokenizer=tokenizer) as b:
        for stream in (False, True):
            body = wanted(wire) | ({"stream": True} if stream and wire.name != "gemini" else {})
            answer = await b.post(body, wire.path(stream))
            assert answer.status == 400
            assert "this engine has no grammar backend" in answer.body["error"]["message"]
        assert not b.engine.requests
        assert not (await b.session()).tree.turns
        assert (await b.post(wire.body("Free."), wire.whole)).status == 200


OPENS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("wire", WHOLE.values(), ids=WHOLE)
async def test_a_template_that_opens_reasoning_is_a_clear_400(wire: Wire) -> None:
    """A grammar would hold the model to JSON in the middle of its thoughts."""
    tokenizer = load_tokenizer(str(qwen_directory("qwen3")), chat_template=OPENS_REASONING)
    async with bench(engine=scripted(tokenizer, "xgrammar"), tokenizer=tokenizer) as b:
        answer = await b.post(wanted(wire), wire.whole)
        assert answer.status == 400
        assert "begins every reply with its reasoning" in answer.body["error"]["message"]
        assert not b.engine.requests


async def test_any_object_will_do_where_a_client_says_only_json() -> None:
    tokenizer = qwen_tokenizer()
    async with bench(engine=scripted(tokenizer, "xgrammar"), tokenizer=tokenizer) as b:
        await b.post({**WIRES["openai_chat"].body("x"), "response_format": {"type": "json_object"}}, "/v1/chat/completions")
        await b.post({**WIRES["openai_responses"].body("x"), "text": {"format": {"type": "json_object"}}}, "/v1/responses")
        await b.post({**WIRES["gemini"].body("x"), "generationConfig": {"responseMimeType": "application/json"}}, WIRES["gemini"].whole)
        assert [json.loads(r["sampling_params"]["json_schema"]) for r in b.engine.requests] == [{"type": "object"}] * 3
