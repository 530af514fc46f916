"""Runs an agent on a task, many times side by side. One rollout's failure never touches another.

A rollout is: open a session, boot a sandbox, run the agent within its time
budget, take its patch, grade it in a second sandbox, finish the session with the
reward. Sandboxes are always removed and sessions always finished, also when the
run is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace

from turnloom.counters import swallowed
from turnloom.errors import SandboxError
from turnloom.harness.contract import AgentContext, AgentOutcome, AgentRun, Harness
from turnloom.harness.launch import run_agent
from turnloom.rollout.contract import Gateway, Grade, MakeSandbox, RolloutEvent, RolloutResult, RolloutStatus, SessionHandle, Task
from turnloom.rollout.grade import refused
from turnloom.rollout.patch import Base, PatchRefused, take_base, take_patch
from turnloom.rollout.workspace import discard
from turnloom.sandbox.contract import Sandbox
from turnloom.sandbox.local import LocalBackend
from turnloom.types import Sample

log = logging.getLogger("turnloom.rollout")

OnEvent = Callable[[RolloutEvent], None]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """`boot_retries` is how often a sandbox that does not come up is tried again, `boot_pause` the seconds before the
    first of these (doubled each time). The limits are tokens."""

    sandbox: MakeSandbox = LocalBackend().make
    model: str = "turnloom"
    context_tokens: int = 32768
    output_tokens: int = 4096
    boot_retries: int = 2
    boot_pause: float = 1.0


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that the rollouts of one call share."""

    gateway: Gateway
    task: Task
    harness: Harness
    group: str
    time_budget: float
    settings: RolloutSettings
    on_event: OnEvent | None

    def emit(self, rollout: str, stage: str, detail: str = "") -> None:
        log.info("rollout %s %s %s", rollout, stage, detail)
        if self.on_event is None:
            return
        try:
            self.on_event(RolloutEvent(rollout, stage, detail))
        except Exception:  # noqa: BLE001 (a listener that fails must not end a rollout)
            swallowed(log, "rollout.listener", "an event listener failed", level=logging.ERROR, trace=True)


@dataclass(slots=True)
class _Progress:
    """How far one rollout has come."""

    run: AgentRun | None = None
    stats: Mapping[str, int] = field(default_factory=dict)
    patch: bytes = b""
    grade: Grade | None = None
    error: str = ""


async def run_rollouts(
    gateway: Gateway,
    task: Task,
    harness: Harness,
    *,
    n: int = 1,
    concurrency: int = 4,
    time_budget: float = 600.0,
    on_event: OnEvent | None = None,
    group: str | None = None,
    settings: RolloutSettings | None = None,
) -> list[RolloutResult]:
    """Run `n` rollouts, `concurrency` at a time, and return them in their order; none raises.

    `time_budget` is seconds of the agent alone. They share `group` (the task's id
    unless given). `on_event` is called for each step, in this event loop.
    """
    plan = _Plan(gateway, task, harness, group or task.id, time_budget, settings or RolloutSettings(), on_event)
    slots = asyncio.Semaphore(max(1, concurrency))
    call = uuid.uuid4().hex[:8]

    async def one(index: int) -> RolloutResult:
        async with slots:
            return await _rollout(plan, f"{plan.group}-{call}-{index}", index)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(index)) for index in range(n)]
    return [task.result() for task in running]


async def _rollout(plan: _Plan, rollout: str, index: int) -> RolloutResult:
    started = time.monotonic()
    progress = _Progress()
    samples: list[Sample] = []
    session: SessionHandle | None = None
    plan.emit(rollout, "started")
    try:
        metadata: dict[str, object] = {"task": plan.task.id, "agent": plan.harness.name, "index": index}
        session = await plan.gateway.open_session(group=plan.group, rollout=rollout, metadata=metadata)
        try:
            await _work(plan, rollout, session, progress)
        except Exception as error:  # Each failure stays its own: it is this rollout's result.
            progress.error = _describe(error)
            log.debug("rollout %s failed", rollout, exc_info=error)
        except asyncio.CancelledError:
            await _abandon(session)
            raise
        samples = await _finish(session, progress)
    except Exception as error:  # The gateway's own failures, likewise.
        progress.error = progress.error or _describe(error)
        log.debug("rollout %s failed", rollout, exc_info=error)
    result = _result(plan, rollout, session, progress, samples, time.monotonic() - started)
    failed = result.status is not RolloutStatus.GRADED
    plan.emit(rollout, "failed" if failed else "finished", result.error if failed else f"reward {result.reward:g}, {result.turns} turns")
    return result


async def _work(plan: _Plan, rollout: str, session: SessionHandle, progress: _Progress) -> None:
    async with _booted(plan, rollout) as (sandbox, base, program):
        plan.emit(rollout, "ready")
        progress.run = await run_agent(plan.harness, sandbox, _context(plan, sandbox, session, program))
        progress.stats = await session.stats()
        if not progress.stats.get("turns"):
            progress.run = replace(progress.run, outcome=AgentOutcome.NO_MODEL_CALL)
            progress.error = f"the agent made no model call and ended with {progress.run.exit_code}{_last_words(progress.run)}"
            return
        plan.emit(rollout, "agent_ended", f"{progress.run.outcome} after {progress.run.duration:.1f} s, {progress.stats['turns']} turns")
        try:
            progress.patch = await take_patch(sandbox, base)
        except PatchRefused as error:
            progress.grade = refused(error)
    # The agent's sandbox is gone before the grading begins.
    if progress.grade is None:
        progress.grade = await _grade(plan, rollout, progress.patch)
    plan.emit(rollout, "graded", f"reward {progress.grade.reward:g}: {progress.grade.detail}")


@asynccontextmanager
async def _booted(plan: _Plan, rollout: str) -> AsyncIterator[tuple[Sandbox, Base, tuple[str, ...]]]:
    """A prepared sandbox with the agent installed, and removed at the end; one that does not come up is tried again."""
    for attempt in range(plan.settings.boot_retries + 1):
        sandbox = plan.settings.sandbox(plan.task.needs)
        try:
            try:
                await sandbox.start()
                program = await plan.harness.install(sandbox)
                await plan.task.prepare(sandbox)
                base = await take_base(sandbox)
            except SandboxError as error:
                if attempt == plan.settings.boot_retries:
                    raise
                plan.emit(rollout, "retry", str(error))
            else:
                with closing(base):
                    yield sandbox, base, program
                return
        finally:
            await discard(sandbox)
        await asyncio.sleep(plan.settings.boot_pause * 2**attempt)


def _context(plan: _Plan, sandbox: Sandbox, session: SessionHandle, program: tuple[str, ...]) -> AgentContext:
    return AgentContext(
        base_url=sandbox.reach(session.base_url),
        api_key=session.key,
        prompt=plan.task.prompt,
        workdir=sandbox.workdir,
        home=sandbox.home,
        session_uuid=str(uuid.uuid4()),
        program=program,
        model=plan.settings.model,
        time_budget=plan.time_budget,
        context_tokens=plan.settings.context_tokens,
        output_tokens=plan.settings.output_tokens,
    )


async def _grade(plan: _Plan, rollout: str, patch: bytes) -> Grade:
    """Grade, and grade anew when a sandbox fails: the agent's work is done and should not be lost."""
    for attempt in range(plan.settings.boot_retries):
        try:
            return await plan.task.grade(patch, plan.settings.sandbox)
        except SandboxError as error:
            plan.emit(rollout, "retry", str(error))
            await asyncio.sleep(plan.settings.boot_pause * 2**attempt)
    return await plan.task.grade(patch, plan.settings.sandbox)


async def _finish(session: SessionHandle, progress: _Progress) -> list[Sample]:
    """Close the session with what is known of it."""
    try:
        progress.stats = await session.stats()
    except Exception as error:  # noqa: BLE001 (the samples matter more than the counts)
        progress.error = progress.error or _describe(error)
        swallowed(log, "rollout.stats", "no stats of session %s", session.id, trace=True)
    return await session.finish(progress.grade.reward if progress.grade is not None and not progress.error else None)


async def _abandon(session: SessionHandle) -> None:
    """Close the session of a cancelled rollout."""
    try:
        await session.finish(None)
    except Exception:  # noqa: BLE001 (nothing may take the place of the cancellation)
        swallowed(log, "rollout.finish", "session %s could not be finished", session.id, trace=True)


def _result(
    plan: _Plan, rollout: str, session: SessionHandle | None, progress: _Progress, samples: list[Sample], duration: float
) -> RolloutResult:
    outcome = progress.run.outcome if progress.run is not None else None
    if outcome is AgentOutcome.NO_MODEL_CALL:
        status = RolloutStatus.NO_MODEL_CALL
    elif progress.error or progress.grade is None:
        status = RolloutStatus.FAILED
    else:
        status = RolloutStatus.GRADED
    graded = progress.grade if status is RolloutStatus.GRADED else None
    return RolloutResult(
        rollout_id=rollout,
        group_id=plan.group,
        session_id=session.id if session is not None else "",
        status=status,
        reward=graded.reward if graded is not None else None,
        outcome=outcome,
        turns=progress.stats.get("turns", 0),
        tokens=progress.stats.get("tokens", 0),
        lineages=progress.stats.get("lineages", 0),
        forks=progress.stats.get("forks", 0),
        duration=duration,
        detail=progress.grade.detail if progress.grade is not None else "",
        error=progress.error,
        agent=progress.run,
        patch=progress.patch,
        samples=tuple(samples),
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _last_words(run: AgentRun) -> str:
    lines = run.stderr.strip().splitlines() or run.stdout.strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""
