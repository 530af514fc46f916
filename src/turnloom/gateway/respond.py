"""The socket side of one turn: a JSON reply, or a stream kept alive while nothing can be sent."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from turnloom.errors import TurnloomError
from turnloom.wire.contract import Dialect, Reply, ReplyEvent, StreamWriter, WireError

log = logging.getLogger("turnloom.gateway")

KEEPALIVE_SECONDS = 15.0

READ_SECONDS = 60.0
"""How long a client may take to read the end of its reply before it counts as gone."""


class Responder:
    """Writes one reply. The status line goes out with the first event, or with the first keepalive where the engine is slow.

    Until then an error is an HTTP status; after it, the dialect's own way to end a
    stream. `finish` returns when the last byte is with the operating system, and
    raises ConnectionError when the client is gone.
    """

    def __init__(self, http: web.Request, dialect: Dialect, *, stream: bool, keepalive: float = KEEPALIVE_SECONDS) -> None:
        self._http = http
        self._dialect = dialect
        self._stream = stream
        self._keepalive = keepalive
        self._writer: StreamWriter | None = None
        self._response: web.StreamResponse | None = None
        self._pinger: asyncio.Task[None] | None = None
        self._last_write = 0.0

    @property
    def response(self) -> web.StreamResponse | None:
        """What was sent, None while nothing was."""
        return self._response

    def open(self, turn_id: str, model: str, prompt_tokens: int) -> None:
        """The prompt is built and the engine is asked: from here on the client is kept alive."""
        if self._stream:
            self._writer = self._dialect.stream(turn_id, model, prompt_tokens)
            self._last_write = asyncio.get_running_loop().time()
            self._pinger = asyncio.create_task(self._ping())

    async def event(self, event: ReplyEvent) -> None:
        if self._writer is not None and (data := self._writer.event(event)):
            await self._send(data)

    async def finish(self, reply: Reply) -> None:
        await self._stop_pinging()
        data = self._writer.finish(reply) if self._writer is not None else self._dialect.write(reply)
        try:
            async with asyncio.timeout(READ_SECONDS):
                if self._writer is not None:
                    await self._send(data)
                else:
                    self._response = web.Response(body=data, content_type="application/json")
                    await self._response.prepare(self._http)
                assert self._response is not None
                await self._response.write_eof()
        except TimeoutError as error:
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ConnectionResetError(f"it did not read the reply within {READ_SECONDS:g} s") from error

    async def error(self, error: TurnloomError) -> web.StreamResponse:
        """The error in the dialect's words, as a status where none was sent yet."""
        await self._stop_pinging()
        if self._response is None or self._writer is None:
            return http_error(self._dialect.error(error))
        try:
            await self._send(self._writer.error(error))
            await self._response.write_eof()
        except ConnectionError as gone:
            log.info("the client left before it could be told: %s (%s)", error, gone)
        return self._response

    async def close(self) -> None:
        await self._stop_pinging()

    async def _send(self, data: bytes) -> None:
        if self._response is None:
            assert self._writer is not None
            self._response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
            self._response.content_type = "text/event-stream"
            self._response.charset = "utf-8"
            begin = self._writer.begin()
            await self._response.prepare(self._http)
            data = begin + data
        self._last_write = asyncio.get_running_loop().time()
        await self._response.write(data)

    async def _ping(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(self._last_write + self._keepalive - clock(), 0.01))
            if clock() - self._last_write >= self._keepalive:
                assert self._writer is not None
                try:
                    await self._send(self._writer.ping())
                except ConnectionError as gone:
                    log.info("keepalive stops, the client is gone: %s", gone)
                    return

    async def _stop_pinging(self) -> None:
        pinger, self._pinger = self._pinger, None
        if pinger is not None:
            pinger.cancel()
            await asyncio.wait({pinger})


def http_error(error: WireError) -> web.Response:
    return web.Response(status=error.status, body=error.body, headers=dict(error.headers), content_type="application/json")
