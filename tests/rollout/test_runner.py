"""Rollouts from start to end: real sandboxes, real agent processes, real HTTP; the gateway only counts."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.rollouts import CountingGateway, agent
from turnloom.errors import ConfigError, HarnessError, SandboxError
from turnloom.harness import AgentOutcome
from turnloom.rollout import (
    Cause,
    Rollout,
    RolloutEvent,
    RolloutSettings,
    RolloutStatus,
    demo_task,
    jobs,
    rollout,
    run_jobs,
    run_rollouts,
)
from turnloom.sandbox import LocalSandbox
from turnloom.sandbox.contract import ExecResult, Needs, SandboxUnavailable


async def test_rollouts_are_graded_and_their_sessions_finished(gateway: CountingGateway, settings: RolloutSettings) -> None:
    events: list[RolloutEvent] = []
    tasks = [demo_task(), replace(demo_task(), id="other")]
    results = await run_rollouts(gateway, tasks, agent("ask(); ask(); fix()"), settings, n=2, concurrency=2, on_event=events.append)
    assert [result.status for result in results] == [RolloutStatus.GRADED] * 4, results
    assert [(result.task_id, result.group_id, result.index) for result in results] == [
        *(("demo-stats", "demo-stats", 0), ("demo-stats", "demo-stats", 1), ("other", "other", 0), ("other", "other", 1)),
    ]
    for result in results:
        session = gateway.open[result.session_id]
        assert (result.rollout_id, result.group_id) == (session.rollout, session.group)
        assert (result.reward, session.finished) == (1.0, [1.0])
        assert (result.outcome, result.turns, result.tokens, result.lineages, result.forks) == (AgentOutcome.COMPLETED, 2, 14, 1, 2)
        assert (result.attempts, result.cause, result.error) == (1, None, "")
        assert result.samples == (f"sample of {session.id}",) * 2
        assert result.sample_count == 2
        assert b"+    return total(values) / len(values)" in result.patch
        assert session.metadata == {"task": result.task_id, "agent": "command", "index": result.index}
        stages = [event.stage for event in events if event.rollout_id == result.rollout_id]
        assert stages == ["started", "ready", "agent_ended", "graded", "finished"]
    assert len({result.rollout_id for result in results}) == 4
    assert gateway.most_busy <= 2


async def test_one_rollout_by_its_own_name(gateway: CountingGateway, settings: RolloutSettings) -> None:
    result = await rollout(gateway, demo_task(), agent("ask(); fix()"), settings, rollout_id="step 7/mine", group="step 7", index=3)
    assert (result.rollout_id, result.group_id, result.index, result.reward) == ("step 7/mine", "step 7", 3, 1.0)
    assert result.session_id.startswith("step_7_mine.")


async def test_an_agent_that_never_calls_its_model_is_an_alarm_and_begun_anew_once(
    gateway: CountingGateway, settings: RolloutSettings, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[RolloutEvent] = []
    mute = agent("fix(); sys.exit('no such model')")
    (result,) = await run_rollouts(gateway, demo_task(), mute, replace(settings, retries=5), on_event=events.append)
    assert (result.status, result.outcome) == (RolloutStatus.NO_MODEL_CALL, AgentOutcome.NO_MODEL_CALL)
    assert (result.cause, result.attempts) == (Cause.NO_MODEL_CALL, 2)
    assert result.reward is None
    assert [(session.dropped, session.finished) for session in gateway.sessions] == [(True, []), (False, [None])]
    assert result.error == "the agent made no model call and ended with 1: no such model"
    assert [event.stage for event in events].count("alarm") == 2
    assert [record.levelno for record in caplog.records if "no model call" in record.message] == [logging.ERROR] * 2


async def test_an_agent_that_runs_out_of_time_is_graded_on_what_it_did(gateway: CountingGateway, settings: RolloutSettings) -> None:
    body = "ask(); fix(); time.sleep(1000)"
    (result,) = await run_rollouts(gateway, demo_task(), agent(body), replace(settings, time_budget=5.0))
    assert (result.status, result.outcome, result.reward) == (RolloutStatus.GRADED, AgentOutcome.TIMED_OUT, 1.0)


async def test_an_agent_that_crashes_is_graded_on_what_it_did(gateway: CountingGateway, settings: RolloutSettings) -> None:
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); sys.exit(5)"), settings)
    assert (result.status, result.outcome, result.reward) == (RolloutStatus.GRADED, AgentOutcome.CRASHED, 0.0)
    assert result.agent is not None
    assert result.agent.exit_code == 5


async def test_an_agent_that_was_refused_at_a_limit_is_graded_and_says_so(gateway: CountingGateway, settings: RolloutSettings) -> None:
    gateway.reached = ["max_turns"]
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); fix(); sys.exit(1)"), settings)
    assert (result.status, result.outcome, result.reward) == (RolloutStatus.GRADED, AgentOutcome.LIMIT_REACHED, 1.0)


@pytest.mark.parametrize("end", ["aborted", "failed"])
async def test_an_engine_that_gives_out_in_the_last_turn_is_no_reward_of_0(
    gateway: CountingGateway, settings: RolloutSettings, end: str
) -> None:
    gateway.ends = ["delivered", end]
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); ask(); sys.exit(1)"), settings)
    assert (result.status, result.cause, result.reward, result.attempts) == (RolloutStatus.FAILED, Cause.ENGINE, None, 1)
    assert result.error == f"the engine gave out in the agent's last turn: {end} at 1"
    assert gateway.sessions[0].finished == [None]


async def test_an_agent_that_gets_over_an_engines_failure_is_graded(gateway: CountingGateway, settings: RolloutSettings) -> None:
    gateway.ends = ["failed", "delivered"]
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); ask(); fix()"), settings)
    assert (result.status, result.reward) == (RolloutStatus.GRADED, 1.0)


class Flaky(LocalSandbox):
    """Fails to start, or to run a command of Python's, as often as it is told."""

    starts = runs = 0

    async def start(self) -> None:
        if Flaky.starts > 0:
            Flaky.starts -= 1
            raise SandboxError("no room")
        await super().start()

    async def exec(self, argv, **options) -> ExecResult:  # type: ignore[no-untyped-def, override]
        if Flaky.runs > 0 and "ask()" in argv[-1]:
            Flaky.runs -= 1
            raise SandboxUnavailable("the connection is gone")
        return await super().exec(argv, **options)


@pytest.mark.parametrize(("starts", "runs"), [(2, 0), (0, 2), (1, 1), (3, 0), (0, 3)])
async def test_a_sandbox_that_gives_out_is_tried_again(
    gateway: CountingGateway, settings: RolloutSettings, boxes: Path, starts: int, runs: int
) -> None:
    Flaky.starts, Flaky.runs = starts, runs
    events: list[RolloutEvent] = []
    flaky = replace(settings, sandbox=lambda needs: Flaky(parent=boxes), retries=2)
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); fix()"), flaky, on_event=events.append)
    well = starts + runs <= 2
    assert result.status == (RolloutStatus.GRADED if well else RolloutStatus.FAILED)
    assert [event.stage for event in events].count("retry") == 2
    assert result.attempts == 3
    error = "SandboxError: no room" if starts else "SandboxUnavailable: the connection is gone"
    assert (result.error, result.cause) == (("", None) if well else (error, Cause.SANDBOX))
    assert [session.dropped for session in gateway.sessions] == [True, True, False]
    assert gateway.sessions[-1].finished == [1.0 if well else None]


class Uninstalled:
    name = "uninstalled"
    tried = 0

    async def install(self, sandbox: object) -> tuple[str, ...]:
        Uninstalled.tried += 1
        raise HarnessError("uninstalled needs Node.js 20 or newer")

    def command(self, context: object) -> None:
        raise AssertionError("never installed")


async def test_one_failure_stays_its_own_and_what_would_fail_again_is_not_tried(
    gateway: CountingGateway, settings: RolloutSettings
) -> None:
    good = agent("ask(); fix()")
    results = await asyncio.gather(
        run_rollouts(gateway, demo_task(), Uninstalled(), settings),  # type: ignore[arg-type]
        run_rollouts(gateway, replace(demo_task(), id="bad", setup=(("false",),)), good, settings),
        run_rollouts(gateway, replace(demo_task(), id="elsewhere", needs=Needs(image="big")), good, replace(settings, sandbox=_refuse)),
        run_rollouts(gateway, demo_task(), good, settings),
    )
    assert [(result.error, result.cause, result.attempts) for (result,) in results] == [
        ("HarnessError: uninstalled needs Node.js 20 or newer", Cause.HARNESS, 1),
        ("TaskError: task bad: setup command 'false' ended with 1", Cause.TASK, 1),
        ("SandboxError: there is no image 'big' here", Cause.SANDBOX, 1),
        ("", None, 1),
    ]
    assert Uninstalled.tried == 1
    assert [result.reward for (result,) in results] == [None, None, None, 1.0]
    assert [session.finished for session in gateway.sessions if session.metadata["task"] == "bad"] == [[None]]


def _refuse(needs: Needs) -> LocalSandbox:
    raise SandboxError(f"there is no image {needs.image!r} here")


async def test_a_command_that_a_sound_sandbox_cannot_start_is_not_tried_again(gateway: CountingGateway, settings: RolloutSettings) -> None:
    from turnloom.harness import load_harness

    (result,) = await run_rollouts(gateway, demo_task(), load_harness("command", argv=["no-such-program"]), settings)
    assert (result.status, result.cause, result.attempts) == (RolloutStatus.FAILED, Cause.SANDBOX, 1)


async def test_a_gateway_that_fails_is_the_rollouts_error(gateway: CountingGateway, settings: RolloutSettings) -> None:
    gateway.finish_fails = True
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); fix()"), settings)
    assert (result.status, result.reward, result.error) == (RolloutStatus.FAILED, None, "RuntimeError: the store is full")
    assert result.cause is Cause.GATEWAY

    async def refuse(**_: object) -> None:
        raise RuntimeError("no more sessions")

    gateway.open_session = refuse  # type: ignore[method-assign, assignment]
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask()"), settings)
    assert (result.status, result.session_id, result.error) == (RolloutStatus.FAILED, "", "RuntimeError: no more sessions")


async def test_a_listener_that_fails_harms_nothing(gateway: CountingGateway, settings: RolloutSettings) -> None:
    def listener(event: RolloutEvent) -> None:
        raise ValueError(event)

    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); fix()"), settings, on_event=listener)
    assert result.reward == 1.0


async def test_a_cancelled_call_finishes_sessions_and_removes_sandboxes(
    gateway: CountingGateway, settings: RolloutSettings, boxes: Path
) -> None:
    body = "ask(); time.sleep(1000)"
    running = asyncio.ensure_future(run_rollouts(gateway, demo_task(), agent(body), settings, n=3, concurrency=2))
    while len(gateway.sessions) < 2 or not all(session.turns for session in gateway.sessions):
        await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [session.finished for session in gateway.sessions] == [[None], [None]]
    assert os.listdir(boxes) == []


async def test_what_cannot_keep_a_result_ends_the_others(gateway: CountingGateway, settings: RolloutSettings, boxes: Path) -> None:
    async def full(result: Rollout) -> None:
        raise ConfigError("the disk is full")

    harness = agent("ask(); time.sleep(1000 if os.path.exists('slow') else 0)")
    slow = replace(demo_task(), id="slow", setup=(("touch", "slow"),))
    planned = jobs([slow, demo_task()], 1, name="")
    with pytest.raises(ConfigError, match="the disk is full"):
        await run_jobs(gateway, planned, harness, settings, on_rollout=full)
    assert [session.finished for session in gateway.sessions if session.metadata["task"] == "slow"] in ([[None]], [])
    assert os.listdir(boxes) == []


async def test_a_session_that_an_earlier_run_left_is_begun_anew(gateway: CountingGateway, settings: RolloutSettings) -> None:
    await gateway.open_session(id="demo-stats-0", group="", rollout="", metadata={})
    ended: list[Rollout] = []

    async def keep(result: Rollout) -> None:
        ended.append(result)

    planned = jobs([demo_task()], 1, name="")
    await run_jobs(gateway, planned, agent("ask(); fix()"), settings, on_rollout=keep)
    assert (ended[0].cause, ended[0].error) == (Cause.GATEWAY, "BadRequest: session id 'demo-stats-0' is taken")
    await run_jobs(gateway, [replace(planned[0], again=True)], agent("ask(); fix()"), settings, on_rollout=keep)
    assert (ended[1].session_id, ended[1].reward) == ("demo-stats-0", 1.0)
    assert gateway.sessions[0].dropped


def test_ids_are_new_unless_they_are_asked_to_be_the_same() -> None:
    tasks = [demo_task(), replace(demo_task(), id="other")]
    assert [job.rollout for job in jobs(tasks, 2, name="")] == ["demo-stats-0", "demo-stats-1", "other-0", "other-1"]
    assert [job.rollout for job in jobs(tasks, 1, name="step7")] == ["demo-stats-step7-0", "other-step7-0"]
    assert {job.rollout for job in jobs(tasks, 2)}.isdisjoint(job.rollout for job in jobs(tasks, 2))
    with pytest.raises(ConfigError, match="'demo-stats'"):
        jobs([demo_task(), demo_task()], 1)


async def test_the_key_is_in_no_result(gateway: CountingGateway, settings: RolloutSettings) -> None:
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask()"), settings)
    assert gateway.sessions[0].key not in repr(result)
