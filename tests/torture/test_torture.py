"""`kill -9` at random moments, thirty times, under sixteen agents; and the torture finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.run import torture
from tests.torture.sabotage import SABOTAGE

ROUNDS = 30

FOUND = {
    "told_before_stored": "not on record",
    "every_request_new": "has 2 turns",
    "last_turn_not_loaded": "",
    "other_ids_loaded": "never asked for with this prompt",
    "other_logprobs_stored": "other logprobs",
    "beginnings_stay": "has 2 turns",
    "begun_not_noted": "count as interrupted",
    "closed_not_stored": "it was finished with",
}
"""What is said of each error that is put in, where it is always the same."""


async def test_nothing_is_lost_doubled_or_changed(tmp_path: Path) -> None:
    report = await torture(tmp_path, rounds=ROUNDS, seed=7)
    assert report.violations == [], report.lines()
    met = ("asked", "reading", "on record, not told")
    assert min(report.counted[each] for each in ("resumed", "interrupted", *(f"killed: {each}" for each in met))) > 0, report.lines()
    assert report.counted["delivered"] > ROUNDS


@pytest.mark.parametrize("name", SABOTAGE)
async def test_an_error_that_is_put_in_is_found(tmp_path: Path, name: str) -> None:
    report = await torture(tmp_path, rounds=5, seed=3, sabotage=name, agents=8, longest=1.2, patience=20)
    assert any(FOUND[name] in line for line in report.violations), report.lines()
