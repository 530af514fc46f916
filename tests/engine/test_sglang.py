"""The SGLang client against a real HTTP server that answers from a script."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from turnloom.engine.contract import AbortOutcome, Chunk
from turnloom.engine.metrics import REGISTRY
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import EngineOverloaded, EngineProtocol, EngineRejected, EngineUnavailable
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine, logprob_at
from turnloom.testing.scripted_reply import Output
from turnloom.types import FinishReason, Sampling, VersionSpan, ids

PROMPT = ids([11, 12, 13])
OUTPUT = (21, 21, 22, 21, 23, 24, 25)
END = 2
REPLY = Reply(ids=OUTPUT, end=END, chunk=2)


@contextlib.asynccontextmanager
async def serving(*script: Reply, **options: object) -> AsyncIterator[tuple[ScriptedEngine, SGLangEngine]]:
    async with ScriptedEngine(script, **options) as server:  # type: ignore[arg-type]
        client = SGLangEngine(server.url)
        try:
            yield server, client
        finally:
            server.release()
            await client.close()


async def sample(client: SGLangEngine, sampling: Sampling | None = None, *, rid: str = "r1", routing_key: str = "") -> list[Chunk]:
    return [chunk async for chunk in client.sample(PROMPT, sampling or Sampling(), rid=rid, routing_key=routing_key)]


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [i for c in chunks for i in c.ids.tolist()], [v for c in chunks for v in c.logprobs.tolist()]


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
async def test_every_style_of_stream_gives_the_same_tokens(style: str, size: int) -> None:
    async with serving(Reply(ids=OUTPUT, end=END, style=style, chunk=size)) as (_, client):  # type: ignore[arg-type]
        chunks = await sample(client)
    tokens, logprobs = joined(chunks)
    assert tokens == [*OUTPUT, END]
    assert logprobs == [logprob_at(len(PROMPT) + i, token) for i, token in enumerate(tokens)]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish is not None
    assert (chunks[-1].finish.reason, chunks[-1].finish.matched) == (FinishReason.STOP, END)


async def test_r17_the_request_keeps_special_tokens_and_asks_for_ids_and_logprobs() -> None:
    async with serving(REPLY) as (server, client):
        await sample(client, Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=50, stop=("\n\n",), seed=4), rid="0" * 32)
        (body,) = server.requests
    params = body.pop("sampling_params")
    assert body == {
        "rid": "0" * 32,
        "input_ids": [11, 12, 13],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
    }
    assert params.pop("temperature") == 0.7
    assert params == {
        "top_p": 0.9,
        "top_k": 5,
        "max_new_tokens": 50,
        "stop": ["\n\n"],
        "sampling_seed": 4,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


async def test_r15_the_routing_key_is_a_header() -> None:
    async with serving(REPLY, REPLY) as (server, client):
        await sample(client, rid="r1", routing_key="session-7")
        await sample(client, rid="r2")
    assert server.headers[0]["X-SMG-Routing-Key"] == "session-7"
    assert "X-SMG-Routing-Key" not in server.headers[1]


async def test_r16_max_tokens_is_clamped_to_the_remaining_context() -> None:
    async with serving(REPLY, REPLY, context_length=20) as (server, client):
        await sample(client, Sampling(max_tokens=1000), rid="r1")
        await sample(client, rid="r2")
    assert [body["sampling_params"]["max_new_tokens"] for body in server.requests] == [16, 16]


async def test_a_prompt_beyond_the_context_is_refused_before_it_is_sent() -> None:
    async with serving(REPLY, context_length=4) as (server, client):
        with pytest.raises(EngineRejected, match=r"3 tokens .* 4"):
            await sample(client)
        assert server.requests == []


async def test_the_context_is_what_prompts_fit_into() -> None:
    """A prompt that is let through must be one that SGLang takes: it refuses those of its last few tokens."""
    async with serving(REPLY, context_length=30) as (server, client):
        server.input_limit = 24
        assert (await client.capabilities()).context_length == 25
        for length, sent in [(23, 1), (24, 1)]:
            with contextlib.suppress(EngineRejected):
                _ = [chunk async for chunk in client.sample(ids(range(length)), Sampling(), rid=f"r{length}")]
            assert len(server.requests) == sent
        assert server.requests[0]["sampling_params"]["max_new_tokens"] == 1


@pytest.mark.parametrize("prompt", [[], [5, 30_000]])
async def test_ids_outside_the_vocabulary_never_leave(prompt: list[int]) -> None:
    async with serving(REPLY, vocab_size=30_000) as (server, client):
        with pytest.raises(EngineRejected):
            _ = [chunk async for chunk in client.sample(ids(prompt), Sampling(), rid="r1")]
        with pytest.raises(EngineRejected):
            await client.prompt_logprobs(ids([1, 2, 30_000]), 1)
        assert server.requests == []


async def test_an_empty_rid_is_never_sent() -> None:
    async with serving(REPLY) as (server, client):
        with pytest.raises(ValueError, match="id"):
            await sample(client, rid="")
        assert await client.abort("") is AbortOutcome.FAILED
        assert server.requests == server.aborts == []


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.HTTP_400, EngineRejected),
        (Fault.HTTP_429, EngineOverloaded),
        (Fault.HTTP_503, EngineOverloaded),
        (Fault.HTTP_500, EngineUnavailable),
        (Fault.RESET, EngineUnavailable),
        (Fault.CUT, EngineUnavailable),
        (Fault.NO_FINISH, EngineUnavailable),
        (Fault.ERROR_EVENT, EngineRejected),
        (Fault.GARBAGE, EngineProtocol),
        (Fault.MISSING_LOGPROB, EngineProtocol),
        (Fault.NULL_LOGPROB, EngineProtocol),
        (Fault.WRONG_ID, EngineProtocol),
        (Fault.REWRITTEN, EngineProtocol),
        (Fault.ID_OUTSIDE, EngineProtocol),
        (Fault.ABORT_400, EngineRejected),
        (Fault.ABORT_503, EngineOverloaded),
    ],
)
async def test_each_fault_is_the_error_it_should_be(fault: Fault, error: type[Exception]) -> None:
    async with serving(Reply(ids=OUTPUT, end=END, chunk=1, fault=fault)) as (_, client):
        with pytest.raises(error) as caught:
            await sample(client)
        assert type(caught.value) is error


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.GARBAGE, Fault.ERROR_EVENT])
async def test_tokens_before_a_fault_are_given_first(fault: Fault) -> None:
    got: list[Chunk] = []
    async with serving(Reply(ids=OUTPUT, end=END, chunk=1, fault=fault, delay=0.001)) as (_, client):

        async def collect() -> None:
            async for chunk in client.sample(PROMPT, Sampling(), rid="r1"):
                got.append(chunk)

        with pytest.raises((EngineUnavailable, EngineProtocol, EngineRejected)):
            await collect()
    assert joined(got)[0] == list(OUTPUT[:4])
    assert all(chunk.finish is None for chunk in got)


@pytest.mark.parametrize("fault", [Fault.ABORT, Fault.ABORT_COLLAPSED])
@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
async def test_an_abort_with_http_200_is_a_last_chunk_after_the_partial_tokens(fault: Fault, style: str) -> None:
    async with serving(Reply(ids=OUTPUT, end=END, chunk=1, fault=fault, style=style)) as (_, client):  # type: ignore[arg-type]
        chunks = await sample(client)
    assert joined(chunks)[0] == list(OUTPUT[:4])
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.reason is FinishReason.ABORT


async def test_a_repeated_last_chunk_changes_nothing() -> None:
    async with serving(Reply(ids=OUTPUT, end=END, fault=Fault.DUPLICATE_FINAL)) as (_, client):
        chunks = await sample(client)
    assert joined(chunks)[0] == [*OUTPUT, END]


async def test_an_unreachable_server_is_unavailable_and_not_healthy() -> None:
    client = SGLangEngine("http://127.0.0.1:9")
    try:
        assert not await client.health()
        with pytest.raises(EngineUnavailable):
            await sample(client)
        assert await client.abort("r1") is AbortOutcome.FAILED
    finally:
        await client.close()


async def test_capabilities_are_read_once_and_default_to_logprobs_after_temperature() -> None:
    async with serving(convention=None, context_length=777, weight_version="w3") as (server, client):
        found = await client.capabilities()
        server.context_length = 1
        assert await client.capabilities() is found
        assert await client.health()
    assert (found.context_length, found.vocab_size, found.logprob_convention, found.weight_version) == (777, 200_000, "temperature", "w3")


async def test_weight_versions_come_with_the_last_chunk() -> None:
    reply = Reply(ids=OUTPUT, end=END, chunk=2, versions=(("v1", 0, 5), ("v2", 5, 8)), cached_tokens=3)
    async with serving(reply, REPLY) as (_, client):
        spans, whole = await sample(client), await sample(client, rid="r2")
    assert spans[-1].versions == (VersionSpan("v1", 0, 5), VersionSpan("v2", 5, 8))
    assert all(not chunk.versions for chunk in spans[:-1])
    assert spans[-1].cached_tokens == 3
    assert whole[-1].versions == (VersionSpan("default", 0, 8),)


@pytest.mark.parametrize("more", [-1, 1])
async def test_a_prompt_that_the_engine_counts_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    plain, prefill = Output.payload, ScriptedEngine._prefill

    def counted(self: Output, start: int, upto: int, *, last: bool) -> dict[str, Any]:
        made = plain(self, start, upto, last=last)
        made["meta_info"]["prompt_tokens"] += more
        return made

    def prefilled(self: ScriptedEngine, body: dict[str, Any], prompt: list[int]) -> web.Response:
        answer = orjson.loads(prefill(self, body, prompt).body)
        answer["meta_info"]["prompt_tokens"] += more
        return web.json_response(answer)

    monkeypatch.setattr(Output, "payload", counted)
    monkeypatch.setattr(ScriptedEngine, "_prefill", prefilled)
    async with serving(REPLY) as (_, client):
        with pytest.raises(EngineProtocol, match="prompt of"):
            await sample(client)
        with pytest.raises(EngineProtocol, match="prompt of"):
            await client.prompt_logprobs(PROMPT, 1)


async def test_a_prompt_logprob_above_zero_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "logprob", lambda *_: 0.7)
    async with serving() as (_, client):
        with pytest.raises(EngineProtocol):
            await client.prompt_logprobs(PROMPT, 1)


async def test_prompt_logprobs_are_those_that_were_sampled() -> None:
    own = (-0.5, -1.5, -2.5, -0.25, -0.125, -3.0, -4.0, -0.75)
    async with serving(Reply(ids=OUTPUT, end=END, logprobs=own)) as (server, client):
        tokens, logprobs = joined(await sample(client))
        sequence = ids([*PROMPT.tolist(), *tokens])
        found = await client.prompt_logprobs(sequence, len(PROMPT))
        assert found.tolist() == logprobs == list(own)
        assert (await client.prompt_logprobs(sequence, 1)).tolist()[2:] == list(own)
        assert server.requests[-1]["sampling_params"]["max_new_tokens"] == 0
        with pytest.raises(ValueError, match="start"):
            await client.prompt_logprobs(sequence, 0)


async def take_one_then(leave: Callable[[asyncio.Task[None]], object], client: SGLangEngine) -> asyncio.Task[None]:
    """A consumer that has one chunk and is then left as `leave` says."""
    first = asyncio.Event()

    async def consume() -> None:
        async for _ in client.sample(PROMPT, Sampling(), rid="r1"):
            first.set()

    task = asyncio.create_task(consume())
    await first.wait()
    leave(task)
    return task


@pytest.mark.parametrize("reply", [Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL), Reply(ids=OUTPUT * 100, chunk=1, delay=0.01)])
async def test_r19_a_cancelled_consumer_stops_that_request_on_the_worker(reply: Reply) -> None:
    async with serving(reply) as (server, client):
        task = await take_one_then(lambda t: t.cancel(), client)
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()
        assert server.aborts == [{"rid": "r1"}]
        assert server.disconnects == []
        assert server.running == 0


async def test_closing_the_iterator_early_aborts_before_the_connection_closes() -> None:
    async with serving(Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL)) as (server, client):
        stream = client.sample(PROMPT, Sampling(), rid="r1")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert server.aborts == []
        await client.close()
        assert server.aborts == [{"rid": "r1"}]
        assert server.disconnects == []


async def test_a_consumer_cancelled_before_the_first_byte_aborts_too() -> None:
    async with serving(Reply(ids=OUTPUT, fault=Fault.HANG)) as (server, client):
        task = asyncio.create_task(sample(client))
        await server.wait_running(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()
        assert server.aborts == [{"rid": "r1"}]


async def test_a_second_cancellation_does_not_wait_for_the_abort() -> None:
    async with serving(Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL), obey_aborts=False) as (server, client):
        task = await take_one_then(lambda t: t.cancel(), client)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.release()
        await client.close()
        assert server.aborts == [{"rid": "r1"}]


async def test_a_finished_stream_is_not_aborted_and_its_connection_is_used_again() -> None:
    async with serving(*[REPLY] * 5) as (server, client):
        for index in range(5):
            await sample(client, rid=f"r{index}")
        assert server.aborts == []
        assert sum(len(held) for held in client._http.session.connector._conns.values()) == 1  # type: ignore[union-attr]


async def test_a_broken_stream_is_aborted_and_the_cause_is_what_is_raised() -> None:
    async with serving(Reply(ids=OUTPUT, chunk=1, fault=Fault.WRONG_ID)) as (server, client):
        with pytest.raises(EngineProtocol):
            await sample(client)
        await client.close()
        assert server.aborts == [{"rid": "r1"}]


async def test_a_silent_engine_times_out() -> None:
    async with ScriptedEngine([Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL)]) as server:
        client = SGLangEngine(server.url, idle_timeout=0.2)
        with pytest.raises(EngineUnavailable):
            await sample(client)
        await client.close()
        assert server.aborts == [{"rid": "r1"}]


async def test_r18_a_router_is_asked_for_its_workers_and_each_is_told() -> None:
    async with ScriptedEngine() as one, ScriptedEngine() as two:
        answer = {"workers": [{"url": f"{one.url}@0"}, {"url": f"{one.url}@1"}, {"url": two.url + "/"}]}
        async with serving(workers=answer) as (_, client):
            assert await client.abort("r1") is AbortOutcome.VERIFIED
        assert one.aborts == two.aborts == [{"rid": "r1"}]


async def test_r20_malformed_worker_entries_are_skipped() -> None:
    async with ScriptedEngine() as one:
        answer = {"workers": [None, 3, {}, {"url": 7}, {"url": "ftp://x"}, {"id": "z"}, {"url": one.url}]}
        async with serving(workers=answer) as (_, client):
            assert await client.abort("r1") is AbortOutcome.VERIFIED
        assert one.aborts == [{"rid": "r1"}]


@pytest.mark.parametrize("answer", [[], "workers", {"workers": 3}, {"other": []}, {"workers": []}])
async def test_r20_a_malformed_workers_answer_is_a_warning(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(workers=answer) as (_, client):
        with caplog.at_level(logging.WARNING, "turnloom.engine"):
            assert await client.abort("r1") is AbortOutcome.FAILED
    assert caplog.records


async def test_r21_one_dead_worker_does_not_spare_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def failures() -> float:
        return REGISTRY.get_sample_value("turnloom_engine_abort_failures_total") or 0.0

    before = failures()
    async with ScriptedEngine() as one:
        answer = {"workers": [{"url": "http://127.0.0.1:9"}, {"url": one.url}]}
        async with serving(workers=answer) as (_, client):
            with caplog.at_level(logging.WARNING, "turnloom.engine"):
                assert await client.abort("r1") is AbortOutcome.UNVERIFIED
        assert one.aborts == [{"rid": "r1"}]
    assert "http://127.0.0.1:9" in caplog.text
    assert "r1" in caplog.text
    assert failures() == before + 1


async def test_r21_the_whole_abort_has_a_budget_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.engine.call.BUDGET", 0.1)
    forever = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        await forever.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/workers", hang)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = SGLangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        assert await client.abort("r1") is AbortOutcome.FAILED
    finally:
        await client.close()
        forever.set()
        await runner.cleanup()


async def test_an_abort_that_stops_nothing_is_not_called_verified() -> None:
    async with serving(Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL), obey_aborts=False, forgetful=True) as (server, client):
        stream = client.sample(PROMPT, Sampling(), rid="r1")
        await anext(stream)
        assert await client.abort("r1") is AbortOutcome.UNVERIFIED
        assert server.running == 1
        rest = [chunk async for chunk in stream]
        assert [(chunk.ids.tolist(), chunk.finish and chunk.finish.reason) for chunk in rest][-1] == ([], FinishReason.ABORT)


async def test_an_old_server_without_loads_leaves_an_abort_unverified() -> None:
    async with serving(loads=False) as (_, client):
        assert await client.abort("r1") is AbortOutcome.UNVERIFIED


async def test_many_streams_at_once_do_not_mix() -> None:
    replies = [Reply(ids=tuple(range(100 * n, 100 * n + 50)), end=END, chunk=3, delay=0.001) for n in range(1, 21)]
    async with serving(*replies) as (server, client):
        results = await asyncio.gather(*(sample(client, rid=f"r{n}") for n in range(20)))
        order = [int(body["rid"][1:]) for body in server.requests]
    for position, rid in enumerate(order):
        assert joined(results[rid])[0] == [*replies[position].ids, END]


async def test_a_long_cumulative_stream_arrives_whole() -> None:
    tokens = tuple(np.random.default_rng(0).integers(1000, 190_000, 4000).tolist())
    async with serving(Reply(ids=tokens, end=END, chunk=400)) as (_, client):
        assert joined(await sample(client))[0] == [*tokens, END]
