"""Which workers an SGLang URL stands for, how they are told to stop a request, and what their loads say of it.

A router knows its workers (`GET /workers`) but forwards no abort; a server
that answers 404 there is a worker itself. SGLang answers an abort with 200
whatever happens, and once a client has gone it may have forgotten the id: then
only the load, requests running or waiting, tells.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from turnloom.counters import swallowed
from turnloom.engine.contract import AbortOutcome
from turnloom.engine.http import BROKEN, EngineHTTP, shown, words
from turnloom.engine.look import Look
from turnloom.engine.metrics import ABORT_FAILURES
from turnloom.errors import EngineError, EngineUnavailable

log = logging.getLogger("turnloom.engine")

_CHECKS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 0.8)
"""Seconds before each look at the loads."""

_TOLD_AGAIN = (0, 1, 3)
"""After which looks it is told once more."""

_IDLE_LOOKS = 2
"""Looks in a row that must find nothing: a request may be on its way when the first is taken."""

_ANSWER_SECONDS = 2.0
"""For each answer within an abort, so that one slow worker leaves time for the rest."""

_LEFT_SECONDS = 600.0
"""How long a worker that is no longer listed may still have requests."""

_FAILURES = (*BROKEN, ValueError)


@dataclass(frozen=True, slots=True)
class _Load:
    """Requests running and waiting on a worker, over all its ranks; when it counted them and when it said so, in its own time."""

    requests: int
    taken: float
    asked: float


_SILENT = _Load(-1, 0.0, 0.0)


class Workers:
    """The workers behind one URL, as a `Stopper`. One that has left the list is told too: what it runs is not over."""

    def __init__(self, http: EngineHTTP) -> None:
        self._http = http
        self._listed: list[str] = []
        self._left: dict[str, float] = {}
        """Worker -> the loop's time when it was found to have left."""
        self._loads = Look(self._look)

    async def find(self) -> list[str]:
        """The base URLs behind the URL: the URL itself for a worker, and those known before where no list can be had.

        Raises EngineUnavailable where neither is to be had.
        """
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), self._http.session.get(f"{self._http.url}/workers") as response:
                found = [self._http.url] if response.status == 404 else await self._read(response)
        except BROKEN as error:
            if not self._listed:
                ABORT_FAILURES.inc()
                raise EngineUnavailable(f"cannot reach {self._http.name}: {words(error)}") from error
            swallowed(
                log, "engine.workers", "%s does not answer, its workers are taken to be those it had: %s", self._http.name, words(error)
            )
            found = self._listed
        now = asyncio.get_running_loop().time()
        self._left |= {worker: now for worker in self._listed if worker not in found}
        self._left = {worker: at for worker, at in self._left.items() if worker not in found and now - at < _LEFT_SECONDS}
        self._listed = found
        return found

    async def _read(self, response: aiohttp.ClientResponse) -> list[str]:
        try:
            response.raise_for_status()
            return read_workers(orjson.loads(await response.read())) or [self._http.url]
        except (aiohttp.ClientResponseError, ValueError) as error:
            swallowed(log, "engine.workers", "%s/workers gives no usable list: %s", self._http.name, words(error))
            return self._listed or [self._http.url]

    async def tell(self, rid: str) -> bool:
        workers = await self.find()
        left = list(self._left)
        told = await asyncio.gather(*(self._abort_on(worker, rid) for worker in [*workers, *left]))
        if not any(told):
            raise EngineUnavailable(f"none of {len(workers)} workers could be told")
        for worker, reached in zip(left, told[len(workers) :], strict=True):
            if not reached:
                self._left.pop(worker, None)
        return all(told[: len(workers)])

    async def gone(self, rid: str) -> AbortOutcome:
        """Nothing running or waiting anywhere is proof. Others' requests may be what is left, so a busy worker proves nothing.

        A worker answers with a snapshot that may be a second old, and in which a request's first tokens do not
        show. One that is older than the worker's own time at the first look is no answer.
        """
        since: dict[str, float] = {}
        idle = 0
        for number, pause in enumerate(_CHECKS):
            await asyncio.sleep(pause)
            loads = await self._loads()
            if any(load is _SILENT for load in loads.values()):
                return AbortOutcome.UNVERIFIED
            quiet = all(
                load is not None and load.taken >= since.setdefault(worker, load.asked) and not load.requests
                for worker, load in loads.items()
            )
            idle = idle + 1 if quiet else 0
            if idle == _IDLE_LOOKS:
                return AbortOutcome.VERIFIED
            if not idle and number in _TOLD_AGAIN:
                # A request that was still on its way is there to be told by now.
                await asyncio.gather(*(self._abort_on(worker, rid) for worker in loads))
        return AbortOutcome.UNVERIFIED

    async def _look(self) -> dict[str, _Load | None]:
        """What each worker says, those that have left too; None where it does not answer well, `_SILENT` where it never will."""
        workers = [*await self.find(), *self._left]
        return dict(zip(workers, await asyncio.gather(*map(self._load, workers)), strict=True))

    async def each(self, path: str, body: Mapping[str, Any]) -> None:
        """The same for every worker. Raises the first EngineError, when all have been asked."""
        asked = (self._http.tell(path, body, base=worker) for worker in await self.find())
        failures = [e for e in await asyncio.gather(*asked, return_exceptions=True) if isinstance(e, BaseException)]
        for failure in failures:
            if not isinstance(failure, EngineError):
                raise failure
            swallowed(log, "engine.pause", "%s: %s", path, failure)
        if failures:
            raise failures[0]

    async def _abort_on(self, worker: str, rid: str) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), self._http.session.post(f"{worker}/abort_request", json={"rid": rid}) as response:
                response.raise_for_status()
                return True
        except _FAILURES as error:
            swallowed(log, "engine.abort", "%s could not be told to abort %s: %s", shown(worker), rid, words(error))
            ABORT_FAILURES.inc()
            return False

    async def _load(self, worker: str) -> _Load | None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), self._http.session.get(f"{worker}/v1/loads") as response:
                if response.status == 404:
                    return _SILENT
                response.raise_for_status()
                said = orjson.loads(await response.read())
                ranks, asked = said["loads"], _seconds(said.get("timestamp"))
                taken = min((_seconds(rank.get("timestamp", asked)) for rank in ranks), default=asked)
                running = [int(rank["num_running_reqs"]) + int(rank.get("num_waiting_reqs") or 0) for rank in ranks]
                return _Load(sum(running), taken, asked) if running else None
        except (*_FAILURES, LookupError, TypeError, AttributeError) as error:
            swallowed(log, "engine.loads", "%s/v1/loads cannot be read: %s", shown(worker), words(error), level=logging.INFO)
            return None


def read_workers(answer: Any) -> list[str]:
    """The `url`s of `{"workers": [{"url": …}]}`, without `@rank` and trailing slash, each once. Raises ValueError without such a list."""
    entries = answer.get("workers") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise ValueError("the answer has no list of workers")
    found: dict[str, None] = {}
    for entry in entries:
        address = entry.get("url") if isinstance(entry, dict) else None
        if isinstance(address, str) and _usable(base := re.sub(r"@\d+$", "", address.rstrip("/"))):
            found[base] = None
    return list(found)


def _seconds(timestamp: Any) -> float:
    """A worker's time in seconds, as a number or in ISO 8601; 0 where it tells none."""
    return datetime.fromisoformat(timestamp).timestamp() if isinstance(timestamp, str) else float(timestamp or 0.0)


def _usable(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
