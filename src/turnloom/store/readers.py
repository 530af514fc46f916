"""The threads that read, beside the one that writes. Each sees what was committed before its query began."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from turnloom.errors import StoreError
from turnloom.store import schema

T = TypeVar("T")


class Readers:
    """A few threads, each with its own read-only connection."""

    def __init__(self, path: Path, *, busy_timeout: float, threads: int = 2) -> None:
        self.path = path
        self.busy_timeout = busy_timeout
        self.local = threading.local()
        self.connections: list[sqlite3.Connection] = []
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="turnloom-store-reader")

    async def run(self, read: Callable[[sqlite3.Connection], T]) -> T:
        try:
            found = asyncio.get_running_loop().run_in_executor(self.pool, self._run, read)
        except RuntimeError as error:
            raise StoreError(f"{self.path} is closed") from error
        return await found

    def _run(self, read: Callable[[sqlite3.Connection], T]) -> T:
        connection: sqlite3.Connection | None = getattr(self.local, "connection", None)
        try:
            if connection is None:
                connection = self.local.connection = schema.connect(self.path, read_only=True, busy_timeout=self.busy_timeout)
                self.connections.append(connection)
            return read(connection)
        except schema.FAILURES as error:
            raise schema.explain(error, self.path) from error
        except (UnicodeEncodeError, OverflowError) as error:
            raise StoreError(f"{self.path}: cannot be looked up: {error}") from error

    async def close(self) -> None:
        await asyncio.to_thread(self.pool.shutdown)
        for connection in self.connections:
            connection.close()
