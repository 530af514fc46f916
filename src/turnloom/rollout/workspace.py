"""Lays out a task's workspace in a sandbox, with a git repository for the agent's own use."""

from __future__ import annotations

import logging
from pathlib import Path

from turnloom.counters import swallowed
from turnloom.errors import TaskError
from turnloom.rollout.repository import CLEAN, ending, git
from turnloom.rollout.task import Files, Task
from turnloom.sandbox.contract import Sandbox

log = logging.getLogger("turnloom.rollout")

_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Turnloom"), ("EMAIL", "turnloom@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}


async def prepare(sandbox: Sandbox, task: Task) -> None:
    """Copy the files in, run the setup, start a repository. Raises TaskError when a setup command fails."""
    await copy_in(sandbox, task.files)
    for argv in task.setup:
        result = await sandbox.exec(argv, timeout=task.setup_timeout)
        if result.timed_out or result.exit_code != 0:
            raise TaskError(f"task {task.id}: setup command {argv[0]!r} {ending(result)}")
    if (await sandbox.exec(["test", "-e", ".git"])).exit_code != 0:
        await _start_repository(sandbox)


async def _start_repository(sandbox: Sandbox) -> None:
    """A repository for the agent's own use, the same in every sandbox, in which it can commit."""
    name, email = _IDENTITY["GIT_AUTHOR_NAME"], _IDENTITY["GIT_AUTHOR_EMAIL"]
    for words in (
        ("init", "-q", "-b", "main"),
        ("config", "user.name", name),
        ("config", "user.email", email),
        ("add", "-A"),
        ("commit", "-q", "--allow-empty", "-m", "Start"),
    ):
        await git(sandbox, words, {**CLEAN, **_IDENTITY})


async def discard(sandbox: Sandbox) -> None:
    """Stop a sandbox whose work is done; one that cannot be removed is reported, and does not undo that work."""
    try:
        await sandbox.stop()
    except Exception as error:  # noqa: BLE001 (whatever a backend raises here, the grade stands)
        swallowed(log, "rollout.sandbox", "a sandbox was left behind: %s", error, level=logging.ERROR, trace=True)


async def copy_in(sandbox: Sandbox, files: Files) -> None:
    """Lay files over the workspace."""
    if isinstance(files, Path):
        await sandbox.upload(files, ".")
        return
    for path, data in files.items():
        await sandbox.write_file(path, data)
