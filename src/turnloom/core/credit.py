"""Which reward a session has when it was given several, and what each sample counts for when they are many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from turnloom.types import Sample

RewardRule = Literal["last", "sum", "mean", "max", "min"]
"""How the rewards of a session are merged into one."""


@dataclass(frozen=True, slots=True)
class Reward:
    """`lineage` names the lineage that earned it, "" where the whole session did; `at` is in Unix seconds."""

    value: float
    at: float = 0.0
    lineage: str = ""


def merged_reward(rewards: Sequence[Reward], rule: RewardRule) -> float | None:
    """One reward of those that the whole session earned, in the order they came; None of none."""
    values = [reward.value for reward in rewards if not reward.lineage]
    if not values:
        return None
    match rule:
        case "last":
            return values[-1]
        case "sum":
            return math.fsum(values)
        case "mean":
            return math.fsum(values) / len(values)
        case "max":
            return max(values)
        case "min":
            return min(values)


def weigh(samples: Iterable[Sample]) -> list[Sample]:
    """The samples in their order, each with the weight 1 / (samples of its rollout among those given).

    So a weighted mean over samples is the mean over rollouts, however many samples and
    sessions a rollout has. A sample without a rollout belongs to its session's.
    """
    given = list(samples)
    counts = Counter(map(_rollout, given))
    return [replace(sample, weight=1.0 / counts[_rollout(sample)]) for sample in given]


def _rollout(sample: Sample) -> str:
    return sample.rollout_id or sample.session_id
