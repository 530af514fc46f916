"""Grades a patch in a clean sandbox. It never sees the sandbox the agent worked in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from turnloom.errors import SandboxError
from turnloom.rollout.contract import Grade, Grader, MakeSandbox, Work
from turnloom.rollout.patch import PatchRefused, apply_patch
from turnloom.rollout.workspace import Files, copy_in, discard
from turnloom.sandbox.contract import Needs, Sandbox, SandboxUnavailable


class Graded(Protocol):
    """What of a task the grading needs."""

    @property
    def id(self) -> str: ...
    @property
    def needs(self) -> Needs: ...
    @property
    def grader(self) -> Grader: ...
    @property
    def protected(self) -> tuple[str, ...]: ...
    @property
    def grader_files(self) -> Files: ...
    @property
    def metadata(self) -> Mapping[str, object]: ...
    async def prepare(self, sandbox: Sandbox) -> None: ...


async def grade_patch(task: Graded, patch: bytes, make: MakeSandbox) -> Grade:
    """Prepare the task anew, apply the patch except below protected paths, add the grader's files, ask the grader.

    A patch that does not apply, or with which the grader cannot begin what it can
    begin without, scores 0. Raises TaskError or SandboxError when the grading itself
    is impossible.
    """
    try:
        return await _grade(task, patch, make)
    except PatchRefused as error:
        return refused(error)


async def _grade(task: Graded, patch: bytes, make: MakeSandbox) -> Grade:
    sandbox = make(task.needs)
    try:
        await sandbox.start()
        await task.prepare(sandbox)
        try:
            await apply_patch(sandbox, patch, (*task.protected, *_paths(task.grader_files)))
            await copy_in(sandbox, task.grader_files)
            return await task.grader.grade(Work(task.id, patch, sandbox, task.metadata))
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            failure = error
    finally:
        await discard(sandbox)
    if not patch:
        raise failure
    # The patch is to blame when all goes well without it.
    await _grade(task, b"", make)
    raise PatchRefused(f"with the patch the grading cannot begin: {failure}")


def refused(error: PatchRefused) -> Grade:
    """The grade of changes that could not be graded."""
    return Grade(0.0, None, str(error))


def _paths(files: Files) -> tuple[str, ...]:
    if isinstance(files, Path):
        return tuple(str(path.relative_to(files)) for path in sorted(files.rglob("*")) if path.is_symlink() or not path.is_dir())
    return tuple(files)
