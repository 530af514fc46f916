"""Every agent through a session of fifteen turns."""

from __future__ import annotations

import pytest

from tests.agents.table import AGENTS, Agent, Row
from tests.e2e.agents import one_lineage, stage
from turnloom.harness import load_harness
from turnloom.harness.install import PackagedHarness

pytestmark = pytest.mark.node


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.id)
async def test_fifteen_turns_are_one_lineage(agent: Agent, rows: list[Row]) -> None:
    harness = load_harness(agent.harness, **agent.options)
    assert isinstance(harness, PackagedHarness)
    async with stage() as s:
        await one_lineage(s, agent.harness, harness)
        stats = await s.bench.handle.stats()
    rows.append(Row(agent, harness.package.version, stats["turns"], stats["lineages"], stats["forks"], True))
