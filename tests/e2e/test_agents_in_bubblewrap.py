"""Real agents in a bubblewrap sandbox: all of the network they have is the gateway, and it is enough."""

from __future__ import annotations

import shutil

import pytest

from tests.e2e.agents import assert_lawful, require_node, shell, stage
from turnloom.harness import AgentOutcome, load_harness
from turnloom.sandbox.bubblewrap import BubblewrapBackend
from turnloom.sandbox.contract import Needs
from turnloom.types import MAIN, Outcome

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="THERE IS NO bwrap HERE: no agent is run in a bubblewrap sandbox"),
]

PROBE = "id -u > who.txt; ls / /root /home >> who.txt 2>&1; getent hosts example.com >> who.txt; test -d .git || echo 'a note' > note.txt"


@pytest.mark.parametrize("agent", ["claude-code", "codex", "pi"])
async def test_an_agent_works_there(agent: str) -> None:
    require_node()
    async with stage() as s:
        local, s.sandbox = s.sandbox, BubblewrapBackend().make(Needs())  # type: ignore[assignment]
        await s.sandbox.start()
        try:
            s.replies = [shell(agent, PROBE), "Done."]
            base_url = s.sandbox.reach(s.bench.handle.base_url)
            run = await s.run(load_harness(agent), "Write a note.", base_url=base_url)
            assert run.outcome is AgentOutcome.COMPLETED, run
            assert await s.sandbox.read_file("note.txt") == b"a note\n"
            assert (await s.sandbox.read_file("who.txt")).startswith(b"1000\n")
        finally:
            await s.sandbox.stop()
            s.sandbox = local
        turns = [turn for turn in await s.turns() if turn.label == MAIN]
        assert [(turn.outcome, turn.fork) for turn in turns] == [(Outcome.DELIVERED, None)] * 2
        assert_lawful(await s.bench.handle.finish())
