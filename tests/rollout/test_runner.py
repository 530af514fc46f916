"""Rollouts from start to end: real sandboxes, real agent processes, real HTTP; the gateway only counts."""

import asyncio
import os
import sys
from dataclasses import replace

import pytest
from aiohttp import web

from turnloom.errors import HarnessError, SandboxError
from turnloom.harness import AgentOutcome, load_harness
from turnloom.rollout import RolloutSettings, RolloutStatus, demo_task, run_rollouts
from turnloom.sandbox import LocalSandbox

CALL = """
import os, sys, urllib.request
def ask():
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    request = urllib.request.Request(url, b"{}", {"x-api-key": os.environ["ANTHROPIC_API_KEY"]})
    return urllib.request.urlopen(request).read()
def fix():
    text = open("stats.py").read()
    open("stats.py", "w").write(text.replace(" (len(values) + 1)", " len(values)"))
"""


class Session:
    def __init__(self, gateway, number, group, rollout, metadata):
        self.gateway, self.group, self.rollout, self.metadata = gateway, group, rollout, metadata
        self.id, self.key = f"session-{number}", f"key-{number}"
        self.base_url = f"{gateway.url}/s/{self.key}"
        self.turns, self.finished = 0, []

    async def finish(self, reward):
        self.finished.append(reward)
        if self.gateway.finish_fails:
            raise RuntimeError("the store is full")
        return [f"sample of {self.id}"] * self.turns

    async def stats(self):
        return {"turns": self.turns, "tokens": 7 * self.turns, "lineages": 1, "forks": 0}


class CountingGateway:
    def __init__(self):
        self.sessions, self.finish_fails, self.busy, self.most_busy = [], False, 0, 0

    async def open_session(self, *, group, rollout, metadata):
        self.sessions.append(Session(self, len(self.sessions), group, rollout, metadata))
        return self.sessions[-1]

    async def post(self, request):
        session = next(s for s in self.sessions if s.key == request.match_info["key"])
        assert request.headers["x-api-key"] == session.key
        session.turns += 1
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        await asyncio.sleep(0.05)
        self.busy -= 1
        return web.json_response({})


@pytest.fixture
async def gateway():
    gateway = CountingGateway()
    app = web.Application()
    app.router.add_post("/s/{key}/v1/messages", gateway.post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    gateway.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield gateway
    await runner.cleanup()


@pytest.fixture
def settings(tmp_path):
    return RolloutSettings(sandbox=lambda needs: LocalSandbox(parent=tmp_path, grace=0.5), boot_pause=0.01)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path):
    yield
    assert os.listdir(tmp_path) == []


def agent(body):
    return load_harness("command", argv=[sys.executable, "-c", CALL + body])


async def test_rollouts_are_graded_and_their_sessions_finished(gateway, settings):
    events = []
    results = await run_rollouts(
        gateway, demo_task(), agent("ask(); ask(); fix()"), n=3, concurrency=2, on_event=events.append, settings=settings
    )
    assert [result.status for result in results] == [RolloutStatus.GRADED] * 3, results
    for result, session in zip(results, sorted(gateway.sessions, key=lambda s: s.metadata["index"]), strict=True):
        assert (result.session_id, result.rollout_id, result.group_id) == (session.id, session.rollout, "demo-stats")
        assert (result.reward, session.finished) == (1.0, [1.0])
        assert (result.outcome, result.turns, result.tokens, result.lineages, result.forks) == (AgentOutcome.COMPLETED, 2, 14, 1, 0)
        assert result.samples == (f"sample of {session.id}",) * 2
        assert result.sample_count == 2
        assert b"+    return total(values) / len(values)" in result.patch
        assert session.metadata == {"task": "demo-stats", "agent": "command", "index": session.metadata["index"]}
        stages = [event.stage for event in events if event.rollout_id == result.rollout_id]
        assert stages == ["started", "ready", "agent_ended", "graded", "finished"]
    assert len({result.rollout_id for result in results}) == 3
    assert gateway.most_busy <= 2


async def test_an_agent_that_never_calls_its_model_is_an_alarm(gateway, settings):
    (result,) = await run_rollouts(gateway, demo_task(), agent("fix(); sys.exit('no such model')"), settings=settings)
    assert (result.status, result.outcome) == (RolloutStatus.NO_MODEL_CALL, AgentOutcome.NO_MODEL_CALL)
    assert (result.reward, gateway.sessions[0].finished) == (None, [None])
    assert result.error == "the agent made no model call and ended with 1: no such model"


async def test_an_agent_that_runs_out_of_time_is_graded_on_what_it_did(gateway, settings):
    body = "import time; ask(); fix(); time.sleep(1000)"
    (result,) = await run_rollouts(gateway, demo_task(), agent(body), time_budget=5.0, settings=settings)
    assert (result.status, result.outcome, result.reward) == (RolloutStatus.GRADED, AgentOutcome.TIMED_OUT, 1.0)


async def test_an_agent_that_crashes_is_graded_on_what_it_did(gateway, settings):
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); sys.exit(5)"), settings=settings)
    assert (result.status, result.outcome, result.reward) == (RolloutStatus.GRADED, AgentOutcome.CRASHED, 0.0)
    assert result.agent.exit_code == 5


class Flaky(LocalSandbox):
    """Fails to start as often as it is told."""

    failures = 0

    async def start(self):
        if Flaky.failures > 0:
            Flaky.failures -= 1
            raise SandboxError("no room")
        await super().start()


@pytest.mark.parametrize(("failures", "status"), [(2, RolloutStatus.GRADED), (3, RolloutStatus.FAILED)])
async def test_a_sandbox_that_does_not_come_up_is_tried_again(gateway, settings, tmp_path, failures, status):
    Flaky.failures = failures
    events = []
    flaky = replace(settings, sandbox=lambda needs: Flaky(parent=tmp_path), boot_retries=2)
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); fix()"), on_event=events.append, settings=flaky)
    assert result.status == status
    assert [event.stage for event in events].count("retry") == 2
    assert result.error == ("" if status is RolloutStatus.GRADED else "SandboxError: no room")
    assert gateway.sessions[0].finished == [1.0 if status is RolloutStatus.GRADED else None]


class Uninstalled:
    name = "uninstalled"

    async def install(self, sandbox):
        raise HarnessError("uninstalled needs Node.js 20 or newer")


async def test_one_failure_stays_its_own(gateway, settings):
    good = agent("ask(); fix()")
    results = await asyncio.gather(
        run_rollouts(gateway, demo_task(), Uninstalled(), settings=settings),
        run_rollouts(gateway, replace(demo_task(), id="bad", setup=(("false",),)), good, settings=settings),
        run_rollouts(gateway, demo_task(), good, settings=settings),
    )
    assert [result.error for (result,) in results] == [
        "HarnessError: uninstalled needs Node.js 20 or newer",
        "TaskError: task bad: setup command 'false' ended with 1",
        "",
    ]
    assert [result.reward for (result,) in results] == [None, None, 1.0]
    assert [session.finished for session in gateway.sessions if session.metadata["task"] == "bad"] == [[None]]


async def test_a_gateway_that_fails_is_the_rollouts_error(gateway, settings):
    gateway.finish_fails = True
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); fix()"), settings=settings)
    assert (result.status, result.reward, result.error) == (RolloutStatus.FAILED, None, "RuntimeError: the store is full")

    async def refuse(**_):
        raise RuntimeError("no more sessions")

    gateway.open_session = refuse
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask()"), settings=settings)
    assert (result.status, result.session_id, result.error) == (RolloutStatus.FAILED, "", "RuntimeError: no more sessions")


async def test_a_listener_that_fails_harms_nothing(gateway, settings):
    def listener(event):
        raise ValueError(event)

    (result,) = await run_rollouts(gateway, demo_task(), agent("ask(); fix()"), on_event=listener, settings=settings)
    assert result.reward == 1.0


async def test_a_cancelled_call_finishes_sessions_and_removes_sandboxes(gateway, settings, tmp_path):
    body = "import time; ask(); time.sleep(1000)"
    running = asyncio.ensure_future(run_rollouts(gateway, demo_task(), agent(body), n=3, concurrency=2, settings=settings))
    while len(gateway.sessions) < 2 or not all(session.turns for session in gateway.sessions):
        await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [session.finished for session in gateway.sessions] == [[None], [None]]
    assert os.listdir(tmp_path) == []


async def test_the_key_is_in_no_result(gateway, settings):
    (result,) = await run_rollouts(gateway, demo_task(), agent("ask()"), settings=settings)
    assert gateway.sessions[0].key not in repr(result)
