"""What `turnloom run` shows: a live line on a terminal, plain lines elsewhere, a table in the end. It decides nothing."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from turnloom.cli.common import say
from turnloom.core.dump import escaped
from turnloom.rollout.contract import Rollout, RolloutEvent, RolloutStatus

TOLD = ("retry", "alarm")
"""Steps of a rollout that a person is told of at once."""

TASKS_SHOWN = 40


class Watch:
    """Counts rollouts as they go and says so, each on its own line. `done` of `total` ended in an earlier run."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total, self.done = total, done
        self.running = 0
        self._ends: Counter[str] = Counter()
        self._tokens, self._ended, self._begun = 0, 0, time.monotonic()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def event(self, event: RolloutEvent) -> None:
        self.running += event.stage == "started"
        if event.stage in TOLD:
            self.tell(f"  {event.rollout_id}: {event.stage}: {event.detail}")

    def ended(self, rollout: Rollout) -> None:
        self.running -= 1
        self.done += 1
        self._ended += 1
        self._tokens += rollout.tokens
        self._ends[_end(rollout)] += 1
        self.tell(f"[{self.done}/{self.total}] {result_line(rollout)}")

    def tell(self, line: str) -> None:
        say(line)

    @property
    def rates(self) -> str:
        """Of this run alone, since it began."""
        minutes = max(time.monotonic() - self._begun, 1e-6) / 60
        return f"{self._ended / minutes:.1f} rollouts/min, {self._tokens / minutes / 60:.0f} tokens/s"

    @property
    def ends(self) -> str:
        return ", ".join(f"{count} {end}" for end, count in self._ends.most_common())


class LiveWatch(Watch):
    """The same above a bar that shows where the run stands."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        super().__init__(total, done)
        columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        self._progress = Progress(*columns, console=console, transient=True)
        self._bar = self._progress.add_task("", total=total, completed=done)

    def __enter__(self) -> Watch:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def event(self, event: RolloutEvent) -> None:
        super().event(event)
        self._show()

    def ended(self, rollout: Rollout) -> None:
        super().ended(rollout)
        self._show()

    def tell(self, line: str) -> None:
        self._progress.console.print(Text(escaped(line)), soft_wrap=True)

    def _show(self) -> None:
        parts = (f"{self.running} running", self.rates, self.ends)
        self._progress.update(self._bar, completed=self.done, description=" | ".join(filter(None, parts)))


def watch(total: int, done: int) -> Watch:
    """Live where standard output is a terminal."""
    return LiveWatch(total, done, Console()) if sys.stdout.isatty() else Watch(total, done)


def result_line(rollout: Rollout) -> str:
    """One line a rollout: turns, tokens, lineages, reward."""
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    figures = f"{rollout.turns} turns, {rollout.tokens} tokens, {rollout.lineages} lineages, {rollout.forks} forks, reward {reward}"
    why = f": {rollout.error}" if rollout.error else ""
    return f"{rollout.rollout_id}  {figures}, {_end(rollout)}, {rollout.duration:.0f} s{why}"


def _end(rollout: Rollout) -> str:
    graded = rollout.status is RolloutStatus.GRADED and rollout.outcome is not None
    return str(rollout.outcome if graded else rollout.status)


def say_table(summary: Mapping[str, Any]) -> None:
    """A row for each task, unless they are many, and one for all."""
    table = Table(box=None, pad_edge=False, header_style="")
    for name in ("task", "rollouts", "graded", "reward", "turns", "tokens", "forks", "seconds", "ended"):
        table.add_column(name, justify="left" if name in ("task", "ended") else "right", no_wrap=True)
    tasks: Mapping[str, Mapping[str, Any]] = summary["tasks"]
    for task, figures in tasks.items() if 1 < len(tasks) <= TASKS_SHOWN else ():
        table.add_row(*_cells(task, figures))
    table.add_row(*_cells("all", summary))
    console = Console(width=200, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        say(line.rstrip())


def _cells(task: str, figures: Mapping[str, Any]) -> list[Text]:
    mean, ends = figures["reward_mean"], {**figures["outcomes"]}
    ends |= {status: count for status, count in figures["statuses"].items() if status != RolloutStatus.GRADED and status not in ends}
    cells = (
        task[:60],
        *(str(figures[name]) for name in ("rollouts", "graded")),
        "none" if mean is None else f"{mean:.3f}",
        *(str(figures[name]) for name in ("turns", "tokens", "forks")),
        f"{figures['seconds']:.0f}",
        ", ".join(f"{count} {end}" for end, count in ends.items()),
    )
    return [Text(escaped(cell)) for cell in cells]
