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
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from turnloom.counters import swallowed
from turnloom.engine.contract import AbortOutcome, Chunk, Trace
from turnloom.engine.http import BROKEN, Call, EngineHTTP, answer, answered, refusal, words
from turnloom.engine.metrics import ABORT_FAILURES, ABORTS, PROTOCOL_ERRORS
from turnloom.errors import EngineError, EngineProtocol, EngineUnavailable
from turnloom.types import NO_FLOATS, NO_IDS, Finish, FinishReason

log = logging.getLogger("turnloom.engine")

BUDGET = 5.0
"""Seconds for a whole abort, its check included."""

_END_SECONDS = (0.4, 0.6, 0.8)
"""How long a stream that was told to stop may take to say that it did; after each but the last it is told again."""

_DRAIN_SECONDS = 1.0
"""How long to wait for the end of the body after the last chunk, so that the connection can be used again."""

_STOPPED = Chunk(NO_IDS, NO_FLOATS, Finish(FinishReason.ABORT, message="stopped"))


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

    async def tell(self, rid: str) -> bool | None:
        """Whether every server that may have the request was told; None where a closed connection is all that stops one.

        Raises EngineError where none could be told.
        """
        ...

    async def gone(self, rid: str) -> AbortOutcome:
        """What the servers' loads say, after a while at most; told again where that can help."""
        ...


@dataclass(slots=True, eq=False)
class _Live:
    """A stream that someone reads."""

    call: Call
    ended: asyncio.Future[bool]
    """Whether the server itself brought it to its end."""
    stop: asyncio.Task[AbortOutcome] | None = None
    """What was begun when it was stopped by its id."""

    def end(self, *, well: bool) -> None:
        if not self.ended.done():
            self.ended.set_result(well)


class Calls:
    """The streams of one engine's client."""

    def __init__(self, http: EngineHTTP, stopper: Stopper) -> None:
        self._http = http
        self._stopper = stopper
        self._live: dict[str, _Live] = {}
        self._stops: dict[asyncio.Task[AbortOutcome], tuple[str, Call | None]] = {}
        """Every stop that was begun, the request it is for, and the connection that it will close."""
        self._closed = False

    async def stream(self, call: Call, decoder: Decoder, rid: str, trace: Trace | None = None) -> AsyncGenerator[Chunk, None]:
        """The chunks of one call, as `Engine.sample` promises them."""
        name, leave, last = self._http.name, True, None
        live = self._live[rid] = _Live(call, asyncio.get_running_loop().create_future())
        try:
            response = await answered(call)
            if response.status != 200:
                leave = False
                raise await refusal(response)
            async with aclosing(_chunks(response, decoder)) as chunks:
                async for chunk in chunks:
                    if chunk.finish is None:
                        yield chunk
                    else:
                        last, leave = chunk, False
                        live.end(well=True)
            if last is None and live.stop is None:
                raise EngineUnavailable(f"{name} ended the stream after {decoder.count} tokens without a finish reason")
        except aiohttp.ClientConnectorError as error:
            leave = False
            raise EngineUnavailable(f"cannot reach {name}: {error}") from error
        except BROKEN as error:
            if live.stop is None:
                raise EngineUnavailable(f"{name} broke off after {decoder.count} tokens: {words(error)}") from error
        except EngineProtocol:
            # Whatever goes on after its own end is not known to have ended.
            leave = True
            PROTOCOL_ERRORS.inc()
            raise
        finally:
            live.end(well=False)
            if self._live.get(rid) is live:
                del self._live[rid]
            if live.stop is not None:
                # One that came to its own end meanwhile was not stopped.
                if last is None or (last.finish is not None and last.finish.reason is FinishReason.ABORT):
                    _record(live.stop, trace)
            elif leave:
                self.leave(call, rid, trace)
            else:
                _release(call)
        yield last or _STOPPED

    def leave(self, call: Call, rid: str, trace: Trace | None = None) -> None:
        """Let go of a request and stop its work. Goes on by itself; `trace` gets what comes of it."""
        if self._closed:
            _close(call)
        else:
            _record(self._begin(rid, call, lambda: _read_out(call)), trace)

    async def abort(self, rid: str) -> AbortOutcome:
        """Stop a request by its id alone, whoever reads it: the stream ends as aborted, if need be without the server."""
        return AbortOutcome.FAILED if self._closed else await asyncio.shield(self._abort(rid))

    def _abort(self, rid: str) -> asyncio.Task[AbortOutcome]:
        if (live := self._live.get(rid)) is not None:
            if live.stop is None:
                live.stop = self._begin(rid, live.call, lambda: asyncio.shield(live.ended))
            return live.stop
        begun = next((stop for stop, (other, _) in self._stops.items() if other == rid), None)
        return begun or self._begin(rid, None, _unseen)

    def _begin(self, rid: str, call: Call | None, end: Callable[[], Awaitable[bool]]) -> asyncio.Task[AbortOutcome]:
        task = asyncio.create_task(self._stop(rid, call, end))
        self._stops[task] = rid, call
        task.add_done_callback(self._ended)
        return task

    def _ended(self, stop: asyncio.Task[AbortOutcome]) -> None:
        """Also of one that was cancelled before it began."""
        _, call = self._stops.pop(stop)
        _close(call)

    async def _stop(self, rid: str, call: Call | None, end: Callable[[], Awaitable[bool]]) -> AbortOutcome:
        """Tell the servers, see the stream end, close it, and look at what is left; all of it within the budget. Never raises."""
        outcome = AbortOutcome.FAILED
        try:
            if not rid:
                raise EngineUnavailable("an abort without a request id would stop every request")
            async with asyncio.timeout(BUDGET):
                told = await self._stopper.tell(rid)
                outcome = AbortOutcome.UNVERIFIED
                if told is not None and await self._seen_to_end(rid, end):
                    outcome = AbortOutcome.VERIFIED
                _close(call)
                if told is not False and outcome is not AbortOutcome.VERIFIED:
                    outcome = await self._stopper.gone(rid)
        except (EngineError, *BROKEN) as error:
            swallowed(log, "engine.abort", "the abort of %s at %s came to no end: %s", rid, self._http.name, words(error))
            if isinstance(error, TimeoutError) and outcome is AbortOutcome.FAILED:
                ABORT_FAILURES.inc()
        ABORTS.labels(outcome.value).inc()
        return outcome

    async def _seen_to_end(self, rid: str, end: Callable[[], Awaitable[bool]]) -> bool:
        """Told again meanwhile: a request that was still on its way when it was told first is there by then."""
        seen = asyncio.ensure_future(end())
        try:
            for seconds in _END_SECONDS:
                await asyncio.wait({seen}, timeout=seconds)
                if seen.done():
                    return seen.result()
                if seconds != _END_SECONDS[-1]:
                    await self._stopper.tell(rid)
            return False
        finally:
            seen.cancel()

    async def ask(self, path: str, body: Mapping[str, Any], rid: str) -> Any:
        """One answer that is not streamed. Raises EngineError."""
        call, leave = self._http.post(path, body), True
        try:
            response = await answered(call)
            leave = False
            return await answer(response, self._http.name)
        except BROKEN as error:
            leave = not isinstance(error, aiohttp.ClientConnectorError)
            raise EngineUnavailable(f"{self._http.name} gave no answer: {words(error)}") from error
        except asyncio.CancelledError:
            leave = True
            raise
        finally:
            if leave:
                self.leave(call, rid)
            else:
                _release(call)

    async def close(self) -> None:
        """Stop what still runs, and wait for every stop that was begun."""
        for rid in list(self._live):
            self._abort(rid)
        while self._stops:
            await asyncio.wait(self._stops)
        self._closed = True


def _record(stop: asyncio.Task[AbortOutcome], trace: Trace | None) -> None:
    if trace is not None:
        trace.aborts.append(stop)


async def _unseen() -> bool:
    return False


async def _read_out(call: Call) -> bool:
    """Whether the server ended this response in good order: what it was working on is over."""
    try:
        response = await answered(call)
        while await _read(response):
            pass
    except BROKEN:
        return False
    return True


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.content.readany()
    except RuntimeError as error:
        # aiohttp's word for a connection that this side has closed.
        raise aiohttp.ClientConnectionError(str(error)) from error


def _close(call: Call | None) -> None:
    """Without waiting. A request that nothing has answered yet is given up."""
    if call is None:
        return
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
    while data := await _more(response, over=done or decoder.finished):
        for payload in lines.feed(data):
            done = done or payload == b"[DONE]"
            if not done and (chunk := decoder.feed(payload)) is not None:
                yield chunk
                # Hundreds of chunks may have come at once, and what a reader does with one need not wait for anything.
                await asyncio.sleep(0)


async def _more(response: aiohttp.ClientResponse, *, over: bool) -> bytes:
    """What comes next, to the very end and not only to `[DONE]`: a connection with bytes left on it cannot be used again."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS if over else None):
            return await _read(response)
    except BROKEN as error:
        if not over:
            raise
        swallowed(log, "engine.stream_end", "the stream had no proper end after its last chunk: %s", words(error), level=logging.INFO)
        response.close()
        return b""
