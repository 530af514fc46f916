"""The vLLM client against vLLM itself, on a CPU in float32: exact ids and logprobs, stops, aborts, pauses, versions, on both routes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import aiohttp
import numpy as np
import pytest

from tests.engines.checkpoint import VOCAB_SIZE
from tests.engines.servers import Server, vllm
from turnloom.engine.contract import Chunk, PauseMode, Trace
from turnloom.engine.vllm import PATHS, Route, VLLMEngine, sample_body
from turnloom.engine.vllm_stop import Requests
from turnloom.errors import EngineRejected
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import AbortOutcome, Finish, FinishReason, IntArray, Sampling, VersionSpan, ids

EXACT = 1e-4
CONTEXT = 2048
PROMPT = ids(range(1000, 1040))
LONG = Sampling(max_tokens=1500)

both_routes = pytest.mark.parametrize("route", list(PATHS))


@pytest.fixture(scope="module")
def plain(vllm_server: Server) -> Iterator[Server]:
    """One without generate and without raw logprobs, that says what its cache held; skipped where the other one is."""
    server = vllm("--no-enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details")
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def client_of(server: Server, route: Route | None = None) -> AsyncIterator[VLLMEngine]:
    """A client; afterwards nothing may run or wait on the server."""
    client = VLLMEngine(server.url, vocab_size=VOCAB_SIZE, route=route)
    try:
        yield client
        await nothing_left(client)
    finally:
        await client.close()


async def nothing_left(client: VLLMEngine) -> None:
    requests = Requests(client._http)
    async with asyncio.timeout(60):
        while await requests.load():
            await asyncio.sleep(0.05)


async def sample(
    client: VLLMEngine, sampling: Sampling, prompt: IntArray = PROMPT, rid: str = "0" * 32, trace: Trace | None = None
) -> list[Chunk]:
    return [chunk async for chunk in client.sample(prompt, sampling, rid=rid, trace=trace)]


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [i for c in chunks for i in c.ids.tolist()], [v for c in chunks for v in c.logprobs.tolist()]


def end_of(chunks: list[Chunk]) -> Finish:
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish is not None
    return chunks[-1].finish


async def difference(client: VLLMEngine, chunks: list[Chunk], prompt: IntArray = PROMPT) -> float:
    """The worst between the logprobs sampled and those of a prefill."""
    tokens, logprobs = joined(chunks)
    recomputed = await client.prompt_logprobs(ids([*prompt, *tokens]), len(prompt))
    return float(np.abs(recomputed - np.array(logprobs)).max())


async def test_what_it_says_of_itself(vllm_server: Server) -> None:
    async with client_of(vllm_server) as client:
        able = await client.capabilities()
        assert await client.health()
        chunks = await sample(client, Sampling(max_tokens=2))
        assert chunks[-1].versions == (VersionSpan("default", 0, 2),), "it is asked for generate, which tells"
    assert (able.context_length, able.logprob_convention, able.weight_version, able.structured) == (CONTEXT, "raw", "default", True)
    assert able.tokenizer == able.model
    assert "noise-qwen3" in able.model


@both_routes
async def test_ids_and_logprobs_are_exact(vllm_server: Server, route: Route) -> None:
    """Raw logprobs whatever the temperature and top_p, several streams at a time."""
    ways = [Sampling(max_tokens=100, temperature=t, top_p=p, top_k=k) for t, p, k in [(1, 1, -1), (0.6, 0.9, 20), (1.3, 1, 0), (0, 1, -1)]]
    prompts = [ids(range(first, first + 30 + first % 7)) for first in (100, 2001, 40_002, 90_003)]
    async with client_of(vllm_server, route) as client:
        jobs = [sample(client, way, prompt, rid=f"{n:032}") for n, (way, prompt) in enumerate(zip(ways, prompts, strict=True))]
        replies = await asyncio.gather(*jobs)
        for prompt, chunks in zip(prompts, replies, strict=True):
            assert end_of(chunks) == Finish(FinishReason.LENGTH)
            assert len(joined(chunks)[0]) == 100
            assert await difference(client, chunks, prompt) < EXACT
        assert await difference(client, replies[0], prompts[1]) > 0.1, "another prompt gives other logprobs"


@both_routes
async def test_tokens_come_while_the_rest_is_still_to_be_sampled(vllm_server: Server, route: Route) -> None:
    trace = Trace()
    async with client_of(vllm_server, route) as client:
        async with aclosing(client.sample(PROMPT, LONG, rid="0" * 32, trace=trace)) as stream:  # type: ignore[type-var]
            first = [await anext(stream) for _ in range(20)]
            assert await Requests(client._http).load() == 1
        assert all(0 < len(chunk.ids) < 100 for chunk in first)
        (abort,) = trace.aborts
        assert await abort is AbortOutcome.VERIFIED


@both_routes
async def test_a_stop_string_ends_the_ids_with_the_token_that_completes_it(vllm_server: Server, route: Route) -> None:
    decode = qwen_tokenizer("qwen3").decode
    way = Sampling(max_tokens=40, seed=5)
    async with client_of(vllm_server, route) as client:
        tokens, _ = joined(await sample(client, way))
        word = next(decode([token]) for token in tokens[20:] if decode([token]).isascii() and len(decode([token])) > 3)
        at = next(n for n in range(1, 41) if word in decode(tokens[:n]))
        chunks = await sample(client, Sampling(max_tokens=40, seed=5, stop=("no such words", word)))
        assert joined(chunks)[0] == tokens[:at]
        assert end_of(chunks) == Finish(FinishReason.STOP, matched=word)
        assert await difference(client, chunks) < EXACT


@both_routes
async def test_an_end_token_is_the_last_id(vllm_server: Server, route: Route) -> None:
    """These weights never end a reply by themselves: a grammar makes them."""
    tokenizer = qwen_tokenizer("qwen3")
    async with client_of(vllm_server, route) as client:
        chunks = await sample(client, Sampling(max_tokens=60, json_schema='{"enum": ["yes", "no"]}'))
    tokens, _ = joined(chunks)
    finish = end_of(chunks)
    assert finish.reason is FinishReason.STOP
    assert tokens[-1] in tokenizer.eos_ids
    assert finish.matched in (None, tokens[-1])
    assert json.loads(tokenizer.decode(tokens[:-1])) in ("yes", "no")


@both_routes
async def test_seed_and_greedy_are_obeyed(vllm_server: Server, route: Route) -> None:
    async with client_of(vllm_server, route) as client:
        seeded = [joined(await sample(client, Sampling(max_tokens=20, seed=seed)))[0] for seed in (11, 11, 12)]
        greedy = [joined(await sample(client, Sampling(max_tokens=20, temperature=t, top_k=k)))[0] for t, k in ((0, -1), (1, 1))]
    assert seeded[0] == seeded[1] != seeded[2]
    assert greedy[0] == greedy[1]


@both_routes
async def test_the_context_is_filled_and_never_passed(vllm_server: Server, route: Route) -> None:
    prompt = ids([3000 + n % 500 for n in range(CONTEXT - 10)])
    async with client_of(vllm_server, route) as client:
        chunks = await sample(client, Sampling(), prompt)
        assert len(joined(chunks)[0]) == 9
        assert end_of(chunks).reason is FinishReason.LENGTH
        assert await difference(client, chunks, prompt) < EXACT
        with pytest.raises(EngineRejected, match="2048"):
            await client.prompt_logprobs(ids([5] * CONTEXT), 1)


@both_routes
async def test_what_it_refuses_is_said_and_harms_nothing(vllm_server: Server, route: Route) -> None:
    async with client_of(vllm_server, route) as client:
        unaware = VLLMEngine(client.url, route=route)
        with pytest.raises(EngineRejected, match="vocabulary"):
            await sample(unaware, Sampling(), ids([VOCAB_SIZE + 7]))
        await unaware.close()
        with pytest.raises(EngineRejected):
            await sample(client, Sampling(json_schema='{"type": 17}'))
        assert len(joined(await sample(client, Sampling(max_tokens=3)))[0]) == 3


@both_routes
async def test_requests_that_are_left_at_any_moment_are_gone(vllm_server: Server, route: Route) -> None:
    rng = random.Random(7)
    traces = [Trace() for _ in range(40)]

    async def leave(client: VLLMEngine, n: int) -> None:
        stream = client.sample(PROMPT, LONG, rid=f"{n:032}", trace=traces[n])
        async with aclosing(stream):  # type: ignore[type-var]
            for _ in range(rng.choice([1, 2, 5, 20])):
                await anext(stream)

    async with client_of(vllm_server, route) as client:
        tasks = [asyncio.create_task(leave(client, n)) for n in range(40)]
        for task in rng.sample(tasks, 20):
            await asyncio.sleep(rng.choice([0.0, 0.001, 0.01, 0.05]))
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        outcomes = [await abort for trace in traces for abort in trace.aborts]
        assert len(outcomes) >= 20
        assert AbortOutcome.VERIFIED in outcomes
        await nothing_left(client)


@both_routes
async def test_an_abort_by_id_ends_the_stream_with_what_was_sampled(vllm_server: Server, route: Route) -> None:
    async with client_of(vllm_server, route) as client:
        chunks, other = [], asyncio.create_task(sample(client, Sampling(max_tokens=60), rid="1" * 32))
        async with aclosing(client.sample(PROMPT, LONG, rid="0" * 32)) as stream:  # type: ignore[type-var]
            async for chunk in stream:
                chunks.append(chunk)
                if len(chunks) == 15:
                    assert await client.abort("0" * 32) is AbortOutcome.VERIFIED
        assert end_of(chunks).reason is FinishReason.ABORT
        assert await difference(client, chunks) < EXACT
        assert end_of(await other).reason is FinishReason.LENGTH, "a neighbour is not touched"
        assert await client.abort("9" * 32) is AbortOutcome.VERIFIED, "and one that it does not know is no failure"


@both_routes
async def test_a_closed_connection_alone_stops_a_request(vllm_server: Server, route: Route) -> None:
    async with client_of(vllm_server, route) as client, aiohttp.ClientSession() as session:
        body = sample_body(route, PROMPT, LONG, await client.capabilities(), "0" * 32)
        async with session.post(client.url + PATHS[route], json=body) as response:
            await response.content.readline()
            response.close()
        await nothing_left(client)


@asynccontextmanager
async def streaming(client: VLLMEngine, sampling: Sampling, count: int) -> AsyncIterator[tuple[list[Chunk], asyncio.Task[None]]]:
    """A stream being read, with `count` chunks in. The server is resumed in any case."""
    chunks: list[Chunk] = []
    enough = asyncio.Event()

    async def read() -> None:
        async for chunk in client.sample(PROMPT, sampling, rid="0" * 32):
            chunks.append(chunk)
            if len(chunks) == count:
                enough.set()

    task = asyncio.create_task(read())
    try:
        await enough.wait()
        yield chunks, task
    finally:
        await client.resume()
        await task


@both_routes
@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_pause_ends_what_runs_or_waits_for_it(vllm_server: Server, route: Route, mode: PauseMode) -> None:
    async with client_of(vllm_server, route) as client:
        async with streaming(client, Sampling(max_tokens=120), 10) as (chunks, task):
            await client.pause(mode)
            await task
            finish, (tokens, _) = end_of(chunks), joined(chunks)
            assert finish.reason is (FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH)
            assert len(tokens) < 120 if mode == "abort" else len(tokens) == 120
            assert await client.health()
            held = asyncio.create_task(sample(client, LONG, rid="1" * 32))
            await asyncio.sleep(0.2)
            assert not held.done()
            assert await client.abort("1" * 32) is AbortOutcome.VERIFIED
            assert joined(await held) == ([], [])
        assert await difference(client, chunks) < EXACT


@both_routes
async def test_what_is_kept_through_a_pause_goes_on_and_says_which_weights_sampled_it(vllm_server: Server, route: Route) -> None:
    async with client_of(vllm_server, route) as client:
        async with streaming(client, Sampling(max_tokens=120), 10) as (chunks, task):
            await client.pause("keep")
            before = sum(len(chunk.ids) for chunk in chunks)
            await client._http.tell("/update_weight_version", {"new_version": f"next-{route}"})
            assert not task.done()
            await client.resume()
            await task
        assert end_of(chunks).reason is FinishReason.LENGTH
        assert len(joined(chunks)[0]) == 120
        assert await difference(client, chunks) < EXACT
        spans = chunks[-1].versions
        await client._http.tell("/update_weight_version", {"new_version": "default"})
    if route == "completions":
        assert spans == (), "this route does not tell"
        return
    seam = spans[0].end
    assert before <= seam < 120
    assert spans == (VersionSpan("default", 0, seam), VersionSpan(f"next-{route}", seam, 120))


async def test_a_server_without_generate_is_asked_for_completions(plain: Server) -> None:
    prompt = ids(range(5000, 5300))
    async with client_of(plain) as client:
        assert (await client.capabilities()).logprob_convention == "temperature"
        first, again = [await sample(client, Sampling(max_tokens=30), prompt) for _ in range(2)]
        assert await difference(client, first, prompt) < EXACT
        assert (first[-1].cached_tokens, again[-1].cached_tokens) == (0, 256)
        cool = await sample(client, Sampling(max_tokens=30, temperature=0.5), prompt)
        assert await difference(client, cool, prompt) > 0.1, "these are after temperature"
        with pytest.raises(EngineRejected, match="processed_logprobs"):
            await sample(client, Sampling(top_p=0.9))
        trace = Trace()
        async with aclosing(client.sample(PROMPT, LONG, rid="0" * 32, trace=trace)) as stream:  # type: ignore[type-var]
            await anext(stream)
        assert [await abort for abort in trace.aborts] == [AbortOutcome.VERIFIED]
