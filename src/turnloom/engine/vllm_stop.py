"""How vLLM is told to stop a request, and what it says of its load.

A request is known by its route's prefix and the id that was sent. The call is
part of the scale-out endpoints, and of the development ones under another path;
a server with neither stops a request when its connection is closed, and only
then. With several API server processes the call reaches one of them, which need
not be the one that has the request.
"""

from __future__ import annotations

import asyncio
import logging
import re

from turnloom.counters import swallowed
from turnloom.engine.contract import AbortOutcome
from turnloom.engine.http import BROKEN, EngineHTTP, words
from turnloom.engine.look import Look
from turnloom.engine.metrics import ABORT_FAILURES
from turnloom.errors import EngineUnavailable

log = logging.getLogger("turnloom.engine")

ABSENT = (403, 404, 405)
"""How a server answers for an endpoint that it was not started with."""

_PATHS = ("/inference/v1/abort_requests", "/abort_requests")

_CHECKS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Seconds before each look at the load. The gauges follow the engine's steps."""

_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)


class Requests:
    """The requests of one server, as a `Stopper`."""

    def __init__(self, http: EngineHTTP) -> None:
        self._http = http
        self._paths: tuple[str, ...] = _PATHS
        self.load = Look(self._load)

    async def tell(self, rid: str) -> bool | None:
        body = {"request_ids": request_ids(rid)}
        for path in self._paths:
            try:
                async with self._http.session.post(f"{self._http.url}{path}", json=body) as response:
                    if response.status in ABSENT:
                        continue
                    response.raise_for_status()
                    self._paths = (path,)
                    return True
            except BROKEN as error:
                ABORT_FAILURES.inc()
                raise EngineUnavailable(f"{self._http.name} could not be told to abort {rid}: {words(error)}") from error
        if self._paths:
            log.warning("%s has no call that aborts a request: start it with --enable-scale-out", self._http.name)
            self._paths = ()
        return None

    async def gone(self, rid: str) -> AbortOutcome:
        """Nothing running or waiting is proof. Others' requests may be what is left, so a busy server proves nothing."""
        await asyncio.sleep(_CHECKS[0])
        # A request that was still on its way is there to be told by now.
        await self.tell(rid)
        for pause in _CHECKS:
            await asyncio.sleep(pause)
            load = await self.load()
            if load is None:
                return AbortOutcome.UNVERIFIED
            if not load:
                return AbortOutcome.VERIFIED
        return AbortOutcome.UNVERIFIED

    async def _load(self) -> int | None:
        """Requests running and waiting, over all engines of the server; None when it does not say (`--disable-log-stats`)."""
        try:
            async with self._http.session.get(f"{self._http.url}/metrics") as response:
                response.raise_for_status()
                return read_load(await response.text())
        except (*BROKEN, ValueError) as error:
            swallowed(log, "engine.loads", "%s/metrics cannot be read: %s", self._http.name, words(error), level=logging.INFO)
            return None


def request_ids(rid: str) -> list[str]:
    """What a request sent as `rid` is called inside the server, on either route."""
    return [f"generate-tokens-{rid}", f"cmpl-{rid}-0"]


def read_load(metrics: str) -> int | None:
    """The sum of the gauges of running and of waiting requests in Prometheus's text format; None unless both are there."""
    found = _GAUGE.findall(metrics)
    if {kind for kind, _ in found} != {"running", "waiting"}:
        return None
    return sum(int(float(value)) for _, value in found)
