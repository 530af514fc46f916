"""One streamed request from POST to the last trace of its work: left, stopped, closed and broken at every moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import orjson
import pytest
from aiohttp import web

from turnloom.engine.contract import AbortOutcome, Chunk, Trace
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import EngineProtocol, EngineUnavailable
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.types import FinishReason, Sampling, ids

PROMPT = ids([11, 12, 13])
OUTPUT = tuple(range(21, 41))
STALLED = Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL)
LONG = Reply(ids=OUTPUT * 200, chunk=1, delay=0.002)


@pytest.fixture(autouse=True)
async def unheard() -> AsyncIterator[list[dict[str, Any]]]:
    """What no one would have heard of: exceptions of tasks that nobody awaited. There must be none."""
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    yield heard
    gc.collect()
    await asyncio.sleep(0)
    assert heard == []


@contextlib.asynccontextmanager
async def serving(*script: Reply, **options: Any) -> AsyncIterator[tuple[ScriptedEngine, SGLangEngine]]:
    async with ScriptedEngine(script, **options) as server, calling(server.url) as client:
        try:
            yield server, client
        finally:
            server.release()


@contextlib.asynccontextmanager
async def calling(url: str, **options: Any) -> AsyncIterator[SGLangEngine]:
    """A client that has let go of everything in the end."""
    client = SGLangEngine(url, **options)
    try:
        yield client
    finally:
        await client.close()
        assert client._calls._live == {}
        assert client._calls._stops == {}
        session = client._http._session
        assert session is None or session.closed


def sampling(client: SGLangEngine, rid: str = "r1", trace: Trace | None = None) -> AsyncIterator[Chunk]:
    return client.sample(PROMPT, Sampling(), rid=rid, trace=trace)


async def read(client: SGLangEngine, rid: str = "r1", trace: Trace | None = None) -> list[Chunk]:
    return [chunk async for chunk in sampling(client, rid, trace)]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [i for chunk in chunks for i in chunk.ids.tolist()]


async def settled(trace: Trace) -> list[AbortOutcome]:
    return list(await asyncio.gather(*trace.aborts))


@pytest.mark.parametrize(
    "reply", [Reply(ids=OUTPUT, fault=Fault.HANG), STALLED, LONG, Reply(ids=OUTPUT, chunk=1)], ids=lambda r: str(r.fault)
)
async def test_a_reader_cancelled_at_any_step_leaves_nothing_behind(reply: Reply) -> None:
    async with serving(*[reply] * 60) as (server, client):
        await client.capabilities()
        traces = []
        for steps in range(60):
            trace = Trace()
            task = asyncio.create_task(read(client, f"r{steps:03}", trace))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert tokens(await task) == list(OUTPUT)
            traces.append(trace)
        for trace in traces:
            assert all(outcome is AbortOutcome.VERIFIED for outcome in await settled(trace))
        await server.wait_running(0)
        session = client._http.session
        assert session.connector is not None
        assert not session.connector._acquired


async def test_leaving_does_not_wait_and_the_trace_gets_what_comes_of_it() -> None:
    async with serving(STALLED) as (server, client):
        trace = Trace()
        stream = sampling(client, trace=trace)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert server.aborts == []
        assert await settled(trace) == [AbortOutcome.VERIFIED]
        assert server.aborts == [{"rid": "r1"}]
        assert server.disconnects == []


async def test_a_stream_that_came_to_its_end_leaves_no_abort() -> None:
    async with serving(Reply(ids=OUTPUT)) as (server, client):
        trace = Trace()
        assert tokens(await read(client, trace=trace)) == list(OUTPUT)
        assert trace.aborts == []
        assert server.aborts == []


async def test_a_reader_that_leaves_between_the_last_chunk_and_the_end_aborts_nothing() -> None:
    last, end = asyncio.Event(), asyncio.Event()

    async def gate(_: dict[str, Any], sent: int) -> None:
        last.set()
        await end.wait()

    async with serving(Reply(ids=OUTPUT, chunk=100), gate=gate) as (server, client):
        trace = Trace()
        task = asyncio.create_task(read(client, trace=trace))
        await last.wait()
        while not client._calls._live or not client._calls._live["r1"].ended.done():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        end.set()
        assert trace.aborts == []
        assert server.aborts == []


async def test_an_abort_by_id_ends_the_stream_as_aborted_and_both_know_one_outcome() -> None:
    async with serving(STALLED) as (server, client):
        trace = Trace()
        reader = asyncio.create_task(read(client, trace=trace))
        await server.wait_running(1)
        first, second = await asyncio.gather(client.abort("r1"), client.abort("r1"))
        got = await reader
        assert first is second is AbortOutcome.VERIFIED
        assert got[-1].finish is not None
        assert got[-1].finish.reason is FinishReason.ABORT
        assert tokens(got) == list(OUTPUT[: len(tokens(got))])
        assert await settled(trace) == [AbortOutcome.VERIFIED]
        assert server.aborts == [{"rid": "r1"}]


async def test_an_abort_ends_a_stream_whose_reader_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.engine.call._END_SECONDS", (0.01,))
    async with serving(STALLED) as (server, client):
        stream = sampling(client)
        await anext(stream)
        assert await client.abort("r1") is AbortOutcome.VERIFIED
        assert server.running == 0
        assert [chunk.finish is not None for chunk in [c async for c in stream]][-1]


async def test_an_abort_by_id_joins_the_one_that_its_reader_began() -> None:
    async with serving(STALLED) as (server, client):
        stream = sampling(client)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert await client.abort("r1") is AbortOutcome.VERIFIED
        assert await client.abort("r1") is AbortOutcome.VERIFIED
        assert server.aborts == [{"rid": "r1"}] * 2


async def test_an_abort_before_the_headers_ends_the_stream_as_aborted() -> None:
    async with serving(Reply(ids=OUTPUT, fault=Fault.HANG), obey_aborts=False) as (server, client):
        task = asyncio.create_task(read(client))
        await server.wait_running(1)
        assert await client.abort("r1") is AbortOutcome.VERIFIED
        (last,) = await task
        assert last.finish is not None
        assert (last.ids.tolist(), last.finish.reason) == ([], FinishReason.ABORT)
        assert server.disconnects == ["r1"]


async def test_an_abort_goes_on_without_the_one_who_asked() -> None:
    async with serving(STALLED) as (server, client):
        stream = sampling(client)
        await anext(stream)
        asked = asyncio.create_task(client.abort("r1"))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert [chunk async for chunk in stream][-1].finish is not None
        await client.close()
        assert server.aborts == [{"rid": "r1"}]


async def test_a_reader_that_leaves_during_an_abort_proves_nothing() -> None:
    """The end of a stream is proof when the server brings it, not when its reader goes."""
    async with serving(STALLED, obey_aborts=False, forgetful=True) as (server, client):
        stream = sampling(client)
        await anext(stream)
        asked = asyncio.create_task(client.abort("r1"))
        while not server.aborts:
            await asyncio.sleep(0.001)
        await stream.aclose()  # type: ignore[attr-defined]
        assert await asked is AbortOutcome.UNVERIFIED
        assert server.running == 1


async def test_an_abort_of_an_id_that_nobody_reads_is_told_and_looked_after() -> None:
    async with serving() as (server, client):
        assert await client.abort("r9") is AbortOutcome.VERIFIED
        assert server.aborts == [{"rid": "r9"}]


async def test_a_stream_that_ends_by_itself_while_it_is_stopped_was_not_stopped() -> None:
    whole = asyncio.Event()

    async def gate(_: dict[str, Any], sent: int) -> None:
        if sent == len(OUTPUT) - 1:
            whole.set()

    async with serving(Reply(ids=OUTPUT, finish="length", chunk=1), gate=gate, obey_aborts=False) as (_, client):
        trace = Trace()
        reader = asyncio.create_task(read(client, trace=trace))
        await whole.wait()
        assert await client.abort("r1") is AbortOutcome.VERIFIED
        assert tokens(await reader) == list(OUTPUT)
        assert trace.aborts == []


async def test_a_closed_client_aborts_nothing() -> None:
    async with serving() as (server, client):
        await client.capabilities()
        await client.close()
        assert await client.abort("r1") is AbortOutcome.FAILED
        assert server.aborts == []


async def test_closing_the_client_stops_what_runs_and_waits_for_it() -> None:
    async with serving(*[STALLED] * 3) as (server, client):
        streams = [sampling(client, f"r{n}") for n in range(3)]
        for stream in streams:
            await anext(stream)
        await streams[0].aclose()  # type: ignore[attr-defined]
        await client.close()
        assert {body["rid"] for body in server.aborts} == {"r0", "r1", "r2"}
        assert server.running == 0
        for stream in streams[1:]:
            (*_, last) = [chunk async for chunk in stream]
            assert last.finish is not None
            assert last.finish.reason is FinishReason.ABORT
        assert client._http._session is not None
        assert client._http._session.closed


async def test_nothing_outlives_a_closed_client() -> None:
    """A stream that begins while the client closes breaks with it, and opens no connection again to be stopped."""
    async with serving(STALLED, STALLED) as (_, client):
        await client.capabilities()
        first = sampling(client)
        await anext(first)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        late = sampling(client, "late")
        await anext(late)
        await closing
        with pytest.raises(EngineUnavailable):
            _ = [chunk async for chunk in late]
        assert client._http._session is not None
        assert client._http._session.closed
        assert [chunk async for chunk in first][-1].finish is not None


@pytest.mark.parametrize("fault", [Fault.WRONG_ID, Fault.MORE_AFTER_FINAL])
async def test_an_engine_that_contradicts_itself_is_stopped(fault: Fault) -> None:
    async with serving(Reply(ids=OUTPUT, chunk=4, fault=fault)) as (server, client):
        trace = Trace()
        with pytest.raises(EngineProtocol):
            await read(client, trace=trace)
        assert await settled(trace) == [AbortOutcome.VERIFIED]
        assert server.aborts == [{"rid": "r1"}]


@pytest.mark.parametrize("finish", [None, {"type": "stop", "matched": 5}])
async def test_a_connection_left_open_after_done_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, finish: Any) -> None:
    monkeypatch.setattr("turnloom.engine.call._DRAIN_SECONDS", 0.01)
    over = asyncio.Event()
    payload = {
        "output_ids": [5],
        "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 5, None]], "finish_reason": finish},
    }

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: " + web.json_response(payload).body + b"\n\ndata: [DONE]\n\n")  # type: ignore[operator]
        await over.wait()
        return response

    async with bare(("POST", "/generate", generate)) as url, calling(url, context_length=100) as client:
        if finish is None:
            with pytest.raises(EngineUnavailable, match="without a finish reason"):
                await read(client)
        else:
            assert tokens(await read(client)) == [5]
        over.set()


async def test_chunks_that_came_at_once_leave_turns_for_others() -> None:
    """Whoever reads them may never have to wait for anything: all else on the loop would stand still meanwhile."""
    finish = {"type": "length", "length": 200}
    told = b""
    for count in range(1, 201):
        meta = {"completion_tokens": count, "output_token_logprobs": [[-1.0, 5, None]], "finish_reason": finish if count == 200 else None}
        told += b"data: " + orjson.dumps({"output_ids": [5], "meta_info": meta}) + b"\n\n"

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(told + b"data: [DONE]\n\n")
        return response

    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with bare(("POST", "/generate", generate)) as url, calling(url, context_length=1000) as client:
        seen, beside = [], asyncio.create_task(other())
        async for _ in sampling(client):
            seen.append(turns)
        beside.cancel()
    assert len(seen) == 200
    assert all(before < after for before, after in pairwise(seen))


@contextlib.asynccontextmanager
async def bare(*routes: tuple[str, str, Any]) -> AsyncIterator[str]:
    """A server with some routes of its own, that says of itself what a client needs to know."""
    app = web.Application()

    async def about(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "m"})

    for path in ("/model_info", "/server_info", "/v1/models"):
        app.router.add_get(path, about)
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_refusal_gives_its_connection_back() -> None:
    async with serving(Reply(fault=Fault.HTTP_500), Reply(ids=OUTPUT)) as (_, client):
        trace = Trace()
        with pytest.raises(EngineUnavailable):
            await read(client, trace=trace)
        assert trace.aborts == []
        await read(client, "r2")
        session = client._http.session
        assert session.connector is not None
        assert not session.connector._acquired


async def test_an_answer_that_is_refused_gives_its_connection_back() -> None:
    async with serving() as (server, client):
        await client.capabilities()
        server.script = [Reply(fault=Fault.HTTP_500)]
        with pytest.raises(EngineUnavailable):
            await client._calls.ask("/generate", {"input_ids": [1], "rid": "r1"}, "r1")
        session = client._http.session
        assert session.connector is not None
        assert not session.connector._acquired
        assert server.aborts == []


async def test_an_answer_whose_asker_leaves_is_stopped() -> None:
    async with serving(Reply(ids=OUTPUT, fault=Fault.HANG)) as (server, client):
        task = asyncio.create_task(client._calls.ask("/generate", {"input_ids": [1], "rid": "r1"}, "r1"))
        await server.wait_running(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()
        assert server.aborts == [{"rid": "r1"}]


async def test_a_call_that_failed_after_its_reader_had_gone_is_heard_of() -> None:
    """No "exception was never retrieved": see `unheard`."""
    async with serving(Reply(ids=OUTPUT, fault=Fault.RESET)) as (server, client):
        await client.capabilities()
        task = asyncio.create_task(read(client))
        while not server.requests:
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineUnavailable):
            await task
