"""How a gateway in this process stops: what it waits for, and what it does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.gateways import Bench, bench, user
from tests.support.slow import RawClient
from turnloom.gateway import api
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import Outcome

LONG = 600.0
"""Seconds that no test waits for."""


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def stopping(b: Bench, drain: float = LONG) -> AsyncIterator[asyncio.Task[None]]:
    """The gateway is told to stop and refuses turns; at the end of the block it has to be done in good time."""
    sessions = b.gateway._sessions
    assert sessions is not None
    task = asyncio.create_task(b.gateway.stop(drain))
    try:
        await until(lambda: sessions.stopping)
        yield task
        async with asyncio.timeout(30):
            await task
    finally:
        task.cancel()


async def healthz(b: Bench) -> int:
    async with b.http.get(b.gateway.url + "/healthz") as answer:
        return answer.status


async def held(b: Bench, count: int = 1) -> list[asyncio.Task[Any]]:
    """Turns that wait for the pool."""
    await b.gateway.hold()
    asked = [asyncio.create_task(b.post(user(f"hi {number}"))) for number in range(count)]
    await until(lambda: b.gateway.engine.gate.held == count)
    return asked


async def test_it_waits_for_no_turn_where_there_is_none() -> None:
    async with bench() as b, stopping(b):
        pass


@pytest.mark.parametrize("count", [1, 3])
async def test_it_waits_until_the_last_turn_has_ended(count: int) -> None:
    async with bench(["Yes"] * count) as b:
        asked = await held(b, count)
        session = await b.session()
        assert (await healthz(b), b.gateway.in_flight) == (200, count)
        async with stopping(b) as task:
            assert await healthz(b) == 503
            refused = await b.post(user("more"))
            assert (refused.status, refused.body["type"]) == (503, "error")
            assert not task.done()
            await b.gateway.release()
            assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * count
        assert [turn.outcome for turn in session.tree.turns.values()] == [Outcome.DELIVERED] * count


async def test_a_turn_that_nobody_lets_go_is_aborted_when_the_drain_is_over() -> None:
    async with bench(["Yes"]) as b:
        (asked,) = await held(b)
        session = await b.session()
        async with stopping(b, 0.05):
            assert (await asked).status == 503
        (turn,) = session.tree.turns.values()
        assert (turn.outcome, len(turn.output)) == (Outcome.ABORTED, 0)


async def test_a_second_stop_waits_for_the_first() -> None:
    async with bench(["Yes"]) as b:
        (asked,) = await held(b)
        async with stopping(b) as first:
            second = asyncio.create_task(b.gateway.stop())
            await b.gateway.release()
            assert (await asked).status == 200
            await second
            assert first.done()


async def test_a_drain_that_is_given_up_loses_no_turn() -> None:
    """As when the process is told to end in another way meanwhile: what was sampled is on record when the gateway is left."""
    async with bench([Reply("one two three four", chunk=1, fault=Fault.STALL)]) as b:
        session = await b.session()
        asked = asyncio.create_task(b.post(user("hi")))
        await until(lambda: b.engine.live and session.in_flight)
        sessions = b.gateway._sessions
        assert sessions is not None
        drain = asyncio.create_task(b.gateway.stop(LONG))
        await until(lambda: sessions.stopping)
        drain.cancel()
        await asyncio.wait({drain})
        await b.gateway.stop()
        assert (await asked).status == 503
        (turn,) = session.tree.turns.values()
        assert turn.outcome is Outcome.ABORTED


async def test_neither_an_idle_connection_nor_a_silent_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "LAST_WORDS_SECONDS", LONG)
    async with bench() as b:
        host, _, port = b.gateway.url.removeprefix("http://").partition(":")
        reader, idle = await asyncio.open_connection(host, int(port))
        idle.write(b"GET /api/hello HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        _, silent = await asyncio.open_connection(host, int(port))
        async with stopping(b):
            pass
        idle.close()
        silent.close()


async def test_a_request_whose_body_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "LAST_WORDS_SECONDS", 0.05)
    async with bench() as b:
        client = await RawClient.post(b.handle.base_url + "/v1/messages", json.dumps(user("hi")).encode(), sent=5)
        async with stopping(b):
            pass
        client.leave()
