"""Law 7: however clients leave and come again, a request is one turn, its reply is one, and the other laws hold of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.persistent import Persistent, repeated
from tests.properties.subjects import subject_of
from tests.properties.test_laws import laws, replies_of, steps
from tests.properties.tongues import TONGUES
from tests.properties.trials import plan_of
from tests.properties.violations import violations
from turnloom.core.retry import Answer, Answers
from turnloom.core.tree import Tree
from turnloom.engine.seam import Seam
from turnloom.gateway import answer
from turnloom.gateway.session import Session
from turnloom.store import codec


def persistent(name: str, seed: int, plan: list[tuple[str, int]], tongue: str = "anthropic") -> Persistent:
    driver = Persistent(subject_of(name), replies_of(name), seed, tongue=TONGUES[tongue])
    asyncio.run(driver.run(plan))
    return driver


def broken(driver: Persistent) -> list[str]:
    return [*repeated(driver), *violations(driver), *forgotten(driver)]


def forgotten(driver: Persistent) -> Iterator[str]:
    """Law 6 of turns that were put in the place of their beginnings."""
    again = Tree(driver.session.tree.matcher)
    for delta in asyncio.run(_deltas(driver)):
        again.apply(codec.decode_delta(codec.encode_delta(delta)))
    if again.nodes != driver.session.tree.nodes or again.turns != driver.session.tree.turns:
        yield "law 6: the store does not give back the tree"
    elif Session(driver.session.row, driver.store, again).unroll() != driver.unroll():
        yield "law 6: the store gives back other samples"


async def _deltas(driver: Persistent) -> list:  # type: ignore[type-arg]
    return list(await driver.store.deltas("s"))


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
@settings(laws, max_examples=250)
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_laws_hold_where_clients_come_again(name: str, seed: int, plan: list[tuple[str, int]]) -> None:
    assert broken(persistent(name, seed, plan)) == []


@pytest.mark.parametrize("tongue", sorted(TONGUES.keys() - {"anthropic"}))
@settings(laws, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_laws_hold_where_clients_of_each_dialect_come_again(tongue: str, seed: int, plan: list[tuple[str, int]]) -> None:
    assert broken(persistent("qwen3", seed, plan, tongue)) == []


def _sessions(count: int = 25) -> Iterator[Persistent]:
    for number in range(count):
        rng = random.Random(number)
        yield persistent("qwen2.5", rng.getrandbits(32), plan_of(rng))


def test_these_sessions_have_what_they_are_for() -> None:
    counted: Counter[str] = Counter()
    for driver in _sessions():
        assert broken(driver) == []
        counted += driver.counted
    assert min(counted[each] for each in ("joined", "asked again", "given again", "gone on with")) > 10, counted


def found() -> list[str]:
    return [line for driver in _sessions() for line in broken(driver)]


def test_found_every_request_makes_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "find", lambda *_: (Answer.NEW, None))
    assert any(line.startswith("law 7") for line in found())


def test_found_no_request_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "identity", lambda request, choice: None)
    assert any(line.startswith("law 7") for line in found())


def test_found_a_beginning_is_sampled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seam, "prompt", property(lambda self: self._prompt))
    assert any(line.startswith("law 7") for line in found())


def test_found_the_beginning_stays_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from turnloom.store.memory import MemoryStore

    async def kept(self: MemoryStore, session_id: str, turn: object, reply: object) -> None:
        return None

    monkeypatch.setattr(MemoryStore, "replace", kept)
    assert any(line.startswith("law 6") for line in found())
