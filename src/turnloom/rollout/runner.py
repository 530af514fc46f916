"""Runs an agent on tasks, once or many times side by side. One rollout's failure never touches another.

A rollout is: open a session, boot a sandbox, run the agent within its time
budget, take its patch, grade it in a second sandbox, finish the session with the
reward (`attempt.py`). Here it is begun anew where that may help, ended when its
guard time is up, and cleaned up after whatever happens: sandboxes are always
stopped and sessions always finished, also when the run is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from turnloom.counters import swallowed
from turnloom.errors import ConfigError
from turnloom.harness.contract import AgentOutcome, Harness
from turnloom.rollout.attempt import OnEvent, Plan, Progress, RolloutSettings, Stage, work
from turnloom.rollout.boot import limited, pause
from turnloom.rollout.contract import Cause, Gateway, Rollout, RolloutStatus, SessionHandle, Task
from turnloom.rollout.sessions import CLOSING_SECONDS, abandon, look, open_anew
from turnloom.sandbox.spawn import to_the_end
from turnloom.types import Sample

log = logging.getLogger("turnloom.rollout")

OnRollout = Callable[[Rollout], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to run. `again` says that an earlier run may have begun it: what is left of that is dropped."""

    task: Task
    group: str
    rollout: str
    index: int
    again: bool = False


def jobs(tasks: Sequence[Task], n: int, *, name: str | None = None) -> list[Job]:
    """`n` rollouts of each task, task by task. The ids are the task's, `name` and a number, with `-` between them.

    Without a `name` it is random, so that no two calls share an id; with "" the ids are the
    same each time. The rollouts of a task share a group, the task's id.
    Raises ConfigError for two tasks of one id.
    """
    twice = [task for task, count in Counter(task.id for task in tasks).items() if count > 1]
    if twice:
        raise ConfigError(f"{len(twice)} ids are of more than one task, {twice[0]!r} first; give each task an id of its own")
    between = f"-{uuid.uuid4().hex[:8]}" if name is None else f"-{name}" if name else ""
    return [Job(task, task.id, f"{task.id}{between}-{index}", index) for task in tasks for index in range(n)]


async def rollout(
    gateway: Gateway,
    task: Task,
    harness: Harness,
    settings: RolloutSettings | None = None,
    *,
    rollout_id: str | None = None,
    group: str | None = None,
    index: int = 0,
    again: bool = False,
    on_event: OnEvent | None = None,
) -> Rollout:
    """Run the agent once on the task, grade what it did, and return what became of it; nothing but a cancellation raises.

    `rollout_id` is a new one unless given, `group` the task's id. `again` drops the
    session that an earlier run left under this id. `on_event` is called for each
    step, in this event loop.
    """
    name = rollout_id or f"{task.id}-{uuid.uuid4().hex[:12]}"
    return await _rollout(Plan(gateway, task, harness, settings or RolloutSettings(), name, group or task.id, index, again, on_event))


async def _rollout(plan: Plan) -> Rollout:
    started, begun = time.time(), time.monotonic()
    progress = Progress()
    samples: list[Sample] = []
    plan.emit("started")
    try:
        await _guarded(plan, progress)
        samples = await _finish(progress)
    except asyncio.CancelledError:
        await to_the_end(abandon(progress.session))
        raise
    result = _result(plan, progress, samples, started, time.monotonic() - begun)
    failed = result.status is not RolloutStatus.GRADED
    plan.emit("failed" if failed else "finished", result.error if failed else f"reward {result.reward:g}, {result.turns} turns")
    return result


async def run_rollouts(
    gateway: Gateway,
    tasks: Task | Sequence[Task],
    harness: Harness,
    settings: RolloutSettings | None = None,
    *,
    n: int = 1,
    concurrency: int = 4,
    on_event: OnEvent | None = None,
) -> list[Rollout]:
    """Run `n` rollouts of each task, `concurrency` at a time, and return them task by task in their order; none raises.

    The rollouts of a task share a group, the task's id. Raises ConfigError for two tasks of one id.
    """
    planned = jobs(tasks if isinstance(tasks, Sequence) else [tasks], n)
    ended: dict[str, Rollout] = {}

    async def keep(result: Rollout) -> None:
        ended[result.rollout_id] = result

    await run_jobs(gateway, planned, harness, settings, concurrency=concurrency, on_rollout=keep, on_event=on_event)
    return [ended[job.rollout] for job in planned]


async def run_jobs(
    gateway: Gateway,
    planned: Iterable[Job],
    harness: Harness,
    settings: RolloutSettings | None = None,
    *,
    on_rollout: OnRollout,
    concurrency: int = 4,
    on_event: OnEvent | None = None,
) -> None:
    """Run all jobs, `concurrency` at a time, beginning them in their order and holding on to none that has ended.

    `on_rollout` gets each as it ends, before the next begins in its place, and is not
    broken off by a cancellation. What it raises cancels the others and goes on from here.
    """
    settings = settings or RolloutSettings()
    if concurrency < 1 or settings.boots < 1:
        raise ConfigError("at least one rollout and one boot must be allowed at once")
    settings = replace(settings, sandbox=limited(settings.sandbox, asyncio.Semaphore(settings.boots)))
    waiting = iter(planned)

    async def worker() -> None:
        for job in waiting:
            plan = Plan(gateway, job.task, harness, settings, job.rollout, job.group, job.index, job.again, on_event)
            await to_the_end(_handed(on_rollout, await _rollout(plan)))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _handed(on_rollout: OnRollout, result: Rollout) -> None:
    await on_rollout(result)


async def _guarded(plan: Plan, progress: Progress) -> None:
    """All attempts, within the guard time."""
    try:
        async with asyncio.timeout(plan.settings.guard_time):
            await _attempts(plan, progress)
    except TimeoutError:  # The guard's own: what an attempt raises is kept in `progress`.
        if progress.grade is None and progress.cause is None:
            progress.blamed(Cause.GUARD, f"the guard time of {plan.settings.guard_time:g} s was up {_where(progress)}")


def _where(progress: Progress) -> str:
    stages = {Stage.RUN: "while the agent ran", Stage.GRADE: "in the grading"}
    return stages.get(progress.stage, "while its sandbox was made ready")


async def _attempts(plan: Plan, progress: Progress) -> None:
    metadata: dict[str, object] = {"task": plan.task.id, "agent": plan.harness.name, "index": plan.index}
    while True:
        try:
            progress.session = await open_anew(
                plan.gateway, rollout=plan.rollout, group=plan.group, metadata=metadata, again=plan.again or progress.attempt > 1
            )
            await work(plan, progress.session, progress)
        except Exception as error:  # noqa: BLE001 (each failure stays its own: it is this rollout's result)
            progress.failed(error)
        if not progress.again or progress.attempt > plan.settings.retries:
            return
        plan.emit("retry", progress.error)
        await _drop(progress.session)
        await asyncio.sleep(pause(plan.settings.pause, progress.attempt))
        _begin_anew(progress)


def _begin_anew(progress: Progress) -> None:
    fresh = Progress(attempt=progress.attempt + 1)
    for name in Progress.__slots__:
        setattr(progress, name, getattr(fresh, name))


async def _drop(session: SessionHandle | None) -> None:
    """Forget the session of a failed attempt: its turns are no part of the rollout that is begun anew.

    Where its gateway is lost it goes when the rollout's session is opened anew.
    """
    try:
        if session is not None:
            await session.drop()
    except Exception as error:  # noqa: BLE001 (opening the next one says what is wrong)
        swallowed(log, "rollout.drop", "session %s could not be dropped: %s", session.id if session else "", error)


async def _finish(progress: Progress) -> list[Sample]:
    """Close the session with what is known of it, and see what it says in the end."""
    if progress.session is None:
        return []
    reward = progress.grade.reward if progress.grade is not None and progress.cause is None else None
    try:
        async with asyncio.timeout(CLOSING_SECONDS):
            samples = await progress.session.finish(reward)
            progress.seen = await look(progress.session)
    except Exception as error:
        log.debug("session %s could not be finished", progress.session.id, exc_info=error)
        if progress.cause is None:
            told = str(error) or f"the session was not closed within {CLOSING_SECONDS:g} s"
            progress.blamed(Cause.GATEWAY, f"{type(error).__name__}: {told}")
        return []
    return samples


def _result(plan: Plan, progress: Progress, samples: list[Sample], started: float, duration: float) -> Rollout:
    run, seen = progress.run, progress.seen
    # Only now is every refusal on record. An agent that was refused may have ended in any way because of it.
    if run is not None and seen.reached and run.outcome is not AgentOutcome.NO_MODEL_CALL:
        run = replace(run, outcome=AgentOutcome.LIMIT_REACHED)
    graded = progress.grade if progress.cause is None else None
    return Rollout(
        rollout_id=plan.rollout,
        group_id=plan.group,
        task_id=plan.task.id,
        index=plan.index,
        session_id=progress.session.id if progress.session is not None else "",
        status=_status(progress),
        reward=graded.reward if graded is not None else None,
        outcome=run.outcome if run is not None else None,
        turns=seen.turns,
        tokens=seen.tokens,
        lineages=seen.lineages,
        forks=seen.forks,
        duration=duration,
        started=started,
        attempts=progress.attempt,
        cause=progress.cause,
        detail=progress.grade.detail if progress.grade is not None else "",
        error=progress.error,
        output=progress.grade.output if progress.grade is not None else "",
        agent=run,
        patch=progress.patch,
        samples=tuple(samples),
    )


def _status(progress: Progress) -> RolloutStatus:
    match progress.cause:
        case None:
            return RolloutStatus.GRADED
        case Cause.NO_MODEL_CALL:
            return RolloutStatus.NO_MODEL_CALL
        case Cause.GUARD:
            return RolloutStatus.ABORTED
        case _:
            return RolloutStatus.FAILED
