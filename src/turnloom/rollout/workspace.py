"""Lays out a task's workspace in a sandbox and takes what an agent changed as a patch.

The workspace is a git repository for the agent's own use. What is compared is
kept apart from it, in a second repository beside the workspace: whatever the
agent does to its own (commits, a rewritten history, no repository at all) does
not change the patch. Attributes and filters of the workspace are switched off
there, so the patch holds the bytes as they are on disk.
"""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

from turnloom.errors import SandboxError, TaskError
from turnloom.rollout.task import Files, Task
from turnloom.sandbox.contract import ExecResult, Sandbox

log = logging.getLogger("turnloom.rollout")

PATCH_LIMIT = 64 << 20
"""Bytes; a larger patch is refused."""

_GIT_TIME = 300.0
_PLAIN_BYTES = b"* -text !eol -filter -ident !working-tree-encoding !diff\n"
_CLEAN = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "Turnloom"), ("EMAIL", "turnloom@localhost"), ("DATE", "2000-01-01T00:00:00Z"))
}


class PatchRefused(TaskError):
    """The agent's changes cannot be graded as they are: its own doing, so it is graded as a failure."""


async def prepare(sandbox: Sandbox, task: Task) -> str:
    """Copy the files in, run the setup, note the state. Returns the id of the base tree.

    Raises TaskError when a setup command fails.
    """
    await copy_in(sandbox, task.files)
    for argv in task.setup:
        result = await sandbox.exec(argv, timeout=task.setup_timeout)
        if result.timed_out or result.exit_code != 0:
            raise TaskError(f"task {task.id}: setup command {argv[0]!r} {_ending(result)}")
    if (await sandbox.exec(["test", "-e", ".git"])).exit_code != 0:
        await _start_repository(sandbox)
    await sandbox.write_file(f"{sandbox.root}/base.git/info/attributes", _PLAIN_BYTES)
    await _git(sandbox, ["init", "-q", "--template="], _base(sandbox))
    await _git(sandbox, ["add", "-A"], _base(sandbox))
    return (await _git(sandbox, ["write-tree"], _base(sandbox))).out.strip()


async def _start_repository(sandbox: Sandbox) -> None:
    """A repository for the agent's own use, the same in every sandbox, in which it can commit."""
    name, email = _IDENTITY["GIT_AUTHOR_NAME"], _IDENTITY["GIT_AUTHOR_EMAIL"]
    for words in (
        ["init", "-q", "-b", "main"],
        ["config", "user.name", name],
        ["config", "user.email", email],
        ["add", "-A"],
        ["commit", "-q", "--allow-empty", "-m", "Start"],
    ):
        await _git(sandbox, words, {**_CLEAN, **_IDENTITY})


async def discard(sandbox: Sandbox) -> None:
    """Stop a sandbox whose work is done; one that cannot be removed is reported, and does not undo that work."""
    try:
        await sandbox.stop()
    except SandboxError as error:
        log.error("a sandbox was left behind: %s", error)


async def copy_in(sandbox: Sandbox, files: Files) -> None:
    """Lay files over the workspace."""
    if isinstance(files, Path):
        await sandbox.upload(files, ".")
        return
    for path, data in files.items():
        await sandbox.write_file(path, data)


async def take_patch(sandbox: Sandbox, base: str) -> bytes:
    """Everything that differs from `base`, new and binary files too, as a git diff; empty when nothing does.

    Ignored files are left out, as in any git diff. Raises PatchRefused when it is too large.
    """
    await _git(sandbox, ["add", "-A"], _base(sandbox))
    options = ["-p", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color"]
    result = await _git(sandbox, ["diff-index", "--cached", *options, base, "--"], _base(sandbox), PATCH_LIMIT)
    if result.stdout_dropped:
        raise PatchRefused(f"the patch is larger than {PATCH_LIMIT >> 20} MiB")
    return result.stdout


async def apply_patch(sandbox: Sandbox, patch: bytes, protected: tuple[str, ...]) -> None:
    """Apply a patch to a prepared workspace, but nothing below a protected path. Raises PatchRefused when it does not apply.

    git itself refuses a patch that leads out of the workspace, through a symlink too.
    """
    if not patch:
        return
    options = [f"--exclude={pattern}" for path in protected for pattern in _patterns(path)]
    argv = ["git", "apply", "--whitespace=nowarn", *options, "-"]
    result = await sandbox.exec(argv, env=_base(sandbox), stdin=patch, timeout=_GIT_TIME)
    if result.timed_out or result.exit_code != 0:
        raise PatchRefused(f"the patch does not apply to the clean workspace: git {_ending(result)}")


def _patterns(path: str) -> list[str]:
    """What covers a path in git's wildmatch: itself, all below, and its parents, which a patch could turn into a symlink."""
    pure = PurePosixPath(path)
    names = [pure, *(parent for parent in pure.parents if parent.parts)]
    escaped = ["".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in str(name)) for name in names]
    return [*escaped, f"{escaped[0]}/*"]


def _base(sandbox: Sandbox) -> dict[str, str]:
    return {**_CLEAN, "GIT_DIR": f"{sandbox.root}/base.git", "GIT_WORK_TREE": sandbox.workdir}


async def _git(sandbox: Sandbox, words: list[str], env: dict[str, str], limit: int = 1 << 20) -> ExecResult:
    result = await sandbox.exec(["git", *words], env=env, timeout=_GIT_TIME, output_limit=limit)
    if result.timed_out or result.exit_code != 0:
        raise TaskError(f"git {words[0]} {_ending(result)}")
    return result


def _ending(result: ExecResult) -> str:
    lines = (result.err.strip() or result.out.strip()).splitlines()
    how = "did not end in time" if result.timed_out else f"ended with {result.exit_code}"
    return f"{how}: {lines[-1][:300]}" if lines else how
