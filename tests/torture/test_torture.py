"""`kill -9` at random moments, thirty times, under sixteen agents; and the torture finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

from tests.torture.run import torture

ROUNDS = 30


async def test_nothing_is_lost_doubled_or_changed(tmp_path: Path) -> None:
    report = await torture(tmp_path, rounds=ROUNDS, seed=7)
    assert report.violations == [], report.lines()
    assert report.counted["delivered"] > ROUNDS
    assert report.counted["retries"] > ROUNDS
    assert report.counted["resumed"] > 0
    assert report.counted["interrupted"] > 0


async def test_an_error_that_is_put_in_is_found(tmp_path: Path) -> None:
    """The others are tried with `python -m tests.torture --sabotage`."""
    report = await torture(tmp_path, rounds=3, seed=3, sabotage="every_request_new", longest=1.5, patience=30)
    assert report.violations
