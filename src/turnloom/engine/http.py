"""One engine's HTTP connections: requests that outlive their caller, JSON answers, errors in the engine's own words.

Knows nothing of what is asked or sampled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import orjson

from turnloom.counters import swallowed
from turnloom.errors import EngineError, EngineOverloaded, EngineProtocol, EngineRejected, EngineUnavailable

log = logging.getLogger("turnloom.engine")

BROKEN = (aiohttp.ClientError, OSError)
"""What a connection that cannot be made, or breaks, raises. TimeoutError is an OSError."""

INFO_SECONDS = 30.0
"""For one answer about the server itself: one that is loading a model is slow to say so."""

HEALTH_SECONDS = 5.0

_KEEPALIVE_SECONDS = 4.0
"""uvicorn closes a connection that was idle for 5 s: one that is used again just then breaks, and a POST is not repeated."""

_OVERLOADED = (408, 429, 503, 529)

_NEVER = (501, 505)
"""Not implemented, HTTP version not supported: the same at the next attempt."""

_COLLISION = "Duplicate request ID"
"""SGLang's words for an id that is live: a router asked again before a worker had let go of the first attempt. Another id helps."""

Call = asyncio.Task[aiohttp.ClientResponse]


class EngineHTTP:
    """`idle_timeout` is the seconds a stream may stay silent, queueing and prefill included."""

    def __init__(self, url: str, *, api_key: str | None = None, connect_timeout: float = 10.0, idle_timeout: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.name = shown(self.url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout, sock_read=idle_timeout)
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # Every turn in flight holds a connection, so their number is not this client's to limit.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self._session

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Call:
        """The request as a task of its own: cancelling a caller must not close the connection before the abort."""
        sent = {"Content-Type": "application/json", **(headers or {})}

        async def post() -> aiohttp.ClientResponse:
            return await self.session.post(f"{self.url}{path}", data=orjson.dumps(body), headers=sent)

        return asyncio.create_task(post())

    async def tell(self, path: str, body: Mapping[str, Any] | None = None, *, base: str = "", seconds: float = INFO_SECONDS) -> Any:
        """POST and the JSON that came back, None where it is none. Raises EngineError."""
        url = f"{base or self.url}{path}"
        try:
            async with asyncio.timeout(seconds), self.session.post(url, json=body or {}) as response:
                if response.status >= 400:
                    raise await refusal(response, f"{shown(url)}: ")
                with suppress(ValueError):
                    return orjson.loads(await response.read())
                return None
        except BROKEN as error:
            raise EngineUnavailable(f"{shown(url)} gave no answer: {words(error)}") from error

    async def info(self, *paths: str, base: str = "", needed: bool = True) -> dict[str, Any]:
        """The JSON object at the first path that has one; empty when none does and none is `needed`. Raises EngineUnavailable."""
        problem = ""
        for path in paths:
            try:
                async with asyncio.timeout(INFO_SECONDS), self.session.get(f"{base or self.url}{path}") as response:
                    found = orjson.loads(await response.read()) if response.status == 200 else None
                    if isinstance(found, dict):
                        return found
                    problem = f"{path} answered {response.status}"
            except (*BROKEN, ValueError) as error:
                problem = f"{path}: {words(error)}"
        if needed:
            raise EngineUnavailable(f"{self.name} is not ready: {problem}")
        return {}

    async def healthy(self, path: str = "/health") -> bool:
        try:
            async with asyncio.timeout(HEALTH_SECONDS), self.session.get(f"{self.url}{path}") as response:
                return response.status == 200
        except BROKEN as error:
            swallowed(log, "engine.health", "%s is not healthy: %s", self.name, words(error), level=logging.INFO)
            return False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def shown(url: str) -> str:
    """A URL for records and logs: without user, password and query."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    return urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, parts.path.rstrip("/"), "", ""))


def words(error: BaseException) -> str:
    return str(error) or type(error).__name__


def error_for_status(status: int, message: str, retry_after: float | None = None) -> EngineError:
    """The error that an HTTP status, or a status code inside an abort, means. `retry_after` is in seconds."""
    if message.startswith(_COLLISION):
        return EngineUnavailable(message)
    if status in _OVERLOADED:
        return EngineOverloaded(message, retry_after)
    if 400 <= status < 500 or status in _NEVER:
        return EngineRejected(message)
    return EngineUnavailable(message)


async def refusal(response: aiohttp.ClientResponse, asked: str = "") -> EngineError:
    """The error of a response that is not 200: what was `asked`, and the server's own words. The connection must still be released."""
    try:
        text = (await response.content.read(4096)).decode("utf-8", "replace").strip()
    except BROKEN:
        text = ""
    try:
        found = orjson.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        said = str(error.get("message") or error.get("detail") or text) if isinstance(error, dict) else str(error)
    except ValueError:
        said = text
    after = response.headers.get("Retry-After", "")
    seconds = float(after) if after.isdecimal() else None
    return error_for_status(response.status, asked + (said or f"the engine answered {response.status}"), seconds)


async def answered(call: Call) -> aiohttp.ClientResponse:
    """The response of a call, which outlives a caller that is cancelled. Raises what the call raises, and ClientError for one given up."""
    await asyncio.wait({call})
    if call.cancelled():
        raise aiohttp.ClientConnectionError("the request was given up")
    return call.result()


async def answer(response: aiohttp.ClientResponse, name: str) -> Any:
    """The JSON of an answer that is not streamed. Raises EngineError."""
    if response.status != 200:
        raise await refusal(response)
    try:
        return orjson.loads(await response.read())
    except ValueError as error:
        raise EngineProtocol(f"{name} gave an answer that is not JSON") from error
