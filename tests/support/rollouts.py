"""Rollouts with real sandboxes, real agent processes and real HTTP, before a gateway that only counts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from turnloom.errors import BadRequest, NotFound
from turnloom.harness import Harness, load_harness

CALL = """
import os, sys, time, urllib.request
def ask():
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    request = urllib.request.Request(url, b"{}", {"x-api-key": os.environ["ANTHROPIC_API_KEY"]})
    return urllib.request.urlopen(request).read()
def fix():
    text = open("stats.py").read()
    open("stats.py", "w").write(text.replace(" (len(values) + 1)", " len(values)"))
"""


def agent(body: str) -> Harness:
    """A program that may `ask()` its model and `fix()` the demo task."""
    return load_harness("command", argv=[sys.executable, "-c", CALL + body])


class Session:
    """`finished` holds the reward of each finish, `outcomes` how each turn ended."""

    def __init__(self, gateway: CountingGateway, name: str, group: str, rollout: str, metadata: dict[str, object]) -> None:
        self.gateway, self.group, self.rollout, self.metadata = gateway, group, rollout, metadata
        self.id, self.key = name, f"key-{len(gateway.sessions)}"
        self.base_url = f"{gateway.url}/s/{self.key}"
        self.outcomes: list[str] = []
        self.reached: list[str] = []
        self.finished: list[float | None] = []
        self.dropped = False

    @property
    def turns(self) -> int:
        return len(self.outcomes)

    async def finish(self, reward: float | None) -> list[Any]:
        self.finished.append(reward)
        if self.gateway.finish_fails:
            raise RuntimeError("the store is full")
        return await self.samples()

    async def samples(self) -> list[Any]:
        return [f"sample of {self.id}"] * self.turns

    async def status(self) -> dict[str, Any]:
        counts = {"in_flight": 0, "sampled_tokens": 7 * self.turns, "lineages": 1, "forks": {"restart": 2}, "reached": self.reached}
        return {"turns": self.turns, "outcomes": {o: self.outcomes.count(o) for o in self.outcomes}, **counts}

    async def tree(self) -> dict[str, Any]:
        return {"turns": [{"index": i, "outcome": o, "error": f"{o} at {i}"} for i, o in enumerate(self.outcomes)]}

    async def drop(self) -> None:
        self.dropped = True
        del self.gateway.open[self.id]


class CountingGateway:
    """`ends` says how the turns of this rollout end, in turn; without it all are delivered. `sessions` are all that were opened."""

    def __init__(self) -> None:
        self.url = ""
        self.sessions: list[Session] = []
        self.open: dict[str, Session] = {}
        self.finish_fails = False
        self.ends: list[str] = []
        self.reached: list[str] = []
        self.busy = self.most_busy = 0

    async def open_session(self, *, id: str, group: str, rollout: str, metadata: dict[str, object]) -> Session:
        if id in self.open:
            raise BadRequest(f"session id {id!r} is taken")
        self.open[id] = Session(self, id, group, rollout, metadata)
        self.sessions.append(self.open[id])
        return self.open[id]

    async def handle(self, session_id: str) -> Session:
        if session_id not in self.open:
            raise NotFound(session_id)
        return self.open[session_id]

    async def post(self, request: web.Request) -> web.Response:
        session = next(s for s in self.sessions if s.key == request.match_info["key"])
        assert request.headers["x-api-key"] == session.key
        session.outcomes.append(self.ends.pop(0) if self.ends else "delivered")
        session.reached += self.reached
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        await asyncio.sleep(0.05)
        self.busy -= 1
        return web.json_response({})


@asynccontextmanager
async def counting_gateway() -> AsyncIterator[CountingGateway]:
    gateway = CountingGateway()
    app = web.Application()
    app.router.add_post("/s/{key}/v1/messages", gateway.post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    gateway.url = f"http://{host}:{port}"
    try:
        yield gateway
    finally:
        await runner.cleanup()
