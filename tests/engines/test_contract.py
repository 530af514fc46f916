"""What every engine promises, of every real engine: exact logprobs, tokens as they are sampled, aborts that leave nothing."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import pytest

from tests.engines.agents import Crowd
from tests.engines.servers import Server
from tests.engines.table import EMBEDDED_ROW, LLAMA_ROW, ROUTER_ROW, SGLANG_ROW, VLLM_ROW, Table
from turnloom import Gateway
from turnloom.engine.contract import Chunk, Engine, Trace
from turnloom.engine.open import open_engine
from turnloom.engine.pool import PATIENCE
from turnloom.export.check import check_engine, check_samples
from turnloom.types import AbortOutcome, FinishReason, Sampling, ids

FLOAT32, QUANTISED = 1e-4, 0.5
"""Nats. What llama.cpp computes with 4-bit weights depends on the shape of the batch."""

PROMPT = ids([9707, 11, 1879, 0, 358, 1079])


@dataclass(frozen=True)
class Real:
    row: str
    url: str
    tolerance: float
    recomputed_at: str
    """Where a prefill is asked for: a router picks any worker, so one of them is asked."""


@pytest.fixture(
    params=[SGLANG_ROW, ROUTER_ROW, VLLM_ROW, LLAMA_ROW, EMBEDDED_ROW], ids=["sglang", "router", "vllm", "llamacpp", "embedded"]
)
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    def started(name: str) -> Server:
        server = request.getfixturevalue(name)
        assert isinstance(server, Server)
        return server

    row = request.param
    if row in (SGLANG_ROW, ROUTER_ROW):
        worker = request.getfixturevalue("workers")[0].url
        yield Real(row, worker if row == SGLANG_ROW else started("router").url, FLOAT32, worker)
    elif row == VLLM_ROW:
        url = started("vllm_server").url.replace("http:", "vllm:")
        yield Real(row, url, FLOAT32, url)
    elif row == LLAMA_ROW:
        url = started("llama_server").url.replace("http:", "llamacpp:")
        yield Real(row, url, QUANTISED, url)
    else:
        yield Real(row, "local:smollm2", QUANTISED, "")


@pytest.fixture
async def engine(real: Real) -> AsyncIterator[Engine]:
    opened = await open_engine(real.url)
    try:
        yield opened
    finally:
        await opened.close()


async def test_an_agents_samples_are_what_the_engine_says_again(real: Real, table: Table) -> None:
    async with Gateway(real.url) as gateway:
        crowd = await Crowd.of(gateway, 4, 2, max_tokens=32)
        await crowd.talk()
        samples = [sample for t in crowd.talkers for sample in await t.handle.finish()]
        assert check_samples(samples).ok
        assert sum(int(sample.loss_mask.sum()) for sample in samples) >= 100
        for talker in crowd.talkers:
            turns = list((await gateway.session(talker.handle.id)).tree.turns.values())
            assert [turn.base for turn in turns] == [None, turns[0].id], "the second turn goes on from the first one's ids"
        oracle = await open_engine(real.recomputed_at) if real.recomputed_at else gateway.engine
        try:
            report = await check_engine(samples, oracle, real.tolerance, at_once=4 if real.tolerance == FLOAT32 else 1)
        finally:
            if oracle is not gateway.engine:
                await oracle.close()
    assert report.ok, report
    assert all(found.compared == found.trained for found in report.samples)
    table.note(real.row, check=f"{max(found.max or 0.0 for found in report.samples):.1g}")


async def test_tokens_come_as_they_are_sampled(engine: Engine, real: Real, table: Table) -> None:
    chunks = await sampled(engine, 40)
    tokens = sum(len(chunk.ids) for chunk in chunks)
    carrying = [chunk for chunk in chunks if len(chunk.ids)]
    assert np.isfinite(np.concatenate([chunk.logprobs for chunk in carrying])).all()
    assert len(carrying) >= tokens / 4, "they come in a few heaps"
    assert all(chunk.finish is None for chunk in chunks[:-1])
    table.note(real.row, streaming=f"{tokens} tokens in {len(carrying)} chunks")
    named = chunks[-1].versions
    assert not named or (named[0].start, named[-1].end) == (0, tokens)
    table.note(real.row, versions="spans of tokens" if named else "none told")


async def test_a_reply_ends_where_it_must(engine: Engine, real: Real) -> None:
    chunks = await sampled(engine, 5)
    count, finish = sum(len(chunk.ids) for chunk in chunks), chunks[-1].finish
    assert finish is not None
    if real.tolerance == FLOAT32:
        assert (count, finish.reason) == (5, FinishReason.LENGTH), "noise never ends a reply by itself"
    else:
        assert (count == 5) if finish.reason is FinishReason.LENGTH else (0 < count <= 5)


async def test_what_is_left_is_stopped_and_known_to_be(engine: Engine, real: Real, table: Table) -> None:
    """Eight at once, each left after its first token: what comes of each abort is known, and how long the last takes."""
    able = await engine.capabilities()
    traces = [Trace() for _ in range(8)]

    async def leave(trace: Trace) -> None:
        stream = engine.sample(
            PROMPT, Sampling(max_tokens=min(1500, able.context_length - 50)), rid=uuid.uuid4().hex, routing_key="a", trace=trace
        )
        async with aclosing(stream) as parts:  # type: ignore[type-var]
            async for chunk in parts:
                if len(chunk.ids):
                    return

    await asyncio.gather(*map(leave, traces))
    left = time.monotonic()
    outcomes = [await each for trace in traces for each in trace.aborts]
    taken = time.monotonic() - left
    assert outcomes.count(AbortOutcome.VERIFIED) == len(outcomes), outcomes
    table.note(real.row, abort=f"{taken:.2f} s, 8 at once, all verified")


async def test_a_gateway_goes_on_after_an_abort_from_outside(engine: Engine, real: Real) -> None:
    """Somebody else stops the request on the server: the reply is whole all the same, and the seam is on record."""
    async with Gateway(engine, patience=PATIENCE) as gateway:
        crowd = await Crowd.of(gateway, 1, 1, max_tokens=1500 if real.tolerance == FLOAT32 else 200)
        talking = asyncio.create_task(crowd.talk())
        await asyncio.wait({talking, asyncio.create_task(crowd.talkers[0].streaming.wait())}, return_when=asyncio.FIRST_COMPLETED)
        (rid,) = gateway.engine.gate.running
        assert await engine.abort(rid) is AbortOutcome.VERIFIED
        await talking
        (turn,) = (await gateway.session(crowd.talkers[0].handle.id)).tree.turns.values()
        assert [piece.why for piece in turn.pieces[:1]] == [""]
        assert len(turn.pieces) == 2
        assert turn.finish.reason is not FinishReason.ABORT
        (sample,) = await crowd.talkers[0].handle.finish()
    assert sample.statuses["seams"] == 1
    assert check_samples([sample]).ok


async def sampled(engine: Engine, count: int) -> list[Chunk]:
    return [chunk async for chunk in engine.sample(PROMPT, Sampling(max_tokens=count), rid=uuid.uuid4().hex)]
