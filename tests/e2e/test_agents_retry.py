"""Real agents that meet an error ask again: their requests are known for what they are, and each reply is one turn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.agents import END, assert_each_prompt_continues_the_one_before, assert_lawful, shell, stage, trained_texts
from turnloom.harness import AgentOutcome, load_harness
from turnloom.harness.pi import ROUTES
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import Outcome

pytestmark = pytest.mark.node

AGENTS: list[tuple[str, dict[str, Any]]] = [("claude-code", {}), ("codex", {}), *(("pi", {"api": api}) for api in ROUTES)]


@pytest.mark.parametrize(("agent", "options"), AGENTS, ids=[" ".join([name, *options.values()]) for name, options in AGENTS])
async def test_what_an_agent_asks_again_is_the_same_turn(agent: str, options: dict[str, Any]) -> None:
    """The engine aborts twice before its first token: at the first request, and after a tool's result."""
    async with stage() as s:
        make, none = shell(agent, "echo one > notes.txt"), Reply("never", fault=Fault.ABORT_QUEUED)
        s.replies = [none, f"I write.\n{make}", none, "Done."]
        run = await s.run(load_harness(agent, **options), "Make notes.txt.", context_tokens=131_072)
        assert run.outcome is AgentOutcome.COMPLETED, run
        turns = await s.turns()
        assert [(turn.outcome, turn.fork) for turn in turns] == [(Outcome.DELIVERED, None)] * 2
        assert len(s.bench.engine.requests) == 4, "two requests of the engine came to nothing"
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"I write.\n{make}{END}", f"Done.{END}"]
