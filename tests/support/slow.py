"""Clients and wires that are worse than they should be: clients that stop reading or leave, a wire that cuts bytes anywhere."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Self
from urllib.parse import urlsplit

SMALL = 4096
"""Bytes of the receive buffer that a slow client asks for."""


class RawClient:
    """One HTTP/1.1 request on a socket of its own. What is not asked for is not read, and little of it is buffered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._chunked = True
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def post(cls, url: str, body: bytes, headers: Mapping[str, str] | None = None, *, sent: int | None = None) -> Self:
        """Only the first `sent` bytes of the body are sent, where that is given."""
        where = urlsplit(url)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        sock.setblocking(False)
        assert where.hostname is not None
        await asyncio.get_running_loop().sock_connect(sock, (where.hostname, where.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=SMALL)
        target = f"{where.path}?{where.query}" if where.query else where.path
        given = {"Host": where.netloc, "Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        writer.write(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode() + body[:sent])
        await writer.drain()
        return cls(reader, writer)

    async def head(self) -> int:
        """The status, once the header is read."""
        self.status = int((await self._reader.readline()).split()[1])
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        self._chunked = self.headers.get("transfer-encoding") == "chunked"
        return self.status

    async def piece(self) -> bytes:
        """The next piece of the body as the server wrote it; empty at the end."""
        if not self._chunked:
            self._chunked = True
            return await self._exactly(int(self.headers.pop("content-length")))
        if "content-length" not in self.headers and self.headers.get("transfer-encoding") != "chunked":
            return b""
        length = int(await self._reader.readline(), 16)
        data = await self._exactly(length + 2)
        return data[:length]

    async def _exactly(self, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            piece = await self._reader.read(length - len(found))
            if not piece:
                raise asyncio.IncompleteReadError(bytes(found), length)
            found += piece
        return bytes(found)

    async def rest(self) -> bytes:
        found = bytearray()
        while piece := await self.piece():
            found += piece
        return bytes(found)

    def leave(self, *, reset: bool = False) -> None:
        """Close the connection, or have it reset, as the operating system does for a process that was killed with unread data."""
        if reset:
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        else:
            self._writer.close()


@asynccontextmanager
async def cut(url: str, size: Callable[[], int]) -> AsyncIterator[str]:
    """The URL of a proxy that passes everything on, both ways, in pieces of at most `size()` bytes."""
    where = urlsplit(url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(size()):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = await asyncio.open_connection(where.hostname, where.port)
        await asyncio.gather(pump(reader, down), pump(up, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
