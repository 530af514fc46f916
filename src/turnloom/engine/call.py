"""One streamed request to an engine, from POST to the last trace of its work: what the clients of all HTTP engines share.

Always streams: a server notices that the client of a stream has gone at once,
and of anything else late or never. Stops the work before it closes a connection:
once the connection is gone, a server may have forgotten the id to stop. What
proves that a request is gone is the end of its own stream; where that does not
come, what the server says of its load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from typing import Protocol

import aiohttp

from turnloom.engine.contract import AbortOutcome, Chunk, Trace
from turnloom.engine.http import BROKEN, Call, EngineHTTP, refusal, words
from turnloom.engine.metrics import ABORT_FAILURES, ABORTS, PROTOCOL_ERRORS
from turnloom.errors import EngineError, EngineProtocol, EngineUnavailable

log = logging.getLogger("turnloom.engine")

BUDGET = 5.0
"""Seconds for a whole abort, its check included."""

_END_SECONDS = 1.0
"""How long a stream that was told to stop may take to say that it did."""

_DRAIN_SECONDS = 1.0
"""How long to wait for the end of the body after the last chunk, so that the connection can be used again."""


class Decoder(Protocol):
    """Fed the payloads of one stream's `data:` lines, gives new tokens."""

    finished: bool
    """The last chunk was given."""

    @property
    def count(self) -> int:
        """Tokens given so far."""
        ...

    def feed(self, data: bytes) -> Chunk | None:
        """Raises EngineError for what the engine says is wrong, and EngineProtocol for what contradicts itself."""
        ...


class Stopper(Protocol):
    """How an engine is told to stop one request."""

    async def tell(self, rid: str) -> bool:
        """Whether every server that may have the request was told. Raises EngineError where none could be."""
        ...

    async def gone(self, rid: str) -> AbortOutcome:
        """What the servers' loads say, after a while at most; told again where that can help."""
        ...


class Calls:
    """The streams of one engine's client."""

    def __init__(self, http: EngineHTTP, stopper: Stopper) -> None:
        self._http = http
        self._stopper = stopper
        self._leaving: set[asyncio.Task[AbortOutcome]] = set()
        self._live: dict[str, asyncio.Event] = {}
        """By request id, the streams that someone reads; set when one has come to its end."""

    async def stream(self, call: Call, decoder: Decoder, rid: str, trace: Trace | None = None) -> AsyncGenerator[Chunk, None]:
        """The chunks of one call, as `Engine.sample` promises them."""
        name, leave = self._http.name, True
        ended = self._live[rid] = asyncio.Event()
        try:
            response = await asyncio.shield(call)
            if response.status != 200:
                leave = False
                raise await refusal(response)
            last = None
            async with aclosing(_chunks(response, decoder)) as chunks:
                async for chunk in chunks:
                    if chunk.finish is None:
                        yield chunk
                    else:
                        last = chunk
                        ended.set()
            if last is None:
                raise EngineUnavailable(f"{name} ended the stream after {decoder.count} tokens without a finish reason")
            leave = False
            yield last
        except aiohttp.ClientConnectorError as error:
            leave = False
            raise EngineUnavailable(f"cannot reach {name}: {error}") from error
        except BROKEN as error:
            raise EngineUnavailable(f"{name} broke off after {decoder.count} tokens: {words(error)}") from error
        except EngineProtocol:
            PROTOCOL_ERRORS.inc()
            raise
        finally:
            ended.set()
            self._live.pop(rid, None)
            if leave:
                self.leave(call, rid, trace)
            else:
                _release(call)

    def leave(self, call: Call, rid: str, trace: Trace | None = None) -> None:
        """Let go of a request and stop its work. Goes on by itself; `trace` gets what comes of it."""
        task = asyncio.create_task(self._stop(rid, lambda: _read_out(call), lambda: _close(call)))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        if trace is not None:
            trace.aborts.append(task)

    async def abort(self, rid: str) -> AbortOutcome:
        """Stop a request by its id alone, whoever reads it."""
        ended = self._live.get(rid)
        return await self._stop(rid, ended.wait if ended is not None else _unseen, lambda: None)

    async def _stop(self, rid: str, end: Callable[[], Awaitable[bool]], close: Callable[[], None]) -> AbortOutcome:
        """Tell the servers, see the stream end, close it, and look at what is left; all of it within the budget. Never raises."""
        outcome = AbortOutcome.FAILED
        try:
            if not rid:
                raise EngineUnavailable("an abort without a request id would stop every request")
            async with asyncio.timeout(BUDGET):
                told = await self._stopper.tell(rid)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_SECONDS):
                        outcome = AbortOutcome.VERIFIED if await end() else outcome
                close()
                if outcome is not AbortOutcome.VERIFIED:
                    outcome = await self._stopper.gone(rid) if told else AbortOutcome.UNVERIFIED
        except (EngineError, *BROKEN) as error:
            log.warning("the abort of %s at %s came to no end: %s", rid, self._http.name, words(error))
            ABORT_FAILURES.inc()
        finally:
            close()
        ABORTS.labels(outcome.value).inc()
        return outcome

    async def close(self) -> None:
        """Wait for every stop that was begun."""
        while self._leaving:
            await asyncio.wait(self._leaving)


async def _unseen() -> bool:
    return False


async def _read_out(call: Call) -> bool:
    """Whether the server ended this response in good order: what it was working on is over."""
    try:
        response = await asyncio.shield(call)
        while await response.content.readany():
            pass
    except BROKEN:
        return False
    return True


def _close(call: Call) -> None:
    """Without waiting. A request that nothing has answered yet is given up."""
    if not call.done():
        call.cancel()
    elif not call.cancelled() and call.exception() is None:
        call.result().close()


def _release(call: Call) -> None:
    """The connection can be used again if its response was read to the end."""
    if call.done() and not call.cancelled() and call.exception() is None:
        call.result().release()


class EventLines:
    """Splits a byte stream into the payloads of its `data:` lines, whatever their length and wherever it is cut."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        searched = len(self._held)
        self._held += data
        start = 0
        while (end := self._held.find(b"\n", max(start, searched))) >= 0:
            line = bytes(self._held[start:end]).rstrip(b"\r")
            start = end + 1
            if line.startswith(b"data:"):
                yield line[5:].strip()
        del self._held[:start]


async def _chunks(response: aiohttp.ClientResponse, decoder: Decoder) -> AsyncGenerator[Chunk, None]:
    """New tokens as they arrive, until the stream ends."""
    lines, done = EventLines(), False
    while data := await _more(response, decoder):
        for payload in lines.feed(data):
            done = done or payload == b"[DONE]"
            if not done and (chunk := decoder.feed(payload)) is not None:
                yield chunk


async def _more(response: aiohttp.ClientResponse, decoder: Decoder) -> bytes:
    """What comes next, to the very end and not only to `[DONE]`: a connection with bytes left on it cannot be used again."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS if decoder.finished else None):
            return await response.content.readany()
    except (TimeoutError, aiohttp.ClientError) as error:
        if not decoder.finished:
            raise
        log.info("the stream had no proper end after its last chunk: %s", words(error))
        response.close()
        return b""
