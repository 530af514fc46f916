"""A short run of the fuzzer, and that it would find something: `python -m tests.fuzz.readers --count 60000` is a long one."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import readers
from tests.fuzz.bodies import DIALECTS, OPEN
from tests.fuzz.readers import COUNTED, Escaped, Tally, pure, read_once, through_a_gateway
from tests.support.dialects import ALL
from tests.support.gateways import bench
from turnloom.gateway.admin import OpenBody
from turnloom.wire.contract import COUNT, Envelope
from turnloom.wire.json import write


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(st.randoms(use_true_random=False))
def test_a_reader_reads_or_refuses(rng: Random) -> None:
    """As hypothesis chooses, which also makes what it finds small."""
    read_once(rng)


def test_every_reader_refuses_some_and_reads_some() -> None:
    tally = Tally()
    pure(2500, 11, tally)
    assert {*DIALECTS, *(f"{name}, counted" for name in COUNTED)} <= tally.outcomes.keys()
    for target, found in tally.outcomes.items():
        assert found["accepted"] > 2, target
        assert found.total() - found["accepted"] > 2, target
    assert "all" in tally.table()


async def test_a_gateway_answers_whatever_comes() -> None:
    tally = Tally()
    await through_a_gateway(600, 11, tally)
    assert len(tally.outcomes) > 12
    assert sum(found["accepted"] for found in tally.outcomes.values()) > 100


@pytest.mark.parametrize("name", DIALECTS)
async def test_what_it_starts_from_is_valid(name: str) -> None:
    async with bench(["Yes"]) as b:
        async with b.http.post(b.handle.base_url + ALL[name].path, data=write(DIALECTS[name])) as answer:
            assert answer.status == 200, await answer.text()
    for dialects in readers.READINGS:
        assert getattr(dialects, name).read(write(DIALECTS[name]), Envelope(verb=COUNT)).messages


def test_the_body_of_an_opening_is_valid() -> None:
    assert OpenBody.model_validate(OPEN).sampling


BUGS: dict[str, Any] = {"a TypeError": TypeError("a bug"), "a KeyError": KeyError("x"), "endless recursion": RecursionError()}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_bug_in_a_reader_would_be_found(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise bug

    monkeypatch.setattr(readers, "labelled", broken)
    with pytest.raises(Escaped, match="seed 3, number"):
        pure(200, 3, Tally())


async def test_a_bug_in_a_gateway_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from turnloom.gateway import app

    def broken(*_: Any) -> Any:
        raise TypeError("a bug")

    monkeypatch.setattr(app, "labelled", broken)
    with pytest.raises(Escaped, match="500"):
        await through_a_gateway(50, 3, Tally())
