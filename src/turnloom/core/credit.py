"""What each sample counts for when they are many. It changes weights only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from turnloom.types import Sample


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
