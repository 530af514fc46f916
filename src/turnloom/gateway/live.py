"""A turn while it is made, and everyone who waits for its reply. It decides nothing about the turn.

The turn runs in a task of its own and writes what it says into a log; each reader
writes the log to its own client, from the start and at its own pace. So a request
that comes again while its first reply is being made joins it. When the last reader
leaves, the turn is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from turnloom.core.retry import Identity
from turnloom.counters import SWALLOWED
from turnloom.errors import SessionClosed, TurnloomError
from turnloom.gateway.observe import in_turn
from turnloom.gateway.respond import Choice
from turnloom.wire.contract import Head, Reply, ReplyEvent

log = logging.getLogger("turnloom.gateway")

AHEAD = 32
"""What a turn may have said that no reader has taken yet. Then it waits, and its engine with it: a client that does not read
holds up its own turn, and memory does not fill with what nobody may ever want."""


class Live:
    """One turn's log. To the turn it is what it writes to, as a client would be: `open`, `event`, `finish`."""

    def __init__(self, asked: Identity | None, number: int) -> None:
        self.asked = asked
        self.number = number
        self._log: list[Head | ReplyEvent | Reply] = []
        self._grown = asyncio.Event()
        self.readers = 0
        self._taken = 0
        """How much of the log the foremost reader has."""
        self._moved = asyncio.Event()
        self._delivered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self.ended = asyncio.Event()

    @property
    def leaving(self) -> bool:
        """Nobody waits for it any more, or it is over: who comes now is too late."""
        return self.ended.is_set() or (self._task is not None and not self.readers)

    def start(self, work: Callable[[Live], Awaitable[object]], over: Callable[[Live], None]) -> None:
        """Begin the turn. `over` is called when it has ended, on record or failed."""
        self._task = asyncio.create_task(self._run(work, over))

    async def _run(self, work: Callable[[Live], Awaitable[object]], over: Callable[[Live], None]) -> None:
        try:
            await work(self)
        except asyncio.CancelledError:
            self._failure = SessionClosed("this reply was given up while it was being made; ask again")
        except Exception as error:
            self._failure = error
            if not self.readers and not isinstance(error, TurnloomError | ConnectionError):
                SWALLOWED.labels("gateway.unheard").inc()
                log.exception("a turn that nobody waited for any more failed")
        finally:
            self.ended.set()
            self._grown.set()
            over(self)

    def open(self, head: Head) -> None:
        self._say(head)

    async def event(self, event: ReplyEvent) -> None:
        """Returns when some reader is not far behind."""
        self._say(event)
        while len(self._log) - self._taken > AHEAD:
            self._moved.clear()
            await self._moved.wait()

    async def finish(self, reply: Reply) -> None:
        """Returns when one reader's client has all of it. Raises what the last reader met where none of them has."""
        self._say(reply)
        if not self.readers:
            raise ConnectionResetError("nobody waits for this reply any more")
        await asyncio.shield(self._delivered)

    def _say(self, said: Head | ReplyEvent | Reply) -> None:
        self._log.append(said)
        self._grown.set()

    async def read(self, out: Choice) -> None:
        """Write all that was said and will be to this client. Raises what ended the turn, and ConnectionError when the client is gone."""
        self.readers += 1
        met: BaseException | None = None
        try:
            await self._relay(out)
        except BaseException as error:
            met = error
            raise
        finally:
            self._leave(met)

    async def _relay(self, out: Choice) -> None:
        at = 0
        while True:
            self._grown.clear()
            while at < len(self._log):
                said = self._log[at]
                at += 1
                if at > self._taken:
                    self._taken = at
                    self._moved.set()
                if isinstance(said, Head):
                    in_turn(said.turn_id)
                    out.open(said)
                elif isinstance(said, Reply):
                    await out.finish(said)
                    if not self._delivered.done():
                        self._delivered.set_result(None)
                else:
                    await out.event(said)
            if self.ended.is_set() and at == len(self._log):
                break
            await self._grown.wait()
        if self._failure is not None:
            raise self._failure

    def _leave(self, met: BaseException | None) -> None:
        self.readers -= 1
        if self.readers or self._task is None or self._task.done():
            return
        if not (self._log and isinstance(self._log[-1], Reply)):
            self._task.cancel(*([str(met)] if isinstance(met, ConnectionError) else []))
        elif not self._delivered.done():
            lost = met if isinstance(met, Exception) else ConnectionResetError("the client left before the end of its reply")
            self._delivered.set_exception(lost)
            self._delivered.exception()
