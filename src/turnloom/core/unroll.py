"""The tree as loss-masked samples, and the reason for every sampled token that does not train.

A token sequence is a chain of turns, each continuing the one before (`Turn.base`).
Each turn that trains and that no other training turn continues ends one sample. A turn shared
by several samples trains in the first of them and is context in the others.
A turn whose rebuilt prompt is not, by its CRC, the prompt that was sent is not
exported, nor is anything after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from turnloom.core.tree import Tree
from turnloom.types import FinishReason, FloatArray, IntArray, Outcome, Sample, Turn, floats, ids


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose samples they are."""

    session_id: str
    rollout_id: str = ""
    group_id: str = ""
    reward: float | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Untrained:
    """`tokens` sampled ids of this turn train nowhere, and why."""

    turn_id: str
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unrolled:
    samples: tuple[Sample, ...]
    untrained: tuple[Untrained, ...]


Policy = Callable[[Turn], str | None]
"""Why a turn does not train; None where it does."""


def delivered_only(turn: Turn) -> str | None:
    """The default policy: what the client never got does not train."""
    return None if turn.outcome is Outcome.DELIVERED else f"outcome {turn.outcome}"


def prompt_crc(prompt: IntArray) -> int:
    """CRC-32 of the ids as little-endian int32."""
    return crc32(prompt.astype("<i4", copy=False).tobytes())


def unroll(tree: Tree, origin: Origin, policy: Policy = delivered_only) -> Unrolled:
    """Samples in the order of their last turns. Reads only: the same tree gives equal samples every time."""
    reasons = _reasons(tree, policy)
    trains = {t for t, reason in reasons.items() if reason is None}
    continued: set[str] = set()
    for turn_id in trains:
        base = tree.turns[turn_id].base
        while base is not None and base not in continued:
            continued.add(base)
            base = tree.turns[base].base
    leaves = [t for t in tree.turns.values() if t.id in trains and t.id not in continued]
    samples: list[Sample] = []
    done: set[str] = set()
    for leaf in leaves:
        chain = tree.chain(leaf.id)
        fresh = {t.id for t in chain if t.id in trains} - done
        samples.append(_sample(tree, chain, fresh, origin, len(samples), 1.0 / len(leaves)))
        done |= fresh
    untrained = tuple(Untrained(t, len(tree.turns[t].output), r) for t, r in reasons.items() if r is not None)
    return Unrolled(tuple(samples), untrained)


def _reasons(tree: Tree, policy: Policy) -> dict[str, str | None]:
    """Per turn, in commit order (a base before what continues it), why it does not train."""
    crcs: dict[str, int] = {}
    lengths: dict[str, int] = {}
    unproved: set[str] = set()
    reasons: dict[str, str | None] = {}
    for turn in tree.turns.values():
        before, length = (crcs[turn.base], lengths[turn.base]) if turn.base is not None else (0, 0)
        seen = crc32(turn.appended.astype("<i4", copy=False).tobytes(), before)
        crcs[turn.id] = crc32(turn.output.astype("<i4", copy=False).tobytes(), seen)
        lengths[turn.id] = length + len(turn.appended) + len(turn.output)
        proved = seen == turn.prompt_crc and length + len(turn.appended) == turn.prompt_len
        if not proved or turn.base in unproved:
            unproved.add(turn.id)
            reasons[turn.id] = "the prompt that was sent cannot be proved"
        elif not len(turn.output):
            reasons[turn.id] = "nothing was sampled"
        elif len(turn.logprobs) != len(turn.output) or not np.isfinite(turn.logprobs).all():
            reasons[turn.id] = "logprobs are missing"
        else:
            reasons[turn.id] = policy(turn)
    return reasons


def _sample(tree: Tree, chain: Sequence[Turn], trained: set[str], origin: Origin, index: int, weight: float) -> Sample:
    ids_: list[IntArray] = []
    mask: list[np.ndarray] = []
    logprobs: list[FloatArray] = []
    turn_index: list[np.ndarray] = []
    versions: list[str | None] = []
    for turn in chain:
        n, m = len(turn.appended), len(turn.output)
        ids_ += [turn.appended, turn.output]
        mask += [np.zeros(n, np.uint8), np.full(m, turn.id in trained, np.uint8)]
        known = turn.logprobs if len(turn.logprobs) == m else np.full(m, np.nan, np.float32)
        logprobs += [np.full(n, np.nan, np.float32), known]
        turn_index += [np.full(n, -1, np.int32), np.full(m, turn.index, np.int32)]
        versions += [None] * n + _versions(turn)
    leaf = chain[-1]
    all_mask = np.concatenate(mask)
    sampled = np.concatenate(turn_index)
    for column in (all_mask, sampled):
        column.flags.writeable = False
    conventions = sorted({t.logprob_convention for t in chain if t.id in trained})
    return Sample(
        token_ids=ids(np.concatenate(ids_)),
        loss_mask=all_mask,
        logprobs=floats(np.concatenate(logprobs)),
        turn_index=sampled,
        weight_version=tuple(versions),
        prompt_len=int(np.argmax(sampled >= 0)),
        temperature=leaf.sampling.temperature,
        session_id=origin.session_id,
        rollout_id=origin.rollout_id or origin.session_id,
        group_id=origin.group_id,
        lineage_id=leaf.id,
        label="",
        sample_index=index,
        weight=weight,
        reward=origin.reward,
        outcome=str(leaf.outcome),
        finish_reason=str(leaf.finish.reason),
        statuses=_statuses(chain),
        metadata={**origin.metadata, "logprob_convention": "+".join(conventions)},
    )


def _versions(turn: Turn) -> list[str | None]:
    column: list[str | None] = [None] * len(turn.output)
    for span in turn.versions:
        for i in range(max(span.start, 0), min(span.end, len(column))):
            column[i] = span.version
    return column


def _statuses(chain: Sequence[Turn]) -> dict[str, int]:
    """Counts over the turns of the sample; keys that are zero are left out."""
    counts: Counter[str] = Counter(turns=len(chain))
    for turn in chain:
        counts.update(f"call_{c.status}" for c in turn.calls)
        counts["truncated"] += turn.finish.reason is FinishReason.LENGTH
        counts["escaped_control_tokens"] += turn.escaped
        counts["respelled_calls"] = max(counts["respelled_calls"], turn.respelled)
        counts["not_delivered"] += turn.outcome is not Outcome.DELIVERED
        counts["bridged"] += turn.base is not None
        if turn.fork is not None:
            counts[f"fork_{turn.fork.kind}"] += 1
    return {k: n for k, n in sorted(counts.items()) if n}
