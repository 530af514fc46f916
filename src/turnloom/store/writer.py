"""The one thread that writes, with group commit.

Whatever waits in the queue goes into one transaction, each piece of work under
its own savepoint: a bad one fails alone. A waiter wakes only after COMMIT.
Work once handed in is done whatever becomes of its waiter.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from turnloom.counters import swallowed
from turnloom.errors import StoreError
from turnloom.store.metrics import COMMIT_SECONDS
from turnloom.store.schema import FAILURES, explain

logger = logging.getLogger("turnloom.store")

Work = Callable[[sqlite3.Connection], object]

BATCH = 512
"""At most so many pieces of work share a transaction."""

LATER = 1.0
"""Seconds that work nobody waits for may wait."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    work: Work
    waiter: asyncio.Future[None] | None
    """None where nobody waits: then it may wait for company."""


class _TransactionLost(Exception):
    """SQLite ended the whole transaction, not just one statement."""


class Writer:
    """Owns `connection` from its start to the end of `close`."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self.path = path
        self.loop = asyncio.get_running_loop()
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.closing = False
        self.commits = 0
        self.seconds = 0.0
        """What all commits have taken."""
        self.thread = threading.Thread(target=self._run, name="turnloom-store-writer", daemon=True)
        self.thread.start()

    async def write(self, work: Work) -> None:
        """Returns when the work is committed. Raises StoreError if it is not; cancellation leaves it queued."""
        if self.closing:
            raise StoreError(f"{self.path} is closed; nothing more can be stored in it")
        waiter: asyncio.Future[None] = self.loop.create_future()
        self.jobs.put(_Job(work, waiter))
        await waiter

    def write_later(self, work: Work) -> None:
        """Commit the work with the next that somebody waits for, at the latest after LATER. A failure is logged and counted."""
        if not self.closing:
            self.jobs.put(_Job(work, None))

    async def flush(self) -> None:
        """Returns when what was handed in before is committed or has failed: who can only read is not kept from it."""
        try:
            await self.write(lambda _: None)
        except StoreError as error:
            swallowed(logger, "store.flush", "what was noted last may be missing from what is read: %s", error)

    def stop(self) -> None:
        """Take no more work; what is queued is still done."""
        if not self.closing:
            self.closing = True
            self.jobs.put(None)

    async def close(self) -> None:
        """Stop, wait until everything queued is done, then close the connection."""
        self.stop()
        await asyncio.to_thread(self.thread.join)
        self.connection.close()

    def _run(self) -> None:
        last = False
        while not last:
            batch, last = self._gather()
            if batch:
                began = monotonic()
                results = self._settle(batch)
                took = monotonic() - began
                self.seconds += took
                COMMIT_SECONDS.observe(took)
                self._wake(batch, results)

    def _gather(self) -> tuple[list[_Job], bool]:
        """What goes into one transaction, and whether it is the last."""
        batch: list[_Job] = []
        hurry, end = False, None
        while len(batch) < BATCH:
            wait = None if end is None else 0.0 if hurry else max(end - monotonic(), 0.0)
            try:
                job = self.jobs.get(timeout=wait)
            except queue.Empty:
                break
            if job is None:
                return batch, True
            batch.append(job)
            hurry = hurry or job.waiter is not None
            end = end or monotonic() + LATER
        return batch, False

    def _settle(self, batch: Sequence[_Job]) -> list[StoreError | None]:
        """The fate of each job. Never raises: a waiter must not hang because this thread died."""
        try:
            return self._commit(batch)
        except Exception as error:
            logger.exception("%s: %d writes failed", self.path, len(batch))
            self._rollback()
            return [self._error(error)] * len(batch)

    def _commit(self, batch: Sequence[_Job]) -> list[StoreError | None]:
        """One transaction for the batch. If it is lost as a whole, one for each, so that only the guilty fail."""
        self._rollback()  # of a transaction that could not be ended when it failed
        try:
            self.connection.execute("BEGIN IMMEDIATE")
        except FAILURES as error:
            return [self._error(error)] * len(batch)
        try:
            return self._transaction(batch)
        except (*FAILURES, _TransactionLost) as error:
            self._rollback()
            if len(batch) == 1:
                return [self._error(error.__cause__ if isinstance(error, _TransactionLost) else error)]
        return [result for job in batch for result in self._commit([job])]

    def _transaction(self, batch: Sequence[_Job]) -> list[StoreError | None]:
        execute = self.connection.execute
        results: list[StoreError | None] = []
        for job in batch:
            execute("SAVEPOINT job")
            try:
                job.work(self.connection)
            except Exception as error:
                if not self.connection.in_transaction:
                    raise _TransactionLost from error
                execute("ROLLBACK TO job")
                results.append(self._error(error))
            else:
                results.append(None)
            execute("RELEASE job")
        execute("COMMIT")
        self.commits += 1
        return results

    def _rollback(self) -> None:
        if self.connection.in_transaction:
            try:
                self.connection.execute("ROLLBACK")
            except FAILURES:
                logger.exception("%s: a transaction could not be rolled back", self.path)

    def _error(self, error: BaseException | None) -> StoreError:
        if isinstance(error, StoreError):
            return error
        if isinstance(error, FAILURES):
            return explain(error, self.path)
        if not isinstance(error, UnicodeEncodeError | OverflowError):
            logger.error("%s: unexpected failure of a write", self.path, exc_info=error)
        return StoreError(f"{self.path}: cannot be stored: {error}")

    def _wake(self, batch: Sequence[_Job], results: Sequence[StoreError | None]) -> None:
        def wake() -> None:
            for job, error in zip(batch, results, strict=True):
                if job.waiter is None:
                    if error is not None:
                        swallowed(logger, "store.later", "a note could not be written: %s", error)
                elif not job.waiter.done():
                    if error is None:
                        job.waiter.set_result(None)
                    else:
                        job.waiter.set_exception(error)
                elif error is not None:
                    logger.error("a write whose caller was cancelled failed: %s", error)

        try:
            self.loop.call_soon_threadsafe(wake)
        except RuntimeError:
            logger.warning("%s: the event loop ended before %d writes were acknowledged; they are stored", self.path, len(batch))
