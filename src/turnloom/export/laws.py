"""The laws that samples alone can prove. Pure: samples in, findings out.

A run is the contiguous stretch of one turn's sampled tokens in one sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from turnloom.engine.contract import LOGPROB_SLACK
from turnloom.export.canonical import PER_TOKEN
from turnloom.export.report import Finding
from turnloom.types import Sample

WEIGHT_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, end) of a sample, sampled in turn `turn`."""

    turn: int
    start: int
    end: int


def runs(sample: Sample) -> list[Run]:
    """The sampled stretches in order; a turn that is broken up has several."""
    turn = sample.turn_index
    if not len(turn):
        return []
    edges = np.flatnonzero(np.diff(turn)) + 1
    bounds = [0, *edges.tolist(), len(turn)]
    stretches = [Run(int(turn[a]), a, b) for a, b in pairwise(bounds)]
    return [run for run in stretches if run.turn >= 0]


def columns(sample: Sample) -> list[Finding]:
    """Lengths, ids and mask: what every other law takes for granted."""
    lengths = {name: len(getattr(sample, name)) for name in PER_TOKEN}
    if len(set(lengths.values())) > 1:
        return [Finding("columns", "per-token columns differ in length: " + ", ".join(f"{k} {n}" for k, n in lengths.items()))]
    for name, kinds in (("token_ids", "iu"), ("loss_mask", "iu"), ("turn_index", "iu"), ("logprobs", "f")):
        if getattr(sample, name).dtype.kind not in kinds:
            return [Finding("columns", f"{name} is {getattr(sample, name).dtype}")]
    found = _at("ids", (sample.token_ids < 0) | (sample.token_ids > 2**31 - 1), "the token id is outside 0..2**31-1")
    return found + _at("mask", (sample.loss_mask != 0) & (sample.loss_mask != 1), "the mask is neither 0 nor 1")


def one_sample(sample: Sample) -> list[Finding]:
    """The laws within one sample, whose columns are sound."""
    return [*_only_sampled(sample), *_logprobs(sample), *_prompt_len(sample), *_turns(sample)]


def _at(law: str, wrong: npt.NDArray[np.bool_], message: str) -> list[Finding]:
    """One finding for all positions where `wrong`, at the first."""
    positions = np.flatnonzero(wrong)
    if not positions.size:
        return []
    more = f" (and {positions.size - 1} more tokens)" if positions.size > 1 else ""
    return [Finding(law, message + more, position=int(positions[0]))]


def _only_sampled(sample: Sample) -> list[Finding]:
    trains = sample.loss_mask == 1
    found = _at("only_sampled", trains & (sample.turn_index < 0), "a token that was not sampled trains")
    no_logprob = trains & (sample.turn_index >= 0) & ~np.isfinite(sample.logprobs)
    return found + _at("only_sampled", no_logprob, "a trained token has no finite logprob")


def _logprobs(sample: Sample) -> list[Finding]:
    """A whole run of context without logprobs is allowed: a turn that does not train because its logprobs are missing."""
    known = ~np.isnan(sample.logprobs)
    found = _at("logprobs", known & (sample.turn_index < 0), "a token that was not sampled has a logprob")
    found += _at("logprobs", sample.logprobs > LOGPROB_SLACK, "a logprob is above 0")
    partly = np.zeros(len(known), dtype=bool)
    for run in runs(sample):
        here = known[run.start : run.end]
        if here.any():
            partly[run.start : run.end] = ~here
    partly &= sample.loss_mask == 0  # a trained one is only_sampled's
    return found + _at("logprobs", partly, "a sampled token lacks the logprob that the rest of its turn has")


def _prompt_len(sample: Sample) -> list[Finding]:
    sampled = np.flatnonzero(sample.turn_index >= 0)
    first = int(sampled[0]) if sampled.size else len(sample.token_ids)
    if sample.prompt_len == first:
        return []
    return [Finding("prompt_len", f"prompt_len is {sample.prompt_len}, but the first sampled token is at {first}", position=first)]


def _turns(sample: Sample) -> list[Finding]:
    found = _at("turns", sample.turn_index < -1, "turn_index is below -1")
    seen: set[int] = set()
    last = -1
    for run in runs(sample):
        if run.turn in seen:
            return [*found, Finding("turns", f"turn {run.turn} is not one contiguous run", position=run.start)]
        if run.turn < last:
            return [*found, Finding("turns", f"turn {run.turn} stands after turn {last}", position=run.start)]
        seen.add(run.turn)
        last = run.turn
    return found


@dataclass(slots=True)
class _Held:
    """The first sample that holds the most of a turn, and the row that trains on each of its tokens (0: none so far)."""

    row: int
    sample: Sample
    run: Run
    trained_by: npt.NDArray[np.int64]


@dataclass(slots=True)
class Across:
    """The laws across samples, fed one sample at a time. Holds their columns: about 13 bytes a token."""

    held: dict[tuple[str, int], _Held] = field(default_factory=dict)
    indices: dict[tuple[str, int], int] = field(default_factory=dict)
    rollouts: dict[str, _Rollout] = field(default_factory=dict)
    session_ids: set[str] = field(default_factory=set)

    def feed(self, row: int, sample: Sample) -> list[Finding]:
        self.session_ids.add(sample.session_id)
        return [*self._sample_index(row, sample), *self._reward(row, sample), *self._shared_turns(row, sample)]

    def _sample_index(self, row: int, sample: Sample) -> list[Finding]:
        first = self.indices.setdefault((sample.session_id, sample.sample_index), row)
        return [Finding("sample_index", f"sample_index {sample.sample_index} is that of row {first} too")] if first != row else []

    def _reward(self, row: int, sample: Sample) -> list[Finding]:
        """Rewards differ between lineages only where `metadata["lineage_rewards"]` is true. A sample without a rollout is its session's."""
        key = sample.rollout_id or sample.session_id
        rollout = self.rollouts.setdefault(key, _Rollout(row))
        rollout.weights.append(sample.weight)
        per_lineage = bool(sample.metadata.get("lineage_rewards"))
        first_row, reward = rollout.rewards.setdefault(sample.lineage_id if per_lineage else None, (row, sample.reward))
        if reward == sample.reward:
            return []
        return [Finding("rewards", f"the reward is {sample.reward}, but {reward} in row {first_row} of the same rollout")]

    def weights(self) -> Iterator[Finding]:
        """To be asked once every sample was fed."""
        for key, rollout in self.rollouts.items():
            total = sum(rollout.weights)
            if not all(weight > 0 for weight in rollout.weights):
                yield Finding("weights", f"a sample of rollout {key} has weight {min(rollout.weights)}", row=rollout.row)
            elif not abs(total - 1) <= WEIGHT_SLACK:
                message = f"the {len(rollout.weights)} samples of rollout {key} weigh {total:.6g}, not 1"
                yield Finding("weights", message, row=rollout.row)

    def _shared_turns(self, row: int, sample: Sample) -> list[Finding]:
        found: list[Finding] = []
        thin = replace(sample, weight_version=(), metadata={})  # what is compared later, no more
        for run in {run.turn: run for run in reversed(runs(sample))}.values():
            trains = sample.loss_mask[run.start : run.end] == 1
            held = self.held.get((sample.session_id, run.turn))
            if held is None:
                self.held[sample.session_id, run.turn] = _Held(row, thin, run, np.where(trains, row, 0))
                continue
            differs = _same_until(held, row, sample, run)
            found += [*_once(held, row, run, trains), *differs]
            if run.end > held.run.end and not differs:
                held.row, held.sample, held.run = row, thin, run
        return found


@dataclass(slots=True)
class _Rollout:
    row: int
    weights: list[float] = field(default_factory=list)
    rewards: dict[str | None, tuple[int, float | None]] = field(default_factory=dict)


def _once(held: _Held, row: int, run: Run, trains: npt.NDArray[np.bool_]) -> list[Finding]:
    """Tokens count from the turn's first, so that a longer run of it is judged against a shorter one, and then remembered."""
    if len(trains) > len(held.trained_by):
        held.trained_by = np.pad(held.trained_by, (0, len(trains) - len(held.trained_by)))
    before = held.trained_by[: len(trains)]
    again = np.flatnonzero(trains & (before > 0))
    found = []
    if again.size:
        position, other = int(again[0]), int(before[again[0]])
        message = f"{again.size} tokens of turn {run.turn} train in row {other} already"
        found.append(Finding("once", message, position=run.start + position))
    before[trains & (before == 0)] = row
    return found


def _same_until(held: _Held, row: int, sample: Sample, run: Run) -> list[Finding]:
    """The sample against the one that holds the most of the turn: ids and turns, then the turn's logprobs.

    They agree up to the end of the turn, or of the shorter of its two runs where
    that sample says that it was cut or realigned there.
    """
    end = min(held.run.end, run.end)
    differs = (held.sample.token_ids[:end] != sample.token_ids[:end]) | (held.sample.turn_index[:end] != sample.turn_index[:end])
    where = np.flatnonzero(differs)
    if where.size:
        message = f"shares turn {run.turn} with row {held.row} but differs from it before that turn's end"
        return [Finding("prefix", message, position=int(where[0]))]
    if held.run.end != run.end:
        short, long = ((held.row, held.sample), row) if held.run.end < run.end else ((row, sample), held.row)
        if not _may_end(short[1], end):
            message = f"turn {run.turn} ends here in row {short[0]}, which was not cut or realigned, and goes on in row {long}"
            return [Finding("prefix", message, position=end)]
    before, here = held.sample.logprobs[run.start : end], sample.logprobs[run.start : end]
    other = np.flatnonzero((before != here) & ~(np.isnan(before) & np.isnan(here)))
    if not other.size:
        return []
    message = f"a token of turn {run.turn} has another logprob in row {held.row}"
    return [Finding("logprobs", message, position=run.start + int(other[0]))]


def _may_end(sample: Sample, end: int) -> bool:
    """Whether a turn of the sample may stop at `end` before all that was sampled: where it was cut, or a realigned turn goes on."""
    return bool(sample.statuses.get("cut" if end == len(sample.token_ids) else "fork_realigned"))
