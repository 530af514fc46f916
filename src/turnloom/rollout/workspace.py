"""Lays out a task's workspace in a sandbox, with a git repository for the agent's own use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from turnloom.counters import swallowed
from turnloom.rollout.repository import CLEAN, git
from turnloom.sandbox.contract import Sandbox

log = logging.getLogger("turnloom.rollout")

Files = Path | Mapping[str, bytes]
"""A directory of this host, or contents by relative path."""

_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Turnloom"), ("EMAIL", "turnloom@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}


async def start_repository(sandbox: Sandbox) -> None:
    """A repository for the agent's own use, the same in every sandbox, in which it can commit; one that is there stays."""
    if (await sandbox.exec(["test", "-e", ".git"])).exit_code == 0:
        return
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
