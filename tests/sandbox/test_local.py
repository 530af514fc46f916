"""The local sandbox: the shared contract, and what is its own."""

import asyncio
import os
import resource
import sys
from pathlib import Path

import pytest
import uvloop

from turnloom.errors import SandboxError
from turnloom.sandbox import LocalSandbox, SandboxUnavailable
from turnloom.sandbox.conformance import CHECKS
from turnloom.sandbox.local import sweep
from turnloom.sandbox.output import Drain, EndsBuffer

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


HARD_TO_REMOVE = {
    "unreadable": "mkdir -p a/b && touch a/b/c && chmod 0 a/b a .",
    "read-only at the top": "mkdir -p a/b/c && touch a/b/f && chmod 500 a/b/c a/b a . ..",
    "names of numbers": "mkdir -p ../0/1 ../1/0 0 1 && touch ../0/0",
    "very deep": "python3 -c 'import os; [(os.mkdir(name), os.chdir(name)) for name in [\"d\"] * 3000]'",
    "deep and unreadable": "mkdir -p $(printf 'd/%.0s' $(seq 99)) && chmod 0 d/d/d/d/d d/d/d d/d",
    "links to elsewhere": "mkdir ../elsewhere && ln -s / all && ln -s ../elsewhere it",
}


@pytest.mark.parametrize("script", HARD_TO_REMOVE.values(), ids=HARD_TO_REMOVE)
async def test_stop_removes_whatever_was_made(script, tmp_path: Path):
    sandbox = LocalSandbox(parent=tmp_path)
    await sandbox.start()
    result = await sandbox.exec(["bash", "-c", script])
    assert result.exit_code == 0, result
    await sandbox.stop()
    assert os.listdir(tmp_path) == []


async def test_a_link_in_the_place_of_the_sandbox_is_removed_and_not_followed(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "sandboxes").mkdir()
    sandbox = LocalSandbox(parent=tmp_path / "sandboxes")
    await sandbox.start()
    root = Path(sandbox.root)
    root.rename(tmp_path / "moved")
    root.symlink_to(tmp_path / "mine")
    await sandbox.stop()
    assert os.listdir(tmp_path / "sandboxes") == []
    assert (tmp_path / "mine" / "file").exists()


KILLED = """
import asyncio, sys
from pathlib import Path
from turnloom.sandbox import LocalSandbox, SandboxUnavailable

async def main():
    sandbox = LocalSandbox(parent=Path(sys.argv[1]))
    await sandbox.start()
    script = "setsid sleep 1000 & echo $! > pid.new; mkdir locked; chmod 0 locked; mv pid.new pid; sleep 1000"
    await sandbox.exec(["sh", "-c", script])

asyncio.run(main())
"""
"""A process of Turnloom with a sandbox, in which a command runs, and one in a session of its own."""


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


async def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path: Path):
    live = LocalSandbox(parent=tmp_path)
    await live.start()
    names = ("turnloom-sandbox-", "turnloom-mine", f"turnloom-sandbox-{'0' * 31}", f"x-turnloom-sandbox-{'0' * 32}")
    foreign = [tmp_path / name for name in names]
    for directory in foreign:
        directory.mkdir()
    link = tmp_path / f"turnloom-sandbox-{'f' * 32}"
    link.symlink_to(foreign[0])
    kept = {Path(live.root), link, *foreign}
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(tmp_path))
    while not (found := list(tmp_path.glob("*/work/pid"))):
        assert owner.returncode is None
        await asyncio.sleep(0.02)
    left, pid = found[0].parent.parent, int(found[0].read_text())

    await sweep(tmp_path)
    assert left.exists(), "its process lives"
    assert runs(pid)
    owner.kill()
    await owner.wait()
    await sweep(tmp_path)
    assert set(tmp_path.iterdir()) == kept
    assert not runs(pid)
    assert (await live.exec(["true"])).exit_code == 0
    await live.stop()


async def test_the_first_sandbox_of_a_place_sweeps_it(tmp_path: Path):
    (tmp_path / f"turnloom-sandbox-{'a' * 32}" / "work").mkdir(parents=True)
    sandbox = LocalSandbox(parent=tmp_path)
    await sandbox.start()
    assert os.listdir(tmp_path) == [Path(sandbox.root).name]
    await sandbox.stop()


async def test_running_out_of_descriptors_is_the_machines_failure_not_the_commands(tmp_path: Path):
    sandbox = LocalSandbox(parent=tmp_path)
    await sandbox.start()
    await sandbox.exec(["true"])
    _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, hard))
    try:
        with pytest.raises(SandboxUnavailable, match="Too many open files"):
            await sandbox.exec(["true"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (await sandbox.exec(["true"])).exit_code == 0
    await sandbox.stop()


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


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_descriptor_is_closed_once(loop_factory):
    """A number closed a second time may by then be another thread's file."""

    async def run():
        read_end, write_end = os.pipe()
        drain = Drain(read_end, 100)
        os.write(write_end, b"out")
        os.close(write_end)
        await asyncio.wait_for(drain.closed.wait(), 10)
        stranger = os.dup2(os.open("/", os.O_RDONLY), read_end)
        drain.close()
        await asyncio.sleep(0.05)
        os.fstat(stranger)
        assert drain.buffer.value() == b"out"

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())
