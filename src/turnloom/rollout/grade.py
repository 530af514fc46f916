"""Grades a patch in a clean sandbox. It never sees the sandbox the agent worked in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from turnloom.errors import SandboxError
from turnloom.rollout.patch import PatchRefused, apply_patch
from turnloom.rollout.task import Files, Task
from turnloom.rollout.workspace import copy_in, discard, prepare
from turnloom.sandbox.contract import ExecResult, Sandbox, SandboxUnavailable


@dataclass(frozen=True, slots=True)
class Grade:
    """`exit_code` is the grading command's, None when it did not run to its end. `output` is what it printed."""

    reward: float
    exit_code: int | None
    detail: str
    output: str = field(default="", repr=False)


async def grade_patch(task: Task, patch: bytes, make_sandbox: Callable[[], Sandbox]) -> Grade:
    """Prepare the task anew, apply the patch except below protected paths, add the grader's files, run the grading command.

    A patch that does not apply, or with which the grading command does not start
    or does not end in time, scores as not passed. Raises TaskError or
    SandboxError when the grading itself is impossible.
    """
    try:
        result = await _evaluate(task, patch, make_sandbox)
    except PatchRefused as error:
        return refused(task, error)
    output = "\n".join(text for text in (result.out, result.err) if text)
    if result.timed_out:
        return Grade(task.score(None), None, f"the grading command did not end within {task.eval_timeout:g} s", output)
    return Grade(task.score(result.exit_code), result.exit_code, f"the grading command ended with {result.exit_code}", output)


async def _evaluate(task: Task, patch: bytes, make_sandbox: Callable[[], Sandbox]) -> ExecResult:
    sandbox = make_sandbox()
    try:
        await sandbox.start()
        await prepare(sandbox, task)
        try:
            await apply_patch(sandbox, patch, (*task.protected, *_paths(task.grader_files)))
            await copy_in(sandbox, task.grader_files)
            return await sandbox.exec(task.evaluate, timeout=task.eval_timeout)
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            failure = error
    finally:
        await discard(sandbox)
    if not patch:
        raise failure
    # The patch is to blame when all goes well without it.
    await _evaluate(task, b"", make_sandbox)
    raise PatchRefused(f"with the patch the grading cannot begin: {failure}")


def refused(task: Task, error: PatchRefused) -> Grade:
    """The grade of changes that could not be graded."""
    return Grade(task.score(None), None, str(error))


def _paths(files: Files) -> tuple[str, ...]:
    if isinstance(files, Path):
        return tuple(str(path.relative_to(files)) for path in sorted(files.rglob("*")) if path.is_symlink() or not path.is_dir())
    return tuple(files)
