"""Keeps the two ends of an output stream while it is drained. It never grows past its limit."""

from __future__ import annotations

import asyncio


class EndsBuffer:
    """The first and the last bytes of a stream: `limit` bytes in all, the halves equal."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def feed(self, data: bytes) -> None:
        self._total += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        rest = data[room:]
        if rest:
            self._tail += rest
            # Trimmed at twice the limit, so that feeding stays linear in the stream.
            if len(self._tail) > 2 * self._tail_limit:
                del self._tail[: len(self._tail) - self._tail_limit]

    @property
    def dropped(self) -> int:
        """Bytes left out of the middle."""
        return max(0, self._total - self._head_limit - self._tail_limit)

    def value(self) -> bytes:
        if not self.dropped:
            return bytes(self._head + self._tail)
        note = f"\n[{self.dropped} bytes left out]\n".encode()
        return bytes(self._head) + note + bytes(self._tail[len(self._tail) - self._tail_limit :])


class Drain(asyncio.Protocol):
    """Reads a pipe into an EndsBuffer; `closed` is set at its end."""

    def __init__(self, limit: int) -> None:
        self.buffer = EndsBuffer(limit)
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.buffer.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
