"""The laws where clients give stop strings and engines run past them, die and are gone on with: what is kept, what is surplus."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.driver import Driver
from tests.properties.subjects import subject_of
from tests.properties.survivors import Survivors
from tests.properties.test_laws import laws, replies_of, steps
from tests.properties.trials import plan_of
from tests.properties.violations import violations
from turnloom.engine.contract import Chunk
from turnloom.engine.pool import Pool
from turnloom.engine.seam import Seam
from turnloom.gateway.output import Output
from turnloom.types import Outcome

STOPS = ("e", "an", ".", " t", "\n", "ing", "}", "zzz")


class Stopping(Driver):
    """Every conversation has stop strings; no engine looks for one."""

    def _fresh(self, name: str) -> dict[str, Any]:
        return super()._fresh(name) | {"stop_sequences": self.rng.sample(STOPS, self.rng.randint(1, 3))}


def stopping(name: str, seed: int, plan: list[tuple[str, int]]) -> Stopping:
    driver = Stopping(subject_of(name), replies_of(name), seed, engine=Survivors)
    asyncio.run(driver.run(plan))
    return driver


def overrun(driver: Driver) -> Iterator[str]:
    """Where a turn does not end with the token that completes its stop string, or what came after is not accounted for.

    What is surplus is then taken out of the engine's log, so that the laws are about what is kept.
    """
    decode, ends = driver.parts.policy.tokenizer.decode, driver.parts.policy.renderer.end_ids
    for call in driver.engine.calls:
        turn = driver.session.tree.turns[call.rid]
        at, kept, stops = f"turn {turn.index}", len(turn.output), turn.sampling.stop
        if turn.output.tolist() != call.output[:kept].tolist() or turn.logprobs.tolist() != call.logprobs[:kept].tolist():
            yield f"law 4: {at} does not begin as what was sampled, with its logprobs"
        if kept + turn.surplus != len(call.output):
            yield f"law 3: {at} keeps {kept} of {len(call.output)} sampled ids, and {turn.surplus} are said to be surplus"
        if any(stop in decode(_text_before_last(turn.output.tolist(), ends)) for stop in stops):
            yield f"law 3: {at} keeps ids after the one that completes a stop string"
        if turn.surplus and not any(stop in decode(turn.output.tolist()) for stop in stops):
            yield f"law 3: {at} has lost ids without a stop string"
        if [i for span in turn.versions for i in range(span.start, span.end)] != list(range(kept)):
            yield f"law 4: of the {kept} ids of {at}, those of {turn.versions} have a version"
        call.output, call.logprobs = call.output[:kept], call.logprobs[:kept]


def _text_before_last(kept: list[int], ends: frozenset[int]) -> list[int]:
    """What of these ids is text and has others after it. End tokens at the end are no text: no stop string is looked for in their names."""
    text = kept
    while text and text[-1] in ends:
        text = text[:-1]
    return text if len(text) < len(kept) else kept[:-1]


def broken(driver: Driver) -> list[str]:
    return [*overrun(driver), *violations(driver)]


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
@settings(laws, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1), plan=steps)
def test_laws_hold_where_replies_are_stopped(name: str, seed: int, plan: list[tuple[str, int]]) -> None:
    assert broken(stopping(name, seed, plan)) == []


def _sessions(count: int = 12) -> Iterator[Stopping]:
    for number in range(count):
        rng = random.Random(number)
        yield stopping("qwen2.5", rng.getrandbits(32), plan_of(rng))


def test_these_sessions_have_what_they_are_for() -> None:
    turns = [turn for driver in _sessions() for turn in driver.session.tree.turns.values()]
    assert sum(turn.surplus > 0 and turn.outcome is Outcome.DELIVERED for turn in turns) > 10
    assert sum(turn.surplus > 0 and len(turn.pieces) > 1 for turn in turns) > 1
    assert sum(not turn.surplus for turn in turns) > 10


def found() -> list[str]:
    return [line for driver in _sessions() for line in broken(driver)]


def test_found_nothing_is_cut_at_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Output, "_cut_at_stop", lambda self: 0)
    assert any(line.startswith("law 3") for line in found())


def test_found_surplus_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Output._cut_at_stop

    def uncounted(self: Output) -> int:
        over = cut(self)
        self.surplus -= over
        return over

    monkeypatch.setattr(Output, "_cut_at_stop", uncounted)
    assert any(line.startswith("law 3") for line in found())


def test_found_versions_come_with_the_last_chunk_only(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Seam.add

    def late(self: Seam, chunk: Chunk) -> Chunk:
        given = add(self, chunk)
        return given if given.finish is not None else replace(given, versions=())

    monkeypatch.setattr(Seam, "add", late)
    assert any("have a version" in line for line in found())


def test_the_pool_is_what_is_tried() -> None:
    assert isinstance(next(_sessions(1)).engine.pool, Pool)
