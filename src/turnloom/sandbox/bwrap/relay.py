"""The one address that a sandbox without a network reaches: 127.0.0.1 inside, the gateway outside. Nothing else is forwarded.

A listening socket stays in the network namespace in which it was made. A short
program enters the sandbox's namespaces, makes one and hands it out; what connects
to it inside is then accepted and served here. No process of ours stays inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from turnloom.errors import SandboxError
from turnloom.sandbox.spawn import failure

log = logging.getLogger("turnloom.sandbox")

_CHUNK = 1 << 16
_TIME = 30.0

Address = tuple[str, int]


class Reached:
    """The addresses out here by the port they have inside."""

    def __init__(self) -> None:
        self.ports: dict[int, Address] = {}

    def add(self, url: str) -> str:
        """The URL inside. Raises SandboxError for one that is not plain http."""
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port or 80
        except ValueError as error:
            raise SandboxError(f"{url!r} has no port that can be reached: {error}") from error
        if parts.scheme != "http" or not host:
            raise SandboxError("a bubblewrap sandbox reaches a gateway at a plain http:// address only, and this is none")
        while self.ports.get(port, (host, parts.port or 80)) != (host, parts.port or 80):
            port = port + 1 if port < 65535 else 1024
        self.ports[port] = (host, parts.port or 80)
        return parts._replace(netloc=f"127.0.0.1:{port}").geturl()


@asynccontextmanager
async def serving(child: int, ports: Mapping[int, Address]) -> AsyncIterator[None]:
    """Serve these ports in the network namespace of the process `child`; at the end every connection is closed."""
    connections: set[asyncio.Task[None]] = set()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(_end, connections)
        for port, address in ports.items():
            listener = await _listen(child, port)
            try:
                server = await asyncio.start_server(partial(_accepted, address, connections), sock=listener)
            except BaseException:
                listener.close()
                raise
            stack.callback(server.close)
        yield


async def _listen(child: int, port: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = Path(__file__).with_name("listener.py")
        words = (sys.executable, "-I", "-S", str(program), str(child), str(port), str(theirs.fileno()))
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, pass_fds=(theirs.fileno(),)
            )
        except OSError as error:
            raise failure("serve the gateway in the sandbox", error) from error
        try:
            _, said = await asyncio.wait_for(process.communicate(), _TIME)
        except TimeoutError as error:
            raise SandboxError(f"cannot serve the gateway in the sandbox: it took more than {_TIME:.0f} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            last = said.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise SandboxError(f"cannot serve the gateway in the sandbox: {''.join(last) or process.returncode}")
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    return listener


async def _accepted(
    address: Address, connections: set[asyncio.Task[None]], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    task = asyncio.current_task()
    assert task is not None
    connections.add(task)
    try:
        await _forward(address, reader, writer)
    except asyncio.CancelledError:
        log.debug("the command has ended, and with it its connection to %s:%d", *address)
    except OSError as error:
        log.debug("a connection from a sandbox to %s:%d ended: %s", *address, error)
    finally:
        connections.discard(task)
        writer.transport.abort()


async def _forward(address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    answers, gateway = await asyncio.open_connection(*address)
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, gateway))
            both.create_task(_copy(answers, writer))
    except* OSError as group:
        log.debug("a connection from a sandbox broke: %s", group.exceptions[0])
    else:
        writer.close()
        await writer.wait_closed()
    finally:
        gateway.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """All bytes, and then the end of them."""
    while data := await source.read(_CHUNK):
        target.write(data)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


async def _end(connections: set[asyncio.Task[None]]) -> None:
    for task in tuple(connections):
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
