"""An engine that is silent for longer than any agent's own limit: the gateway's keepalives hold the connection."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.agents import stage
from turnloom.harness import AgentOutcome, load_harness
from turnloom.testing.scripted_engine import Reply
from turnloom.types import Outcome

pytestmark = [pytest.mark.node, pytest.mark.idle]

SILENCE = 330.0
"""Seconds: more than the 300 of a provider's own limits, and than the 240 at most that the agents wait in a stream."""


async def silent(agent: str) -> None:
    async with stage() as s:
        s.replies = [Reply("After a long while.", chunk=1000, delay=SILENCE)]
        run = await s.run(load_harness(agent), "Say something.", context_tokens=131_072, time_budget=SILENCE + 120)
        assert run.outcome is AgentOutcome.COMPLETED, run
        assert "After a long while." in run.stdout
        assert len(s.bench.engine.requests) == 1, "it did not ask again"
        (turn,) = await s.turns()
        assert turn.outcome is Outcome.DELIVERED


async def test_agents_stay_connected_to_a_silent_engine() -> None:
    """All at once: they only wait."""
    await asyncio.gather(*map(silent, ("claude-code", "codex", "gemini-cli", "qwen-code")))
