"""A run in figures. PURE: from the lines of results.jsonl to counts and means."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from turnloom.rollout.contract import RolloutStatus

Row = Mapping[str, Any]


def summary_of(rows: Sequence[Row], planned: int, seconds: float) -> dict[str, Any]:
    """Of all rollouts, and of each task's, by the tasks' names. `planned` is how many the run has, `seconds` how long this part of it took.

    `reward_mean` is over graded rollouts, None where there is none.
    """
    tasks: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: str(row["task"])):
        tasks.setdefault(row["task"], []).append(row)
    return {
        "planned": planned,
        "complete": len(rows) == planned,
        "wall_seconds": seconds,
        **figures(rows),
        "tasks": {task: figures(own) for task, own in tasks.items()},
    }


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts and sums of some rollouts."""
    rewards = [row["reward"] for row in rows if row["status"] == RolloutStatus.GRADED]
    return {
        "rollouts": len(rows),
        "graded": len(rewards),
        "reward_mean": math.fsum(rewards) / len(rewards) if rewards else None,
        "statuses": dict(Counter(row["status"] for row in rows)),
        "outcomes": dict(Counter(row["outcome"] for row in rows if row["outcome"] is not None)),
        "causes": dict(Counter(row["cause"] for row in rows if row["cause"] is not None)),
        "retried": sum(row["attempts"] > 1 for row in rows),
        **{name: sum(row[name] for row in rows) for name in ("turns", "tokens", "lineages", "forks", "samples", "seconds")},
    }
