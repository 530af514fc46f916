"""Valid samples from a few words: a session's turns, each by its base and its lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from turnloom.testing.scripted_engine import logprob_at
from turnloom.types import Sample, floats, ids

Spec = tuple[int | None, int, int]
"""The turn it continues (or None), how many tokens it appends, how many it samples."""

TWO_LINEAGES: Sequence[Spec] = ((None, 3, 2), (0, 2, 3), (1, 1, 2), (0, 4, 2))
"""Row 1 is ppp00aa111a22, row 2 is ppp00aaaa33: digits are the turns that sampled, turn 0 is shared and trains in row 1."""


def weave(specs: Sequence[Spec], session: str = "s1", reward: float | None = 1.0, **metadata: object) -> list[Sample]:
    """One sample per turn that none continues; a shared turn trains in the first. Logprobs are the scripted engine's."""
    bases = {base for base, _, _ in specs}
    leaves = [turn for turn in range(len(specs)) if turn not in bases]
    trained: set[int] = set()
    samples = []
    for leaf in leaves:
        chain = _chain(specs, leaf)
        samples.append(_sample(specs, chain, trained, session, len(samples), 1 / len(leaves), reward, metadata))
        trained.update(chain)
    return samples


def _chain(specs: Sequence[Spec], leaf: int) -> list[int]:
    chain: list[int] = []
    turn: int | None = leaf
    while turn is not None:
        chain.insert(0, turn)
        turn = specs[turn][0]
    return chain


def _sample(
    specs: Sequence[Spec],
    chain: Sequence[int],
    trained: set[int],
    session: str,
    index: int,
    weight: float,
    reward: float | None,
    metadata: dict[str, object],
) -> Sample:
    tokens: list[int] = []
    mask: list[int] = []
    turns: list[int] = []
    for turn in chain:
        _, appended, sampled = specs[turn]
        tokens += [100 * turn + n for n in range(appended + sampled)]
        turns += [-1] * appended + [turn] * sampled
        mask += [0] * appended + [int(turn not in trained)] * sampled
    logprobs = [logprob_at(at, token) if turn >= 0 else np.nan for at, (token, turn) in enumerate(zip(tokens, turns, strict=True))]
    return Sample(
        token_ids=ids(tokens),
        loss_mask=np.array(mask, dtype=np.uint8),
        logprobs=floats(logprobs),
        turn_index=np.array(turns, dtype=np.int32),
        weight_version=tuple(f"v{turn // 2}" if turn >= 0 else None for turn in turns),
        prompt_len=next((at for at, turn in enumerate(turns) if turn >= 0), len(turns)),
        temperature=1.0,
        session_id=session,
        rollout_id=f"rollout of {session}",
        group_id="g",
        lineage_id=f"t{chain[-1]}",
        label="",
        sample_index=index,
        weight=weight,
        reward=reward,
        outcome="delivered",
        finish_reason="stop",
        statuses={"turns": len(chain)},
        metadata={"logprob_convention": "raw", **metadata},
    )


@st.composite
def specs(draw: st.DrawFn) -> list[Spec]:
    """A random session: turns that continue any earlier one or none."""
    count = draw(st.integers(1, 7))
    bases = [draw(st.none() | st.integers(0, turn - 1)) if turn else None for turn in range(count)]
    return [(base, draw(st.integers(0 if base is not None else 1, 4)), draw(st.integers(1, 4))) for base in bases]
