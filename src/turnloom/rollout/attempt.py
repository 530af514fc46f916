"""One attempt at a rollout: a sandbox, the agent in it, its patch, the grade. It opens no session and never tries again."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from enum import IntEnum

from turnloom.counters import swallowed
from turnloom.errors import (
    EngineError,
    GatewayUnavailable,
    HarnessError,
    RequestError,
    SandboxError,
    StoreError,
    TaskError,
)
from turnloom.harness.contract import AgentContext, AgentOutcome, AgentRun, Harness
from turnloom.harness.launch import run_agent
from turnloom.rollout.boot import pause
from turnloom.rollout.contract import Cause, Gateway, Grade, MakeSandbox, RolloutEvent, SessionHandle, Task
from turnloom.rollout.grade import refused
from turnloom.rollout.patch import Base, PatchRefused, take_base, take_patch
from turnloom.rollout.sessions import Seen, look
from turnloom.rollout.workspace import discard
from turnloom.sandbox.contract import Sandbox, SandboxUnavailable
from turnloom.sandbox.local import LocalBackend
from turnloom.sandbox.spawn import to_the_end

log = logging.getLogger("turnloom.rollout")

OnEvent = Callable[[RolloutEvent], None]

GUARD_ALLOWANCE = 1800.0
"""Seconds beyond the agent's own budget that booting, setting up and grading may take together, unless a guard is given."""

STOP_SECONDS = 120.0
"""How long a sandbox may take to stop before it counts as left behind."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What all rollouts of one call share. The limits are tokens, times are seconds.

    `time_budget` is of the agent alone, `guard` of everything from the first boot to the grade
    (None: the budget and GUARD_ALLOWANCE). `retries` is how often a rollout is begun anew
    when its sandbox gives out or its gateway is lost, and a grading when its sandbox does; a
    rollout whose agent made no model call is begun anew at most once. `pause` is the wait before the first of these,
    doubled each time. `boots` is how many sandboxes start at once in a call for many.
    """

    sandbox: MakeSandbox = LocalBackend().make
    model: str = "turnloom"
    context_tokens: int = 32768
    output_tokens: int = 4096
    time_budget: float = 600.0
    guard: float | None = None
    retries: int = 2
    pause: float = 1.0
    boots: int = 16

    @property
    def guard_time(self) -> float:
        return self.time_budget + GUARD_ALLOWANCE if self.guard is None else self.guard


@dataclass(frozen=True, slots=True)
class Plan:
    """One rollout as it is to be run. `again` says that an earlier run may have begun it."""

    gateway: Gateway
    task: Task
    harness: Harness
    settings: RolloutSettings
    rollout: str
    group: str
    index: int = 0
    again: bool = False
    on_event: OnEvent | None = None

    def emit(self, stage: str, detail: str = "") -> None:
        log.info("rollout %s %s %s", self.rollout, stage, detail)
        if self.on_event is None:
            return
        try:
            self.on_event(RolloutEvent(self.rollout, stage, detail))
        except Exception:  # noqa: BLE001 (a listener that fails must not end a rollout)
            swallowed(log, "rollout.listener", "an event listener failed", level=logging.ERROR, trace=True)


class Stage(IntEnum):
    PLAN = 0
    BOOT = 1
    RUN = 2
    GRADE = 3


@dataclass(slots=True)
class Progress:
    """How far one attempt has come."""

    attempt: int = 1
    stage: Stage = Stage.PLAN
    session: SessionHandle | None = None
    run: AgentRun | None = None
    seen: Seen = field(default_factory=Seen)
    patch: bytes = b""
    grade: Grade | None = None
    cause: Cause | None = None
    error: str = ""
    again: bool = False
    """Whether what failed may go well another time."""

    def failed(self, error: Exception) -> None:
        """The first error counts: later ones follow from it."""
        log.debug("an attempt failed", exc_info=error)
        if self.cause is None:
            self.cause, self.error = cause_of(error), f"{type(error).__name__}: {error}"
            # A command that cannot be started in a sandbox that stands, or work that cannot be graded, would fail again.
            booting = self.stage is Stage.BOOT and isinstance(error, SandboxError)
            self.again = booting or (self.stage is not Stage.GRADE and isinstance(error, SandboxUnavailable | GatewayUnavailable))

    def blamed(self, cause: Cause, error: str) -> None:
        self.cause, self.error = cause, error
        self.again = cause is Cause.NO_MODEL_CALL and self.attempt == 1


def cause_of(error: Exception) -> Cause:
    """Whose doing an error is, by its class."""
    match error:
        case SandboxError():
            return Cause.SANDBOX
        case HarnessError():
            return Cause.HARNESS
        case TaskError():
            return Cause.TASK
        case EngineError():
            return Cause.ENGINE
        case GatewayUnavailable() | StoreError() | RequestError():
            return Cause.GATEWAY
        case _:
            return Cause.OTHER


async def work(plan: Plan, session: SessionHandle, progress: Progress) -> None:
    """From the boot to the grade. What cannot go on raises, with `progress` saying how far it came."""
    async with _booted(plan, progress) as (sandbox, base, program):
        plan.emit("ready")
        progress.stage = Stage.RUN
        progress.run = await run_agent(plan.harness, sandbox, _context(plan, sandbox, session, program))
        progress.seen = await look(session)
        _judge(plan, progress, progress.run)
        if progress.cause is not None:
            return
        plan.emit("agent_ended", f"{progress.run.outcome} after {progress.run.duration:.1f} s, {progress.seen.turns} turns")
        try:
            progress.patch = await take_patch(sandbox, base)
        except PatchRefused as error:
            progress.grade = refused(error)
    # The agent's sandbox is gone before the grading begins.
    progress.stage = Stage.GRADE
    if progress.grade is None:
        progress.grade = await _grade(plan, progress.patch)
    plan.emit("graded", f"reward {progress.grade.reward:g}: {progress.grade.detail}")


def _judge(plan: Plan, progress: Progress, run: AgentRun) -> None:
    """Whether what the agent leaves is its own doing, and so can be graded."""
    seen = progress.seen
    if not seen.turns and not seen.reached:
        progress.run = replace(run, outcome=AgentOutcome.NO_MODEL_CALL)
        progress.blamed(Cause.NO_MODEL_CALL, f"the agent made no model call and ended with {run.exit_code}{_last_words(run)}")
        log.error("rollout %s: %s", plan.rollout, progress.error)
        plan.emit("alarm", progress.error)
    elif seen.gave_out:
        progress.blamed(Cause.ENGINE, f"the engine gave out in the agent's last turn: {seen.gave_out}")


@asynccontextmanager
async def _booted(plan: Plan, progress: Progress) -> AsyncIterator[tuple[Sandbox, Base, tuple[str, ...]]]:
    """A prepared sandbox with the agent installed, and removed at the end."""
    sandbox = plan.settings.sandbox(plan.task.needs)
    progress.stage = Stage.BOOT
    try:
        await sandbox.start()
        program = await plan.harness.install(sandbox)
        await plan.task.prepare(sandbox)
        with closing(await take_base(sandbox)) as base:
            yield sandbox, base, program
    finally:
        await to_the_end(_stop(sandbox))


async def _stop(sandbox: Sandbox) -> None:
    """Within a time of its own: a backend that hangs here must not hold up the run."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await discard(sandbox)
    except TimeoutError:
        swallowed(log, "rollout.sandbox", "a sandbox did not stop within %g s and was left behind", STOP_SECONDS, level=logging.ERROR)


def _context(plan: Plan, sandbox: Sandbox, session: SessionHandle, program: tuple[str, ...]) -> AgentContext:
    return AgentContext(
        base_url=sandbox.reach(session.base_url),
        api_key=session.key,
        prompt=plan.task.prompt,
        workdir=sandbox.workdir,
        home=sandbox.home,
        session_uuid=str(uuid.uuid4()),
        program=program,
        model=plan.settings.model,
        time_budget=plan.settings.time_budget,
        context_tokens=plan.settings.context_tokens,
        output_tokens=plan.settings.output_tokens,
    )


async def _grade(plan: Plan, patch: bytes) -> Grade:
    """Grade, and grade anew when a sandbox fails: the agent's work is done and should not be lost."""
    for attempt in range(1, plan.settings.retries + 1):
        try:
            return await plan.task.grade(patch, plan.settings.sandbox)
        except SandboxError as error:
            plan.emit("retry", f"the grading: {error}")
            await asyncio.sleep(pause(plan.settings.pause, attempt))
    return await plan.task.grade(patch, plan.settings.sandbox)


def _last_words(run: AgentRun) -> str:
    lines = run.stderr.strip().splitlines() or run.stdout.strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""
