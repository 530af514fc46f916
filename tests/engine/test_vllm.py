"""The vLLM client against a real HTTP server that answers from a script. Against vLLM itself: `tests/engines/test_vllm.py`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from turnloom.engine.contract import AbortOutcome, Chunk, Trace
from turnloom.engine.vllm import Route, VLLMEngine
from turnloom.engine.vllm_stop import Requests, read_load
from turnloom.errors import EngineOverloaded, EngineProtocol, EngineRejected, EngineUnavailable
from turnloom.testing.scripted_reply import Fault, Reply, logprob_at
from turnloom.testing.scripted_vllm import ScriptedVLLM
from turnloom.types import FinishReason, Sampling, VersionSpan, ids

PROMPT = ids([11, 12, 13])
OUTPUT = (21, 21, 22, 21, 23, 24, 25)
END = 2
REPLY = Reply(ids=OUTPUT, end=END, chunk=2)
RID = "0" * 32
ROUTES: list[Route] = ["generate", "completions"]
SCALE_OUT, DEV = "/inference/v1/abort_requests", "/abort_requests"
NAMES = [f"generate-tokens-{RID}", f"cmpl-{RID}-0"]

both_routes = pytest.mark.parametrize("scale_out", [True, False], ids=ROUTES)


@contextlib.asynccontextmanager
async def serving(*script: Reply, vocab: int | None = None, **options: Any) -> AsyncIterator[tuple[ScriptedVLLM, VLLMEngine]]:
    async with ScriptedVLLM(script, **options) as server:
        client = VLLMEngine(server.url, vocab_size=vocab)
        try:
            yield server, client
        finally:
            await client.close()


async def sample(client: VLLMEngine, sampling: Sampling | None = None, *, rid: str = RID, trace: Trace | None = None) -> list[Chunk]:
    return [chunk async for chunk in client.sample(PROMPT, sampling or Sampling(), rid=rid, trace=trace)]


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [i for c in chunks for i in c.ids.tolist()], [v for c in chunks for v in c.logprobs.tolist()]


async def leave_after_one(client: VLLMEngine, trace: Trace) -> AbortOutcome:
    stream = client.sample(PROMPT, Sampling(), rid=RID, trace=trace)
    async with contextlib.aclosing(stream):  # type: ignore[type-var]
        await anext(stream)
    (abort,) = trace.aborts
    return await abort


@both_routes
@pytest.mark.parametrize("size", [1, 3, 100])
async def test_each_route_gives_the_same_tokens(scale_out: bool, size: int) -> None:
    reply = Reply(ids=OUTPUT, end=END, chunk=size, cached_tokens=2)
    async with serving(reply, scale_out=scale_out) as (server, client):
        chunks = await sample(client)
        assert server.requests[0][0] == ("/inference/v1/generate" if scale_out else "/v1/completions")
    tokens, logprobs = joined(chunks)
    assert tokens == [*OUTPUT, END]
    assert logprobs == [logprob_at(len(PROMPT) + i, token) for i, token in enumerate(tokens)]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish is not None
    assert (chunks[-1].finish.reason, chunks[-1].finish.matched) == (FinishReason.STOP, END)
    assert chunks[-1].cached_tokens == 2


async def test_the_route_is_found_once_and_may_be_chosen() -> None:
    async with serving(*[REPLY] * 4, scale_out=False) as (server, client):
        await sample(client)
        await sample(client)
        chosen = VLLMEngine(server.url, route="generate")
        with pytest.raises(EngineRejected, match="Scale-out"):
            await sample(chosen)
        await chosen.close()
        assert [path for path, _ in server.requests] == ["/v1/completions"] * 2


async def test_a_request_leaves_nothing_for_the_server_to_fill_in() -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=50, stop=("\n\n",), seed=4, json_schema='{"type":"object"}')
    async with serving(REPLY) as (server, client):
        await sample(client, sampling)
    ((_, body),) = server.requests
    assert body == {
        "request_id": RID,
        "token_ids": [11, 12, 13],
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 50,
            "logprobs": 0,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "stop": ["\n\n"],
            "structured_outputs": {"json": '{"type":"object"}'},
            "seed": 4,
            "detokenize": True,
        },
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert server.headers[0]["X-Request-Id"] == RID


async def test_completions_are_asked_for_ids_and_logprobs_by_id() -> None:
    async with serving(REPLY, scale_out=False) as (server, client):
        await sample(client, Sampling(top_k=-1))
    ((_, body),) = server.requests
    assert (body["model"], body["prompt"], body["top_k"], body["repetition_penalty"]) == ("scripted", [11, 12, 13], -1, 1.0)
    assert (body["return_token_ids"], body["return_tokens_as_token_ids"], body["add_special_tokens"]) == (True, True, False)
    assert "detokenize" not in body
    assert "stop" not in body


async def test_the_routing_key_is_a_header() -> None:
    async with serving(REPLY) as (server, client):
        _ = [chunk async for chunk in client.sample(PROMPT, Sampling(), rid=RID, routing_key="session-7")]
        assert server.headers[0]["X-SMG-Routing-Key"] == "session-7"


@both_routes
async def test_max_tokens_is_clamped_to_the_remaining_context(scale_out: bool) -> None:
    async with serving(REPLY, REPLY, context_length=20, scale_out=scale_out) as (server, client):
        await sample(client, Sampling(max_tokens=1000))
        await sample(client)
        limits = [body.get("sampling_params", body)["max_tokens"] for _, body in server.requests]
    assert limits == [16, 16]


@pytest.mark.parametrize("prompt", [[], [5, 30_000], [1] * 39])
async def test_a_prompt_that_cannot_be_right_never_leaves(prompt: list[int]) -> None:
    async with serving(REPLY, vocab=30_000, context_length=40) as (server, client):
        with pytest.raises(EngineRejected):
            _ = [chunk async for chunk in client.sample(ids(prompt), Sampling(), rid=RID)]
        with pytest.raises(EngineRejected):
            await client.prompt_logprobs(ids([1, 2, 30_000]), 1)
        with pytest.raises(EngineRejected, match=r"40 tokens.* 40"):
            await client.prompt_logprobs(ids([1] * 40), 1)
        assert server.requests == []


async def test_an_empty_rid_is_never_sent() -> None:
    async with serving(REPLY) as (server, client):
        with pytest.raises(ValueError, match="id"):
            await sample(client, rid="")
        assert await client.abort("") is AbortOutcome.FAILED
        assert server.requests == []
        assert server.aborts == []


@both_routes
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
        (Fault.ID_OUTSIDE, EngineProtocol),
        (Fault.ABORT_400, EngineRejected),
        (Fault.ABORT_503, EngineOverloaded),
    ],
)
async def test_each_fault_ends_in_its_error(scale_out: bool, fault: Fault, error: type[Exception]) -> None:
    async with serving(Reply(ids=OUTPUT, end=END, chunk=2, fault=fault), vocab=200_000, scale_out=scale_out) as (_, client):
        with pytest.raises(error) as raised:
            await sample(client)
    assert type(raised.value) is error


@both_routes
@pytest.mark.parametrize("fault", [Fault.ABORT, Fault.ABORT_COLLAPSED])
async def test_an_abort_of_the_servers_own_is_the_last_chunk(scale_out: bool, fault: Fault) -> None:
    versions = (("v1", 0, 3), ("v2", 3, 9))
    async with serving(Reply(ids=OUTPUT, end=END, chunk=1, fault=fault, versions=versions), scale_out=scale_out) as (server, client):
        chunks = await sample(client)
        assert server.aborts == []
    assert joined(chunks)[0] == list(OUTPUT[:4])
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.reason is FinishReason.ABORT
    assert chunks[-1].versions == ((VersionSpan("v1", 0, 3), VersionSpan("v2", 3, 4)) if scale_out else ())


@both_routes
async def test_a_last_chunk_that_comes_twice_counts_once(scale_out: bool) -> None:
    async with serving(Reply(ids=OUTPUT, end=END, fault=Fault.DUPLICATE_FINAL), scale_out=scale_out) as (_, client):
        chunks = await sample(client)
    assert joined(chunks)[0] == [*OUTPUT, END]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize(("scale_out", "dev", "path"), [(True, True, SCALE_OUT), (False, True, DEV), (True, False, SCALE_OUT)])
async def test_leaving_aborts_by_every_name_that_the_request_may_have(scale_out: bool, dev: bool, path: str) -> None:
    async with serving(Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL), scale_out=scale_out, dev=dev) as (server, client):
        assert await leave_after_one(client, Trace()) is AbortOutcome.VERIFIED
        assert server.aborts == [(path, NAMES)]
        await server.wait_running(0)


async def test_without_an_abort_call_the_closed_connection_is_what_stops_it(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(*[Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL)] * 2, scale_out=False, dev=False) as (server, client):
        with caplog.at_level(logging.WARNING, "turnloom.engine"):
            for _ in range(2):
                assert await leave_after_one(client, Trace()) is AbortOutcome.VERIFIED
                await server.wait_running(0)

    warned = f"{client.name} has no call that aborts a request: start it with --enable-scale-out"
    assert [record.getMessage() for record in caplog.records] == [warned]


async def test_a_server_that_forgets_the_id_is_looked_at_until_it_is_idle() -> None:
    async with serving(Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL), obey_aborts=False) as (server, client):
        assert await leave_after_one(client, Trace()) is AbortOutcome.VERIFIED
        assert server.aborts[0] == (SCALE_OUT, NAMES)


@pytest.mark.parametrize("metrics", ["vllm:num_requests_running 1.0\nvllm:num_requests_waiting 0.0\n", "other 0.0\n"])
async def test_a_load_that_does_not_say_so_proves_nothing(metrics: str) -> None:
    async with serving(Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL), obey_aborts=False, metrics=metrics) as (_, client):
        assert await leave_after_one(client, Trace()) is AbortOutcome.UNVERIFIED


async def test_one_look_at_the_load_serves_all_who_ask_before_it_begins() -> None:
    async with serving() as (server, client):
        requests = Requests(client._http)
        assert await asyncio.gather(*(requests.load() for _ in range(20))) == [0] * 20
        assert server.looks == 2, "one for who asks first, and one for all who ask while it is under way"


@both_routes
async def test_an_abort_by_id_ends_the_stream_of_whoever_reads_it(scale_out: bool) -> None:
    async with serving(Reply(ids=OUTPUT, chunk=1, fault=Fault.STALL), scale_out=scale_out) as (server, client):
        reading = asyncio.create_task(sample(client))
        await server.wait_running(1)
        assert await client.abort(RID) is AbortOutcome.VERIFIED
        chunks = await reading
    assert joined(chunks)[0] == list(OUTPUT[:3])
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.reason is FinishReason.ABORT


async def test_an_abort_that_cannot_be_told_fails_and_is_known() -> None:
    client = VLLMEngine("http://127.0.0.1:9")
    assert await client.abort(RID) is AbortOutcome.FAILED
    await client.close()


async def test_a_finished_stream_is_not_aborted() -> None:
    async with serving(REPLY) as (server, client):
        trace = Trace()
        await sample(client, trace=trace)
        assert server.aborts == []
        assert trace.aborts == []


async def test_what_the_server_says_of_itself() -> None:
    async with serving() as (_, client):
        able = await client.capabilities()
    assert (able.model, able.context_length, able.tokenizer) == ("scripted", 4096, "scripted/tokenizer")
    assert (able.logprob_convention, able.weight_version, able.vocab_size, able.structured) == ("raw", "default", None, True)


async def test_a_server_that_is_not_for_development_says_less() -> None:
    async with serving(dev=False) as (server, _):
        client = VLLMEngine(server.url, vocab_size=77, context_length=50, logprob_convention="temperature")
        able = await client.capabilities()
        await client.close()
    assert (able.tokenizer, able.weight_version) == ("scripted/root", None)
    assert (able.vocab_size, able.context_length, able.logprob_convention) == (77, 50, "temperature")


async def test_the_servers_own_word_on_its_logprobs_counts() -> None:
    async with serving(REPLY, logprobs_mode="processed_logprobs") as (server, _):
        client = VLLMEngine(server.url, logprob_convention="raw")
        assert (await client.capabilities()).logprob_convention == "temperature"
        with pytest.raises(EngineRejected, match="top_p"):
            await sample(client, Sampling(top_p=0.9))
        with pytest.raises(EngineRejected, match="top_k"):
            await sample(client, Sampling(top_k=9))
        assert server.requests == []
        assert joined(await sample(client, Sampling(temperature=0.5)))[0] == [*OUTPUT, END]
        await client.close()


async def test_a_server_that_is_slow_to_say_what_its_logprobs_are_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(ScriptedVLLM):
        async def _server_info(self, _: web.Request) -> web.Response:
            await asyncio.Event().wait()
            return web.Response()

    monkeypatch.setattr("turnloom.engine.vllm.INFO_SECONDS", 0.1)
    async with Slow() as server:
        client = VLLMEngine(server.url)
        with pytest.raises(EngineUnavailable, match="server_info"):
            await client.capabilities()
        await client.close()


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
async def test_logits_are_no_logprobs(mode: str) -> None:
    async with serving(logprobs_mode=mode) as (_, client):
        with pytest.raises(EngineProtocol, match=mode):
            await client.capabilities()


async def test_a_dead_server_has_no_capabilities_and_is_not_healthy() -> None:
    client = VLLMEngine("http://127.0.0.1:9")
    with pytest.raises(EngineUnavailable):
        await client.capabilities()
    assert not await client.health()
    await client.close()


@both_routes
async def test_prompt_logprobs_are_those_of_the_sequence(scale_out: bool) -> None:
    sequence = ids([5, 6, 7, 8])
    async with serving(scale_out=scale_out) as (server, client):
        found = await client.prompt_logprobs(sequence, 2)
        with pytest.raises(ValueError, match="start"):
            await client.prompt_logprobs(sequence, 0)
        ((_, body),) = server.requests
    assert found.tolist() == [logprob_at(2, 7), logprob_at(3, 8)]
    params = body.get("sampling_params", body)
    assert (params["temperature"], params["max_tokens"], params["prompt_logprobs"], body["stream"]) == (1.0, 1, 0, False)


@pytest.mark.parametrize(
    "said",
    [
        {},
        [],
        {"prompt_logprobs": None},
        {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}]},
        {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}, {"8": {"logprob": -1.0}}]},
        {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": None}}]},
        {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -9999.0}}]},
        {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -1.0}}], "usage": {"prompt_tokens": 2}},
    ],
)
async def test_prompt_logprobs_of_something_else_are_refused(said: Any) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(said)

    async with serving() as (_, client):
        await client.capabilities()
        app = web.Application()
        app.router.add_post("/inference/v1/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client._http.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        with pytest.raises(EngineProtocol):
            await client.prompt_logprobs(ids([5, 6, 7]), 1)
        await runner.cleanup()


async def test_pause_and_resume_are_the_servers_own() -> None:
    async with serving() as (server, client):
        for mode in ("abort", "wait", "keep"):
            await client.pause(mode)  # type: ignore[arg-type]
        await client.resume()
        assert server.pauses == ["/pause?mode=abort", "/pause?mode=wait", "/pause?mode=keep", "/resume"]


async def test_a_server_without_pause_says_what_it_needs() -> None:
    async with serving(dev=False) as (_, client):
        with pytest.raises(EngineRejected, match="VLLM_SERVER_DEV_MODE"):
            await client.pause("keep")
        with pytest.raises(EngineRejected, match="VLLM_SERVER_DEV_MODE"):
            await client.resume()


def test_the_load_is_the_sum_over_engines_and_nothing_else() -> None:
    text = (
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="a}b"} 1.0\n'
        'vllm:num_requests_running{engine="1",model_name="a}b"} 2.0\n'
        'vllm:num_requests_waiting{engine="0"} 4.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 40.0\n'
    )
    assert read_load(text) == 7
    assert read_load("vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n") == 0
    assert read_load('vllm:num_requests_running{engine="0"} 0.0\n') is None
