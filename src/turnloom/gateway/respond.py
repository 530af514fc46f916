"""The socket side of one request: a JSON reply, or a stream kept alive while nothing can be sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress

from aiohttp import web

from turnloom.counters import swallowed
from turnloom.errors import EngineAborted, TurnloomError
from turnloom.wire.contract import Dialect, Head, Reply, ReplyEvent, StreamWriter, WireError

log = logging.getLogger("turnloom.gateway")

KEEPALIVE_SECONDS = 15.0

READ_SECONDS = 60.0
"""How long a client may leave a piece of its reply unread, when no more fits on its way, before it counts as gone."""

ERROR_PAUSE = 0.25
"""Seconds between what was last written and an error that ends the stream, so that clients read them apart."""


class OtherChoiceFailed(EngineAborted):
    """This reply is whole, but another choice of its request failed, and the response is whole or not at all."""


class Responder:
    """Writes one response. The status line goes out with the first event, or with the first keepalive where the engine is slow.

    Until then an error is an HTTP status; after it, the dialect's own way to end a
    stream. A request for several choices has one Responder and a `Choice` each.
    """

    def __init__(
        self, http: web.Request, dialect: Dialect, *, stream: bool, choices: int = 1, keepalive: float = KEEPALIVE_SECONDS
    ) -> None:
        self._http = http
        self._dialect = dialect
        self._stream = stream
        self._keepalive = keepalive
        self._writer: StreamWriter | None = None
        self._head: Head | None = None
        self._begun = False
        self._opening = b""
        self._response: web.StreamResponse | None = None
        self._pinger: asyncio.Task[None] | None = None
        self._last_write = 0.0
        self.choices = [Choice(self, number) for number in range(choices)]
        self._replies: dict[int, Reply] = {}
        self._lost = 0
        self._settled = asyncio.Event()
        """Every choice has its reply or will never have one."""
        self._whole: asyncio.Task[None] | None = None
        self._sending = asyncio.Lock()

    @property
    def response(self) -> web.StreamResponse | None:
        """What was sent, None while nothing was."""
        return self._response

    def open(self, head: Head) -> None:
        if not self._stream or self._begun or (self._head is not None and self._head.turn_id != head.turn_id):
            return
        self._head, self._writer = head, self._dialect.stream(head)
        if self._pinger is None:
            self._last_write = asyncio.get_running_loop().time()
            self._pinger = asyncio.create_task(self._ping())

    def _begin(self) -> StreamWriter:
        """The writer, whose opening words are spelled before any other."""
        assert self._writer is not None
        if not self._begun:
            self._begun, self._opening = True, self._writer.begin()
        return self._writer

    async def event(self, event: ReplyEvent, choice: int) -> None:
        if self._writer is not None and (data := self._begin().event(event, choice)):
            await self._read_in_time(self._send(data))

    async def finish(self, reply: Reply, choice: int) -> None:
        self._replies[choice] = reply
        last = self._settle() and not self._lost
        if last:
            await self._stop_pinging()
        if self._writer is not None:
            await self._read_in_time(self._finish_stream(self._begin(), reply, choice, last))
        elif len(self.choices) == 1:
            await self._read_in_time(self._write_whole())
        else:
            await self._finish_together()

    async def _finish_stream(self, writer: StreamWriter, reply: Reply, choice: int, last: bool) -> None:
        if last:
            await self._end_stream(writer.finish(reply, choice))
        else:
            await self._send(writer.finish(reply, choice))

    async def _end_stream(self, data: bytes) -> None:
        await self._send(data)
        assert self._response is not None
        await self._response.write_eof()

    async def _finish_together(self) -> None:
        """One body for all choices: each returns when it is written, or raises when it never will be."""
        await self._settled.wait()
        if self._lost:
            raise OtherChoiceFailed("another choice of this request failed")
        if self._whole is None:
            self._whole = asyncio.create_task(self._read_in_time(self._write_whole()))
            self._whole.add_done_callback(lambda task: task.cancelled() or task.exception())
        while not self._whole.done():
            # A client closes its connection once it has read all; that is no reason to call what it read undelivered.
            with suppress(asyncio.CancelledError):
                await asyncio.wait({self._whole})
        self._whole.result()

    async def _write_whole(self) -> None:
        replies = [self._replies[number] for number in sorted(self._replies)]
        headers = self._named(replies[0].head)
        self._response = web.Response(body=self._dialect.write(replies), content_type="application/json", headers=headers)
        await self._response.prepare(self._http)
        await self._response.write_eof()

    async def _read_in_time(self, writing: Coroutine[None, None, None]) -> None:
        """Raises ConnectionError when the client does not read what is written."""
        task = asyncio.current_task()
        assert task is not None
        cancelled = task.cancelling()
        try:
            async with asyncio.timeout(READ_SECONDS):
                await writing
        except TimeoutError as error:
            raise self._abandoned() from error
        except asyncio.CancelledError as error:
            if task.cancelling() > cancelled:
                raise
            # Nobody cancelled this: a wait for this reader was cut short before, and aiohttp cannot take it up again.
            raise self._abandoned() from error

    def _abandoned(self) -> ConnectionResetError:
        if self._http.transport is not None:
            self._http.transport.abort()
        return ConnectionResetError(f"it did not read the reply within {READ_SECONDS:g} s")

    def lose(self, choice: int) -> None:
        """This choice is over. Where it has no reply, no whole response can be written."""
        if choice not in self._replies:
            self._lost += 1
            self._settle()

    def _settle(self) -> bool:
        if len(self._replies) + self._lost == len(self.choices):
            self._settled.set()
        return self._settled.is_set()

    async def error(self, error: TurnloomError) -> web.StreamResponse:
        """The error in the dialect's words, as a status where none was sent yet."""
        await self._stop_pinging()
        if self._response is None or self._writer is None:
            return http_error(self._dialect.error(error))
        # Google's SDK for JavaScript knows an error for what it is only where a read begins with it.
        await asyncio.sleep(max(self._last_write + ERROR_PAUSE - asyncio.get_running_loop().time(), 0.0))
        try:
            await self._read_in_time(self._end_stream(self._begin().error(error)))
        except ConnectionError as gone:
            words = "the client left before it could be told: %s (%s)"
            swallowed(log, "gateway.error", words, error, gone, level=logging.INFO)
        return self._response

    async def close(self) -> None:
        await self._stop_pinging()

    def _named(self, head: Head | None = None) -> dict[str, str]:
        """The turn's id as the official SDKs of Anthropic and OpenAI look for a request's."""
        found = head or self._head
        return {} if found is None else {"request-id": f"req_{found.turn_id}", "x-request-id": f"req_{found.turn_id}"}

    async def _send(self, data: bytes) -> None:
        async with self._sending:
            await self._write(data)

    async def _write(self, data: bytes) -> None:
        """Write `data`, and before the first of it the status line and what opens the stream. Only while `_sending` is held."""
        if self._response is None:
            assert self._writer is not None
            self._response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **self._named()})
            self._response.content_type = self._writer.content_type
            self._response.charset = "utf-8"
            data = self._opening + data
            await self._response.prepare(self._http)
        await self._response.write(data)
        self._last_write = asyncio.get_running_loop().time()

    async def _ping(self) -> None:
        """A keepalive is spelled only when it goes out at once: some dialects number their events."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                await asyncio.sleep(max(self._last_write + self._keepalive - clock(), 0.01))
                async with self._sending:
                    if clock() - self._last_write >= self._keepalive:
                        await self._read_in_time(self._write(self._begin().ping()))
        except ConnectionError as gone:
            swallowed(log, "gateway.keepalive", "keepalive stops, the client is gone: %s", gone, level=logging.INFO)

    async def _stop_pinging(self) -> None:
        pinger, self._pinger = self._pinger, None
        if pinger is not None:
            pinger.cancel()
            await asyncio.wait({pinger})


class Choice:
    """One reply of a response, as the main path writes it."""

    def __init__(self, out: Responder, number: int) -> None:
        self._out = out
        self.number = number

    def open(self, head: Head) -> None:
        """From here on the client is kept alive. Called again when the prompt is built and its length is known."""
        self._out.open(head)

    async def event(self, event: ReplyEvent) -> None:
        await self._out.event(event, self.number)

    async def finish(self, reply: Reply) -> None:
        """Returns when the last byte is with the operating system. Raises ConnectionError when the client is gone,
        OtherChoiceFailed when the response is whole or not at all."""
        await self._out.finish(reply, self.number)


def http_error(error: WireError) -> web.Response:
    return web.Response(status=error.status, body=error.body, headers=dict(error.headers), content_type="application/json")
