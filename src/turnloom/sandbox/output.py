"""Keeps the two ends of an output stream while it is drained. It never grows past its limit."""

from __future__ import annotations

import asyncio
import logging
import os

from turnloom.counters import swallowed

log = logging.getLogger("turnloom.sandbox")

_CHUNK = 1 << 16


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


class Drain:
    """Reads a pipe's end, which it owns, into an EndsBuffer; `closed` is set when that is over.

    It closes the descriptor itself and once. uvloop's transports close the
    descriptor of a file object twice, and in between another thread may have been
    given the same number.
    """

    def __init__(self, descriptor: int, limit: int) -> None:
        self.buffer = EndsBuffer(limit)
        self.closed = asyncio.Event()
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            swallowed(log, "sandbox.output", "a command's output cannot be read on: %s", error)
            data = b""
        if data:
            self.buffer.feed(data)
        else:
            self.close()

    def close(self) -> None:
        """Read no more. Closing twice is no error."""
        if not self.closed.is_set():
            self.closed.set()
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
