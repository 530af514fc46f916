"""`make agents`: every agent, some of which take minutes to install. What came of each is written to docs/agents.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.table import AGENTS, Row, written

DOCUMENT = Path(__file__).parents[2] / "docs" / "agents.md"
ROWS = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "idle: minutes of silence")
    config.stash[ROWS] = []


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[Row]:
    """The lines of the table."""
    return request.config.stash[ROWS]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A table of some of the agents would be a wrong one: it is written when all of them ran and passed."""
    rows = {row.agent.id: row for row in session.config.stash[ROWS]}
    if rows.keys() == {agent.id for agent in AGENTS}:
        DOCUMENT.write_text(written([rows[agent.id] for agent in AGENTS]), "utf-8")
