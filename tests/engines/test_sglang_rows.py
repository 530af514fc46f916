"""The reference's rows on engines, against real SGLang workers and the real router: what `tests/reference` holds against scripted ones."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.engines.checkpoint import VOCAB_SIZE
from tests.engines.cluster import load
from tests.engines.servers import Server
from turnloom.engine.contract import AbortOutcome, Chunk, Trace
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import EngineRejected, EngineUnavailable
from turnloom.testing.scripted_engine import ScriptedEngine
from turnloom.types import FinishReason, IntArray, Sampling, VersionSpan, ids

CONTEXT = 2048


@contextlib.asynccontextmanager
async def calling(url: str, **options: Any) -> AsyncIterator[SGLangEngine]:
    client = SGLangEngine(url, vocab_size=VOCAB_SIZE, **options)
    try:
        yield client
    finally:
        await client.close()


def prompt(length: int = 24) -> IntArray:
    """One that no worker has in its cache."""
    return ids(np.random.default_rng(uuid.uuid4().int).integers(1000, 100_000, length).astype(np.int32))


def rid() -> str:
    return uuid.uuid4().hex


class Reader:
    """A stream that is read on its own. `begun` is set by its first token."""

    def __init__(self, client: SGLangEngine, tokens: int = 1500, *, id: str = "", at: IntArray | None = None, key: str = "") -> None:
        self.rid, self.trace, self.begun = id or rid(), Trace(), asyncio.Event()
        self.prompt = prompt() if at is None else at
        self.chunks: list[Chunk] = []
        self._stream = client.sample(self.prompt, Sampling(max_tokens=tokens), rid=self.rid, routing_key=key, trace=self.trace)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for chunk in self._stream:
            self.chunks.append(chunk)
            if len(chunk.ids):
                self.begun.set()

    @property
    def tokens(self) -> list[int]:
        return [i for chunk in self.chunks for i in chunk.ids.tolist()]

    @property
    def logprobs(self) -> list[float]:
        return [v for chunk in self.chunks for v in chunk.logprobs.tolist()]

    @property
    def reason(self) -> FinishReason | None:
        finish = self.chunks[-1].finish
        return finish and finish.reason

    async def whole(self) -> Reader:
        await self.task
        return self

    async def leave(self) -> list[AbortOutcome]:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        return list(await asyncio.gather(*self.trace.aborts))


async def loads(*workers: Server) -> list[int]:
    return [await asyncio.to_thread(load, worker) for worker in workers]


async def test_r15_a_key_stays_on_the_worker_that_has_its_tokens(router: Server) -> None:
    async with calling(router.url) as client:
        prompts = {f"session-{n}": prompt(64) for n in range(6)}
        for _ in range(2):
            replies = [await Reader(client, 4, at=at, key=key).whole() for key, at in prompts.items()]
    assert all(reply.chunks[-1].cached_tokens >= 60 for reply in replies)


async def test_r16_the_room_that_is_left_is_asked_for_and_a_prompt_beyond_it_is_not_sent(router: Server) -> None:
    async with calling(router.url) as client:
        most = (await client.capabilities()).context_length
        assert CONTEXT - 8 < most <= CONTEXT
        for left in (20, 2):
            reply = await Reader(client, 1500, at=prompt(most - left)).whole()
            assert (len(reply.tokens), reply.reason) == (left - 1, FinishReason.LENGTH)
        with pytest.raises(EngineRejected, match=str(most)):
            await Reader(client, at=prompt(most - 1)).whole()


async def test_r17_ids_in_and_logprobs_out_through_the_router(router: Server) -> None:
    async with calling(router.url) as client:
        reply = await Reader(client, 32).whole()
        again = await client.prompt_logprobs(ids([*reply.prompt.tolist(), *reply.tokens]), len(reply.prompt))
    assert len(reply.tokens) == 32
    assert np.abs(again - np.array(reply.logprobs, np.float32)).max() <= 1e-4


async def test_r18_a_bare_worker_stops_what_its_reader_leaves(workers: list[Server]) -> None:
    async with calling(workers[0].url) as client:
        reader = Reader(client)
        await reader.begun.wait()
        assert await reader.leave() == [AbortOutcome.VERIFIED]
        assert await loads(workers[0]) == [0]


@pytest.mark.parametrize("behind", [True, False], ids=["the router", "no router"])
async def test_r19_only_that_request_stops(router: Server, workers: list[Server], behind: bool) -> None:
    """Ids are of one length, since SGLang stops every request whose id begins with the one it is told."""
    async with calling(router.url if behind else workers[0].url) as client:
        name = rid()
        stopped, alike, other = (
            Reader(client, 400, id=name + "0001", key="a"),
            Reader(client, 60, id=name + "0002", key="a"),
            Reader(client, 60, key="b"),
        )
        for reader in (stopped, alike, other):
            await reader.begun.wait()
        assert await client.abort(stopped.rid) is AbortOutcome.VERIFIED
        await asyncio.gather(stopped.whole(), alike.whole(), other.whole())
    assert (stopped.reason, len(stopped.tokens) < 400) == (FinishReason.ABORT, True)
    assert [(r.reason, len(r.tokens)) for r in (alike, other)] == [(FinishReason.LENGTH, 60)] * 2
    assert await loads(*workers) == [0, 0]


async def test_r20_what_can_be_used_of_a_malformed_list_is_used(workers: list[Server]) -> None:
    listed = [None, {"url": 7}, {"url": "http://["}, *({"url": f"{worker.url}/"} for worker in workers), {"url": f"{workers[0].url}@1"}]
    async with ScriptedEngine(workers={"workers": listed}) as front, calling(workers[0].url) as direct, calling(front.url) as client:
        reader = Reader(direct)
        await reader.begun.wait()
        assert await client.abort(reader.rid) is AbortOutcome.VERIFIED
        assert (await reader.whole()).reason is FinishReason.ABORT


async def test_r21_a_dead_worker_spares_no_other(workers: list[Server]) -> None:
    listed = [{"url": "http://127.0.0.1:9"}, {"url": workers[0].url}]
    async with ScriptedEngine(workers={"workers": listed}) as front, calling(workers[0].url) as direct, calling(front.url) as client:
        reader = Reader(direct)
        await reader.begun.wait()
        assert await client.abort(reader.rid) is AbortOutcome.UNVERIFIED
        assert (await reader.whole()).reason is FinishReason.ABORT
        assert await loads(workers[0]) == [0]


async def test_r22_a_stream_that_is_stopped_keeps_what_it_sampled(workers: list[Server]) -> None:
    async with calling(workers[0].url) as client:
        reader = Reader(client)
        await reader.begun.wait()
        assert await client.abort(reader.rid) is AbortOutcome.VERIFIED
        await reader.whole()
        assert reader.chunks[-1].versions == (VersionSpan("default", 0, len(reader.tokens)),)
        again = await client.prompt_logprobs(ids([*reader.prompt.tolist(), *reader.tokens]), len(reader.prompt))
    assert np.abs(again - np.array(reader.logprobs, np.float32)).max() <= 1e-4


async def test_a_live_id_that_is_taken_is_refused_and_the_first_is_stopped_as_a_ghost(workers: list[Server]) -> None:
    async with calling(workers[0].url) as client, calling(workers[0].url) as other:
        first = Reader(other)
        await first.begun.wait()
        second = Reader(client, id=first.rid)
        with pytest.raises(EngineUnavailable, match="Duplicate request ID"):
            await second.whole()
        assert await asyncio.gather(*second.trace.aborts) == [AbortOutcome.VERIFIED]
        assert (await first.whole()).reason is FinishReason.ABORT


@pytest.mark.parametrize("mode", ["wait", "keep"])
async def test_a_paused_server_is_healthy_and_its_streams_go_on_when_it_does(workers: list[Server], mode: Any) -> None:
    async with calling(workers[0].url) as client:
        reader = Reader(client, 60)
        await reader.begun.wait()
        await client.pause(mode)
        assert await client.health()
        assert not reader.task.done()
        await client.resume()
        assert (len((await reader.whole()).tokens), reader.reason) == (60, FinishReason.LENGTH)


async def test_what_is_left_while_a_server_is_paused_never_runs(workers: list[Server]) -> None:
    async with calling(workers[0].url) as client:
        await client.capabilities()
        await client.pause("abort")
        reader = Reader(client)
        done, _ = await asyncio.wait([reader.task], timeout=0.5)
        assert not done
        await reader.leave()
        await client.resume()
        assert reader.chunks == []
        assert (await Reader(client, 5).whole()).reason is FinishReason.LENGTH
        assert await loads(workers[0]) == [0]


async def test_experts_that_a_server_does_not_give_are_done_without(router: Server, workers: list[Server]) -> None:
    for url in (router.url, workers[0].url):
        async with calling(url, arrays=("routed_experts",)) as client:
            reply = await Reader(client, 5).whole()
            assert (len(reply.tokens), dict(reply.chunks[-1].arrays)) == (5, {})
