"""What a person sees of a run while it goes: the same lines on a terminal and elsewhere, and never a raw control character."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from turnloom.cli.run_progress import LiveWatch, Watch
from turnloom.harness import AgentOutcome
from turnloom.rollout import Rollout, RolloutEvent, RolloutStatus

ENDED = Rollout("task-0", "task", "task", 0, "s", RolloutStatus.GRADED, 1.0, AgentOutcome.TIMED_OUT, 3, 90, 1, 0, 2.0)
ODD = Rollout("task-1", "task", "task", 1, "s", RolloutStatus.FAILED, None, None, 0, 0, 0, 0, 2.0, error="\x1b]0;title\x07 [red]gone")


def go(watch: Watch) -> None:
    with watch:
        for name in ("task-0", "task-1"):
            watch.event(RolloutEvent(name, "started"))
        assert watch.running == 2
        watch.event(RolloutEvent("task-1", "ready"))
        watch.event(RolloutEvent("task-1", "alarm", "no model call \x1b[2J"))
        watch.ended(ENDED)
        watch.ended(ODD)
        assert (watch.running, watch.done, watch.ends) == (0, 7, "1 timed_out, 1 failed")


LINES = [
    r"  task-1: alarm: no model call \x1b[2J",
    "[6/9] task-0  3 turns, 90 tokens, 1 lineages, 0 forks, reward 1, timed_out, 2 s",
    r"[7/9] task-1  0 turns, 0 tokens, 0 lineages, 0 forks, reward none, failed, 2 s: \x1b]0;title\x07 [red]gone",
]


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    go(Watch(9, 5))
    assert capsys.readouterr().out.splitlines() == LINES


def test_a_terminal_has_the_lines_above_a_bar() -> None:
    file = io.StringIO()
    go(LiveWatch(9, 5, Console(file=file, force_terminal=True, width=300)))
    shown = file.getvalue()
    for line in LINES:
        assert line in shown, shown
    assert "7/9" in shown
    assert "0 running | " in shown
    assert "1 timed_out, 1 failed" in shown
    assert "\x1b]0;" not in shown
