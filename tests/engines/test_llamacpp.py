"""The llama.cpp client against llama.cpp's own server: exact ids and logprobs, whole characters, slots, aborts.

The model's weights have four bits, and its arithmetic depends on the shape of a
batch. A token evaluated alone both times is the same to the last bits of float32
(EXACT); beside another sequence it differs, by a few hundredths in the mean.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import aiohttp
import numpy as np
import pytest

from tests.engines.servers import Server, free_port
from turnloom.engine import llama_completion
from turnloom.engine.contract import Chunk, Trace
from turnloom.engine.llama_server import LlamaServerEngine
from turnloom.engine.llama_slots import look_at_slots
from turnloom.engine.local import start_local
from turnloom.engine.models import find_model
from turnloom.errors import EngineRejected, EngineUnavailable
from turnloom.testing.tokenizers import smollm2_tokenizer
from turnloom.types import AbortOutcome, Finish, FinishReason, FloatArray, IntArray, Sampling, ids

EXACT = 1e-4
BATCHED = 0.1
"""The mean over a reply. A logprob of another token, or place, is off by more than 1."""

PATIENCE = 120
"""Seconds after which a test says that something never came: a batch of a prompt takes its time on a busy machine."""

END = 2
CONTEXT = 2048

WILFUL = """
import signal, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.hostnames, params.n_ctx, params.endpoint_slots, params.warmup = ["127.0.0.1"], 2048, True, False
params.cpuparams.n_threads = 1
params.n_batch = params.n_ubatch = 32
way = params.sampling
way.temp, way.top_k, way.top_p, way.min_p, way.typ_p = 0.1, 3, 0.5, 0.3, 0.5
way.penalty_repeat, way.penalty_freq, way.penalty_present, way.penalty_last_n = 1.8, 1.0, 1.0, -1
way.dry_multiplier, way.xtc_probability, way.xtc_threshold, way.dynatemp_range = 1.0, 1.0, 0.05, 0.5
way.mirostat, way.ignore_eos, way.min_keep = 2, True, 5
server = xllamacpp.Server(params)
signal.pause()
"""
"""A server whose own defaults change everything that can be changed about sampling. It reads prompts in small batches."""


def chat(text: str) -> IntArray:
    return ids(smollm2_tokenizer().encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"))


PROMPT = chat("Tell me about the sea, the moon and the tides.")
UNFINISHED = chat("Repeat after me: 你好世界 🎉🚀🐧 再见")
GREEDY = Sampling(temperature=0.0, max_tokens=60)


@pytest.fixture(scope="module")
def wilful() -> Iterator[Server]:
    port = free_port()
    server = Server("llama.cpp", [sys.executable, "-c", WILFUL, str(find_model("smollm2")), str(port)], port=port)
    server.start()
    yield server
    server.stop()


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[LlamaServerEngine]:
    """A client; afterwards no slot of the server may work."""
    client = LlamaServerEngine(server.url)
    try:
        yield client
        await nothing_left(client)
    finally:
        await client.close()


async def working(client: LlamaServerEngine) -> int:
    states = await look_at_slots(client._http)
    assert states, "this server offers its slots"
    return sum(state.processing for state in states)


async def nothing_left(client: LlamaServerEngine) -> None:
    async with asyncio.timeout(PATIENCE):
        while await working(client):
            await asyncio.sleep(0.02)


async def sample(
    client: LlamaServerEngine, sampling: Sampling, prompt: IntArray = PROMPT, rid: str = "r", trace: Trace | None = None
) -> list[Chunk]:
    return [chunk async for chunk in client.sample(prompt, sampling, rid=rid, trace=trace)]


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [i for c in chunks for i in c.ids.tolist()], [v for c in chunks for v in c.logprobs.tolist()]


async def differences(client: LlamaServerEngine, chunks: list[Chunk], prompt: IntArray = PROMPT) -> FloatArray:
    """Between the logprobs sampled and those of a recomputation, each."""
    tokens, logprobs = joined(chunks)
    recomputed = await client.prompt_logprobs(ids([*prompt, *tokens]), len(prompt))
    return np.abs(recomputed - np.array(logprobs, np.float32))


async def in_one(server: Server, prompt: IntArray, count: int) -> tuple[list[int], int]:
    """The ids of one greedy request that is not streamed, and for how many llama.cpp reports a logprob."""
    body = {
        "prompt": prompt.tolist(),
        "n_predict": count,
        "n_probs": 1,
        "return_tokens": True,
        "temperature": 0,
        "samplers": ["temperature"],
    }
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/completion", json=body) as response:
        answer = await response.json(content_type=None)
    return answer["tokens"], len(answer["completion_probabilities"])


async def test_what_it_says_of_itself(llama_server: Server) -> None:
    async with client_of(llama_server) as client:
        able = await client.capabilities()
        assert await client.health()
    assert (able.context_length, able.vocab_size, able.logprob_convention, able.structured) == (CONTEXT, 49152, "raw", False)
    assert (able.tokenizer or "").endswith(".gguf")


@pytest.mark.parametrize(
    "way", [Sampling(), Sampling(temperature=0.6, top_p=0.9, top_k=20), Sampling(temperature=1.3), Sampling(temperature=0.0)], ids=str
)
async def test_ids_and_logprobs_are_exact(llama_server: Server, way: Sampling) -> None:
    """Raw logprobs whatever the temperature, top_p and top_k."""
    sampling = Sampling(temperature=way.temperature, top_p=way.top_p, top_k=way.top_k, max_tokens=50, seed=3)
    async with client_of(llama_server) as client:
        chunks = await sample(client, sampling)
        worst = float((await differences(client, chunks)).max())
        other = float((await differences(client, chunks, chat("Write a poem about stones."))).max())
    assert worst < EXACT
    assert other > 0.1, "after another prompt there are other logprobs"


async def test_a_seed_gives_the_same_again(llama_server: Server) -> None:
    async with client_of(llama_server) as client:
        replies = [joined(await sample(client, Sampling(max_tokens=12, seed=seed)))[0] for seed in (5, 5, 6)]
    assert replies[0] == replies[1]
    assert replies[0] != replies[2]


async def test_unfinished_characters_arrive_whole_with_every_logprob(llama_server: Server) -> None:
    tokens, reported = await in_one(llama_server, UNFINISHED, 60)
    assert reported < len(tokens), "llama.cpp reports no logprob for a token within a character"
    async with client_of(llama_server) as client:
        chunks = await sample(client, GREEDY, UNFINISHED)
        assert joined(chunks)[0] == tokens
        assert "�" not in smollm2_tokenizer().decode(tokens).rstrip("�")
        assert (await differences(client, chunks, UNFINISHED)).max() < EXACT


async def test_greedy_is_what_the_embedded_engine_gives(llama_server: Server) -> None:
    local = await start_local()
    try:
        embedded = [chunk async for chunk in local.sample(PROMPT, GREEDY, rid="0" * 32)]
    finally:
        await local.close()
    async with client_of(llama_server) as client:
        chunks = await sample(client, GREEDY)
    assert joined(chunks)[0] == joined(embedded)[0]
    np.testing.assert_allclose(joined(chunks)[1], joined(embedded)[1], atol=BATCHED)


async def test_the_end_token_is_the_last_id_with_its_own_logprob(llama_server: Server) -> None:
    prompt = chat("Say hi.")
    async with client_of(llama_server) as client:
        chunks = await sample(client, Sampling(temperature=0.0, max_tokens=200), prompt)
        assert chunks[-1].finish == Finish(FinishReason.STOP, matched=END)
        assert joined(chunks)[0][-1] == END
        assert END not in joined(chunks)[0][:-1]
        assert (await differences(client, chunks, prompt)).max() < EXACT


async def test_nothing_of_a_servers_own_defaults_is_left(wilful: Server) -> None:
    """Every parameter of sampling that the server tells of its last request is the one that shapes nothing."""
    async with client_of(wilful) as client:
        tokens, _ = joined(await sample(client, Sampling(max_tokens=1, seed=1)))
        assert tokens
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{wilful.url}/slots") as response:
                used = (await response.json())[0]["params"]
            async with session.get(f"{wilful.url}/props") as response:
                own = (await response.json())["default_generation_settings"]["params"]
        chunks = await sample(client, GREEDY)
    asked = llama_completion._NEUTRAL
    wanted = {name: value for name, value in asked.items() if name in used}
    assert {name: used[name] for name in wanted} == wanted
    changed = {name for name in own if name in used and own[name] != used[name]}
    assert {"temperature", "top_k", "min_p", "repeat_penalty", "mirostat", "xtc_probability", "dry_multiplier", "samplers"} <= changed
    assert joined(chunks)[0] == (await in_one(wilful, PROMPT, 60))[0][: len(joined(chunks)[0])]


async def test_four_sessions_share_two_slots(llama_server: Server) -> None:
    prompts = [chat(f"Tell me a story of {word}.") for word in ("a fox", "an owl", "the sea", "中国")]
    async with client_of(llama_server) as client:
        replies = await asyncio.gather(*(sample(client, Sampling(max_tokens=40, seed=n), p, str(n)) for n, p in enumerate(prompts)))
        for prompt, chunks in zip(prompts, replies, strict=True):
            assert (await differences(client, chunks, prompt)).mean() < BATCHED
        assert (await differences(client, replies[0], prompts[2])).mean() > BATCHED


async def test_a_reader_that_leaves_leaves_no_slot_at_work(llama_server: Server) -> None:
    """At random moments: in the queue, in prefill, in a slice and between two."""
    dice = random.Random(7)
    async with client_of(llama_server) as client:

        async def turn(number: int) -> Trace:
            trace = Trace()
            prompt = ids([*range(1000 + number, 1200 + number), *PROMPT])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(dice.uniform(0.01, 4)):
                    await sample(client, Sampling(max_tokens=1500, temperature=1.5), prompt, str(number), trace)
            return trace

        traces = await asyncio.gather(*(turn(number) for number in range(12)))
        await nothing_left(client)
        outcomes = [await outcome for trace in traces for outcome in trace.aborts]
        assert outcomes
        assert set(outcomes) <= {AbortOutcome.VERIFIED, AbortOutcome.UNVERIFIED}
        assert len(joined(await sample(client, Sampling(max_tokens=5, seed=1)))[0]) == 5, "every slot is free again"


async def test_between_two_slices_nothing_decodes(llama_server: Server) -> None:
    trace = Trace()
    async with client_of(llama_server) as client:
        async with aclosing(client.sample(PROMPT, Sampling(max_tokens=500), rid="r", trace=trace)) as stream:  # type: ignore[type-var]
            for _ in range(3):
                assert len((await anext(stream)).ids)
                assert await working(client) == 0
        assert [await outcome for outcome in trace.aborts] == [AbortOutcome.VERIFIED]


async def test_prefill_stops_at_its_next_batch(wilful: Server) -> None:
    long, trace = ids(1 + np.arange(500) * 37 % 40_000), Trace()
    async with client_of(wilful) as client:
        reading = asyncio.create_task(sample(client, Sampling(), long, trace=trace))
        async with asyncio.timeout(PATIENCE):
            while not await working(client):
                await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.wait({reading})
        assert await trace.aborts[0] in (AbortOutcome.VERIFIED, AbortOutcome.UNVERIFIED)
        await nothing_left(client)
        again = await sample(client, Sampling(max_tokens=1), long)
        assert again[0].cached_tokens < 400, "most of the prompt was never read"


async def test_an_abort_by_id_ends_the_stream(llama_server: Server) -> None:
    async with client_of(llama_server) as client:
        got: list[Chunk] = []
        async for chunk in client.sample(PROMPT, Sampling(max_tokens=500), rid="mine"):
            got.append(chunk)
            if len(got) == 2:
                assert await client.abort("mine") is AbortOutcome.VERIFIED
        assert got[-1].finish is not None
        assert got[-1].finish.reason is FinishReason.ABORT


async def test_what_the_server_refuses_is_rejected_and_harms_nobody(llama_server: Server) -> None:
    outside = LlamaServerEngine(llama_server.url, vocab_size=60_000, context_length=5000)
    try:
        for prompt in (ids([1, 55_000, 3]), ids([1] * 3000)):
            with pytest.raises(EngineRejected):
                await sample(outside, Sampling(max_tokens=5), prompt)
    finally:
        await outside.close()
    async with client_of(llama_server) as client:
        assert len(joined(await sample(client, Sampling(max_tokens=5, temperature=0.0)))[0]) == 5


async def test_a_server_that_dies_is_unavailable_after_the_tokens_it_gave() -> None:
    port = free_port()
    server = Server("llama.cpp", [sys.executable, "-c", WILFUL, str(find_model("smollm2")), str(port)], port=port)
    server.start()
    client = LlamaServerEngine(server.url)
    try:
        stream = client.sample(PROMPT, Sampling(max_tokens=1500, temperature=1.5), rid="r")
        got = [await anext(stream) for _ in range(3)]
        server.kill()
        with pytest.raises(EngineUnavailable):
            await anext(stream)
        assert len(joined(got)[0]) >= 3
        assert not await client.health()
    finally:
        server.stop()
        await client.close()
