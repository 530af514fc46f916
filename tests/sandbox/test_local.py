"""The local sandbox: the shared contract, and what is its own."""

import asyncio
import os
from pathlib import Path

import pytest
import uvloop

from turnloom.errors import SandboxError
from turnloom.sandbox import LocalSandbox
from turnloom.sandbox.conformance import CHECKS
from turnloom.sandbox.output import EndsBuffer

BACKENDS = {"local": lambda: LocalSandbox(grace=0.5)}


@pytest.fixture(params=BACKENDS)
async def sandbox(request):
    sandbox = BACKENDS[request.param]()
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check, sandbox):
    await check(sandbox)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_on_uvloop(check):
    """The loop the gateway runs on starts processes in its own way."""

    async def run():
        sandbox = LocalSandbox(grace=0.5)
        await sandbox.start()
        try:
            await check(sandbox)
        finally:
            await sandbox.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def test_stop_removes_every_file_even_from_read_only_directories(tmp_path: Path):
    sandbox = LocalSandbox(parent=tmp_path)
    await sandbox.start()
    await sandbox.exec(["sh", "-c", "mkdir -p a/b && touch a/b/c && chmod 500 a/b a"])
    assert os.listdir(tmp_path)
    await sandbox.stop()
    assert not os.listdir(tmp_path)


async def test_nothing_works_before_start():
    sandbox = LocalSandbox()
    with pytest.raises(SandboxError, match="not running"):
        await sandbox.exec(["true"])
    await sandbox.stop()


async def test_starting_twice_is_an_error(sandbox):
    with pytest.raises(SandboxError, match="already started"):
        await sandbox.start()


async def test_a_sandbox_that_cannot_be_made_is_an_error(tmp_path: Path):
    with pytest.raises(SandboxError, match="cannot make"):
        await LocalSandbox(parent=tmp_path / "missing").start()


async def test_only_the_named_variables_are_there(sandbox):
    names = {line.partition("=")[0] for line in (await sandbox.exec(["env"])).out.splitlines()}
    assert names - {"_", "PWD", "SHLVL"} == {"PATH", "LANG", "HOME", "TMPDIR", "TURNLOOM_SANDBOX"}


async def test_descriptors_are_given_back(sandbox):
    await sandbox.exec(["true"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await sandbox.exec(["true"], stdin=b"x")
        with pytest.raises(SandboxError):
            await sandbox.exec(["turnloom-no-such-program"])
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 8, 9])
@pytest.mark.parametrize("step", [1, 2, 7, 100])
def test_a_buffer_keeps_its_two_ends_however_it_is_fed(limit, step):
    data = bytes(range(65, 65 + 26))
    buffer = EndsBuffer(limit)
    for at in range(0, len(data), step):
        buffer.feed(data[at : at + step])
    head, tail = limit - limit // 2, limit // 2
    assert buffer.dropped == len(data) - limit
    note = f"\n[{buffer.dropped} bytes left out]\n".encode()
    assert buffer.value() == data[:head] + note + data[len(data) - tail :]


def test_a_buffer_that_is_just_full_leaves_nothing_out():
    buffer = EndsBuffer(5)
    buffer.feed(b"abc")
    buffer.feed(b"de")
    assert (buffer.value(), buffer.dropped) == (b"abcde", 0)
