"""The threads that read, beside the one that writes. Each sees what was committed before its query began.

A read gets whole answers and never a cursor: one that an error leaves unfinished
would hold its connection to the moment at which it began, for all reads to come.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar

from turnloom.errors import StoreError
from turnloom.store import schema

T = TypeVar("T")


class Rows(Protocol):
    def __call__(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """All rows of the answer, each a tuple."""
        ...


class Readers:
    """A few threads, each with its own read-only connection."""

    def __init__(self, path: Path, *, busy_timeout: float, threads: int = 2) -> None:
        self.path = path
        self.busy_timeout = busy_timeout
        self.local = threading.local()
        self.connections: list[sqlite3.Connection] = []
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="turnloom-store-reader")

    async def run(self, read: Callable[[Rows], T]) -> T:
        try:
            found = asyncio.get_running_loop().run_in_executor(self.pool, self._run, read)
        except RuntimeError as error:
            raise StoreError(f"{self.path} is closed") from error
        return await found

    def _run(self, read: Callable[[Rows], T]) -> T:
        try:
            return read(self._rows)
        except schema.FAILURES as error:
            raise schema.explain(error, self.path) from error
        except (UnicodeEncodeError, OverflowError) as error:
            raise StoreError(f"{self.path}: cannot be looked up: {error}") from error

    def _rows(self, query: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        with closing(self._connection().execute(query, values)) as cursor:
            return cursor.fetchall()

    def _connection(self) -> sqlite3.Connection:
        """This thread's own."""
        known: sqlite3.Connection | None = getattr(self.local, "connection", None)
        if known is None:
            known = self.local.connection = schema.connect(self.path, read_only=True, busy_timeout=self.busy_timeout)
            self.connections.append(known)
        return known

    async def close(self) -> None:
        await asyncio.to_thread(self.pool.shutdown)
        for connection in self.connections:
            connection.close()
