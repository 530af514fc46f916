"""What sandboxes of this machine share in starting a command: its pipes, its input, its end. It never decides where a command runs."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from typing import IO, Any

from turnloom.errors import SandboxError
from turnloom.sandbox.contract import SandboxUnavailable
from turnloom.sandbox.output import Drain

log = logging.getLogger("turnloom.sandbox")

DRAIN_TIME = 2.0
"""Seconds to wait for an output pipe to close after all processes are gone; only one that got away holds it longer."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT})
"""What this machine has run out of, whoever asks."""


def failure(what: str, error: Exception) -> SandboxError:
    """SandboxUnavailable when this machine ran out of something, else a plain SandboxError."""
    kind = SandboxUnavailable if isinstance(error, OSError) and error.errno in _EXHAUSTED else SandboxError
    return kind(f"cannot {what}: {error}")


def refuse_odd_words(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Raises SandboxError for a command line or an environment that no program can be started with."""
    if not argv:
        raise SandboxError("the command is empty")
    if any("\0" in word for word in (*argv, *env, *env.values())):
        raise SandboxError("the command or its environment holds a NUL byte")  # uvloop would cut it short there.


async def spawn(
    argv: Sequence[str],
    *,
    cwd: str | os.PathLike[str],
    env: Mapping[str, str],
    stdin: bytes | None,
    output_limit: int,
    pass_fds: Sequence[int] = (),
    shown: str = "",
) -> tuple[asyncio.subprocess.Process, Drain, Drain]:
    """Start `argv` as the leader of a session of its own, its output being drained. `shown` is its name in an error.

    Raises SandboxError when it cannot be started.
    """
    # Pipes of our own: asyncio's would make wait() last until every process that inherited them has ended.
    out, out_end = open_pipe(output_limit)
    try:
        err, err_end = open_pipe(output_limit)
    except BaseException:
        out.close()
        os.close(out_end)
        raise
    try:
        with _input_file(stdin) as source:
            process = await asyncio.create_subprocess_exec(
                *argv, cwd=cwd, env=env, stdin=source, stdout=out_end, stderr=err_end, start_new_session=True, pass_fds=pass_fds
            )
    except BaseException as error:
        out.close()
        err.close()
        if isinstance(error, OSError | ValueError):
            raise failure(f"start {shown or argv[0]!r}", error) from error
        raise
    finally:
        os.close(out_end)
        os.close(err_end)
    return process, out, err


def open_pipe(limit: int) -> tuple[Drain, int]:
    """A pipe being drained, and the end to write to."""
    try:
        read_end, write_end = os.pipe()
    except OSError as error:
        raise failure("open a pipe", error) from error
    return Drain(read_end, limit), write_end


def _input_file(data: bytes | None) -> IO[bytes]:
    """Standard input as a file: no writer to run beside the command, nothing to deadlock on."""
    if data is None:
        return open(os.devnull, "rb")
    with tempfile.NamedTemporaryFile() as draft:
        draft.write(data)
        draft.flush()
        return open(draft.name, "rb")  # For reading only; the name goes at once.


async def quietly(waiting: Coroutine[Any, Any, object], seconds: float) -> None:
    """Wait, but no longer than this."""
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        log.debug("gave up waiting after %s s", seconds)


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run clean-up to its end even when the caller is cancelled meanwhile; the cancellation is then passed on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
