"""What a rollout needs of a gateway and of a task, and what it gives back. Types only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

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

    async def stats(self) -> Mapping[str, int]:
        """Counts so far: `turns`, `tokens` (sampled), `lineages`, `forks`."""


class Gateway(Protocol):
    async def open_session(self, *, group: str, rollout: str, metadata: dict[str, object]) -> SessionHandle:
        """A new session for one rollout of a group."""


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
    FAILED = "failed"
    """Something on Turnloom's or the task's side failed; `error` says what. There is no reward."""


@dataclass(frozen=True, slots=True)
class RolloutEvent:
    """A step of one rollout, for a person to read. `stage` is one of started, retry, ready, agent_ended, graded, finished, failed."""

    rollout_id: str
    stage: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """One rollout, whatever became of it.

    `reward` is None unless it was graded. `patch` is what the agent changed, as a
    binary git diff. `duration` is seconds, sandboxes and grading included.
    `detail` is how the grading went, `error` what failed.
    """

    rollout_id: str
    group_id: str
    session_id: str
    status: RolloutStatus
    reward: float | None
    outcome: AgentOutcome | None
    turns: int
    tokens: int
    lineages: int
    forks: int
    duration: float
    detail: str = ""
    error: str = ""
    agent: AgentRun | None = field(default=None, repr=False)
    patch: bytes = field(default=b"", repr=False)
    samples: tuple[Sample, ...] = field(default=(), repr=False)

    @property
    def sample_count(self) -> int:
        return len(self.samples)
