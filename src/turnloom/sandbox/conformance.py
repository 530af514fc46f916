"""What the contract says, as checks that any backend can run against itself.

Each check takes a started, empty sandbox and raises AssertionError when a promise
is broken. They need a POSIX shell and Python (`python3`) inside. In pytest:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_contract(check, sandbox):
        await check(sandbox)
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from turnloom.errors import SandboxError
from turnloom.sandbox.contract import ExecResult, Sandbox

Check = Callable[[Sandbox], Awaitable[None]]

SECRET = "TURNLOOM_CONFORMANCE_SECRET"


async def _shell(sandbox: Sandbox, script: str, **options: object) -> ExecResult:
    return await sandbox.exec(["sh", "-c", script], **options)  # type: ignore[arg-type]


async def _refused(work: Awaitable[object], what: str) -> None:
    try:
        await work
    except SandboxError:
        return
    raise AssertionError(f"{what} was not refused")


async def exit_code_and_streams_are_kept_apart(sandbox: Sandbox) -> None:
    result = await _shell(sandbox, "printf out; printf err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out", b"err")
    assert not result.timed_out
    assert not result.truncated


async def a_signal_gives_a_negative_exit_code(sandbox: Sandbox) -> None:
    result = await _shell(sandbox, "kill -9 $$")
    assert result.exit_code == -9, result
    assert not result.timed_out


async def arguments_are_never_shell_words(sandbox: Sandbox) -> None:
    words = ["$(touch pwned)", "`touch pwned`", "; touch pwned", "* ?", "", "a\nb", "-n", "é"]
    result = await sandbox.exec(["python3", "-c", "import sys; sys.stdout.write('|'.join(sys.argv[1:]))", *words])
    assert result.out == "|".join(words), result.out
    await _refused(sandbox.read_file("pwned"), "reading a file that a shell word would have made")


async def a_command_that_cannot_start_is_an_error(sandbox: Sandbox) -> None:
    await _refused(sandbox.exec(["turnloom-no-such-program"]), "a missing program")
    await _refused(sandbox.exec([]), "an empty command")
    await _refused(sandbox.exec(["true"], cwd="no/such/directory"), "a missing directory")
    await _refused(sandbox.exec(["true", "nul\0byte"]), "a NUL byte")
    await _refused(sandbox.exec(["true"], env={"NAME": "nul\0byte"}), "a NUL byte in the environment")


async def the_environment_is_clean(sandbox: Sandbox) -> None:
    os.environ[SECRET] = "must not be seen"
    try:
        result = await sandbox.exec(["env"], env={"GIVEN": "yes"})
    finally:
        del os.environ[SECRET]
    assert SECRET not in result.out
    assert "GIVEN=yes" in result.out.splitlines()
    assert f"HOME={sandbox.home}" in result.out.splitlines()


async def home_and_workdir_start_empty(sandbox: Sandbox) -> None:
    for path in (sandbox.home, sandbox.workdir):
        result = await sandbox.exec(["ls", "-A", path])
        assert (result.exit_code, result.stdout) == (0, b""), path
    assert (await sandbox.exec(["pwd"])).out.strip() == sandbox.workdir


async def standard_input_is_given_or_empty(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["cat"])).stdout == b""
    data = bytes(range(256)) * 4096
    assert (await sandbox.exec(["cat"], stdin=data, output_limit=len(data))).stdout == data


async def a_command_may_leave_its_input_unread(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["true"], stdin=b"x" * (1 << 20))).exit_code == 0


async def output_is_kept_from_both_ends(sandbox: Sandbox) -> None:
    script = "import sys; [(s.write('head'), s.write('x' * (4 << 20)), s.write('tail')) for s in (sys.stdout, sys.stderr)]"
    result = await sandbox.exec(["python3", "-c", script], output_limit=1000)
    assert result.exit_code == 0
    for data, dropped in ((result.stdout, result.stdout_dropped), (result.stderr, result.stderr_dropped)):
        assert data.startswith(b"head")
        assert data.endswith(b"tail")
        assert dropped == (4 << 20) + 8 - 1000
        assert str(dropped).encode() in data
        assert len(data) < 1100
    exact = await _shell(sandbox, "printf 0123456789", output_limit=10)
    assert (exact.stdout, exact.stdout_dropped) == (b"0123456789", 0)


async def a_timeout_ends_the_command(sandbox: Sandbox) -> None:
    result = await _shell(sandbox, "echo before; sleep 1000; echo after", timeout=0.3)
    assert result.timed_out
    assert result.exit_code != 0
    assert result.stdout == b"before\n"


async def term_comes_first_so_that_a_command_can_say_goodbye(sandbox: Sandbox) -> None:
    result = await _shell(sandbox, "trap 'exit 7' TERM; while :; do sleep 0.05; done", timeout=1.0)
    assert result.timed_out
    assert result.exit_code == 7


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, __file__, sys.argv[1]], start_new_session=sys.argv[2] == "away")
    if "wait" in sys.argv: time.sleep(1000)
    while not os.path.exists(sys.argv[1]): time.sleep(0.01)
else:
    with open(sys.argv[1] + ".new", "w") as out: out.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(1000)
"""
"""Starts a grandchild that ignores TERM and writes its process id to a file; `away` gives it a session of its own."""


async def _is_gone(sandbox: Sandbox, pid: int) -> None:
    """A killed process may stay as a zombie, without its arguments, for a moment: that is gone too.

    Where each command has process ids of its own, this one is another program by now.
    """
    script = f"ps -o args= -p {pid} 2>/dev/null || tr '\\0' ' ' 2>/dev/null </proc/{pid}/cmdline || true"
    state = await _shell(sandbox, script)
    assert "stubborn.py" not in state.out, f"process {pid} still runs: {state.out!r}"


async def nothing_outlives_a_timeout(sandbox: Sandbox) -> None:
    await sandbox.write_file("stubborn.py", STUBBORN.encode())
    for place in ("here", "away"):
        result = await sandbox.exec(["python3", "stubborn.py", f"pid.{place}", place, "wait"], timeout=3.0)
        assert result.timed_out
        await _is_gone(sandbox, int(await sandbox.read_file(f"pid.{place}")))


async def nothing_outlives_a_normal_end(sandbox: Sandbox) -> None:
    await sandbox.write_file("stubborn.py", STUBBORN.encode())
    for place in ("here", "away"):
        result = await sandbox.exec(["python3", "stubborn.py", f"pid.{place}", place], timeout=60)
        assert (result.exit_code, result.timed_out) == (0, False)
        await _is_gone(sandbox, int(await sandbox.read_file(f"pid.{place}")))


async def nothing_outlives_a_cancellation(sandbox: Sandbox) -> None:
    await sandbox.write_file("stubborn.py", STUBBORN.encode())
    running = asyncio.ensure_future(sandbox.exec(["python3", "stubborn.py", "pid", "away", "wait"]))
    pid = await _eventually(sandbox, "pid")
    running.cancel()
    try:
        await running
    except asyncio.CancelledError:
        await _is_gone(sandbox, pid)
        return
    raise AssertionError("the cancellation was swallowed")


async def _eventually(sandbox: Sandbox, path: str) -> int:
    while True:
        try:
            return int(await sandbox.read_file(path))
        except SandboxError:
            await asyncio.sleep(0.02)


async def commands_run_side_by_side(sandbox: Sandbox) -> None:
    """One command's end leaves another's processes alone."""
    waiting = asyncio.ensure_future(_shell(sandbox, "touch up; until test -e go; do sleep 0.02; done; echo done"))
    await _shell(sandbox, "until test -e up; do sleep 0.02; done")
    assert (await _shell(sandbox, "sleep 1000", timeout=0.1)).timed_out
    await sandbox.write_file("go", b"")
    assert (await waiting).stdout == b"done\n"


async def files_are_kept_byte_for_byte(sandbox: Sandbox) -> None:
    data = bytes(range(256)) + b"\r\n\0"
    await sandbox.write_file("deep/er/file.bin", data)
    assert await sandbox.read_file("deep/er/file.bin") == data
    assert await sandbox.read_file(f"{sandbox.workdir}/deep/er/file.bin") == data
    assert (await sandbox.exec(["cat", "deep/er/file.bin"])).stdout == data
    await sandbox.write_file("deep/er/file.bin", b"")
    assert await sandbox.read_file("deep/er/file.bin") == b""


async def an_unreadable_file_is_an_error(sandbox: Sandbox) -> None:
    await _shell(sandbox, "mkdir directory; mkfifo fifo; ln -s nowhere dangling; printf 12345 > big")
    for path in ("missing", "directory", "fifo", "dangling", ""):
        await _refused(sandbox.read_file(path), f"reading {path!r}")
    await _refused(sandbox.read_file("big", limit=4), "reading a file over the limit")


async def paths_stay_inside(sandbox: Sandbox) -> None:
    await _shell(sandbox, "ln -s / top; ln -s /etc/passwd users")
    for path in ("../../../../../etc/passwd", "/etc/passwd", "top/etc/passwd", "users"):
        await _refused(sandbox.read_file(path), f"reading {path!r}")
        await _refused(sandbox.write_file(path + ".turnloom", b""), f"writing {path!r}") if path != "users" else None
    await _refused(sandbox.exec(["true"], cwd="top"), "working outside")


async def writing_replaces_what_was_left_there(sandbox: Sandbox) -> None:
    await _shell(sandbox, "mkfifo name")
    await sandbox.write_file("name", b"data")
    assert await sandbox.read_file("name") == b"data"


async def directories_go_in_and_out(sandbox: Sandbox) -> None:
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place, "source"), Path(place, "target")
        (source / "sub").mkdir(parents=True)
        (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (source / "sub" / "run.sh").chmod(0o755)
        (source / "link").symlink_to("sub/run.sh")
        await sandbox.upload(source, "tree")
        assert (await sandbox.exec(["tree/sub/run.sh"])).stdout == b"ran\n"
        assert (await sandbox.exec(["readlink", "tree/link"])).out.strip() == "sub/run.sh"
        await sandbox.download("tree", target)
        assert (target / "sub" / "run.sh").read_text() == "#!/bin/sh\necho ran\n"
        assert (target / "link").is_symlink()
        await _refused(sandbox.download("missing", Path(place, "other")), "downloading what is missing")


async def stop_is_final_and_can_be_repeated(sandbox: Sandbox) -> None:
    await _shell(sandbox, "mkdir -p locked/in && touch locked/in/file && chmod 500 locked/in locked")
    await sandbox.stop()
    await sandbox.stop()
    await _refused(sandbox.exec(["true"]), "a command after stop")
    await _refused(sandbox.read_file("x"), "reading after stop")
    await _refused(sandbox.write_file("x", b""), "writing after stop")


CHECKS: tuple[Check, ...] = (
    exit_code_and_streams_are_kept_apart,
    a_signal_gives_a_negative_exit_code,
    arguments_are_never_shell_words,
    a_command_that_cannot_start_is_an_error,
    the_environment_is_clean,
    home_and_workdir_start_empty,
    standard_input_is_given_or_empty,
    a_command_may_leave_its_input_unread,
    output_is_kept_from_both_ends,
    a_timeout_ends_the_command,
    term_comes_first_so_that_a_command_can_say_goodbye,
    nothing_outlives_a_timeout,
    nothing_outlives_a_normal_end,
    nothing_outlives_a_cancellation,
    commands_run_side_by_side,
    files_are_kept_byte_for_byte,
    an_unreadable_file_is_an_error,
    paths_stay_inside,
    writing_replaces_what_was_left_there,
    directories_go_in_and_out,
    stop_is_final_and_can_be_repeated,
)
