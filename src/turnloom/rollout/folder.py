"""The folder of a run: what it was asked for, each rollout as it ends, logs, a summary. It runs nothing.

    run.json         the settings, by which a later command knows that it is the same run
    run.lock         held by the process that writes here
    turnloom.db      the gateway's store: every session with all its turns
    results.jsonl    one line for each rollout that ended, on disk before the next begins
    logs/ROLLOUT/    agent.stdout, agent.stderr, patch.diff, grade.txt
    samples.*        of the graded rollouts, written when the run is over
    summary.json     likewise

A rollout that was graded is never repeated. All others, half done or failed, are
begun anew when the run is resumed; of several lines of one rollout the last counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Self

from turnloom.errors import ConfigError, StoreError
from turnloom.export.files import atomic
from turnloom.rollout.contract import Rollout, RolloutStatus, Task
from turnloom.rollout.sessions import safe_name
from turnloom.store import lock

SETTINGS, RESULTS, SUMMARY, LOGS, STORE = "run.json", "results.jsonl", "summary.json", "logs", "turnloom.db"

Row = dict[str, Any]
"""One line of results.jsonl, as `row_of` writes it."""


class RunFolder:
    """One run's folder, to be used as a context manager: its lock is held until it is closed."""

    def __init__(self, path: Path, lock_descriptor: int, rows: dict[str, Row], began: bool) -> None:
        self.path = path
        self.began = began
        """Whether an earlier command began this run."""
        self._lock = lock_descriptor
        self._rows = rows
        self._writing = Lock()

    @classmethod
    def open(cls, path: Path, settings: Mapping[str, Any], *, resume: bool) -> Self:
        """A new run, or with `resume` the one that is there, if any.

        Raises ConfigError where a run is there that is not to be resumed, has other
        settings or cannot be read, and StoreError where another process writes it.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            descriptor = lock.take(path / "run")
        except StoreError as error:
            raise StoreError(f"{path} is in use: {error}") from error
        except OSError as error:
            raise ConfigError(f"cannot write in {path}: {error.strerror or error}; choose another --out") from error
        try:
            began = _is_begun(path)
            return cls(path, descriptor, _begin(path, settings, resume) if began else _settle(path, settings), began)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"cannot write in {path}: {error.strerror or error}; choose another --out") from error
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def store(self) -> Path:
        return self.path / STORE

    @property
    def rows(self) -> list[Row]:
        """The last line of each rollout, in the order in which they first ended."""
        return list(self._rows.values())

    @property
    def graded(self) -> frozenset[str]:
        """The rollouts that are never repeated."""
        return frozenset(name for name, row in self._rows.items() if row["status"] == RolloutStatus.GRADED)

    def logs(self, rollout_id: str) -> Path:
        return self.path / LOGS / safe_name(rollout_id)

    def add(self, rollout: Rollout) -> None:
        """Write a rollout that ended: its logs, then its line, which is on disk when this returns. From any thread. Raises ConfigError."""
        row = row_of(rollout)
        try:
            self._write_logs(rollout)
            with self._writing, open(self.path / RESULTS, "ab") as file:
                file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"cannot write in {self.path}: {error.strerror or error}; go on with --resume when it can be") from error
        self._rows[rollout.rollout_id] = row

    def _write_logs(self, rollout: Rollout) -> None:
        place, agent = self.logs(rollout.rollout_id), rollout.agent
        place.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("agent.stdout", agent.stdout if agent else ""),
            ("agent.stderr", agent.stderr if agent else ""),
            ("grade.txt", "\n".join(filter(None, (rollout.detail, rollout.output)))),
        ):
            (place / name).write_bytes(text.encode("utf-8", "backslashreplace"))
        (place / "patch.diff").write_bytes(rollout.patch)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Raises ConfigError."""
        with atomic(self.path / SUMMARY) as file:
            file.write(json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Closing twice is no error."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def row_of(rollout: Rollout) -> Row:
    """The line of a rollout, without its output, its patch and its samples."""
    return {
        "rollout_id": rollout.rollout_id,
        "task": rollout.task_id,
        "index": rollout.index,
        "group_id": rollout.group_id,
        "session_id": rollout.session_id,
        "status": str(rollout.status),
        "reward": rollout.reward,
        "outcome": str(rollout.outcome) if rollout.outcome is not None else None,
        "exit_code": rollout.agent.exit_code if rollout.agent is not None else None,
        "cause": str(rollout.cause) if rollout.cause is not None else None,
        "error": rollout.error,
        "detail": rollout.detail,
        "turns": rollout.turns,
        "tokens": rollout.tokens,
        "lineages": rollout.lineages,
        "forks": rollout.forks,
        "samples": rollout.sample_count,
        "attempts": rollout.attempts,
        "started": rollout.started,
        "seconds": rollout.duration,
    }


def digest(value: object) -> str:
    """A short SHA-256 of a setting that is compared and not shown."""
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tasks_digest(tasks: Iterable[Task]) -> str:
    """Of the tasks' ids, prompts and places, in their order."""
    return digest([[task.id, task.prompt, task.needs.image, task.needs.workdir] for task in tasks])


def _is_begun(path: Path) -> bool:
    """A command that could not start, for want of an engine say, has left its settings and nothing else."""
    return any((path / name).exists() for name in (STORE, RESULTS))


def _settle(path: Path, settings: Mapping[str, Any]) -> dict[str, Row]:
    with atomic(path / SETTINGS) as file:
        file.write(json.dumps(settings, indent=2).encode() + b"\n")
    return {}


def _begin(path: Path, settings: Mapping[str, Any], resume: bool) -> dict[str, Row]:
    if not resume:
        raise ConfigError(f"{path} holds an earlier run; go on with it with --resume, choose another --out, or remove it")
    _compare(path / SETTINGS, settings)
    return _read(path / RESULTS)


def _compare(earlier: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = json.loads(earlier.read_text("utf-8"))
        if not isinstance(before, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{earlier} cannot be read: {error}; choose another --out") from error
    asked = json.loads(json.dumps(settings))
    other = [name for name in sorted({*before, *asked}) if before.get(name) != asked.get(name)]
    if other:
        told = "; ".join(f"{name} was {json.dumps(before.get(name))}, now {json.dumps(asked.get(name))}" for name in other)
        raise ConfigError(f"{earlier.parent} holds a run with other settings: {told}. Resume it with its own, or choose another --out")


def _read(path: Path) -> dict[str, Row]:
    """The rows of a results file. A last line that a crash cut off is removed from it. Raises ConfigError for any other damage."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with open(path, "r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())
    rows: dict[str, Row] = {}
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            row = json.loads(line)
            rows[row["rollout_id"]] = row
            if row["status"] not in {str(status) for status in RolloutStatus}:
                raise ValueError(f"its status is {row['status']!r}")
        except (ValueError, KeyError, TypeError) as error:
            told = f"{path} line {number} is not the result of a rollout: {error!r}; mend it, or choose another --out"
            raise ConfigError(told) from error
    return rows
