"""The reference's behaviours towards its engines, row by row: routing, limits, aborts, streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.gateways import Bench, bench, follow, user
from turnloom.engine.metrics import REGISTRY
from turnloom.store.contract import Limits
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.scripted_router import ScriptedRouter
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import AbortOutcome, Outcome, Turn

LONG = Reply(text="word " * 2000, chunk=1, delay=0.01)
"""Nobody waits for its end."""


def worker(reply: Reply | str = "Hello", **options: Any) -> ScriptedEngine:
    """One that gives the same reply over and over."""
    return ScriptedEngine(lambda *_: reply, tokenizer=qwen_tokenizer(), end_id=151645, **options)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def leave(b: Bench) -> Turn:
    """The turn of a client that reads its first words and goes, when all is known of it."""
    session = await b.session()
    answer = await b.http.post(b.handle.base_url + "/v1/messages", json=user("hi", stream=True, max_tokens=5000))
    while b"text_delta" not in await answer.content.readany():
        pass
    answer.close()
    await until(lambda: session.in_flight == 0 and session.tree.turns)
    await session.settled()
    return list(session.tree.turns.values())[-1]


async def test_r15_one_routing_key_per_session() -> None:
    async with bench(["Hi"] * 3) as b:
        await b.post(user("a"))
        await b.post(user("b"))
        other = await b.gateway.open_session()
        async with b.http.post(other.base_url + "/v1/messages", json=user("c")) as answer:
            assert answer.status == 200
        keys = [h["X-SMG-Routing-Key"] for h in b.engine.headers if "X-SMG-Routing-Key" in h]
        assert keys[0] == keys[1] != keys[2]


async def test_r15_a_session_stays_on_its_worker_behind_a_router() -> None:
    async with worker() as one, worker() as two, worker() as three, bench(engine=ScriptedRouter([one.url, two.url])) as b:
        router: Any = b.engine
        handles = [await b.gateway.open_session() for _ in range(4)]
        bodies = {handle.id: user("a") for handle in handles}
        for number in range(3):
            for handle in handles:
                async with b.http.post(handle.base_url + "/v1/messages", json=bodies[handle.id]) as answer:
                    assert answer.status == 200
                    bodies[handle.id] = follow(bodies[handle.id], await answer.json(), "go on")
            if number == 0:
                router.workers.append(three.url)
        assert len(router.placed) == 4
        assert (len(one.requests), len(two.requests), len(three.requests)) == (6, 6, 0)


async def test_r16_overflow_is_the_dialects_error_and_max_tokens_is_clamped() -> None:
    engine = ScriptedEngine(["Hi"] * 2, tokenizer=qwen_tokenizer(), end_id=151645, context_length=100)
    async with bench(engine=engine) as b:
        assert (await b.post(user("short", max_tokens=5000))).status == 200
        asked = b.engine.requests[0]
        assert asked["sampling_params"]["max_new_tokens"] == 100 - len(asked["input_ids"]) - 1
        long = await b.post(user("word " * 200))
        assert (long.status, long.body["error"]["type"]) == (400, "invalid_request_error")
        assert long.body["error"]["message"].startswith("prompt is too long: ")
        assert len(b.engine.requests) == 1
        assert len((await b.session()).tree.turns) == 1


async def test_r17_ids_in_logprobs_out() -> None:
    async with bench(["Hi"]) as b:
        await b.post(user("hi"))
        (sent,) = b.engine.requests
        assert all(isinstance(i, int) for i in sent["input_ids"])
        assert sent["return_logprob"] is True
        assert sent["stream"] is True
        assert sent["sampling_params"]["skip_special_tokens"] is False
        assert sent["sampling_params"]["no_stop_trim"] is True


async def test_r17_a_router_has_nothing_to_drop() -> None:
    """It writes a request anew and leaves out what it does not know: the worker gets all that a worker asked directly gets."""
    direct = worker()
    async with bench(engine=direct) as b:
        assert (await b.post(user("hi"))).status == 200
    async with worker() as behind, bench(engine=ScriptedRouter([behind.url])) as b:
        assert (await b.post(user("hi"))).status == 200
    (one,), (two,) = direct.requests, behind.requests
    assert {k: v for k, v in one.items() if k != "rid"} == {k: v for k, v in two.items() if k != "rid"}
    assert len(one["rid"]) == len(two["rid"])


async def test_r18_a_bare_worker_is_told_when_the_client_leaves() -> None:
    """`/workers` is a 404 there."""
    async with bench(engine=worker(LONG)) as b:
        engine = b.engine
        turn = await leave(b)
        assert (turn.outcome, turn.abort) == (Outcome.ORPHANED, AbortOutcome.VERIFIED)
        assert [body["rid"] for body in engine.aborts] == [engine.requests[0]["rid"]]
        assert engine.disconnects == []
        assert engine.running == 0


async def test_r18_a_bare_worker_is_told_when_a_turn_takes_too_long() -> None:
    stalled = worker(Reply(text="one two three", chunk=1, fault=Fault.STALL))
    async with bench(engine=stalled, session_limits=Limits(turn_timeout=0.3)) as b:
        answer = await b.post(user("hi"))
        assert answer.status >= 500
        session = await b.session()
        await session.settled()
        (turn,) = session.tree.turns.values()
        assert turn.outcome is not Outcome.DELIVERED
        assert turn.abort == AbortOutcome.VERIFIED
        assert [body["rid"] for body in b.engine.aborts] == [b.engine.requests[0]["rid"]]


async def test_r19_every_worker_is_told_and_only_that_request_stops() -> None:
    async with worker(LONG) as one, worker(LONG) as two, bench(engine=ScriptedRouter([one.url, two.url])) as b:
        others = [await b.gateway.open_session() for _ in range(3)]
        answers = [await b.http.post(h.base_url + "/v1/messages", json=user("hi", stream=True, max_tokens=60)) for h in others]
        turn = await leave(b)
        assert turn.abort == AbortOutcome.VERIFIED
        stopped = [{"rid": f"{turn.id}0001"}]
        assert one.aborts == two.aborts == stopped
        for answer in answers:
            assert b"message_stop" in await answer.read()
        assert one.aborts == two.aborts == stopped
        assert (one.running, two.running) == (0, 0)


@pytest.mark.parametrize(
    "listed",
    [
        b"no JSON",
        500,
        {"workers": "none"},
        {"workers": [None, 3, {}, {"url": 7}, {"url": "ftp://x"}, {"url": "http://["}]},
    ],
    ids=["no JSON", "a 500", "no list", "no usable entry"],
)
async def test_r20_malformed_workers_are_a_warning_and_break_nothing(listed: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with bench(engine=worker(LONG)) as b:
        engine = b.engine
        engine.workers = listed
        with caplog.at_level(logging.WARNING, "turnloom.engine"):
            turn = await leave(b)
        assert (turn.outcome, turn.abort) == (Outcome.ORPHANED, AbortOutcome.VERIFIED)
        assert bool(caplog.records) is not (isinstance(listed, dict) and listed["workers"] != "none")
        assert (await b.post(user("again", max_tokens=5))).status == 200


async def test_r20_entries_without_a_usable_url_are_skipped_and_a_trailing_slash_is_none() -> None:
    async with bench(engine=worker(LONG)) as b:
        engine = b.engine
        engine.workers = {"workers": [None, {"id": "x"}, {"url": "//x"}, {"url": f"{engine.url}/"}, {"url": f"{engine.url}@1"}]}
        turn = await leave(b)
        assert turn.abort == AbortOutcome.VERIFIED
        assert [body["rid"] for body in engine.aborts] == [f"{turn.id}0001"]


async def test_r21_each_failure_is_its_own_and_hides_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One worker is dead, one never answers; the third is told at once, and the whole has its budget."""
    monkeypatch.setattr("turnloom.engine.sglang_stop._ANSWER_SECONDS", 0.3)

    def failures() -> float:
        return REGISTRY.get_sample_value("turnloom_engine_abort_failures_total") or 0.0

    before = failures()
    async with worker() as silent, bench(engine=worker(LONG)) as b:
        engine = b.engine
        silent.slow["/abort_request"] = float("inf")
        dead = "http://127.0.0.1:9"
        engine.workers = {"workers": [{"url": dead}, {"url": silent.url}, {"url": engine.url}]}
        with caplog.at_level(logging.WARNING, "turnloom.engine"):
            turn = await leave(b)
        rid = f"{turn.id}0001"
        assert turn.outcome is Outcome.ORPHANED
        assert turn.abort == AbortOutcome.VERIFIED, "its own stream ended"
        assert engine.aborts == [{"rid": rid}]
        await engine.wait_running(0)
        assert any(dead in line and rid in line for line in caplog.messages)
        assert any(rid in line and dead not in line for line in caplog.messages)
        assert failures() >= before + 2


async def test_r21_the_cause_is_what_the_client_is_told() -> None:
    """The stream is broken and so is every way to abort it: the answer speaks of the stream."""
    async with bench(engine=worker(Reply(text="one two three", chunk=1, fault=Fault.WRONG_ID))) as b:
        engine = b.engine
        engine.abort_endpoint = False
        answer = await b.post(user("hi"))
        assert answer.status >= 500
        assert "abort" not in answer.body["error"]["message"]
        session = await b.session()
        await session.settled()
        (turn,) = session.tree.turns.values()
        assert (turn.outcome, turn.abort) == (Outcome.FAILED, AbortOutcome.FAILED)
        assert session.unroll().samples == ()


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed", ("cumulative", "incremental"), ("incremental", "cumulative")])
@pytest.mark.parametrize("chunk", [1, 3, 100])
async def test_r22_streams_cumulative_and_incremental_are_one(style: Any, chunk: int) -> None:
    text = "no no no, one two one two"
    async with bench(engine=worker(Reply(text=text, style=style, chunk=chunk))) as b:
        engine = b.engine
        answer = await b.post(user("hi"))
        assert answer.body["content"] == [{"type": "text", "text": text}]
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.output.tolist() == [*b.tokenizer.encode(text), 151645]
        whole = [*engine.requests[0]["input_ids"], *turn.output.tolist()]
        assert turn.logprobs.tolist() == [engine.logprob(whole, i) for i in range(turn.prompt_len, len(whole))]


@pytest.mark.parametrize("fault", [Fault.MISSING_LOGPROB, Fault.NULL_LOGPROB, Fault.WRONG_ID, Fault.REWRITTEN, Fault.MORE_AFTER_FINAL])
async def test_r22_a_mismatch_is_refused_and_trains_nothing(fault: Fault) -> None:
    async with bench(engine=worker(Reply(text="one two three four", chunk=1, fault=fault))) as b:
        engine = b.engine
        answer = await b.post(user("hi"))
        assert answer.status == 502
        session = await b.session()
        await session.settled()
        (turn,) = session.tree.turns.values()
        assert (turn.outcome, turn.abort) == (Outcome.FAILED, AbortOutcome.VERIFIED)
        assert session.unroll().samples == ()
        assert engine.running == 0


async def test_r22_a_request_is_stopped_by_its_id() -> None:
    """Its neighbours, even with an id that begins alike, go on."""
    async with bench(engine=worker(LONG)) as b:
        engine = b.engine
        answer = await b.http.post(b.handle.base_url + "/v1/messages", json=user("hi", stream=True, max_tokens=5000))
        while b"text_delta" not in await answer.content.readany():
            pass
        (sent,) = engine.requests
        client = b.gateway.engine.members[0]  # type: ignore[attr-defined]
        assert await client.abort(sent["rid"][:-4]) is AbortOutcome.UNVERIFIED
        assert engine.running == 1
        assert await client.abort(sent["rid"]) is AbortOutcome.VERIFIED
        assert engine.running == 0
        await answer.read()
