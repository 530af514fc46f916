"""Rollouts before a real gateway, in this process and by its admin API: what the session says decides how they ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.gateways import ADMIN, bench
from turnloom import Client, Limits
from turnloom.harness import AgentOutcome, load_harness
from turnloom.rollout import Cause, Gateway, RolloutSettings, RolloutStatus, demo_task, rollout
from turnloom.testing.scripted_engine import Fault, Reply

TALK = """
import json, os, sys, urllib.request
def ask(text):
    body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())
    return urllib.request.urlopen(request).read()
"""


def talk(body: str) -> object:
    return load_harness("command", argv=[sys.executable, "-c", TALK + body])


async def run(gateway: Gateway, body: str, settings: RolloutSettings, **more: object):  # type: ignore[no-untyped-def]
    return await rollout(gateway, demo_task(), talk(body), settings, rollout_id="r", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("remote", [False, True])
async def test_a_refused_turn_is_a_limit_reached(settings: RolloutSettings, remote: bool) -> None:
    async with bench(["Hello"] * 3, limits=Limits(max_turns=1)) as b, Client(b.gateway.url, ADMIN) as client:
        result = await run(client if remote else b.gateway, "ask('one'); ask('two')", settings)
        assert (result.status, result.outcome, result.reward, result.turns) == (RolloutStatus.GRADED, AgentOutcome.LIMIT_REACHED, 0.0, 1)
        assert [sample.reward for sample in result.samples] == [0.0]


async def test_the_first_turn_refused_is_no_wrong_setting(settings: RolloutSettings) -> None:
    async with bench(["Hello"], limits=Limits(max_turns=0)) as b:
        result = await run(b.gateway, "ask('one')", settings)
        assert (result.status, result.outcome, result.turns) == (RolloutStatus.GRADED, AgentOutcome.LIMIT_REACHED, 0)


@pytest.mark.parametrize("fault", [Fault.ABORT, Fault.HTTP_500])
async def test_an_engine_that_gave_out_is_no_reward_of_0(settings: RolloutSettings, fault: Fault) -> None:
    async with bench(["Hello", Reply(text="Never said", fault=fault)]) as b:
        result = await run(b.gateway, "ask('one'); ask('two')", settings)
        assert (result.status, result.cause, result.reward, result.attempts) == (RolloutStatus.FAILED, Cause.ENGINE, None, 1)
        assert [sample.reward for sample in result.samples] == [None]


@pytest.mark.parametrize("remote", [False, True])
async def test_what_an_earlier_run_left_is_dropped(settings: RolloutSettings, remote: bool, tmp_path: Path) -> None:
    async with bench(["Hello"] * 3, store=tmp_path / "turnloom.db") as b, Client(b.gateway.url, ADMIN) as client:
        gateway = client if remote else b.gateway
        first = await run(gateway, "ask('one'); ask('two')", settings)
        taken = await run(gateway, "ask('one')", settings)
        assert (first.turns, taken.cause) == (2, Cause.GATEWAY)
        assert "taken" in taken.error
        again = await run(gateway, "ask('one')", settings, again=True)
        assert (again.status, again.turns, again.session_id) == (RolloutStatus.GRADED, 1, "r")
        assert len([s for s in await b.gateway.sessions() if s["id"] == "r"]) == 1
