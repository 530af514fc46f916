"""The laws where a turn outlives its engines, and where a session has two models; each shown to be able to fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.driver import Driver
from tests.properties.subjects import subject_of
from tests.properties.survivors import Survivors, torn
from tests.properties.test_laws import laws, replies_of, steps
from tests.properties.trials import plan_of
from tests.properties.two_pools import TwoPools, mixed
from tests.properties.violations import violations
from turnloom.core import unroll as unrolling
from turnloom.core.records import Pending
from turnloom.core.tree import Tree
from turnloom.engine.contract import Chunk
from turnloom.engine.seam import Seam
from turnloom.gateway.session import Session
from turnloom.store import codec
from turnloom.types import ForkKind, Sampling

some = settings(laws, max_examples=200)


def survived(name: str, seed: int, plan: list[tuple[str, int]]) -> Driver:
    driver = Driver(subject_of(name), replies_of(name), seed, engine=Survivors)
    asyncio.run(driver.run(plan))
    return driver


def two_pools(side: str, seed: int, plan: list[tuple[str, int]]) -> TwoPools:
    driver = TwoPools(subject_of("qwen2.5"), replies_of("qwen2.5"), subject_of(side), replies_of(side), seed)
    asyncio.run(driver.run(plan))
    return driver


def again(driver: Driver) -> Tree:
    """The session's tree, from what the store holds."""
    tree = Tree(driver.matcher)
    for delta in asyncio.run(_deltas(driver)):
        tree.apply(codec.decode_delta(codec.encode_delta(delta)))
    return tree


async def _deltas(driver: Driver) -> list[Any]:
    return list(await driver.store.deltas("s"))


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
@some
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_laws_hold_where_engines_die(name: str, seed: int, plan: list[tuple[str, int]]) -> None:
    driver = survived(name, seed, plan)
    assert violations(driver) == []
    assert list(torn(driver)) == []
    assert again(driver).turns == driver.session.tree.turns, "with its pieces and its versions"


@pytest.mark.parametrize("side", ["smollm2", "qwen3"])
@some
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_laws_hold_with_two_models(side: str, seed: int, plan: list[tuple[str, int]]) -> None:
    driver = two_pools(side, seed, plan)
    assert violations(driver) == []
    assert list(mixed(driver)) == []


@pytest.mark.parametrize("side", ["smollm2", "qwen3"])
@some
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_a_restart_finds_both_models_turns(side: str, seed: int, plan: list[tuple[str, int]]) -> None:
    driver = two_pools(side, seed, plan)
    tree = again(driver)
    assert tree.turns == driver.session.tree.turns
    assert tree.nodes == driver.session.tree.nodes
    assert Session(driver.session.row, driver.store, tree).unroll() == driver.unroll()


def _sessions(run: Callable[[int, list[tuple[str, int]]], Driver], count: int = 12) -> list[Driver]:
    found = []
    for number in range(count):
        rng = random.Random(number)
        found.append(run(rng.getrandbits(32), plan_of(rng)))
    return found


def broken_by_death() -> list[str]:
    return [line for d in _sessions(lambda seed, plan: survived("qwen2.5", seed, plan)) for line in (*violations(d), *torn(d))]


def broken_by_mixing() -> list[str]:
    return [line for d in _sessions(lambda seed, plan: two_pools("smollm2", seed, plan)) for line in (*violations(d), *mixed(d))]


def test_these_sessions_have_what_they_are_for() -> None:
    """Seams, within replies and before them; replies of both models, on top of each other."""
    turns = [t for d in _sessions(lambda seed, plan: survived("qwen2.5", seed, plan)) for t in d.session.tree.turns.values()]
    assert sum(len(t.pieces) > 1 for t in turns) > 5
    assert sum(bool(t.pieces) and bool(t.pieces[0].why) for t in turns) > 1
    turns = [t for d in _sessions(lambda seed, plan: two_pools("smollm2", seed, plan)) for t in d.session.tree.turns.values()]
    assert sum(t.fork is not None and t.fork.kind is ForkKind.OTHER_POOL for t in turns) > 3
    assert not broken_by_death()
    assert not broken_by_mixing()


def test_found_an_id_is_left_out_at_the_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Seam.prompt.fget
    assert whole is not None
    monkeypatch.setattr(Seam, "prompt", property(lambda self: whole(self)[:-1] if self.count else whole(self)))
    assert any("not asked to go on from the prompt" in line for line in broken_by_death())


def test_found_a_pieces_tokens_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(self: Seam) -> Sampling:
        return replace(self._sampling, max_tokens=self._most)

    monkeypatch.setattr(Seam, "sampling", property(asks))
    assert any("may sample" in line for line in broken_by_death())


def test_found_a_seams_logprob_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Seam.add

    def add(self: Seam, chunk: Chunk) -> Chunk:
        found = whole(self, chunk)
        return replace(found, logprobs=found.logprobs * 2) if self._start else found

    monkeypatch.setattr(Seam, "add", add)
    assert any(line.startswith("law 4") for line in broken_by_death())


def test_found_a_later_requests_versions_replace_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Seam.open

    def opened(self: Seam) -> None:
        whole(self)
        self._before = []

    monkeypatch.setattr(Seam, "open", opened)
    assert any("its versions are" in line for line in broken_by_death())


def test_found_a_bridge_onto_another_models_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Tree._prepare

    def fault(self: Tree, *args: Any) -> Pending:
        found = prepare(self, *args)
        return replace(found, base=found.elsewhere, elsewhere=None) if found.elsewhere else found

    monkeypatch.setattr(Tree, "_prepare", fault)
    assert any("goes on from ids of" in line for line in broken_by_mixing())


def test_found_another_models_turn_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = unrolling.Training.__call__
    monkeypatch.setattr(unrolling.Training, "__call__", lambda self, turn: plain(self, replace(turn, pool="")))
    assert any("train" in line for line in broken_by_mixing())
