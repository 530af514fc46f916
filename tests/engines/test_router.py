"""Two real SGLang workers behind the real router: sessions stay, turns outlive a worker and a weight update, nothing is left decoding."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from tests.engines.agents import Crowd, until
from tests.engines.checkpoint import checkpoint
from tests.engines.servers import Server
from tests.engines.table import Table
from turnloom import Gateway
from turnloom.engine.sglang import SGLangEngine
from turnloom.export.check import check_engine, check_samples
from turnloom.types import AbortOutcome, Outcome, Sample, Turn

FLOAT32 = 1e-4
"""Nats."""


@asynccontextmanager
async def serving(router: Server, **options: object) -> AsyncIterator[Gateway]:
    async with Gateway(router.url, admin_key="a", **options) as gateway:  # type: ignore[arg-type]
        yield gateway


async def turns_of(gateway: Gateway, crowd: Crowd) -> list[Turn]:
    return [turn for t in crowd.talkers for turn in (await gateway.session(t.handle.id)).tree.turns.values()]


async def samples_of(crowd: Crowd) -> list[Sample]:
    return [sample for t in crowd.talkers for sample in await t.handle.finish()]


async def worst_difference(worker: Server, samples: list[Sample]) -> float:
    """Nats between the logprobs that train and a recomputation by prefill on this worker."""
    engine = SGLangEngine(worker.url)
    try:
        report = await check_engine(samples, engine, FLOAT32, at_once=16)
    finally:
        await engine.close()
    assert all(d.compared == d.trained and not d.reason for d in report.samples), report
    return max(d.max or 0.0 for d in report.samples)


async def tell(worker: Server, path: str, **body: object) -> dict[str, object]:
    async with aiohttp.ClientSession() as http, http.post(worker.url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(content_type=None) if answer.content_type == "application/json" else {}


async def running(worker: Server, since: float) -> int | None:
    """What a worker counted after this Unix time; None where its count is older, as it may be by a second."""
    async with aiohttp.ClientSession() as http, http.get(worker.url + "/v1/loads") as answer:
        (rank,) = (await answer.json())["loads"]
    return int(rank["num_running_reqs"] + rank["num_waiting_reqs"]) if rank["timestamp"] >= since else None


async def idle(workers: list[Server]) -> None:
    """A worker that was told to stop its requests takes a moment, and meanwhile answers an update with 400."""
    since = time.time()
    async with asyncio.timeout(30):
        while [await running(worker, since) for worker in workers] != [0] * len(workers):
            await asyncio.sleep(0.1)


async def load(weights: Path, version: str, *workers: Server) -> None:
    for worker in workers:
        await tell(worker, "/update_weights_from_disk", model_path=str(weights), weight_version=version)


async def test_a_session_stays_on_one_worker_and_every_logprob_is_recomputed(router: Server, workers: list[Server]) -> None:
    async with serving(router) as gateway:
        crowd = await Crowd.of(gateway, 6, 3, max_tokens=24)
        await crowd.talk()
        assert crowd.whole
        bridged = [turn for turn in await turns_of(gateway, crowd) if turn.base is not None]
        assert len(bridged) == 12
        for turn in bridged:
            assert turn.cached_tokens >= turn.kept - 2, "what the session's worker has in its cache is not computed again"
        samples = await samples_of(crowd)
    assert check_samples(samples).ok
    assert await worst_difference(workers[0], samples) <= FLOAT32


async def test_a_worker_dies_while_sixteen_agents_stream(router: Server, workers: list[Server], table: Table) -> None:
    """No agent sees an error and every reply is whole. Where a reply went on is on record, and holds on both sides."""
    async with serving(router) as gateway:
        crowd = await Crowd.of(gateway, 16, 3)
        talking = asyncio.create_task(crowd.talk())
        await until(lambda: talking.done() or sum(t.streaming.is_set() for t in crowd.talkers) >= 12)
        workers[0].kill()
        await talking
        assert crowd.whole
        turns = await turns_of(gateway, crowd)
        samples = await samples_of(crowd)
    assert {turn.outcome for turn in turns} == {Outcome.DELIVERED}
    seams = [piece for turn in turns for piece in turn.pieces[1:]]
    assert seams, "no turn was on the worker that died"
    assert all(piece.start > 0 and "broke off" in piece.why for piece in seams)
    assert all(0 < piece.start < len(turn.output) for turn in turns for piece in turn.pieces[1:])
    assert all(version is not None for s in samples for version, m in zip(s.weight_version, s.loss_mask, strict=True) if m)
    assert sum(s.statuses.get("seams", 0) for s in samples) == len(seams)
    assert check_samples(samples).ok
    worst = await worst_difference(workers[1], samples)
    assert worst <= FLOAT32
    table.tell(
        "killed", f"no agent saw an error; {len(seams)} of {len(turns)} turns went on; logprobs within {worst:.1g} nats on both sides"
    )


@pytest.mark.parametrize("who", ["updated", "paused"], ids=["the gateway holds", "the trainer pauses the workers"])
async def test_a_weight_update_in_mid_turn(router: Server, workers: list[Server], who: str, table: Table) -> None:
    """Each token has the version that sampled it, and its logprob is that of those weights."""
    old, new = checkpoint(0), checkpoint(1)
    await load(old, "old", *workers)
    async with serving(router) as gateway, aiohttp.ClientSession(headers={"Authorization": "Bearer a"}) as admin:
        crowd = await Crowd.of(gateway, 16, 2)
        talking = asyncio.create_task(crowd.talk())
        await until(lambda: talking.done() or sum(t.streaming.is_set() for t in crowd.talkers) >= 12)
        if who == "updated":
            async with admin.post(gateway.url + "/api/v1/pause", json={"mode": "abort"}) as answer:
                assert (answer.status, (await answer.json())["running"]) == (200, 0)
            await idle(workers)
            await load(new, "new", *workers)
            async with admin.post(gateway.url + "/api/v1/resume") as answer:
                assert answer.status == 200
        else:
            for worker in workers:
                await tell(worker, "/pause_generation", mode="abort")
            await load(new, "new", *workers)
            for worker in workers:
                await tell(worker, "/continue_generation")
        await talking
        assert crowd.whole
        turns = await turns_of(gateway, crowd)
        samples = await samples_of(crowd)
    seams = [(turn, piece) for turn in turns for piece in turn.pieces[1:]]
    assert seams
    for turn, _ in seams:
        # A turn may have gone on under the old weights first, on a worker that was paused later.
        (_, _, at), (_, start, end) = spans = [(s.version, s.start, s.end) for s in turn.versions]
        assert [version for version, _, _ in spans] == ["old", "new"]
        assert (start, end) == (at, len(turn.output))
        assert at in {piece.start for piece in turn.pieces}
    assert check_samples(samples).ok
    assert {v for s in samples for v in s.weight_version} == {"old", "new", None}
    after = await worst_difference(workers[0], [only(s, "new") for s in samples])
    await load(old, "old", *workers)
    before = await worst_difference(workers[0], [only(s, "old") for s in samples if "old" in s.weight_version])
    assert max(before, after) <= FLOAT32
    table.tell(who, f"{len(seams)} turns have tokens of both; each version's are within {max(before, after):.1g} nats of its own weights")


def only(sample: Sample, version: str) -> Sample:
    """Only the tokens of one weight version train."""
    from dataclasses import replace

    mask = sample.loss_mask * np.array([v == version for v in sample.weight_version], np.uint8)
    return replace(sample, loss_mask=mask)


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_a_hold_that_breaks_nothing_off(router: Server, workers: list[Server], mode: str) -> None:
    async with serving(router) as gateway, aiohttp.ClientSession(headers={"Authorization": "Bearer a"}) as admin:
        crowd = await Crowd.of(gateway, 8, 3, max_tokens=30)
        talking = asyncio.create_task(crowd.talk())
        await until(lambda: talking.done() or sum(t.streaming.is_set() for t in crowd.talkers) >= 4)
        async with admin.post(gateway.url + "/api/v1/pause", json={"mode": mode}) as answer:
            said = await answer.json()
        assert said["paused"]
        assert mode == "keep" or said["running"] == 0
        await until(lambda: gateway.engine.gate.held == 8)
        assert not talking.done()
        async with admin.post(gateway.url + "/api/v1/resume") as answer:
            assert not (await answer.json())["paused"]
        await talking
        assert crowd.whole
        assert all(len(turn.pieces) == 1 for turn in await turns_of(gateway, crowd))


async def test_two_hundred_cancelled_turns_leave_nothing_decoding(router: Server, workers: list[Server], table: Table) -> None:
    rng = random.Random(0)
    async with serving(router) as gateway, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        handles = [await gateway.open_session() for _ in range(200)]
        slots = asyncio.Semaphore(24)

        async def leave(number: int) -> None:
            body = {
                "model": "m",
                "max_tokens": 1500,
                "stream": number % 4 > 0,
                "messages": [{"role": "user", "content": f"hello {number}"}],
            }
            async with slots:
                url, key = handles[number].base_url + "/v1/messages", handles[number].key
                asked = asyncio.create_task(read(http, url, key, body))
                await asyncio.sleep(rng.random() * 1.5)
                asked.cancel()
                await asyncio.wait([asked])

        await asyncio.gather(*(leave(number) for number in range(200)))
        last, left = time.time(), list[int | None]([None])
        while left != [0, 0] and time.time() - last < 30:
            left = [await running(worker, last) for worker in workers]
        taken = time.time() - last
        assert (left, taken < 2.0) == ([0, 0], True), taken
        for handle in handles:
            await (await gateway.session(handle.id)).settled()
        turns = [turn for h in handles for turn in (await gateway.session(h.id)).tree.turns.values()]
        assert len(turns) >= 150, "some leave before their turn begins, not most"
        assert {turn.outcome for turn in turns} == {Outcome.ORPHANED}
        stopped = [turn.abort for turn in turns]
        assert AbortOutcome.FAILED not in stopped
        assert stopped.count(AbortOutcome.VERIFIED) > 0.5 * len(stopped), "of the rest, busy workers prove nothing"
        async with http.post(router.url + "/abort_request", json={"rid": "none"}) as answer:
            assert answer.status == 404, "the router aborts nothing"
    known = f"{stopped.count(AbortOutcome.VERIFIED)} of {len(stopped)} aborts verified"
    table.tell("cancelled", f"no request on either worker {taken:.2f} s after the last; {known}")


async def read(http: aiohttp.ClientSession, url: str, key: str, body: dict[str, object]) -> None:
    async with http.post(url, json=body, headers={"x-api-key": key}) as answer:
        await answer.read()
