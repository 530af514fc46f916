"""Laws 1 to 5 under every history policy, matcher and maximum length, against what the engine really got and gave."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.properties.driver import ACTIONS, Driver
from tests.properties.replies import Replies
from tests.properties.subjects import subject_of
from turnloom.core.match import CANONICAL, STRICT
from turnloom.core.unroll import UNLIMITED, Longest, Origin, Overlong, Unrolled, iter_samples, unroll
from turnloom.gateway.policy import SAMPLED, History
from turnloom.render.contract import Renderer, Unbridgeable
from turnloom.types import ForkKind, Message, Outcome, Tool

POLICIES = {
    "sampled, strict": (SAMPLED, STRICT),
    "template": (History("template"), CANONICAL),
    "template, realigned a little": (History("template", realign=12), CANONICAL),
    "template, realigned": (History("template", realign=10_000), CANONICAL),
    "template, strict": (History("template", realign=40), STRICT),
}

steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**32 - 1)), min_size=1, max_size=9)
longest = st.builds(Longest, st.none() | st.integers(1, 900), st.sampled_from(Overlong))


@functools.cache
def replies_of(name: str) -> Replies:
    return Replies(subject_of(name))


def run(name: str, seed: int, plan: list[tuple[str, int]], policy: str) -> Driver:
    driver = Driver(subject_of(name), replies_of(name), seed, *POLICIES[policy])
    asyncio.run(driver.run(plan))
    return driver


def check_turns(driver: Driver) -> None:
    """Law 1, and that each departure from what is held says where and why."""
    calls = {c.rid: c for c in driver.engine.calls}
    turns = driver.session.tree.turns
    for turn in turns.values():
        prompt = calls[turn.id].prompt
        if turn.base is None:
            assert turn.kept == 0
            assert (turn.fork is None) == (turn.index == 0)
        else:
            base = calls[turn.base]
            held = np.concatenate([base.prompt, base.output])
            np.testing.assert_array_equal(prompt[: turn.kept], held[: turn.kept], "law 1")
            realigned = turn.fork is not None and turn.fork.kind is ForkKind.REALIGNED
            assert len(base.prompt) <= turn.kept <= len(held)
            assert realigned == (turn.kept < len(held)), "only realignment leaves sampled tokens off"
        np.testing.assert_array_equal(driver.session.tree.held(turn.id), np.concatenate([prompt, calls[turn.id].output]))
        if (fork := turn.fork) is not None:
            assert 0 <= fork.token_index <= len(prompt)
            assert fork.came == driver.parts.policy.tokenizer.decode(prompt[fork.token_index : fork.token_index + 12].tolist())
            assert fork.recorded != fork.came or not fork.recorded or "in other tokens" in fork.detail


def check_samples(driver: Driver, found: Unrolled, most: int | None) -> None:
    """Laws 2, 3 and 4."""
    calls = {c.rid: c for c in driver.engine.calls}
    turns = driver.session.tree.turns
    by_index = {t.index: t for t in turns.values()}
    trained = {t: np.zeros(len(calls[t].output), int) for t in turns}
    for sample in found.samples:
        assert sample.loss_mask.any()
        assert most is None or len(sample.token_ids) <= most
        for index in set(sample.turn_index[sample.loss_mask == 1].tolist()):
            turn = by_index[index]
            call = calls[turn.id]
            where = np.flatnonzero((sample.turn_index == index) & (sample.loss_mask == 1))
            offsets = where - len(call.prompt)
            assert offsets[0] >= 0, "law 4: only sampled ids"
            last = int(where[-1]) + 1
            seen = np.concatenate([call.prompt, call.output])
            np.testing.assert_array_equal(sample.token_ids[:last], seen[:last], "law 2: the context the engine had")
            np.testing.assert_array_equal(sample.logprobs[where], call.logprobs[offsets], "law 4: with their logprobs")
            trained[turn.id][offsets] += 1
    untrained = {u.turn_id: u for u in found.untrained}
    assert len(untrained) == len(found.untrained)
    for turn_id, times in trained.items():
        count = len(times) - (untrained[turn_id].tokens if turn_id in untrained else 0)
        assert times.tolist() == [1] * count + [0] * (len(times) - count), "law 3: once, or a reason"
    assert not found.samples or sum(s.weight for s in found.samples) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), plan=steps, longest=longest)
def test_laws_hold_under_every_policy(policy: str, name: str, seed: int, plan: list[tuple[str, int]], longest: Longest) -> None:
    driver = run(name, seed, plan, policy)
    check_turns(driver)
    tree, origin = driver.session.tree, Origin("s")
    whole = unroll(tree, origin)
    check_samples(driver, whole, None)
    for turn in tree.turns.values():
        if turn.outcome is Outcome.DELIVERED and len(turn.output):
            reasons = {u.reason for u in whole.untrained if u.turn_id == turn.id}
            assert reasons <= {"replaced by realignment"}, "what was delivered trains"
    for limit in (longest, UNLIMITED):
        found = unroll(tree, origin, longest=limit)
        check_samples(driver, found, limit.max_tokens)
        assert tuple(iter_samples(tree, origin, longest=limit)) == found.samples
        assert unroll(tree, origin, longest=limit) == found, "law 5"


class NoBridge:
    """The real renderer of a template that can never be split after a reply."""

    def __init__(self, renderer: Renderer) -> None:
        self.end_ids, self.render = renderer.end_ids, renderer.render

    def bridge(
        self, reply: Message, output: Sequence[int], new: Sequence[Message], tools: Sequence[Tool], *, calls_before: int = 0
    ) -> Unbridgeable:
        return Unbridgeable("this template is never split")


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_where_no_bridge_is_possible_what_is_shared_is_kept(name: str, seed: int, plan: list[tuple[str, int]]) -> None:
    """A whole rendering that begins with what is held goes on from it; one that does not says what the renderer said."""
    driver = Driver(subject_of(name), replies_of(name), seed)
    driver.parts = replace(driver.parts, policy=replace(driver.parts.policy, renderer=NoBridge(driver.renderer)))
    asyncio.run(driver.run(plan))
    check_turns(driver)
    check_samples(driver, driver.unroll(), None)
    tree = driver.session.tree
    for turn in tree.turns.values():
        path = tree.path(tree.node_of[turn.id])[:-1]
        above = [tree.nodes[n].turn for n in path if tree.nodes[n].turn is not None]
        if turn.fork is not None and turn.fork.kind is ForkKind.TEMPLATE:
            assert turn.fork.detail.startswith("this template is never split")
            assert turn.base is None or turn.base in above[:-1], "only what stands before the last reply"
        else:
            assert turn.base == (above[-1] if above else None)
