"""Ends everything one command started. It never touches a process without the command's own marks.

A process belongs to a command when it is in the session that the command leads,
or carries the command's tag in its environment: agents start their tools in
sessions of their own (`setsid`), which a signal to the process group misses. The
tag is read from /proc, so the second way works on Linux only. A process that
does both, leave the session and clear its environment, gets away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from turnloom.counters import swallowed

log = logging.getLogger("turnloom.sandbox")

TAG = "TURNLOOM_SANDBOX"
_ROUNDS = 50
_PAUSE = 0.02


def signal_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a process group; one that is gone is no error."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        swallowed(log, "sandbox.signal", "cannot signal process group %d: %s", leader, error)


def tagged(tag: str, leader: int | None = None) -> list[int]:
    """Living processes whose tag is `tag` (or starts with it, when it ends in a dot) or whose session is led by `leader`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*") if os.path.isdir("/proc") else ():
        pid = int(entry.name)
        try:
            stat = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if stat[0] in (b"Z", b"X") or pid == os.getpid():
                continue
            # proc(5): after the name come state, ppid, pgrp, session.
            if (leader is not None and int(stat[3]) == leader) or _has_tag((entry / "environ").read_bytes(), tag):
                found.append(pid)
        except (OSError, IndexError):
            continue  # It ended meanwhile, or belongs to another user.
    return found


def _has_tag(environ: bytes, tag: str) -> bool:
    wanted = f"{TAG}={tag}".encode()
    return any(v.startswith(wanted) if tag.endswith(".") else v == wanted for v in environ.split(b"\0"))


async def kill_all(tag: str, leader: int | None = None) -> None:
    """KILL until no process of the command is left; one that forks meanwhile is met in the next round."""
    if leader is not None:
        signal_group(leader, signal.SIGKILL)
    left: list[int] = []
    for _ in range(_ROUNDS):
        left = await asyncio.to_thread(tagged, tag, leader)
        if not left:
            return
        for pid in left:
            _kill(pid, signal.SIGKILL)
        await asyncio.sleep(_PAUSE)
    log.warning("processes %s of sandbox %s do not end", left, tag)


async def terminate(tag: str, leader: int) -> None:
    """Ask every process of the command to end (TERM), each once: many programs take a second TERM for "at once"."""
    found = await asyncio.to_thread(tagged, tag, leader)
    for pid in found:
        _kill(pid, signal.SIGTERM)
    if not found:
        signal_group(leader, signal.SIGTERM)


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        swallowed(log, "sandbox.signal", "cannot signal process %d: %s", pid, error)
