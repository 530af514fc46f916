"""The tree as loss-masked samples, and the reason for every sampled token that does not train.

A token sequence is a chain of turns, each continuing the one before (`Turn.base`).
Each turn that trains and that no other training turn continues ends one sample. A turn shared
by several samples trains in the first of them and is context in the others.
A turn whose rebuilt prompt is not, by its CRC, the prompt that was sent is not
exported, nor is anything after it.

A sample is never split in two: the second part would have lost the context that
its tokens were sampled in. One that is too long is cut, or left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from zlib import crc32

import numpy as np

from turnloom.core.align import used
from turnloom.core.tree import Tree
from turnloom.types import SIDE, CallStatus, FinishReason, FloatArray, IntArray, Outcome, Sample, Turn, floats, ids


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
    """`tokens` sampled ids of this turn train nowhere, and why. They are all that it sampled, or the last of them."""

    turn_id: str
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unrolled:
    samples: tuple[Sample, ...]
    untrained: tuple[Untrained, ...]


class Overlong(StrEnum):
    """What becomes of a sample with more than `max_tokens`."""

    TRUNCATE = "truncate"
    """Cut at that token."""
    TURN = "turn"
    """Cut after the last whole turn that fits."""
    DROP = "drop"
    """Left out."""


@dataclass(frozen=True, slots=True)
class Longest:
    """No sample has more than `max_tokens`; None is unlimited."""

    max_tokens: int | None = None
    overlong: Overlong = Overlong.TRUNCATE


UNLIMITED = Longest()

BEYOND = "beyond the maximum sample length"
DROPPED = "its sample is longer than the maximum"
REPLACED = "replaced by realignment"

Policy = Callable[[Turn], str | None]
"""Why a turn does not train; None where it does."""


CONSTRAINED = "constrained sampling"


@dataclass(frozen=True, slots=True)
class Training:
    """The usual policy: what the client never got does not train, nor what another pool than the policy's sampled, nor
    what was sampled for a label of `skip`.

    A reply that the engine held to a schema does not train unless `constrained`:
    its logprobs are those of the policy and the grammar together.
    """

    skip: frozenset[str] = frozenset({SIDE})
    constrained: bool = False

    def __call__(self, turn: Turn) -> str | None:
        if turn.outcome is not Outcome.DELIVERED:
            return f"outcome {turn.outcome}"
        if turn.pool:
            return f"pool {turn.pool}"
        if turn.label in self.skip:
            return f"label {turn.label}"
        return CONSTRAINED if turn.sampling.json_schema and not self.constrained else None


DEFAULT_TRAINING = Training()


def prompt_crc(prompt: IntArray) -> int:
    """CRC-32 of the ids as little-endian int32."""
    return _crc(prompt, 0)


def unroll(tree: Tree, origin: Origin, policy: Policy = DEFAULT_TRAINING, longest: Longest = UNLIMITED) -> Unrolled:
    """Samples in the order of their last turns. Reads only: the same tree gives equal samples every time."""
    plan = _plan(tree, policy, longest)
    free = plan if longest.max_tokens is None else _plan(tree, policy, UNLIMITED)
    lost = DROPPED if longest.overlong is Overlong.DROP else BEYOND
    return Unrolled(tuple(_samples(tree, origin, plan)), _untrained(tree, plan, free, lost))


def iter_samples(tree: Tree, origin: Origin, policy: Policy = DEFAULT_TRAINING, longest: Longest = UNLIMITED) -> Iterator[Sample]:
    """The same samples one at a time, for a tree whose samples do not fit into memory together."""
    yield from _samples(tree, origin, _plan(tree, policy, longest))


@dataclass(frozen=True, slots=True)
class _Planned:
    """One sample to be: its last turn, and per turn the sampled ids [start, end) that train in it."""

    leaf: str
    spans: Mapping[str, tuple[int, int]]
    left_out: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """What trains where. Linear in turns: no token is copied for it."""

    samples: Sequence[_Planned]
    reasons: Mapping[str, str | None]
    trained: Mapping[str, int]
    """How many of a turn's sampled ids train, from its first."""
    max_tokens: int | None


def _plan(tree: Tree, policy: Policy, longest: Longest) -> _Plan:
    reasons = _reasons(tree, _within(policy, longest))
    leaves = _leaves(tree, reasons)
    if longest.max_tokens is not None and longest.overlong is Overlong.DROP:
        leaves = [t for t in leaves if _end(t) <= longest.max_tokens]
    limit = longest.max_tokens if longest.overlong is Overlong.TRUNCATE else None
    trained: dict[str, int] = {}
    seen: dict[str, int] = {}
    spans = [_spans(tree, leaf, number, reasons, trained, seen, limit) for number, leaf in enumerate(leaves)]
    left_out = _left_out(tree, seen)
    samples = [_Planned(t.id, found, left_out[number]) for number, (t, found) in enumerate(zip(leaves, spans, strict=True))]
    return _Plan(samples, reasons, trained, limit)


def _within(policy: Policy, longest: Longest) -> Policy:
    """The policy less the turns that have no place below the maximum."""
    most = longest.max_tokens
    if most is None or longest.overlong is Overlong.DROP:
        return policy

    def within(turn: Turn) -> str | None:
        needed = turn.prompt_len + 1 if longest.overlong is Overlong.TRUNCATE else _end(turn)
        return policy(turn) or (BEYOND if needed > most else None)

    return within


def _end(turn: Turn) -> int:
    return turn.prompt_len + len(turn.output)


def _leaves(tree: Tree, reasons: Mapping[str, str | None]) -> list[Turn]:
    """Turns that train and that no other training turn continues, in commit order."""
    continued: set[str] = set()
    for turn in tree.turns.values():
        base = turn.base if reasons[turn.id] is None else None
        while base is not None and base not in continued:
            continued.add(base)
            base = tree.turns[base].base
    return [t for t in tree.turns.values() if reasons[t.id] is None and t.id not in continued]


def _spans(
    tree: Tree,
    leaf: Turn,
    number: int,
    reasons: Mapping[str, str | None],
    trained: dict[str, int],
    seen: dict[str, int],
    limit: int | None,
) -> dict[str, tuple[int, int]]:
    """What the sample of this leaf trains that no earlier one does: its turns up to one that was seen, and of that
    one the end that a realigned turn had left off. Every turn is walked over once."""
    spans: dict[str, tuple[int, int]] = {}
    turn, end = leaf, len(leaf.output)
    if limit is not None:
        end = min(end, limit - leaf.prompt_len)
    while True:
        start = trained.get(turn.id, 0)
        if reasons[turn.id] is None and end > start:
            spans[turn.id] = (start, end)
            trained[turn.id] = end
        if turn.id in seen or turn.base is None:
            seen.setdefault(turn.id, number)
            return spans
        seen[turn.id] = number
        base = tree.turns[turn.base]
        turn, end = base, min(turn.kept - base.prompt_len, len(base.output))


def _left_out(tree: Tree, seen: Mapping[str, int]) -> Counter[int]:
    """Per sample, how many turns go on from it and are in none, by the sample that first holds what they go on from."""
    owner: dict[str, int | None] = dict(seen)
    for turn in tree.turns.values():
        if turn.id not in owner:
            owner[turn.id] = owner[turn.base] if turn.base is not None else None
    return Counter(number for turn_id, number in owner.items() if number is not None and turn_id not in seen)


def _untrained(tree: Tree, plan: _Plan, free: _Plan, lost: str) -> tuple[Untrained, ...]:
    """`free` is the plan without a maximum. What trains there and not here has the reason `lost`."""
    found = []
    for turn_id, reason in free.reasons.items():
        sampled, trained = len(tree.turns[turn_id].output), plan.trained.get(turn_id, 0)
        if reason is None and trained < sampled:
            reason = lost if free.trained.get(turn_id, 0) > trained else REPLACED
        if reason is not None:
            found.append(Untrained(turn_id, sampled - trained, reason))
    return tuple(found)


def _reasons(tree: Tree, policy: Policy) -> dict[str, str | None]:
    """Per turn, in commit order (a base before what continues it), why it does not train."""
    crcs: dict[str, tuple[int, int]] = {}
    unproved: set[str] = set()
    reasons: dict[str, str | None] = {}
    for turn in tree.turns.values():
        seen, proved = _proof(tree, turn, crcs)
        crcs[turn.id] = (seen, _crc(turn.output, seen))
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


def _proof(tree: Tree, turn: Turn, crcs: Mapping[str, tuple[int, int]]) -> tuple[int, bool]:
    """The CRC of the rebuilt prompt, and whether it is the prompt that was sent.

    `crcs` are those of each earlier turn's prompt and of its whole sequence.
    """
    if turn.base is None:
        seen = _crc(turn.appended, 0)
        return seen, seen == turn.prompt_crc and turn.kept == 0
    base = tree.turns[turn.base]
    prompt, whole = crcs[turn.base]
    output = turn.kept - base.prompt_len
    before = whole if output == len(base.output) else _crc(base.output[: max(output, 0)], prompt)
    seen = _crc(turn.appended, before)
    return seen, seen == turn.prompt_crc and 0 <= output <= len(base.output)


def _crc(column: IntArray, before: int) -> int:
    return crc32(column.astype("<i4", copy=False).tobytes(), before)


def _samples(tree: Tree, origin: Origin, plan: _Plan) -> Iterator[Sample]:
    for index, planned in enumerate(plan.samples):
        yield _sample(tree, planned, plan.max_tokens, origin, index, 1.0 / len(plan.samples))


def _sample(tree: Tree, planned: _Planned, max_tokens: int | None, origin: Origin, index: int, weight: float) -> Sample:
    ids_: list[IntArray] = []
    mask: list[np.ndarray] = []
    logprobs: list[FloatArray] = []
    turn_index: list[np.ndarray] = []
    versions: list[str | None] = []
    chain = tree.chain(planned.leaf)
    for turn, m in zip(chain, used(chain), strict=True):
        n = len(turn.appended)
        ids_ += [turn.appended, turn.output[:m]]
        start, end = planned.spans.get(turn.id, (0, 0))
        trains = np.zeros(m, np.uint8)
        trains[start:end] = 1
        mask += [np.zeros(n, np.uint8), trains]
        known = turn.logprobs[:m] if len(turn.logprobs) == len(turn.output) else np.full(m, np.nan, np.float32)
        logprobs += [np.full(n, np.nan, np.float32), known]
        turn_index += [np.full(n, -1, np.int32), np.full(m, turn.index, np.int32)]
        versions += [None] * n + _versions(turn)[:m]
    leaf = chain[-1]
    all_mask = np.concatenate(mask)[:max_tokens]
    sampled = np.concatenate(turn_index)[:max_tokens]
    for column in (all_mask, sampled):
        column.flags.writeable = False
    conventions = sorted({t.logprob_convention for t in chain if t.id in planned.spans})
    cut = max_tokens is not None and _end(leaf) > max_tokens
    return Sample(
        token_ids=ids(np.concatenate(ids_)[:max_tokens]),
        loss_mask=all_mask,
        logprobs=floats(np.concatenate(logprobs)[:max_tokens]),
        turn_index=sampled,
        weight_version=tuple(versions[:max_tokens]),
        prompt_len=int(np.argmax(sampled >= 0)),
        temperature=leaf.sampling.temperature,
        session_id=origin.session_id,
        rollout_id=origin.rollout_id or origin.session_id,
        group_id=origin.group_id,
        lineage_id=leaf.id,
        label=next((t.label for t in chain if t.id in planned.spans), ""),
        sample_index=index,
        weight=weight,
        reward=origin.reward,
        outcome=str(leaf.outcome),
        finish_reason=str(leaf.finish.reason),
        statuses=_statuses(chain, left_out=planned.left_out, cut=int(cut)),
        metadata={**origin.metadata, "logprob_convention": "+".join(conventions)},
    )


def _versions(turn: Turn) -> list[str | None]:
    column: list[str | None] = [None] * len(turn.output)
    for span in turn.versions:
        for i in range(max(span.start, 0), min(span.end, len(column))):
            column[i] = span.version
    return column


def _statuses(chain: Sequence[Turn], **of_sample: int) -> dict[str, int]:
    """Counts over the turns of the sample, and of the sample itself; keys that are zero are left out."""
    counts: defaultdict[str, int] = defaultdict(int, turns=len(chain), **of_sample)
    for turn in chain:
        for call in turn.calls:
            counts[f"call_{call.status}"] += 1
            counts["ill_formed_calls"] += call.status is not CallStatus.OK
        counts["truncated"] += turn.finish.reason is FinishReason.LENGTH
        counts["aborted"] += turn.outcome is Outcome.ABORTED
        counts["escaped_control_tokens"] += turn.escaped
        counts["respelled_calls"] = max(counts["respelled_calls"], turn.respelled)
        counts["not_delivered"] += turn.outcome is not Outcome.DELIVERED
        counts["bridged"] += turn.base is not None
        counts["seams"] += max(len(turn.pieces) - 1, 0)
        counts["surplus_tokens"] += turn.surplus
        if turn.fork is not None:
            counts[f"fork_{turn.fork.kind}"] += 1
    return {k: n for k, n in sorted(counts.items()) if n}
