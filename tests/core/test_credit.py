"""A rollout counts once, whatever it was split into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from turnloom.core.credit import weigh
from turnloom.export.check import check_samples
from turnloom.types import Sample, floats, ids


def sample(rollout: str, session: str = "s", index: int = 0, reward: float | None = 1.0) -> Sample:
    return Sample(
        token_ids=ids([1, 2]),
        loss_mask=np.array([0, 1], np.uint8),
        logprobs=floats([np.nan, -0.5]),
        turn_index=np.array([-1, index], np.int32),
        weight_version=(None, None),
        prompt_len=1,
        temperature=1.0,
        session_id=session,
        rollout_id=rollout,
        group_id="g",
        lineage_id=f"{session}-{index}",
        label="",
        sample_index=index,
        weight=1.0,
        reward=reward,
        outcome="delivered",
        finish_reason="stop",
    )


def mean_reward(samples: Sequence[Sample]) -> float:
    return sum(s.weight * (s.reward or 0.0) for s in samples) / sum(s.weight for s in samples)


def test_a_mean_over_samples_is_the_mean_over_rollouts() -> None:
    fanned_out = [sample("won", index=i) for i in range(3)]
    weighed = weigh([*fanned_out, sample("lost", "t", reward=0.0)])
    assert [s.weight for s in weighed] == [pytest.approx(1 / 3)] * 3 + [1.0]
    assert mean_reward(weighed) == pytest.approx(0.5)


def test_sessions_that_share_a_rollout_weigh_one_together() -> None:
    weighed = weigh([sample("r", "a", 0), sample("r", "a", 1), sample("r", "b", 0)])
    assert sum(s.weight for s in weighed) == pytest.approx(1.0)
    assert check_samples(weighed).ok


def test_a_sample_without_a_rollout_is_its_sessions() -> None:
    weighed = weigh([sample("", "a", 0), sample("", "a", 1), sample("", "b")])
    assert [s.weight for s in weighed] == [0.5, 0.5, 1.0]
    assert check_samples(weighed).ok


def test_nothing_but_the_weight_changes_and_the_given_samples_stay() -> None:
    given = [sample("r", "a"), sample("r", "b")]
    weighed = weigh(iter(given))
    assert [replace(s, weight=1.0) for s in weighed] == given
    assert [s.weight for s in given] == [1.0, 1.0]
    assert weigh(weighed) == weighed
    assert weigh([]) == []
