"""When a worker's load proves that a request is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from turnloom.engine.http import EngineHTTP
from turnloom.engine.sglang_stop import Workers
from turnloom.types import AbortOutcome

NOW = "2026-01-01T00:00:10+00:00"
AT = 1_767_225_610.0
"""The same time in seconds."""


@asynccontextmanager
async def worker(*looks: Any) -> AsyncIterator[tuple[Workers, list[str]]]:
    """A worker whose loads answer these one after another, and then the last again and again; and the rids that it was told to abort."""
    told: list[str] = []
    left = list(looks)

    async def loads(_: web.Request) -> web.Response:
        return web.json_response(left.pop(0) if len(left) > 1 else left[0])

    async def abort(request: web.Request) -> web.Response:
        told.append((await request.json())["rid"])
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/loads", loads)
    app.router.add_post("/abort_request", abort)
    async with TestServer(app) as server:
        http = EngineHTTP(str(server.make_url("")))
        try:
            yield Workers(http), told
        finally:
            await http.close()


def look(running: int, age: float | None = 0.0, now: object = NOW) -> dict[str, Any]:
    rank: dict[str, Any] = {"num_running_reqs": running, "num_waiting_reqs": 0}
    if age is not None:
        rank["timestamp"] = AT - age
    return {"timestamp": now, "loads": [rank]}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.engine.sglang_stop._CHECKS", (0.0,) * 6)


async def test_a_snapshot_from_before_the_abort_proves_nothing() -> None:
    """SGLang shows a request only after some tokens: an older 0 says that it was not counted yet."""
    async with worker(look(0, age=0.5)) as (workers, told):
        assert await workers.gone("r") is AbortOutcome.UNVERIFIED
        assert set(told) == {"r"}


async def test_a_younger_snapshot_is_waited_for() -> None:
    async with worker(look(0, age=0.5), look(0, age=0.5), look(0, age=-1.0)) as (workers, _):
        assert await workers.gone("r") is AbortOutcome.VERIFIED


async def test_a_request_that_shows_up_later_is_told_again() -> None:
    async with worker(look(0, age=0.5), look(1, age=-0.2), look(0, age=-0.4)) as (workers, told):
        assert await workers.gone("r") is AbortOutcome.VERIFIED
        assert len(told) == 2


@pytest.mark.parametrize("first", [look(0, age=None), look(0, now=AT), look(0, age=None, now=None)])
async def test_a_worker_that_tells_no_time_is_believed(first: dict[str, Any]) -> None:
    async with worker(first) as (workers, _):
        assert await workers.gone("r") is AbortOutcome.VERIFIED


@pytest.mark.parametrize("broken", [look(0, now="noon"), {"loads": [{"num_running_reqs": 0, "timestamp": [1]}]}, {"loads": "none"}, []])
async def test_what_cannot_be_read_proves_nothing(broken: Any) -> None:
    async with worker(broken) as (workers, _):
        assert await workers.gone("r") is AbortOutcome.UNVERIFIED
