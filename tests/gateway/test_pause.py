"""Around a weight update: new requests wait, what runs ends as it is told, clients are kept alive, and each turn goes on as one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.gateway.test_survival import QWEN, engines, said, told
from tests.support.gateways import user
from tests.support.pools import Story, pooled, until
from tests.support.wires import WIRES, Wire
from turnloom.gateway import lifecycle
from turnloom.store.contract import Limits
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import Outcome

REPLY = "One two three, four five six. Seven!"
EVERY = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)


class HalfWay:
    """Holds every reply back after two chunks until it is let go; `reached` when one is there."""

    def __init__(self) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, _: dict[str, Any], sent: int) -> None:
        if sent == 2:
            self.reached.set()
            await self.go.wait()


@EVERY
@pytest.mark.parametrize("begun", [False, True], ids=["held before its first token", "aborted half-way"])
async def test_a_streaming_client_is_kept_alive_and_gets_one_reply(wire: Wire, begun: bool) -> None:
    story, gate = Story(QWEN, REPLY), HalfWay()
    async with pooled(engines(story, gate=gate if begun else None), keepalive=0.05) as b:
        if not begun:
            assert (await b.admin("POST", "/pause"))[0] == 200
        async with b.http.post(b.handle.base_url + wire.stream, json=wire.body("hi", stream=True)) as answer:
            assert answer.status == 200
            raw = b""
            if begun:
                await gate.reached.wait()
                status, state = await b.admin("POST", "/pause")
                assert (status, state["running"], state["paused"]) == (200, 0, True)
            pings = 0
            async with asyncio.timeout(60):
                while pings < 3:
                    piece = await answer.content.readany()
                    pings += piece.count(wire.ping.encode()) if wire.ping != "\n" else piece == b"\n"
                    raw += piece
            assert len(story.asked) == int(begun), "no new request while it is held"
            gate.go.set()
            assert (await b.admin("POST", "/resume"))[1]["paused"] is False
            raw += await answer.content.read()
        assert wire.shown(raw) == REPLY
        assert wire.error.encode() not in raw
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.outcome is Outcome.DELIVERED
        assert turn.output.tolist() == story.whole
        assert len(turn.pieces) == 1 + begun
        assert all(p.why for p in turn.pieces[1:])


@EVERY
async def test_a_client_that_does_not_stream_waits_and_gets_its_reply(wire: Wire) -> None:
    story = Story(QWEN, REPLY)
    async with pooled(engines(story), keepalive=0.05) as b:
        await b.admin("POST", "/pause", {"mode": "keep"})
        asking = asyncio.create_task(b.post(wire.body("hi"), wire.whole))
        await until(lambda: b.gateway.engine.gate.held == 1)
        assert story.asked == []
        await b.admin("POST", "/resume")
        answer = await asking
        assert answer.status == 200
        assert wire.said(answer.body) == REPLY


async def test_abort_stops_what_runs_and_says_so() -> None:
    story, gate = Story(QWEN, REPLY), HalfWay()
    async with pooled(engines(story, gate=gate)) as b:
        asking = asyncio.create_task(b.post(user("hi")))
        await gate.reached.wait()
        status, state = await b.admin("POST", "/pause", {"mode": "abort"})
        assert (status, state["paused"], state["running"]) == (200, True, 0)
        await until(lambda: b.gateway.engine.gate.held == 1)
        assert [abort["rid"][32:] for abort in b.engine.aborts[:1]] == ["0001"]
        gate.go.set()
        await b.admin("POST", "/resume")
        assert said(await asking) == REPLY


async def test_wait_answers_when_what_runs_has_ended() -> None:
    story, gate = Story(QWEN, REPLY), HalfWay()
    async with pooled(engines(story, gate=gate)) as b:
        first = asyncio.create_task(b.post(user("hi")))
        await gate.reached.wait()
        pausing = asyncio.create_task(b.admin("POST", "/pause", {"mode": "wait"}))
        await until(lambda: b.gateway.engine.gate.shut)
        second = asyncio.create_task(b.post(user("hi again")))
        await until(lambda: b.gateway.engine.gate.held == 1)
        _, listed = await b.admin("GET", "/engines")
        assert listed["pools"]["policy"] == {"paused": True, "running": 1, "held": 1, "engines": [{"name": b.engine.url, "running": 1}]}
        assert not pausing.done()
        gate.go.set()
        status, state = await pausing
        assert (status, state["running"], state["held"]) == (200, 0, 1)
        assert said(await first) == REPLY
        (turn,) = (await b.session()).tree.turns.values()
        assert len(turn.pieces) == 1
        assert (b.engine.aborts, len(story.asked)) == ([], 1)
        await b.admin("POST", "/resume")
        assert (await second).status == 200


async def test_wait_for_a_while_answers_with_what_still_runs() -> None:
    story, gate = Story(QWEN, REPLY), HalfWay()
    async with pooled(engines(story, gate=gate)) as b:
        asking = asyncio.create_task(b.post(user("hi")))
        await gate.reached.wait()
        _, state = await b.admin("POST", "/pause", {"mode": "wait", "seconds": 0.01})
        assert (state["running"], state["paused"]) == (1, True)
        gate.go.set()
        assert said(await asking) == REPLY, "what runs is left to its end"


async def test_keep_leaves_what_runs() -> None:
    story, gate = Story(QWEN, REPLY), HalfWay()
    async with pooled(engines(story, gate=gate)) as b:
        asking = asyncio.create_task(b.post(user("hi")))
        await gate.reached.wait()
        _, state = await b.admin("POST", "/pause", {"mode": "keep"})
        assert (state["running"], state["paused"]) == (1, True)
        gate.go.set()
        assert said(await asking) == REPLY
        assert b.engine.aborts == []


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_the_turns_time_stands_still(mode: str) -> None:
    """No timer runs while it is held."""
    story, gate = Story(QWEN, REPLY), HalfWay()
    async with pooled(engines(story, gate=gate), session_limits=Limits(turn_timeout=600)) as b:
        asking = asyncio.create_task(b.post(user("hi")))
        await gate.reached.wait()
        await b.admin("POST", "/pause", {"mode": mode})
        pool = b.gateway.engine
        await until(lambda: mode == "keep" or pool.gate.held)
        (turn,) = pool._turns.values()
        assert turn.trace.timer is not None
        assert turn.trace.timer.when() is None
        gate.go.set()
        await b.admin("POST", "/resume")
        assert said(await asking) == REPLY


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_weight_update_within_a_turn_is_recorded_token_by_token(mode: str) -> None:
    """The servers are paused and let go by the same two calls; the engine samples on with what it was given meanwhile."""
    story = Story(QWEN, REPLY, chunk=1)
    pool = engines(story, 2, weight_version="v1")
    half_way = asyncio.Event()

    async def seen(_: dict[str, Any], sent: int) -> None:
        if sent == 4:
            half_way.set()
        await asyncio.sleep(0)

    for each in pool:
        each.gate = seen
        script = each.script
        each.script = lambda body, index, script=script: _slow(script(body, index))  # type: ignore[operator]
    async with pooled(pool) as b:
        asking = asyncio.create_task(b.post(user("hi", stream=True)))
        await half_way.wait()
        status, state = await b.admin("POST", "/pause", {"mode": mode, "engines": True})
        assert (status, state["running"]) == (200, int(mode == "keep"))
        for each in pool:
            assert not each.going.is_set(), "every server is paused"
            async with b.http.post(
                f"{each.url}/update_weights_from_disk", json={"weight_version": "v2", "model_path": "m", "flush_cache": False}
            ) as answer:
                assert answer.status == 200
        assert (await b.admin("POST", "/resume", {"engines": True}))[0] == 200
        assert said(await asking) == REPLY
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.output.tolist() == story.whole
        old, new = turn.versions
        assert (old.version, old.start, new.version, new.end) == ("v1", 0, "v2", len(story.whole))
        assert 4 <= old.end == new.start < len(story.whole)
        assert [p.start for p in turn.pieces] == ([0] if mode == "keep" else [0, old.end])


def _slow(reply: Reply) -> Reply:
    return replace(reply, delay=0.02)


async def test_a_server_that_cannot_be_told_does_not_keep_the_others_from_going_on() -> None:
    story = Story(QWEN, REPLY)
    pair = engines(story, 2)
    async with pooled(pair) as b:
        assert (await b.admin("POST", "/pause", {"mode": "keep", "engines": True}))[0] == 200
        await pair[0].kill()
        asking = asyncio.create_task(b.post(user("hi")))
        await until(lambda: b.gateway.engine.gate.held == 1)
        status, answer = await b.admin("POST", "/resume", {"engines": True})
        assert status == 503, "it says that one was not reached"
        assert answer["error"]["message"]
        assert said(await asking) == REPLY
        assert not b.gateway.engine.gate.shut


async def test_pausing_and_resuming_twice_is_once() -> None:
    story = Story(QWEN, REPLY)
    async with pooled(engines(story)) as b:
        for _ in range(2):
            assert (await b.admin("POST", "/pause"))[1]["paused"] is True
        for _ in range(2):
            assert (await b.admin("POST", "/resume"))[1]["paused"] is False
        assert said(await b.post(user("hi"))) == REPLY


async def test_a_held_gateway_is_ready() -> None:
    """Nothing is lost: a watchdog must not take it for dead while weights are changed."""
    async with pooled(engines(Story(QWEN, REPLY))) as b:
        await b.admin("POST", "/pause")
        await b.engine.kill()
        async with b.http.get(f"{b.gateway.url}/healthz") as answer:
            assert answer.status == 200
        await b.admin("POST", "/resume")
        async with b.http.get(f"{b.gateway.url}/healthz") as answer:
            assert answer.status == 503


@pytest.mark.parametrize(
    ("method", "path", "body"), [("POST", "/pause", {}), ("POST", "/resume", {}), ("GET", "/engines", None)], ids=lambda v: str(v)
)
async def test_only_the_admin_may(method: str, path: str, body: Any) -> None:
    async with pooled(engines(Story(QWEN, REPLY))) as b:
        for key in ("", "wrong", b.handle.key):
            assert (await b.admin(method, path, body, key=key))[0] == 401
        assert not b.gateway.engine.gate.shut


@pytest.mark.parametrize("path", ["/pause", "/resume"])
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"pool": "other"}, 404, "there are: policy"),
        ({"mode": "stop"}, 400, "mode"),
        ({"seconds": -1}, 400, "seconds"),
        ({"sceonds": 1}, 400, "sceonds"),
        ([], 400, "body"),
    ],
    ids=str,
)
async def test_a_wrong_wish_holds_nothing(path: str, body: Any, status: int, words: str) -> None:
    async with pooled(engines(Story(QWEN, REPLY))) as b:
        got, answer = await b.admin("POST", path, body)
        assert got == status
        assert words in answer["error"]["message"]
        assert not b.gateway.engine.gate.shut


async def test_one_pool_is_held_and_the_others_are_not() -> None:
    policy, side = Story(QWEN, REPLY), Story(QWEN, "A title")
    both = {"policy": engines(policy)[0], "side": engines(side)[0]}
    async with pooled(both, {"policy": QWEN, "side": QWEN}) as b:
        await b.admin("POST", "/pause", {"pool": "policy"})
        assert said(await b.post(user("title?"), **{"x-turnloom-label": "side"})) == "A title"
        asking = asyncio.create_task(b.post(user("hi")))
        await until(lambda: b.gateway.engine.gate.held == 1)
        _, listed = await b.admin("GET", "/engines")
        assert {name: (p["paused"], p["held"]) for name, p in listed["pools"].items()} == {"policy": (True, 1), "side": (False, 0)}
        await b.admin("POST", "/resume", {"pool": "policy"})
        assert said(await asking) == REPLY


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_while_held_is_not_sampled_for(stream: bool) -> None:
    story = Story(QWEN, REPLY)
    async with pooled(engines(story), keepalive=0.05) as b:
        await b.admin("POST", "/pause")
        asking = asyncio.create_task(b.post(user("hi", stream=stream)))
        pool, session = b.gateway.engine, await b.session()
        await until(lambda: pool.gate.held == 1)
        asking.cancel()
        await until(lambda: session.tree.turns)
        (turn,) = session.tree.turns.values()
        assert (turn.outcome, len(turn.output), turn.abort) == (Outcome.ORPHANED, 0, "")
        assert pool.gate.held == 0
        await b.admin("POST", "/resume")
        assert story.asked == []


@pytest.mark.parametrize("begun", [False, True], ids=["held before its first token", "aborted half-way"])
async def test_a_session_that_is_finished_while_held_says_so(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "DRAIN_SECONDS", 0.05)
    story, gate = Story(QWEN, REPLY), HalfWay()
    async with pooled(engines(story, gate=gate)) as b:
        asking = asyncio.create_task(_begin(b, gate, begun))
        await until(lambda: b.gateway.engine.gate.held == 1)
        samples = await b.handle.finish()
        assert told(await asking) == (503, "api_error")
        assert samples == []
        (turn,) = (await b.session()).tree.turns.values()
        assert (turn.outcome, turn.error) == (Outcome.ABORTED, "the session was closed")
        assert bool(len(turn.output)) == begun
        assert turn.output.tolist() == story.whole[: len(turn.output)]


async def _begin(b: Any, gate: HalfWay, begun: bool) -> Any:
    """A request that is held, at once or half-way."""
    if not begun:
        await b.admin("POST", "/pause")
        return await b.post(user("hi"))
    asking = asyncio.create_task(b.post(user("hi")))
    await gate.reached.wait()
    await b.admin("POST", "/pause")
    return await asking


async def test_a_gateway_that_stops_while_held_ends_what_it_holds() -> None:
    story = Story(QWEN, REPLY)
    async with pooled(engines(story)) as b:
        await b.admin("POST", "/pause")
        asking = asyncio.create_task(b.post(user("hi")))
        await until(lambda: b.gateway.engine.gate.held == 1)
        session = await b.session()
        async with asyncio.timeout(60):
            await b.gateway.stop()
            assert told(await asking) == (503, "api_error")
        (turn,) = session.tree.turns.values()
        assert turn.outcome is Outcome.ABORTED
        assert story.asked == []


async def test_a_gateway_stops_though_a_pause_still_waits() -> None:
    story, gate = Story(QWEN, REPLY), HalfWay()
    async with pooled(engines(story, gate=gate)) as b:
        asking = asyncio.create_task(b.post(user("hi")))
        await gate.reached.wait()
        pausing = asyncio.create_task(b.admin("POST", "/pause", {"mode": "wait"}))
        await until(lambda: b.gateway.engine.gate.shut)
        async with asyncio.timeout(60):
            await b.gateway.stop()
        gate.go.set()
        await asyncio.wait([asking, pausing])


async def test_an_engine_that_dies_while_held_is_outlived() -> None:
    story = Story(QWEN, REPLY, (5, Fault.STALL))
    pair = engines(story, 2)
    async with pooled(pair) as b:
        asking = asyncio.create_task(b.post(user("hi", stream=True)))
        await until(lambda: story.asked)
        first = pair[int(story.asked[0][0])]
        await b.admin("POST", "/pause", {"mode": "keep"})
        await first.kill()
        await until(lambda: b.gateway.engine.gate.held == 1)
        await b.admin("POST", "/resume")
        assert said(await asking) == REPLY
