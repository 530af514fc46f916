"""The gateway's address is all of the network that a bubblewrap sandbox has."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import uuid

import pytest
import uvloop

from turnloom.errors import SandboxError
from turnloom.sandbox.bubblewrap import BubblewrapBackend
from turnloom.sandbox.bwrap.relay import Reached
from turnloom.sandbox.contract import Needs

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="THERE IS NO bwrap HERE: nothing of the bubblewrap sandbox is tested")

CONNECT = """
import socket, sys
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with socket.create_connection((host, int(port)), 5) as s:
            print(s.recv(100).decode())
    except OSError as error:
        print("no", type(error).__name__)
"""

ECHO = """
import hashlib, socket, sys, threading
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
data = bytes(range(256)) * (1 << 14)
threading.Thread(target=lambda: (s.sendall(data), s.shutdown(socket.SHUT_WR))).start()
got = b"".join(iter(lambda: s.recv(1 << 16), b""))
print(len(got), got == data)
"""


class Server:
    """Says its name to who connects, then repeats what it gets until there is no more."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self.over = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(self.name.encode())
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self.over.set()
            writer.close()


async def serve(name: str, host: str = "127.0.0.1"):
    handler = Server(name)
    server = await asyncio.start_server(handler, host, 0)
    return handler, server, server.sockets[0].getsockname()[1]


@pytest.fixture
async def sandbox(tmp_path):
    sandbox = BubblewrapBackend(parent=tmp_path, grace=0.5).make(Needs())
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


def own_address() -> str:
    """This machine's address to others, or one of its loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.2"


async def test_the_gateway_is_reached_and_nothing_else(sandbox):
    gateway, one, port = await serve("the gateway")
    other, two, elsewhere = await serve("another", "0.0.0.0")
    async with one, two:
        outside = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CONNECT, "127.0.0.1", str(elsewhere), own_address(), str(elsewhere), stdout=asyncio.subprocess.PIPE
        )
        assert (await outside.communicate())[0] == b"another\nanother\n", "from out here both are there"
        words = ("127.0.0.1", port, "127.0.0.1", elsewhere, own_address(), elsewhere, "localhost", port, "192.0.2.1", 80, "example.com", 80)
        argv = ["python3", "-c", CONNECT, *map(str, words)]
        before = (await sandbox.exec(argv)).out.splitlines()
        assert all(line.startswith("no ") for line in before), before
        assert len(before) == 6
        assert sandbox.reach(f"http://127.0.0.1:{port}/s/KEY") == f"http://127.0.0.1:{port}/s/KEY"
        after = (await sandbox.exec(argv)).out.splitlines()
        assert [line for line in after if not line.startswith("no ")] == ["the gateway"] * 2, after
        assert after[0] == after[3] == "the gateway"
        assert (gateway.connections, other.connections) == (2, 2)
    interfaces = await sandbox.exec(["python3", "-c", "import socket; print([name for _, name in socket.if_nameindex()])"])
    assert interfaces.out == "['lo']\n"


async def test_sockets_without_a_file_are_out_of_reach(sandbox):
    name = f"turnloom-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        probe = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect('\\0' + sys.argv[1])"
        assert (await sandbox.exec(["python3", "-c", probe, name])).exit_code == 1


async def test_bytes_go_both_ways_whole_and_so_does_the_end(sandbox):
    _, server, port = await serve("")
    async with server:
        sandbox.reach(f"http://127.0.0.1:{port}")
        assert (await sandbox.exec(["python3", "-c", ECHO, str(port)], timeout=60)).out == f"{256 << 14} True\n"


async def test_the_gateway_sees_that_an_ended_command_has_left(sandbox):
    handler, server, port = await serve("")
    async with server:
        sandbox.reach(f"http://127.0.0.1:{port}")
        hold = "import socket, sys, time; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); open('up', 'w'); time.sleep(1000)"
        running = asyncio.ensure_future(sandbox.exec(["python3", "-c", hold, str(port)]))
        while not handler.connections:
            await asyncio.sleep(0.02)
        assert not handler.over.is_set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.wait_for(handler.over.wait(), 30)


async def test_a_gateway_that_is_gone_closes_the_connection(sandbox):
    _, server, port = await serve("")
    server.close()
    sandbox.reach(f"http://127.0.0.1:{port}")
    assert (await sandbox.exec(["python3", "-c", CONNECT, "127.0.0.1", str(port)], timeout=60)).out in ("\n", "no ConnectionResetError\n")


async def test_commands_side_by_side_each_reach_it(sandbox):
    handler, server, port = await serve("here")
    async with server:
        sandbox.reach(f"http://127.0.0.1:{port}")
        argv = ["python3", "-c", CONNECT, "127.0.0.1", str(port)]
        results = await asyncio.gather(*(sandbox.exec(argv) for _ in range(6)))
        assert [result.out for result in results] == ["here\n"] * 6
        assert handler.connections == 6


def test_it_is_reached_on_uvloop(tmp_path):
    """The loop the gateway runs on starts processes and serves sockets in its own way."""

    async def run():
        _, server, port = await serve("here")
        sandbox = BubblewrapBackend(parent=tmp_path).make(Needs())
        await sandbox.start()
        try:
            async with server:
                sandbox.reach(f"http://127.0.0.1:{port}")
                assert (await sandbox.exec(["python3", "-c", CONNECT, "127.0.0.1", str(port)])).out == "here\n"
        finally:
            await sandbox.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_addresses_inside_are_told_apart():
    reached = Reached()
    assert reached.add("http://10.0.0.1:8000/s/a?b#c") == "http://127.0.0.1:8000/s/a?b#c"
    assert reached.add("http://gateway:8000/s/a") == "http://127.0.0.1:8001/s/a"
    assert reached.add("http://10.0.0.1:8000/s/b") == "http://127.0.0.1:8000/s/b"
    assert reached.add("http://[::1]:80") == "http://127.0.0.1:80"
    assert reached.ports == {8000: ("10.0.0.1", 8000), 8001: ("gateway", 8000), 80: ("::1", 80)}
    for odd in ("https://gateway/s/a", "http://", "http://host:99999", "ftp://x", "gateway:8000"):
        with pytest.raises(SandboxError):
            reached.add(odd)
