"""Stops a request on the worker that has it, and checks that it stopped. Never raises, never takes more than the budget.

A router knows its workers (`GET /workers`) but forwards no abort; a server
that answers 404 there is a worker itself. SGLang answers an abort with 200
whatever happens, so what proves it is the load: requests running or waiting.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import aiohttp
import orjson

from turnloom.engine.contract import AbortOutcome
from turnloom.engine.metrics import ABORT_FAILURES, ABORTS

log = logging.getLogger("turnloom.engine")

BUDGET = 5.0
"""Seconds for the whole abort, its check included."""

_CHECKS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Seconds before each look at the load. It must fall, or be nothing; on a busy server it may do neither."""

_FAILURES = (aiohttp.ClientError, OSError, ValueError)


async def abort_request(session: aiohttp.ClientSession, url: str, rid: str) -> AbortOutcome:
    """Abort `rid` on the server or router at `url`; each worker's failure is its own."""
    outcome = AbortOutcome.FAILED
    if not rid:
        log.error("an abort without a request id would stop every request; %s is left alone", url)
        return outcome
    try:
        async with asyncio.timeout(BUDGET):
            outcome = await _abort_and_check(session, await find_workers(session, url), rid)
    except TimeoutError:
        log.warning("the abort of %s at %s took longer than %g s", rid, url, BUDGET)
        ABORT_FAILURES.inc()
    except _FAILURES as error:
        log.warning("the abort of %s at %s failed: %s", rid, url, _words(error))
        ABORT_FAILURES.inc()
    ABORTS.labels(outcome.value).inc()
    return outcome


async def find_workers(session: aiohttp.ClientSession, url: str) -> list[str]:
    """The base URLs behind `url`; `url` itself when it lists none that can be used."""
    async with session.get(f"{url}/workers") as response:
        if response.status == 404:
            return [url]
        try:
            response.raise_for_status()
            return read_workers(orjson.loads(await response.read())) or [url]
        except (aiohttp.ClientResponseError, ValueError) as error:
            log.warning("%s/workers gives no usable list, it is taken for a worker itself: %s", url, _words(error))
            return [url]


def read_workers(answer: Any) -> list[str]:
    """The `url`s of `{"workers": [{"url": …}]}`, without `@rank` and trailing slash, each once. Raises ValueError without such a list."""
    entries = answer.get("workers") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise ValueError("the answer has no list of workers")
    found: dict[str, None] = {}
    for entry in entries:
        address = entry.get("url") if isinstance(entry, dict) else None
        if isinstance(address, str) and address.startswith(("http://", "https://")):
            found[re.sub(r"@\d+$", "", address.rstrip("/"))] = None
    return list(found)


async def _abort_and_check(session: aiohttp.ClientSession, workers: list[str], rid: str) -> AbortOutcome:
    before = await _loads(session, workers)
    told = await asyncio.gather(*(_abort_on(session, worker, rid) for worker in workers))
    if not any(told):
        return AbortOutcome.FAILED
    if not all(told):
        return AbortOutcome.UNVERIFIED
    for pause in _CHECKS:
        await asyncio.sleep(pause)
        now = await _loads(session, workers)
        if None in now or None in before:
            return AbortOutcome.UNVERIFIED
        if not any(now) or any(new < old for new, old in zip(now, before, strict=True) if new is not None and old is not None):
            return AbortOutcome.VERIFIED
    return AbortOutcome.UNVERIFIED


async def _abort_on(session: aiohttp.ClientSession, worker: str, rid: str) -> bool:
    try:
        async with session.post(f"{worker}/abort_request", json={"rid": rid}) as response:
            response.raise_for_status()
            return True
    except _FAILURES as error:
        log.warning("%s could not be told to abort %s: %s", worker, rid, _words(error))
        ABORT_FAILURES.inc()
        return False


async def _loads(session: aiohttp.ClientSession, workers: list[str]) -> list[int | None]:
    return await asyncio.gather(*(_load(session, worker) for worker in workers))


async def _load(session: aiohttp.ClientSession, worker: str) -> int | None:
    """Requests running and waiting on a worker, over all its ranks; None when it does not say."""
    try:
        async with session.get(f"{worker}/v1/loads") as response:
            if response.status != 200:
                return None
            ranks = orjson.loads(await response.read())["loads"]
            return sum(int(rank["num_running_reqs"]) + int(rank.get("num_waiting_reqs") or 0) for rank in ranks)
    except (*_FAILURES, LookupError, TypeError, AttributeError) as error:
        log.info("%s/v1/loads cannot be read: %s", worker, _words(error))
        return None


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
