"""What a harness is given, what it says, and how an agent's run ended. Types only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from turnloom.sandbox.contract import Sandbox


@dataclass(frozen=True, slots=True)
class AgentContext:
    """One run of one agent.

    `base_url` is what the agent's SDK appends its routes to (`…/v1/messages`); it
    may hold the session's key, so neither it nor `api_key` is shown in a repr.
    `workdir` and `home` are absolute paths in the sandbox, `session_uuid` a UUID
    for agents that want one, `time_budget` seconds, the limits tokens.
    `program` is what `Harness.install` returned.
    """

    base_url: str = field(repr=False)
    api_key: str = field(repr=False)
    prompt: str
    workdir: str
    home: str
    session_uuid: str
    program: tuple[str, ...]
    model: str = "turnloom"
    time_budget: float = 600.0
    context_tokens: int = 32768
    output_tokens: int = 4096


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line and all it needs. `files` maps absolute paths in the sandbox to contents written before the start."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    stdin: bytes | None = None


class AgentOutcome(StrEnum):
    """How an agent ended. An exit code of 0 is all that `completed` says: some agents exit 0 when they are stopped."""

    COMPLETED = "completed"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    LIMIT_REACHED = "limit_reached"
    """A limit of its session refused it a turn. Only who sees the session can say so."""
    NO_MODEL_CALL = "no_model_call"
    """It never called its model: a wrong setting, not a bad answer. Only who sees the calls can say so."""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """How the run ended; the streams are UTF-8 text cut in the middle when long, `duration` is seconds."""

    exit_code: int
    outcome: AgentOutcome
    stdout: str
    stderr: str
    duration: float


class Harness(Protocol):
    """One kind of agent."""

    @property
    def name(self) -> str: ...

    async def install(self, sandbox: Sandbox) -> tuple[str, ...]:
        """Make the agent ready for this sandbox and return the words that start it.

        Quick when it is there already; safe to call from several runs at once.
        Raises HarnessError that says what to do.
        """

    def command(self, context: AgentContext) -> Launch:
        """The command line for one run. Pure: the same context gives the same launch."""


@runtime_checkable
class Needy(Protocol):
    """A harness that can say early that this machine lacks something it needs."""

    async def require(self) -> None:
        """Quick, and changes nothing. Raises HarnessError that says what to do."""
