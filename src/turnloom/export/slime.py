"""One sample as the fields of slime's `Sample`. It imports nothing of slime's, and decides no reward.

Field names and lengths are those of `slime/utils/types.py` (THUDM/slime): `tokens` is
the whole sequence; `response_length`, `loss_mask` and `rollout_log_probs` are of the
response region alone, which begins at the first sampled token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from turnloom.errors import TurnloomError
from turnloom.export.canonical import refuse_unless_whole
from turnloom.types import FinishReason, Sample

COMPLETED, TRUNCATED, ABORTED = "completed", "truncated", "aborted"
"""The values of slime's `Sample.Status` that these fields have."""


def to_slime(sample: Sample, decode: Callable[[Sequence[int]], str] | None = None) -> dict[str, Any]:
    """The fields of a sample that trains. `decode` gives `response` its text, which is "" without it.

    `rollout_log_probs` is 0.0 where nothing was sampled: there the loss mask is 0.
    `status` is the string of slime's enum. Raises TurnloomError for a sample that holds
    no sampled token, or that no exporter could carry truly.
    """
    refuse_unless_whole(sample)
    start = sample.prompt_len
    response = sample.token_ids[start:].tolist()
    if not response:
        raise TurnloomError(f"sample {sample.sample_index} of session {sample.session_id} holds no sampled token; it is not exported")
    logprobs = sample.logprobs[start:]
    return {
        "tokens": sample.token_ids.tolist(),
        "response": decode(response) if decode is not None else "",
        "response_length": len(response),
        "loss_mask": sample.loss_mask[start:].astype(int).tolist(),
        "rollout_log_probs": np.where(np.isfinite(logprobs), logprobs, 0.0).astype(float).tolist(),
        "reward": sample.reward,
        "status": TRUNCATED if sample.finish_reason == FinishReason.LENGTH else COMPLETED,
        "weight_versions": [*dict.fromkeys(version for version in sample.weight_version if version is not None)],
        "remove_sample": False,
        "metadata": {
            **sample.metadata,
            "rollout": sample.rollout_id,
            "session": sample.session_id,
            "lineage": sample.lineage_id,
            "label": sample.label,
            "statuses": dict(sample.statuses),
        },
    }


def aborted(reason: str) -> dict[str, Any]:
    """The fields of a rollout that gives nothing to train on.

    slime wants a sequence, a mask and a number for each row of its batch: these are
    two padding ids that no loss sees, and the row is marked for removal. The reward of 0
    stands for none; slime's own group mean counts it.
    """
    return {
        "tokens": [0, 0],
        "response": "",
        "response_length": 1,
        "loss_mask": [0],
        "rollout_log_probs": [0.0],
        "reward": 0.0,
        "status": ABORTED,
        "weight_versions": [],
        "remove_sample": True,
        "metadata": {"abort_reason": reason},
    }
