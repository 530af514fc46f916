"""What a rollout needs of a gateway and of a task, and what it gives back. Types only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from turnloom.harness.contract import AgentOutcome, AgentRun
from turnloom.sandbox.contract import Needs, Sandbox
from turnloom.types import Sample


class SessionHandle(Protocol):
    """One open session."""

    @property
    def id(self) -> str: ...

    @property
    def key(self) -> str:
        """The session's secret, which the agent gets as its API key."""

    @property
    def base_url(self) -> str:
        """`http://host:port/s/KEY`, to which an SDK appends its routes."""

    async def finish(self, reward: float | None) -> list[Sample]:
        """Close the session with this reward (None: it was never graded) and return its samples."""

    async def samples(self) -> list[Sample]:
        """Those of the turns so far."""

    async def status(self) -> Mapping[str, Any]:
        """Counts so far: `turns`, `in_flight`, `sampled_tokens`, `lineages`, `forks` and `outcomes` (by kind); and `reached`, the
        limits at which a request was refused."""

    async def tree(self) -> Mapping[str, Any]:
        """`turns`, each with its `index`, `outcome` and `error`."""

    async def drop(self) -> None:
        """Forget it and its turns, also those in flight."""


class Gateway(Protocol):
    async def open_session(self, *, id: str, group: str, rollout: str, metadata: dict[str, object]) -> SessionHandle:
        """A new session for one rollout of a group. Raises BadRequest when the id is taken."""

    async def handle(self, session_id: str) -> SessionHandle:
        """A session that is on record. Raises NotFound."""


MakeSandbox = Callable[[Needs], Sandbox]
"""A sandbox that is not started yet, as `Backend.make`."""


@dataclass(frozen=True, slots=True)
class Grade:
    """`exit_code` is the grading command's, None when there was none that ran to its end. `output` is what was printed."""

    reward: float
    exit_code: int | None
    detail: str
    output: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Work:
    """What a grader gets: a fresh sandbox of the task, with the patch applied and the grader's own files laid over it."""

    task: str
    patch: bytes = field(repr=False)
    sandbox: Sandbox = field(repr=False)
    metadata: Mapping[str, object] = field(default_factory=dict)


class Grader(Protocol):
    async def grade(self, work: Work) -> Grade:
        """Judge the work. Raises TaskError or SandboxError when no judgement is possible: that is never a reward of 0."""


class Task(Protocol):
    """What the agent is to do, where, and how it is judged. `RepositoryTask` is one for repositories; bring your own for all else."""

    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> str: ...

    @property
    def needs(self) -> Needs:
        """The place that it asks for, for the agent and again for the grading."""

    async def prepare(self, sandbox: Sandbox) -> None:
        """Lay out the workspace in a started sandbox, the same each time. Raises TaskError or SandboxError."""

    async def grade(self, patch: bytes, make: MakeSandbox) -> Grade:
        """Judge what the agent changed in a sandbox that it never saw.

        Raises TaskError or SandboxError when no judgement is possible: that is never a reward of 0.
        """


class RolloutStatus(StrEnum):
    GRADED = "graded"
    """The agent ran, however it ended, and its work was graded."""
    NO_MODEL_CALL = "no_model_call"
    """The agent never reached its model: an alarm about settings, not a reward."""
    ABORTED = "aborted"
    """The guard time over everything was up before it was graded. There is no reward."""
    FAILED = "failed"
    """Something on Turnloom's, the engine's or the task's side failed; `error` says what. There is no reward."""


class Cause(StrEnum):
    """Why a rollout was not graded: whose doing it was."""

    SANDBOX = "sandbox"
    HARNESS = "harness"
    """The agent could not be installed or started."""
    TASK = "task"
    ENGINE = "engine"
    """It gave out in the agent's last turn, in spite of the gateway's patience."""
    GATEWAY = "gateway"
    NO_MODEL_CALL = "no_model_call"
    GUARD = "guard"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RolloutEvent:
    """A step of one rollout, for a person to read.

    `stage` is one of started, retry, ready, agent_ended, alarm, graded, finished, failed.
    """

    rollout_id: str
    stage: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout, whatever became of it.

    `reward` is None unless it was graded. `attempts` is how often it was begun;
    all else is of the last one. `started` is in Unix seconds, `duration` in seconds
    over all attempts, sandboxes and grading included. `detail` is how the grading
    went, `output` what it printed; `error` is what failed, and `cause` whose doing
    that was, None for a graded one. `patch` is what the agent changed, as a binary
    git diff.
    """

    rollout_id: str
    group_id: str
    task_id: str
    index: int
    session_id: str
    status: RolloutStatus
    reward: float | None
    outcome: AgentOutcome | None
    turns: int
    tokens: int
    lineages: int
    forks: int
    duration: float
    started: float = 0.0
    attempts: int = 1
    cause: Cause | None = None
    detail: str = ""
    error: str = ""
    output: str = field(default="", repr=False)
    agent: AgentRun | None = field(default=None, repr=False)
    patch: bytes = field(default=b"", repr=False)
    samples: tuple[Sample, ...] = field(default=(), repr=False)

    @property
    def sample_count(self) -> int:
        return len(self.samples)
