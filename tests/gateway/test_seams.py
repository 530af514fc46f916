"""A reply in several pieces reads as one: text, reasoning, calls, stop strings, usage, logprobs, versions, and the record of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_survival import QWEN, engines, pieces_are_true, said, told
from tests.support.gateways import user
from tests.support.pools import Story, pooled, until
from tests.support.wires import WIRES, Wire
from turnloom.core.dump import dump_tree
from turnloom.engine.metrics import CONTINUED
from turnloom.engine.pool import Patience
from turnloom.store.contract import Limits
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine, logprob_at
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Finish, FinishReason, Outcome, Sampling, VersionSpan

QWEN3 = qwen_tokenizer("qwen3")
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "under the 🦊"}}\n</tool_call>'
RICH = f"<think>\nHm, naïve 🦊.\n</think>\n\nCafé 北京 👩‍🚀\n{CALL}"
TOOL = {"name": "look", "description": "", "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}}}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_cut_anywhere_reasoning_text_and_calls_are_what_they_are_uncut(stream: bool) -> None:
    """At every token: inside a character of several tokens, a tag, the arguments of a call."""
    size = len(QWEN3.encode(RICH)) + 1
    assert size > len(RICH.split()), "some characters are several tokens"
    body = user("hi", stream=stream, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    whole = None
    for cut in range(size):
        story = Story(QWEN3, RICH, *([(cut, Fault.CUT)] if cut else []))
        async with pooled([ScriptedEngine(story.of("0"), tokenizer=QWEN3)], tokenizer=QWEN3) as b:
            answer = await b.post(body)
            assert answer.status == 200
            (turn,) = (await b.session()).tree.turns.values()
            shown = joined(answer.events) if stream else [told_of(block) for block in answer.body["content"]]
            whole = whole or shown
            assert shown == whole, f"cut after {cut} tokens"
            assert [p.start for p in turn.pieces] == ([0, cut] if cut else [0])
            assert turn.output.tolist() == story.whole
            pieces_are_true(story, turn, b)
    assert [kind for kind, _ in whole or ()] == ["thinking", "text", "tool_use"]


def told_of(block: dict[str, Any]) -> tuple[str, Any]:
    return block["type"], block.get("text") or block.get("thinking") or block.get("input")


def joined(events: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """The blocks of a stream, whatever its pieces."""
    found: list[tuple[str, str]] = []
    for name, data in events:
        if name == "content_block_start":
            found.append((data["content_block"]["type"], ""))
        elif name == "content_block_delta":
            delta = data["delta"]
            found[-1] = found[-1][0], found[-1][1] + (delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
    return found


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_no_dialect_shows_a_seam(wire: Wire, stream: bool) -> None:
    story = Story(QWEN, "One two three. 🦊 Four!", (2, Fault.CUT), (0, Fault.HTTP_503), (3, Fault.ABORT))
    async with pooled(engines(story)) as b:
        async with b.http.post(b.handle.base_url + wire.path(stream), json=wire.body("hi", stream=stream)) as answer:
            assert answer.status == 200
            raw = await answer.read()
        if stream:
            assert wire.shown(raw) == "One two three. 🦊 Four!"
            assert wire.error.encode() not in raw
        else:
            assert wire.said(json.loads(raw)) == "One two three. 🦊 Four!"


async def test_usage_is_that_of_one_reply() -> None:
    story = Story(QWEN, "One two three four five", (2, Fault.CUT), (1, Fault.ABORT))
    async with pooled(engines(story)) as b:
        answer = await b.post(user("hi"))
        usage = answer.body["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (len(story.prompt or []), len(story.whole))


async def test_what_may_be_sampled_is_shared_by_the_pieces() -> None:
    story = Story(QWEN, "One two three four five six", (2, Fault.CUT))
    async with pooled(engines(story)) as b:
        answer = await b.post(user("hi") | {"max_tokens": 5})
        assert answer.body["stop_reason"] == "max_tokens"
        assert answer.body["usage"]["output_tokens"] == 5
        assert [r["sampling_params"]["max_new_tokens"] for r in b.engine.requests] == [5, 3]


async def test_nothing_is_sampled_after_the_last_token_allowed() -> None:
    story = Story(QWEN, "One two three four five six", (4, Fault.NO_FINISH))
    async with pooled(engines(story)) as b:
        answer = await b.post(user("hi") | {"max_tokens": 4})
        assert answer.body["stop_reason"] == "max_tokens"
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.output.tolist() == story.whole[:4]
        assert len(b.engine.requests) == 1


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.ABORT])
async def test_nothing_is_sampled_after_the_end_token(fault: Fault) -> None:
    story = Story(QWEN, "One two three", (4, fault))
    assert len(story.whole) == 4
    async with pooled(engines(story)) as b:
        answer = await b.post(user("hi"))
        assert (answer.status, answer.body["stop_reason"]) == (200, "end_turn")
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.output.tolist() == story.whole
        assert turn.finish == Finish(FinishReason.STOP, matched=story.whole[-1])
        assert len(b.engine.requests) == 1


async def test_a_stop_string_across_the_seam_is_found_and_the_engine_told() -> None:
    """Its first word is before the cut: no single request sees it."""
    text = "One two three four five six seven eight nine ten"
    story = Story(QWEN, text, (3, Fault.CUT), chunk=1)
    release = asyncio.Event()

    async def slow(body: dict[str, Any], sent: int) -> None:
        """Of what comes after the stop string one token is out, and no more until it was told to stop."""
        if len(story.asked) == 2 and sent > 2:
            await release.wait()

    engine = ScriptedEngine(story.of("0"), tokenizer=QWEN, gate=slow)
    async with pooled([engine]) as b:
        asking = asyncio.create_task(b.post(user("hi", stop_sequences=[" three four"])))
        await until(lambda: any(abort["rid"].endswith("0002") for abort in engine.aborts))
        release.set()
        answer = await asking
        assert answer.body["stop_reason"] == "stop_sequence"
        assert answer.body["content"][0]["text"] == "One two"
        session = await b.session()
        await session.settled()
        (turn,) = session.tree.turns.values()
        assert turn.output.tolist() == QWEN.encode("One two three four"), "up to the token that completes it"
        assert turn.surplus >= 1
        assert turn.abort == "verified"
        assert turn.id + "0002" in [abort["rid"] for abort in engine.aborts]
        (sample,) = session.unroll().samples
        assert int(sample.loss_mask.sum()) == len(turn.output)


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.ABORT])
async def test_nothing_is_sampled_after_a_whole_stop_string(fault: Fault) -> None:
    story = Story(QWEN, "One two three four five", (3, fault), chunk=1)
    async with pooled(engines(story)) as b:
        answer = await b.post(user("hi", stop_sequences=[" three"]))
        assert (answer.status, answer.body["stop_reason"]) == (200, "stop_sequence")
        (turn,) = (await b.session()).tree.turns.values()
        assert (turn.outcome, turn.surplus) == (Outcome.DELIVERED, 0)
        assert len(b.engine.requests) == 1


async def test_logprobs_shown_are_those_of_every_piece() -> None:
    story = Story(QWEN, "One two three four", (2, Fault.CUT))
    async with pooled(engines(story)) as b:
        answer = await b.post(user("hi", logprobs=True), "/v1/chat/completions")
        shown = answer.body["choices"][0]["logprobs"]["content"]
        assert [c["token"] for c in shown] == [QWEN.decode([t]) for t in story.whole]
        start = len(story.prompt or [])
        assert [c["logprob"] for c in shown] == [logprob_at(start + i, t) for i, t in enumerate(story.whole)]


async def test_every_choice_survives_by_itself() -> None:
    tokens = [*QWEN.encode("One two three"), QWEN.control_tokens["<|im_end|>"]]

    def script(body: dict[str, Any], index: int) -> Reply:
        if index < 3:
            return Reply(ids=(*tokens[:2], 0, 0), fault=Fault.CUT)
        return Reply(ids=tuple(tokens[2:]))

    async with pooled([ScriptedEngine(script, tokenizer=QWEN)], session_sampling=Sampling(seed=40)) as b:
        answer = await b.post(user("hi", n=3), "/v1/chat/completions")
        assert [c["message"]["content"] for c in answer.body["choices"]] == ["One two three"] * 3
        turns = (await b.session()).tree.turns.values()
        assert [[p.start for p in t.pieces] for t in turns] == [[0, 2]] * 3
        seeds = {r["rid"]: r["sampling_params"]["sampling_seed"] for r in b.engine.requests}
        assert len(seeds) == 6
        assert sorted(s for rid, s in seeds.items() if rid.endswith("1")) == [40, 41, 42]
        assert sorted(s for rid, s in seeds.items() if rid.endswith("2")) == [42, 43, 44]


async def test_a_schema_that_has_begun_ends_with_its_engine() -> None:
    story = Story(QWEN, '{"b": 1}', (2, Fault.CUT))
    schema = {"type": "json_schema", "schema": {"type": "object", "properties": {"b": {"type": "integer"}}}}
    async with pooled(engines(story, grammar_backend="xgrammar")) as b:
        answer = await b.post(user("hi", output_config={"format": schema}))
        assert told(answer) == (503, "api_error")
        assert len(b.engine.requests) == 1
        (turn,) = (await b.session()).tree.turns.values()
        assert (turn.outcome, turn.output.tolist()) == (Outcome.FAILED, story.whole[:2])


async def test_each_token_keeps_the_weights_that_sampled_it() -> None:
    """Of a cut piece what its chunks said, of one that ended what it listed."""
    story = Story(QWEN, "One two three four five", (2, Fault.CUT))
    first, second = engines(story, 2, weight_version="v1")
    async with pooled([first, second]) as b:
        tell = story.of

        def updated(name: str) -> Any:
            script = tell(name)

            def answer(body: dict[str, Any], index: int) -> Reply:
                if len(story.asked) == 1:
                    for each in (first, second):
                        each.weights = each.weight_version = "v2"
                return script(body, index)

            return answer

        first.script, second.script = updated("0"), updated("1")
        answer = await b.post(user("hi"))
        assert answer.status == 200
        session = await b.session()
        (turn,) = session.tree.turns.values()
        assert turn.versions == (VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 6))
        (sample,) = session.unroll().samples
        assert sample.weight_version[-6:] == ("v1", "v1", "v2", "v2", "v2", "v2")


async def test_one_session_has_one_routing_key_in_every_request() -> None:
    story = Story(QWEN, "One two three", (1, Fault.CUT))
    async with pooled(engines(story)) as b:
        await b.post(user("hi"))
        assert [h["X-SMG-Routing-Key"] for h in b.engine.headers] == [b.handle.id] * 2
        (turn,) = (await b.session()).tree.turns.values()
        assert [r["rid"] for r in b.engine.requests] == [turn.id + "0001", turn.id + "0002"]


async def test_a_turns_pieces_are_told_wherever_it_is_shown(tmp_path: Path) -> None:
    story, before = Story(QWEN, "One two three four", (2, Fault.CUT), cached_tokens=5), CONTINUED._value.get()
    store = tmp_path / "s.db"
    async with pooled(engines(story), store=store) as b:
        assert said(await b.post(user("hi"))) == "One two three four"
        assert CONTINUED._value.get() == before + 1
        async with b.http.get(f"{b.gateway.url}/metrics") as answer:
            assert f"turnloom_engine_continued_total {before + 1}" in (await answer.text())
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.cached_tokens == 5
        _, tree = await b.admin("GET", f"/sessions/{b.handle.id}/tree")
        (shown,) = tree["turns"]
        assert shown["pieces"] == [{"start": p.start, "engine": p.engine, "why": p.why} for p in turn.pieces]
        assert (shown["cached_tokens"], shown["surplus"], shown["abort"]) == (5, 0, turn.abort)
        _, rows = await b.admin("GET", f"/sessions/{b.handle.id}/samples?format=canonical")
        assert b'"seams":1' in rows.replace(b" ", b"")
        session_id, piece = b.handle.id, turn.pieces[1]
        await (await b.session()).settled()
        kept = (await b.session()).tree.turns[turn.id]
    async with pooled([ScriptedEngine([], tokenizer=QWEN)], store=store) as b:
        assert (await b.gateway.session(session_id)).tree.turns == {turn.id: kept}
        lines = dump_tree((await b.gateway.session(session_id)).tree)
        assert any(f"went on at 2 on {piece.engine}" in line for line in lines), "what `turnloom show` prints"


async def test_a_client_that_leaves_during_the_backoff_is_not_sampled_for() -> None:
    story = Story(QWEN, "One two three", *[(2, Fault.CUT)] * 9, chunk=1)
    patience = Patience(attempts=9, seconds=1e6, pause=1e5, longest=1e5)
    async with pooled(engines(story), patience=patience) as b:
        asking = asyncio.create_task(b.post(user("hi", stream=True)))
        pool = b.gateway.engine
        await until(lambda: story.asked, lambda: not pool.gate.running)
        asking.cancel()
        session = await b.session()
        await until(lambda: session.tree.turns)
        (turn,) = session.tree.turns.values()
        assert (turn.outcome, turn.output.tolist()) == (Outcome.ORPHANED, story.whole[:2])
        assert len(story.asked) == 1
        assert not pool._turns


async def test_a_turns_own_time_goes_on_through_the_backoff() -> None:
    story = Story(QWEN, "One two three", *[(2, Fault.CUT)] * 9, chunk=1)
    patience = Patience(attempts=9, seconds=1e6, pause=1e5, longest=1e5)
    async with pooled(engines(story), patience=patience, session_limits=Limits(turn_timeout=0.5)) as b:
        answer = await b.post(user("hi"))
        assert told(answer) == (529, "overloaded_error")
        (turn,) = (await b.session()).tree.turns.values()
        assert (turn.outcome, turn.error) == (Outcome.ABORTED, "the turn's time was up")
