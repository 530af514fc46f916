"""The checker on the samples of real sessions: under every history policy, realigned and cut. It never cries wolf, and never sleeps."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.properties.driver import ACTIONS, Driver
from tests.properties.replies import Replies
from tests.properties.subjects import subject_of
from tests.support.histories import Weaver, assistant, request, user
from turnloom.core.match import CANONICAL, STRICT
from turnloom.core.unroll import Longest, Origin, Overlong, unroll
from turnloom.export.check import check_samples
from turnloom.export.report import Report, format_report
from turnloom.gateway.policy import SAMPLED, History
from turnloom.types import Fork, ForkKind, Outcome, Sample, floats, ids

POLICIES = {
    "sampled": (SAMPLED, CANONICAL),
    "sampled, strict": (SAMPLED, STRICT),
    "template": (History("template"), CANONICAL),
    "template, realigned a little": (History("template", realign=12), CANONICAL),
    "template, realigned": (History("template", realign=10_000), CANONICAL),
}

steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**32 - 1)), min_size=1, max_size=9)
longest = st.builds(Longest, st.none() | st.integers(1, 900), st.sampled_from(Overlong))


@functools.cache
def replies() -> Replies:
    return Replies(subject_of("qwen3"))


def samples_of(policy: str, seed: int, plan: list[tuple[str, int]], most: Longest) -> list[Sample]:
    driver = Driver(subject_of("qwen3"), replies(), seed, *POLICIES[policy])
    asyncio.run(driver.run(plan))
    return list(driver.session.unroll(most).samples)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), plan=steps, most=longest)
def test_what_a_session_gives_passes(policy: str, seed: int, plan: list[tuple[str, int]], most: Longest) -> None:
    samples = samples_of(policy, seed, plan, most)
    report = check_samples(samples)
    assert report.ok is bool(samples), format_report(report)


# Trees with what sessions seldom have: several replies realigned at several places, beside whole ones.

Step = tuple[int, int, int, int, bool]
"""Which earlier turn it goes on from, how many of its sampled ids it leaves off, appended, sampled, delivered."""

tree_steps = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0, 0, 1, 2, 9]), st.integers(1, 3), st.integers(1, 5), st.integers(0, 6).map(bool)),
    min_size=1,
    max_size=8,
)


def grown(plan: Sequence[Step]) -> Weaver:
    """A tree of these turns; token ids and logprobs are all different."""
    w, said = Weaver(), [[user("u")]]
    numbers = iter(range(1000, 10**6))
    for i, (at, left_off, appended, sampled, delivered) in enumerate(plan):
        before = said[at % len(said)]
        pending = w.tree.prepare(request(*before))
        base = w.tree.turns[pending.base] if pending.base is not None else None
        left_off = min(left_off, len(base.output)) if base is not None else 0
        w.commit(
            pending,
            assistant(f"A{i}"),
            kept=base.prompt_len + len(base.output) - left_off if base is not None else None,
            fork=Fork(ForkKind.REALIGNED, 1) if left_off else None,
            appended=ids([next(numbers) for _ in range(appended)]),
            output=tuple(next(numbers) for _ in range(sampled)),
            logprobs=floats([-next(numbers) / 1e6 for _ in range(sampled)]),
            outcome=Outcome.DELIVERED if delivered else Outcome.ORPHANED,
        )
        said.append([*before, assistant(f"A{i}"), user(f"u{i}")])
    return w


def woven(plan: Sequence[Step], most: Longest) -> list[Sample]:
    return list(unroll(grown(plan).tree, Origin("s"), longest=most).samples)


short = st.builds(Longest, st.none() | st.integers(1, 30), st.sampled_from(Overlong))


@settings(max_examples=400, deadline=None)
@given(tree_steps, short, st.randoms(use_true_random=False))
def test_any_tree_passes_in_any_order_of_its_rows(plan, most, random) -> None:
    samples = woven(plan, most)
    random.shuffle(samples)
    report = check_samples(samples)
    assert report.ok is bool(samples), format_report(report)


def overlaps(samples: Sequence[Sample]) -> Iterator[tuple[int, int, int]]:
    """Row, other row, and up to where they are the same sequence, for each pair that shares a turn."""
    for a, left in enumerate(samples):
        for b, right in enumerate(samples):
            shared = set(left.turn_index.tolist()) & set(right.turn_index.tolist()) - {-1}
            if a != b and shared:
                common = min(len(left.token_ids), len(right.token_ids))
                turn = max(shared)
                mine = np.flatnonzero((left.turn_index[:common] == turn) & (right.turn_index[:common] == turn))
                yield a, b, int(mine[-1]) + 1


Change = tuple[int, str, int, float]
"""Row, column, position, the new value."""


def wrong_tokens(samples: Sequence[Sample]) -> Iterator[Change]:
    for a, _, end in overlaps(samples):
        yield from ((a, "token_ids", at, samples[a].token_ids[at] ^ 1) for at in range(end))


def wrong_logprobs(samples: Sequence[Sample]) -> Iterator[Change]:
    for a, sample in enumerate(samples):
        yield from ((a, "logprobs", int(at), -0.5) for at in np.flatnonzero(sample.turn_index < 0))
        yield from ((a, "logprobs", int(at), 0.5) for at in np.flatnonzero(sample.turn_index >= 0))
        yield from ((a, "logprobs", int(at), np.nan) for at in np.flatnonzero(sample.loss_mask))
    for a, _, end in overlaps(samples):
        yield from ((a, "logprobs", int(at), samples[a].logprobs[at] - 1) for at in np.flatnonzero(samples[a].turn_index[:end] >= 0))


def trained_twice(samples: Sequence[Sample]) -> Iterator[Change]:
    for a, b, end in overlaps(samples):
        yield from ((a, "loss_mask", int(at), 1) for at in np.flatnonzero(samples[b].loss_mask[:end]))


def trained_context(samples: Sequence[Sample]) -> Iterator[Change]:
    for a, sample in enumerate(samples):
        yield from ((a, "loss_mask", int(at), 1) for at in np.flatnonzero(sample.turn_index < 0))


def other_turns(samples: Sequence[Sample]) -> Iterator[Change]:
    for a, sample in enumerate(samples):
        yield from ((a, "turn_index", int(at), -1) for at in np.flatnonzero(sample.turn_index >= 0))


def changed(samples: Sequence[Sample], change: Change) -> list[Sample]:
    row, column, at, value = change
    values = getattr(samples[row], column).copy()
    values[at] = value
    return [replace(s, **{column: values}) if i == row else s for i, s in enumerate(samples)]


CORRUPTIONS: dict[str, tuple[Callable[[Sequence[Sample]], Iterator[Change]], set[str]]] = {
    "a token changed in what two samples share": (wrong_tokens, {"prefix"}),
    "a logprob changed": (wrong_logprobs, {"logprobs", "only_sampled"}),
    "a token trained twice": (trained_twice, {"once"}),
    "a context token trained": (trained_context, {"only_sampled"}),
    "a sampled token passed off as context": (other_turns, {"logprobs", "only_sampled"}),
}


def broken(report: Report) -> set[str]:
    return {law for law, count in report.violations.items() if count}


@pytest.mark.parametrize("name", CORRUPTIONS)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=tree_steps, most=short, order=st.randoms(use_true_random=False), data=st.data())
def test_no_corruption_passes(name: str, plan, most, order, data) -> None:
    changes, laws = CORRUPTIONS[name]
    samples = woven(plan, most)
    order.shuffle(samples)
    possible = list(changes(samples))
    assume(possible)
    report = check_samples(changed(samples, data.draw(st.sampled_from(possible))))
    assert broken(report) & laws, format_report(report)


@pytest.mark.parametrize("policy", ["sampled", "template, realigned"])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), plan=steps, most=longest, data=st.data())
def test_no_corruption_of_a_session_passes(policy: str, seed: int, plan, most, data) -> None:
    samples = samples_of(policy, seed, plan, most)
    name = data.draw(st.sampled_from(sorted(CORRUPTIONS)))
    possible = list(CORRUPTIONS[name][0](samples))
    assume(possible)
    assert not check_samples(changed(samples, data.draw(st.sampled_from(possible)))).ok


def realigned_beside_whole() -> list[Sample]:
    """Turn 0 sampled four tokens: row 1 holds one of them, row 2 all."""
    w = Weaver()
    w.say(request(user("a")), assistant("A"), output=(200, 201, 202, 203))
    pending = w.tree.prepare(request(user("a"), assistant("A"), user("b")))
    w.commit(pending, assistant("B"), kept=3, fork=Fork(ForkKind.REALIGNED, 1))
    w.say(request(user("a"), assistant("A"), user("other")), assistant("C"))
    return list(unroll(w.tree, Origin("s")).samples)


@pytest.mark.parametrize("rows", [[0, 1], [1, 0]])
def test_a_realigned_sample_beside_a_whole_one_passes(rows: list[int]) -> None:
    samples = realigned_beside_whole()
    assert check_samples([samples[row] for row in rows]).ok


@pytest.mark.parametrize("rows", [[0, 1], [1, 0]])
def test_a_turn_that_ends_early_and_does_not_say_why_is_a_finding(rows: list[int]) -> None:
    samples = realigned_beside_whole()
    samples[0] = replace(samples[0], statuses={"turns": 2})
    (finding,) = check_samples([samples[row] for row in rows]).findings
    assert (finding.law, finding.row, finding.position) == ("prefix", 2, 3)
    short, whole = rows.index(0) + 1, rows.index(1) + 1
    assert finding.message == f"turn 0 ends here in row {short}, which was not cut or realigned, and goes on in row {whole}"


def test_what_only_the_longer_runs_hold_trains_once() -> None:
    """Three samples of one turn, the shortest first: the tokens that it lacks train in the second, and not in the third too."""
    first, whole = realigned_beside_whole()
    third = replace(whole, sample_index=2)
    samples = [replace(s, weight=1 / 3) for s in (first, whole, third)]
    report = check_samples(samples)
    assert broken(report) == {"once"}
    assert {(f.row, f.position) for f in report.findings} == {(3, 3), (3, 8)}
    context = replace(samples[2], loss_mask=np.zeros_like(third.loss_mask))
    assert check_samples([*samples[:2], context]).ok


@pytest.mark.parametrize(("column", "law"), [("token_ids", "prefix"), ("logprobs", "logprobs")])
def test_longer_runs_are_held_against_each_other(column: str, law: str) -> None:
    """The first sample has one token of the turn; the others have four, and differ in the last."""
    first, whole = realigned_beside_whole()
    third = replace(whole, sample_index=2, loss_mask=np.zeros_like(whole.loss_mask))
    samples = [replace(s, weight=1 / 3) for s in (first, whole, third)]
    report = check_samples(changed(samples, (2, column, 5, getattr(whole, column)[5] - 1)))
    assert [(f.law, f.row, f.position) for f in report.findings if f.position == 5] == [(law, 3, 5)]
