"""What each fault of a server comes to at the client: its chunks, its error, what is known of the abort. No token that was not sampled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from turnloom.engine.contract import AbortOutcome, Chunk, Trace
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import EngineError, EngineOverloaded, EngineProtocol, EngineUnavailable
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine, logprob_at
from turnloom.testing.scripted_router import ScriptedRouter
from turnloom.types import FinishReason, Sampling, VersionSpan, ids

PROMPT = ids([11, 12, 13])
OUTPUT = tuple(range(21, 41))
END = 2
REPLY = Reply(ids=OUTPUT, end=END, chunk=2)
STALLED = Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL)


@contextlib.asynccontextmanager
async def serving(*script: Reply, **options: Any) -> AsyncIterator[tuple[ScriptedEngine, SGLangEngine]]:
    async with ScriptedEngine(script, **options) as server, calling(server.url) as client:
        try:
            yield server, client
        finally:
            server.release()


@contextlib.asynccontextmanager
async def calling(url: str) -> AsyncIterator[SGLangEngine]:
    client = SGLangEngine(url)
    try:
        yield client
    finally:
        await client.close()


async def read(client: SGLangEngine, rid: str = "r1", key: str = "", trace: Trace | None = None) -> list[Chunk]:
    return [chunk async for chunk in client.sample(PROMPT, Sampling(), rid=rid, routing_key=key, trace=trace)]


async def collect(client: SGLangEngine, got: list[Chunk]) -> None:
    """Chunks as they come, for streams that end with an error."""
    async for chunk in client.sample(PROMPT, Sampling(), rid="r1"):
        got.append(chunk)


def sampled(chunks: list[Chunk]) -> list[tuple[int, float]]:
    return [(i, v) for c in chunks for i, v in zip(c.ids.tolist(), c.logprobs.tolist(), strict=True)]


def spoken(*tokens: int) -> list[tuple[int, float]]:
    """What the scripted engine samples for these tokens after PROMPT."""
    return [(token, logprob_at(len(PROMPT) + i, token)) for i, token in enumerate(tokens)]


async def left(client: SGLangEngine, rid: str = "r1") -> AbortOutcome:
    """The outcome for a reader that takes one chunk and goes."""
    trace = Trace()
    stream = client.sample(PROMPT, Sampling(), rid=rid, trace=trace)
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    (outcome,) = await asyncio.gather(*trace.aborts)
    return outcome


@pytest.mark.parametrize(("matched", "end"), [(None, END), ("STOP", -1)], ids=["stop token", "stop string"])
async def test_tokens_past_a_stop_are_given_as_they_were_sampled(matched: str | None, end: int) -> None:
    """They are tokens of the engine, with its logprobs; that the reply ended before them is for its parser to see."""
    async with serving(Reply(ids=OUTPUT, end=end, matched=matched, past=(71, 72), chunk=3)) as (_, client):
        chunks = await read(client)
    stopped = (*OUTPUT, END) if matched is None else OUTPUT
    assert sampled(chunks) == spoken(*stopped, 71, 72)
    assert chunks[-1].finish is not None
    assert (chunks[-1].finish.reason, chunks[-1].finish.matched) == (FinishReason.STOP, matched or END)


@pytest.mark.parametrize(
    "style",
    [
        ("cumulative", "cumulative", "incremental"),
        ("incremental", "incremental", "cumulative"),
        ("mixed", "cumulative", "incremental", "mixed"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize("chunk", [1, 2, 7])
async def test_a_server_may_change_its_style_within_a_stream(style: Any, chunk: int) -> None:
    async with serving(Reply(ids=OUTPUT, end=END, style=style, chunk=chunk)) as (_, client):
        assert sampled(await read(client)) == spoken(*OUTPUT, END)


async def test_a_last_chunk_that_comes_again_with_more_is_a_contradiction() -> None:
    got: list[Chunk] = []
    async with serving(Reply(ids=OUTPUT, end=END, chunk=4, fault=Fault.MORE_AFTER_FINAL)) as (_, client):
        with pytest.raises(EngineProtocol, match="after the last chunk"):
            await collect(client, got)
    assert sampled(got) == spoken(*OUTPUT)
    assert all(chunk.finish is None for chunk in got)


@pytest.mark.parametrize("fault", [Fault.HTTP_429, Fault.HTTP_503])
@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("", None), ("Tue, 01 Dec 2026 00:00:00 GMT", None), ("-1", None)])
async def test_a_busy_server_says_when_to_come_again(fault: Fault, header: str, seconds: float | None) -> None:
    async with serving(Reply(fault=fault, retry_after=header)) as (server, client):
        with pytest.raises(EngineOverloaded) as caught:
            await read(client)
        assert caught.value.retry_after == seconds
        assert server.aborts == []


async def test_a_server_that_was_busy_is_as_good_as_any() -> None:
    async with serving(*[Reply(fault=Fault.HTTP_503)] * 3, REPLY) as (_, client):
        for number in range(3):
            with pytest.raises(EngineOverloaded):
                await read(client, f"r{number}")
        assert sampled(await read(client, "r4")) == spoken(*OUTPUT, END)


async def test_an_abort_in_the_queue_is_a_last_chunk_without_tokens() -> None:
    async with serving(Reply(fault=Fault.ABORT_QUEUED)) as (_, client):
        (last,) = await read(client)
    assert last.finish is not None
    assert (last.ids.tolist(), last.finish.reason, last.finish.message) == ([], FinishReason.ABORT, "Abort in waiting queue")


async def test_a_live_id_that_is_taken_can_be_asked_again_under_another() -> None:
    """A router's own retry collided with its first attempt: not the request's fault, and the first is unharmed until stopped."""
    async with serving(STALLED, REPLY) as (server, client), calling(server.url) as other:
        first = asyncio.create_task(read(other))
        await server.wait_running(1)
        trace = Trace()
        with pytest.raises(EngineUnavailable, match="Duplicate request ID detected: r1"):
            await read(client, trace=trace)
        # What was found alive under an id of this client's own is a ghost, and is stopped.
        assert await asyncio.gather(*trace.aborts) == [AbortOutcome.VERIFIED]
        assert (await first)[-1].finish is not None
        assert sampled(await read(client, "r2")) == spoken(*OUTPUT, END)


async def test_slow_health_is_no_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.engine.http.HEALTH_SECONDS", 0.05)
    async with serving(REPLY) as (server, client):
        assert await client.health()
        server.slow["/health"] = float("inf")
        assert not await client.health()
        assert sampled(await read(client)) == spoken(*OUTPUT, END)


async def test_slow_loads_are_waited_for() -> None:
    async with serving(STALLED) as (server, client):
        server.slow["/v1/loads"] = 0.3
        server.obey_aborts = False
        assert await left(client) is AbortOutcome.VERIFIED


@pytest.mark.parametrize("slow", ["/v1/loads", "/abort_request", "/workers"])
async def test_a_path_that_never_answers_leaves_the_abort_open_and_the_reader_free(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.engine.sglang_stop._ANSWER_SECONDS", 0.05)
    async with serving(STALLED) as (server, client):
        await client.capabilities()
        server.slow[slow] = float("inf")
        server.obey_aborts = False
        outcome = await left(client)
        assert (
            outcome
            is {"/v1/loads": AbortOutcome.UNVERIFIED, "/abort_request": AbortOutcome.FAILED, "/workers": AbortOutcome.VERIFIED}[slow]
        )
        await server.wait_running(0)


async def test_loads_that_never_fall_prove_nothing_but_the_end_of_the_stream_does() -> None:
    async with serving(STALLED, STALLED) as (server, client):
        server.load_floor = 3
        assert await left(client) is AbortOutcome.VERIFIED
        server.obey_aborts = False
        assert await left(client, "r2") is AbortOutcome.UNVERIFIED


async def test_a_worker_that_forgets_is_told_before_it_can() -> None:
    async with serving(Reply(ids=OUTPUT * 100, chunk=1, delay=0.01), forgetful=True) as (server, client):
        assert await left(client) is AbortOutcome.VERIFIED
        assert server.running == 0
        assert server.disconnects == []


async def test_what_a_worker_has_forgotten_is_not_called_gone() -> None:
    async with serving(Reply(ids=OUTPUT * 200, chunk=1, delay=0.01), forgetful=True, obey_aborts=False) as (server, client):
        assert await left(client) is AbortOutcome.UNVERIFIED
        assert server.disconnects == ["r1"]
        server.obey_aborts = True
        assert await client.abort("r1") is AbortOutcome.UNVERIFIED
        assert server.running == 1


async def test_an_abort_endpoint_that_is_missing_is_a_failure_and_the_stream_ends_all_the_same() -> None:
    async with serving(STALLED) as (server, client):
        server.abort_endpoint = False
        assert await left(client) is AbortOutcome.FAILED
        await server.wait_running(0)


@pytest.mark.parametrize(
    "answer", [b"garbage", b"", b"\xff\xfe", 500, 403, [], {"workers": [{"url": "http://["}, {"url": "http://x:port"}]}]
)
async def test_garbage_from_workers_leaves_the_worker_itself(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(STALLED) as (server, client):
        server.workers = answer
        with caplog.at_level(logging.WARNING, "turnloom.engine"):
            outcome = await left(client)
        assert outcome is AbortOutcome.VERIFIED
        assert server.aborts == [{"rid": "r1"}]
        assert bool(caplog.records) is not isinstance(answer, dict)


async def test_garbage_from_a_router_leaves_the_workers_it_had() -> None:
    async with ScriptedEngine([STALLED]) as worker, serving(STALLED) as (front, client):
        front.abort_endpoint = False
        front.workers = {"workers": [{"url": worker.url}]}
        await client.capabilities()
        front.workers = b"garbage"
        assert await client.abort("r1") is AbortOutcome.VERIFIED
        assert worker.aborts == [{"rid": "r1"}]


async def test_a_router_that_died_leaves_the_workers_it_had() -> None:
    async with ScriptedEngine() as worker, serving() as (front, client):
        front.workers = {"workers": [{"url": worker.url}]}
        await client.capabilities()
        await front.kill()
        assert await client.abort("r1") is AbortOutcome.VERIFIED
        assert worker.aborts == [{"rid": "r1"}]


async def test_a_worker_that_was_added_is_told() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, serving() as (front, client):
        front.workers = {"workers": [{"url": one.url}]}
        await client.capabilities()
        front.workers = {"workers": [{"url": one.url}, {"url": two.url}]}
        assert await client.abort("r1") is AbortOutcome.VERIFIED
        assert one.aborts == two.aborts == [{"rid": "r1"}]


async def test_a_worker_that_was_removed_is_told_and_looked_at_as_long_as_it_lives() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, serving() as (front, client):
        front.workers = {"workers": [{"url": one.url}, {"url": two.url}]}
        await client.capabilities()
        front.workers = {"workers": [{"url": one.url}]}
        two.load_floor = 1
        assert await client.abort("r1") is AbortOutcome.UNVERIFIED
        assert {"rid": "r1"} in two.aborts
        two.load_floor = 0
        assert await client.abort("r2") is AbortOutcome.VERIFIED
        await two.kill()
        assert await client.abort("r3") is AbortOutcome.VERIFIED
        assert one.aborts[-1] == {"rid": "r3"}


async def test_a_worker_removed_between_the_abort_and_the_look_is_still_looked_at() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two, serving() as (front, client):
        lists = [[one.url, two.url]]

        def listed() -> Any:
            return {"workers": [{"url": url} for url in lists[0]]}

        front.workers = listed
        await client.capabilities()
        two.load_floor = 1
        two.slow["/abort_request"] = 0.05
        asked = asyncio.create_task(client.abort("r1"))
        while not one.aborts:
            await asyncio.sleep(0.001)
        lists[0] = [one.url]
        assert await asked is AbortOutcome.UNVERIFIED


async def test_a_weight_update_in_mid_stream_gives_each_token_its_own_version() -> None:
    async def gate(_: dict[str, Any], sent: int) -> None:
        if sent == 3:
            server.weights = server.weight_version = "w2"

    async with serving(REPLY, gate=gate, weight_version="w1") as (server, client):
        chunks = await read(client)
    assert [chunk.version for chunk in chunks] == ["w1"] * 3 + ["w2"] * 8
    assert chunks[-1].versions == (VersionSpan("w1", 0, 6), VersionSpan("w2", 6, 21))


async def test_a_weight_update_of_a_server_that_lists_no_spans_is_seen_chunk_by_chunk() -> None:
    async def gate(_: dict[str, Any], sent: int) -> None:
        if sent == 3:
            server.weight_version = "w2"

    async with serving(REPLY, gate=gate, weight_version="w1", lists_versions=False) as (server, client):
        chunks = await read(client)
    assert chunks[-1].versions == (VersionSpan("w1", 0, 6), VersionSpan("w2", 6, 21))


async def test_what_the_last_chunk_lists_counts_more_than_what_the_chunks_named() -> None:
    reply = Reply(ids=OUTPUT, end=END, chunk=2, versions=(("w1", 0, 5), ("w2", 5, 21)), claimed="w1")
    async with serving(reply) as (_, client):
        chunks = await read(client)
    assert chunks[-1].versions == (VersionSpan("w1", 0, 5), VersionSpan("w2", 5, 21))


async def test_a_killed_server_breaks_its_streams_and_serves_again_at_its_old_place() -> None:
    async with serving(STALLED, REPLY) as (server, client):
        got: list[Chunk] = []
        task = asyncio.create_task(collect(client, got))
        while len(got) < 3:
            await asyncio.sleep(0.001)
        await server.kill()
        with pytest.raises(EngineUnavailable):
            await task
        assert sampled(got) == spoken(*OUTPUT[: len(got)])
        assert not await client.health()
        with pytest.raises(EngineUnavailable):
            await read(client, "r2")
        url = server.url
        assert await server.start() == url
        assert await client.health()
        assert sampled(await read(client, "r3")) == spoken(*OUTPUT, END)


async def test_a_pause_that_aborts_ends_what_runs() -> None:
    async with serving(STALLED, REPLY) as (server, client):
        task = asyncio.create_task(read(client))
        await server.wait_running(1)
        await client.pause("abort")
        chunks = await task
        assert chunks[-1].finish is not None
        assert chunks[-1].finish.reason is FinishReason.ABORT
        assert sampled(chunks) == spoken(*OUTPUT[: len(sampled(chunks))])
        held = asyncio.create_task(read(client, "r2"))
        while len(server.requests) < 2:
            await asyncio.sleep(0.001)
        assert await client.health()
        await client.resume()
        assert sampled(await held) == spoken(*OUTPUT, END)


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_a_pause_that_aborts_nothing_leaves_the_reply_whole(mode: Any) -> None:
    begun = asyncio.Event()

    async def gate(_: dict[str, Any], sent: int) -> None:
        begun.set()

    async with serving(Reply(ids=OUTPUT, end=END, chunk=1, delay=0.005), gate=gate) as (server, client):
        task = asyncio.create_task(read(client))
        await begun.wait()
        await client.pause(mode)
        assert server.running == 1
        assert await client.health()
        await client.resume()
        assert sampled(await task) == spoken(*OUTPUT, END)


async def test_a_reader_that_leaves_a_paused_server_leaves_no_ghost_behind() -> None:
    """A request that came in the pause is in no load and reached by no abort: only its connection ends it."""
    async with serving(REPLY, REPLY) as (server, client):
        await client.capabilities()
        await client.pause("wait")
        trace = Trace()
        task = asyncio.create_task(read(client, trace=trace))
        await server.wait_running(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*trace.aborts)
        assert server.running == 0
        await client.resume()
        assert server.disconnects == ["r1"]


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_an_abort_that_a_pause_keeps_back_is_not_called_verified(mode: Any) -> None:
    async with serving(Reply(ids=OUTPUT * 100, chunk=1, delay=0.01), forgetful=True) as (server, client):
        stream = client.sample(PROMPT, Sampling(), rid="r1")
        await anext(stream)
        await client.pause(mode)
        assert await client.abort("r1") is AbortOutcome.UNVERIFIED
        assert server.running == 1
        await client.resume()
        await server.wait_running(0)
        assert (await anext(stream)).finish is not None or [c async for c in stream][-1].finish is not None


async def test_weights_updated_in_place_under_a_cache_are_a_failure_that_the_spans_tell() -> None:
    import aiohttp

    begun = asyncio.Event()

    async def gate(_: dict[str, Any], sent: int) -> None:
        begun.set()

    slow = Reply(ids=OUTPUT, end=END, chunk=1, delay=0.005)
    async with serving(slow, gate=gate, weight_version="w1") as (server, client), aiohttp.ClientSession() as http:
        task = asyncio.create_task(read(client))
        await begun.wait()
        await client.pause("keep")
        async with http.post(f"{server.url}/update_weights_from_disk", json={"weight_version": "w2"}) as answer:
            assert answer.status == 400
        await client.resume()
        chunks = await task
    assert {chunk.version for chunk in chunks} == {"w1"}
    assert [span.version for span in chunks[-1].versions] == ["w1", "w2"]
    assert sampled(chunks) == spoken(*OUTPUT, END)


async def test_a_pause_that_a_worker_does_not_know_is_an_error() -> None:
    async with ScriptedEngine() as one, serving() as (front, client):
        front.workers = {"workers": [{"url": one.url}, {"url": "http://127.0.0.1:9"}]}
        with pytest.raises(EngineError):
            await client.pause("abort")
        assert not one.going.is_set()


@pytest.mark.parametrize("forgetful", [False, True])
async def test_behind_a_router_nothing_decodes_on(forgetful: bool) -> None:
    """The router knows no abort, the workers may forget: every one of two hundred is stopped before its connection closes."""
    long = Reply(ids=OUTPUT * 100, chunk=1, delay=0.02, style="incremental")
    async with (
        ScriptedEngine(lambda *_: long, forgetful=forgetful) as one,
        ScriptedEngine(lambda *_: long, forgetful=forgetful) as two,
        ScriptedRouter([one.url, two.url]) as router,
        calling(router.url) as client,
    ):
        traces = [Trace() for _ in range(200)]
        for start in range(0, 200, 20):
            numbered = list(enumerate(traces))[start : start + 20]
            tasks = [asyncio.create_task(read(client, f"r{n:03}", f"s{n}", trace)) for n, trace in numbered]
            for steps, task in enumerate(tasks):
                for _ in range(steps * 5):
                    await asyncio.sleep(0)
                task.cancel()
            assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))
        outcomes = [outcome for trace in traces for outcome in await asyncio.gather(*trace.aborts)]
        assert AbortOutcome.FAILED not in outcomes
        assert (one.running, two.running) == (0, 0)
        assert len(one.requests) + len(two.requests) > 100, "most were cancelled when a worker had them"


async def test_a_routers_retry_keeps_its_id_and_a_dead_worker_is_passed_over() -> None:
    async with ScriptedEngine([REPLY] * 2) as one, ScriptedRouter(["http://127.0.0.1:9", one.url]) as router, calling(router.url) as client:
        assert sampled(await read(client, "r1", "s")) == spoken(*OUTPUT, END)
        assert {rid for rid, _ in router.attempts} == {"r1"}
        assert router.attempts[-1] == ("r1", one.url)
