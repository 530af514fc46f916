"""What a task is, and how one is read from a directory.

A task directory holds `task.toml` (or `task.json`) and the files it names:

    prompt = "Fix the failing test."     # or prompt_file = "prompt.md"
    id = "stats-mean"                    # the directory's name when left out
    files = "files"                      # copied into the workspace
    setup = [["pip", "install", "-e", "."]]
    protected = ["tests"]                # what the agent changes here never reaches the grading

    [eval]
    argv = ["python3", "-I", "tests/run.py"]
    files = "grader"                     # optional: laid over the workspace for grading only
    timeout = 120.0

Commands are lists of words; there is no shell in between.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnloom.errors import TaskError
from turnloom.rollout.contract import Grade, Grader, MakeSandbox
from turnloom.rollout.grade import grade_patch
from turnloom.rollout.graders import CommandGrader
from turnloom.rollout.repository import ending
from turnloom.rollout.workspace import Files, copy_in, start_repository
from turnloom.sandbox.contract import ANYWHERE, Needs, Sandbox


@dataclass(frozen=True, slots=True)
class RepositoryTask:
    """A `Task`: a repository, a prompt and a grader.

    `files` are laid over what the place `needs` asks for has in its workdir. The
    `setup` commands run there before the agent, and again before the grading.
    `grader` judges a clean copy with the agent's patch. Changes of the agent below
    a `protected` path, or to a path of `grader_files`, are left out of that copy.
    """

    id: str
    prompt: str
    grader: Grader
    files: Files = field(default_factory=dict)
    needs: Needs = ANYWHERE
    setup: tuple[tuple[str, ...], ...] = ()
    protected: tuple[str, ...] = ()
    grader_files: Files = field(default_factory=dict)
    setup_timeout: float = 600.0
    metadata: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id or not self.prompt:
            raise TaskError("a task needs an id and a prompt")
        for path in (*self.protected, *_names(self.files), *_names(self.grader_files)):
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or not pure.parts:
                raise TaskError(f"task {self.id}: {path!r} is not a path inside the workspace")

    async def prepare(self, sandbox: Sandbox) -> None:
        """Copy the files in, run the setup, start a repository. Raises TaskError when a setup command fails."""
        await copy_in(sandbox, self.files)
        for argv in self.setup:
            result = await sandbox.exec(argv, timeout=self.setup_timeout)
            if result.timed_out or result.exit_code != 0:
                raise TaskError(f"task {self.id}: setup command {argv[0]!r} {ending(result)}")
        await start_repository(sandbox)

    async def grade(self, patch: bytes, make: MakeSandbox) -> Grade:
        return await grade_patch(self, patch, make)


def _names(files: Files) -> tuple[str, ...]:
    return () if isinstance(files, Path) else tuple(files)


class _Eval(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    argv: list[str] = Field(min_length=1)
    files: str | None = None
    timeout: float = Field(default=300.0, gt=0)


class _TaskFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    id: str | None = None
    prompt: str | None = None
    prompt_file: str | None = None
    files: str = "files"
    setup: list[list[str]] = []
    setup_timeout: float = Field(default=600.0, gt=0)
    protected: list[str] = []
    eval: _Eval


def load_task(path: Path) -> RepositoryTask:
    """The task in a directory (or of its `task.toml` or `task.json`). Raises TaskError that names the file and the field."""
    place = _task_file(path)
    try:
        found = _TaskFile.model_validate(_parse(place))
    except ValidationError as error:
        problem = error.errors()[0]
        raise TaskError(f"{place}: {'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}") from error
    home = place.parent
    if (found.prompt is None) == (found.prompt_file is None):
        raise TaskError(f"{place}: give either prompt or prompt_file")
    try:
        prompt = found.prompt if found.prompt is not None else (home / str(found.prompt_file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{place}: prompt_file: {error}") from error
    return RepositoryTask(
        id=found.id or home.resolve().name,
        prompt=prompt,
        files=_directory(place, "files", found.files),
        grader=CommandGrader(tuple(found.eval.argv), timeout=found.eval.timeout),
        setup=tuple(tuple(words) for words in found.setup),
        protected=tuple(found.protected),
        grader_files=_directory(place, "eval.files", found.eval.files) if found.eval.files else {},
        setup_timeout=found.setup_timeout,
    )


def _task_file(path: Path) -> Path:
    candidates = (path,) if path.is_file() else (path / "task.toml", path / "task.json")
    place = next((candidate for candidate in candidates if candidate.is_file()), None)
    if place is None:
        raise TaskError(f"there is no task.toml or task.json in {path}")
    return place


def _parse(place: Path) -> Any:
    try:
        text = place.read_text(encoding="utf-8")
        return json.loads(text) if place.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise TaskError(f"{place}: {error}") from error


def _directory(place: Path, name: str, value: str) -> Path:
    directory = place.parent / value
    if not directory.is_dir():
        raise TaskError(f"{place}: {name}: there is no directory {value!r} beside it")
    return directory
