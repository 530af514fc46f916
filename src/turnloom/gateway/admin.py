"""The admin API under `/api/v1`: which calls there are. Every one needs the admin key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from turnloom.engine.pool import Pool
from turnloom.gateway.admin_bodies import FinishBody, OpenBody, RewardBody
from turnloom.gateway.admin_body import read_model
from turnloom.gateway.admin_engines import Engines, PauseBody, ResumeBody
from turnloom.gateway.admin_sessions import SessionCalls, error_response, json_response

__all__ = ["FinishBody", "OpenBody", "RewardBody", "add_routes", "error_response"]

Call = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_routes(app: web.Application, calls: SessionCalls, pools: Mapping[str, Pool], authorize: Callable[[web.Request], None]) -> None:
    engines = EngineCalls(Engines(pools))
    for method, path, call in (
        ("POST", "/sessions", calls.open),
        ("GET", "/sessions", calls.list),
        ("GET", "/sessions/{id}", calls.get),
        ("DELETE", "/sessions/{id}", calls.drop),
        ("GET", "/sessions/{id}/tree", calls.tree),
        ("GET", "/sessions/{id}/samples", calls.samples),
        ("POST", "/sessions/{id}/reward", calls.reward),
        ("POST", "/sessions/{id}/finish", calls.finish),
        ("GET", "/store", calls.store),
        ("GET", "/metrics", calls.metrics),
        ("GET", "/engines", engines.list),
        ("POST", "/pause", engines.pause),
        ("POST", "/resume", engines.resume),
    ):
        app.router.add_route(method, f"/api/v1{path}", _guarded(call, authorize))


def _guarded(call: Call, authorize: Callable[[web.Request], None]) -> Call:
    async def handler(http: web.Request) -> web.StreamResponse:
        authorize(http)
        return await call(http)

    return handler


class EngineCalls:
    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    async def list(self, http: web.Request) -> web.Response:
        return json_response(await self._engines.list())

    async def pause(self, http: web.Request) -> web.Response:
        return json_response(await self._engines.pause(await read_model(http, PauseBody)))

    async def resume(self, http: web.Request) -> web.Response:
        return json_response(await self._engines.resume(await read_model(http, ResumeBody)))
