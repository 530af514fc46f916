"""Calls of the admin API over HTTP: what is refused comes back as the gateway's own error, what is lost is asked for again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import orjson

from turnloom import errors
from turnloom.errors import ConfigError, GatewayUnavailable, RequestError, TurnloomError
from turnloom.gateway.bind import checked_key

JSON = "application/json"

ATTEMPTS = 4
PAUSE_SECONDS = 0.1
"""Before the second attempt; doubled before each further one."""

_OWN_WORDS = (errors.UnknownResponse, errors.PromptTooLong)
"""Made of other things than a message. The admin API answers with neither."""


class Http:
    """`seconds` is how long one answer may take, None as long as it takes: a finish waits for turns in flight."""

    def __init__(self, url: str, admin_key: str, seconds: float | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"a gateway's URL begins with http:// or https://, not {url[:80]!r}")
        self._base = f"{url.rstrip('/')}/api/v1"
        self._headers = {"Authorization": f"Bearer {checked_key(admin_key)}"}
        self._timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=30)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        if self._session is not None:
            raise ConfigError("the client is started already")
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)

    async def stop(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(
        self, method: str, path: str, body: Any = None, *, has: str, query: dict[str, str] | None = None, again: bool = True
    ) -> Any:
        """The JSON object that it answers, which `has` this member. `again`: it may be asked twice and come to the same."""
        raw = await self.read(method, path, body, query=query, again=again)
        try:
            found = orjson.loads(raw)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict) or has not in found:
            raise self._strange(method, path, "what no gateway answers there")
        return found

    async def read(
        self, method: str, path: str, body: Any = None, *, kind: str = JSON, query: dict[str, str] | None = None, again: bool = True
    ) -> bytes:
        """The whole body of its answer, which is of this media type. What never reached the gateway is always asked again.

        Raises what the gateway says, GatewayUnavailable where it cannot be reached, broke
        off its answer, or is none, and ConfigError before `start` and after `stop`.
        """
        data = None if body is None else _spelled(body)
        for attempt in range(1, ATTEMPTS + 1):
            session = self._session
            if session is None or session.closed:
                raise ConfigError("the client is not started, or closed; use `async with Client(...)` or `with BlockingClient(...)`")
            try:
                async with session.request(method, self._base + path, data=data, params=query, allow_redirects=False) as answer:
                    raw = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if attempt == ATTEMPTS or not (again or isinstance(error, aiohttp.ClientConnectorError)):
                    raise GatewayUnavailable(f"the gateway at {self._base} did not answer {method} {path}: {_why(error)}") from error
            else:
                if answer.status == 204 or (answer.status < 300 and answer.content_type == kind):
                    return raw
                if answer.status < 300:
                    raise self._strange(method, path, answer.content_type)
                raise refused(answer.status, raw)
            await asyncio.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _strange(self, method: str, path: str, what: str) -> GatewayUnavailable:
        return GatewayUnavailable(f"{self._base} answered {method} {path} with {what}; is this the address of a gateway?")


def refused(status: int, raw: bytes) -> TurnloomError:
    """The error that the gateway answered with; what is no answer of a gateway is a GatewayUnavailable."""
    try:
        told = orjson.loads(raw)["error"]
        name, message = str(told["type"]), str(told["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return GatewayUnavailable(f"status {status} without a gateway's error; is this the address of a gateway?")
    kind = getattr(errors, name, TurnloomError)
    if not isinstance(kind, type) or not issubclass(kind, TurnloomError):
        kind = TurnloomError
    return RequestError(message) if issubclass(kind, _OWN_WORDS) else kind(message)


def _spelled(body: Any) -> bytes:
    """Raises BadRequest for what is no JSON: a number that is not finite too, which orjson would write as null."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise errors.BadRequest(f"this cannot be sent as JSON: {error}") from error


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
