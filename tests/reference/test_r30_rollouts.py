"""Row 30 of the reference's behaviours: many boots at once are limited and tried again, a guard time is over everything, an
aborted rollout is marked and gives no reward, and a reward comes to the samples."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.gateways import bench
from tests.support.rollouts import CountingGateway, agent, counting_gateway
from turnloom.errors import SandboxError
from turnloom.harness import load_harness
from turnloom.rollout import Cause, Grade, MakeSandbox, RolloutSettings, RolloutStatus, demo_task, rollout, run_rollouts
from turnloom.sandbox import LocalSandbox

ASK = """
import json, os, urllib.request
body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "Do it."}]}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())
urllib.request.urlopen(request).read()
"""


@pytest.fixture
async def gateway() -> AsyncIterator[CountingGateway]:
    async with counting_gateway() as gateway:
        yield gateway


class Slow(LocalSandbox):
    """Counts how many boot at once; each third one does not come up at first."""

    booting = most = made = 0

    async def start(self) -> None:
        Slow.booting += 1
        Slow.most = max(Slow.most, Slow.booting)
        Slow.made += 1
        number = Slow.made
        try:
            await asyncio.sleep(0.05)
            if number % 3 == 0:
                raise SandboxError("no room")
            await super().start()
        finally:
            Slow.booting -= 1


async def test_r30_boots_are_limited_and_tried_again(gateway: CountingGateway, tmp_path: Path) -> None:
    Slow.most = Slow.made = 0
    settings = RolloutSettings(sandbox=lambda needs: Slow(parent=tmp_path), boots=2, retries=5, pause=0.01)
    results = await run_rollouts(gateway, demo_task(), agent("ask(); fix()"), settings, n=6, concurrency=6)
    assert [result.reward for result in results] == [1.0] * 6
    assert Slow.most == 2, "one of the agents' or of the gradings' was not counted"
    assert Slow.made > 12, "none failed"
    assert os.listdir(tmp_path) == []


class Endless:
    """A task whose grading never ends."""

    def __init__(self) -> None:
        inner = demo_task()
        self.id, self.prompt, self.needs, self.prepare = inner.id, inner.prompt, inner.needs, inner.prepare

    async def grade(self, patch: bytes, make: MakeSandbox) -> Grade:
        sandbox = make(self.needs)
        await sandbox.start()
        try:
            await sandbox.exec(["sleep", "1000"])
        finally:
            await sandbox.stop()
        raise AssertionError("it ended")


class Unready(LocalSandbox):
    async def start(self) -> None:
        await super().start()
        await asyncio.sleep(1000)


@pytest.mark.parametrize(
    ("where", "told"),
    [("boot", "while its sandbox was made ready"), ("run", "while the agent ran"), ("grade", "in the grading")],
)
async def test_r30_a_guard_time_is_over_everything(gateway: CountingGateway, tmp_path: Path, where: str, told: str) -> None:
    kind = Unready if where == "boot" else LocalSandbox
    settings = RolloutSettings(sandbox=lambda needs: kind(parent=tmp_path, grace=0.1), guard=3.0, retries=3)
    harness = agent("ask(); time.sleep(1000)" if where == "run" else "ask()")
    result = await rollout(gateway, Endless() if where == "grade" else demo_task(), harness, settings)
    assert (result.status, result.cause, result.reward) == (RolloutStatus.ABORTED, Cause.GUARD, None)
    assert result.error == f"the guard time of 3 s was up {told}"
    assert gateway.sessions[0].finished == [None]
    assert result.turns == (where != "boot")
    assert os.listdir(tmp_path) == []


async def test_r30_the_reward_comes_to_the_samples_and_an_aborted_rollout_has_none(tmp_path: Path) -> None:
    import sys

    good = load_harness("command", argv=[sys.executable, "-c", ASK])
    stuck = load_harness("command", argv=[sys.executable, "-c", ASK + "import time; time.sleep(1000)"])
    settings = RolloutSettings(sandbox=lambda needs: LocalSandbox(parent=tmp_path, grace=0.1))
    async with bench(["It is done."] * 2) as b:
        graded = await rollout(b.gateway, demo_task(), good, settings, rollout_id="good")
        aborted = await rollout(b.gateway, demo_task(), stuck, replace(settings, guard=4.0), rollout_id="stuck")
        assert (graded.status, [sample.reward for sample in graded.samples]) == (RolloutStatus.GRADED, [0.0])
        assert (aborted.status, [sample.reward for sample in aborted.samples]) == (RolloutStatus.ABORTED, [None])
        assert {s["id"]: s["status"] for s in await b.gateway.sessions(limit=2)} == {"good": "closed", "stuck": "closed"}
