"""One output out of several requests: however it is cut, it is the same output."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.members import some
from turnloom.engine.contract import Chunk, Trace
from turnloom.engine.seam import Seam
from turnloom.types import Finish, FinishReason, Sampling, VersionSpan, floats, ids

PROMPT = ids([7, 8, 9])
END = Finish(FinishReason.STOP, matched=5)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[list[int], list[float], list[str]]:
    """Ids, logprobs, and the weight version of each token."""
    size = draw(st.integers(1, 40))
    versions: list[str] = []
    while len(versions) < size:
        versions += [draw(st.sampled_from("abc"))] * draw(st.integers(1, 12))
    return (
        draw(st.lists(st.integers(0, 99), min_size=size, max_size=size)),
        draw(st.lists(st.floats(-20, 0, width=32), min_size=size, max_size=size)),
        versions[:size],
    )


def spans(versions: list[str], start: int = 0) -> tuple[VersionSpan, ...]:
    """The longest runs of one version, from 0 on."""
    cuts = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
    return tuple(VersionSpan(versions[a], a, b) for a, b in pairwise(cuts) if a < b)


@settings(max_examples=400, deadline=None)
@given(outputs(), st.data())
def test_any_cutting_of_an_output_gives_the_same_output(output: tuple[list[int], list[float], list[str]], data: st.DataObject) -> None:
    """Cut into requests, each of them into chunks. A request that is cut off names its versions chunk by chunk; one that ends may
    list them instead, and then its chunks' own words count for nothing."""
    tokens, logprobs, versions = output
    size = len(tokens)
    requests = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    seam, got, at = Seam(PROMPT, Sampling(max_tokens=size)), [], 0
    for start, end in pairwise(requests):
        assert seam.prompt.tolist() == [*PROMPT.tolist(), *tokens[:start]]
        assert seam.sampling.max_tokens == size - start
        seam.open()
        listed = data.draw(st.booleans())
        cuts = sorted({start, end, *data.draw(st.lists(st.integers(start, end), max_size=3))})
        changes = [] if listed else [i for i in range(start + 1, end) if versions[i] != versions[i - 1]]
        cuts = sorted({*cuts, *changes})
        for at, upto in pairwise(cuts):
            said = "false" if listed else versions[at]
            last = upto == end
            chunk = Chunk(
                ids(tokens[at:upto]),
                floats(logprobs[at:upto]),
                (END if end == size else Finish(FinishReason.ABORT)) if last and (listed or end == size) else None,
                spans(versions[start:end]) if listed and last else (),
                version=said,
            )
            got.append(seam.add(chunk))
    assert np.concatenate([c.ids for c in got]).tolist() == tokens
    assert np.array_equal(np.concatenate([c.logprobs for c in got]), floats(logprobs))
    assert got[-1].finish == END
    assert got[-1].versions == spans(versions)
    assert seam.count == size


def test_what_an_earlier_request_named_stays_when_a_later_one_lists_its_own() -> None:
    """Also where both are of one version."""
    seam = Seam(PROMPT, Sampling(max_tokens=9))
    seam.open()
    seam.add(some(1, 2, version="v1"))
    seam.open()
    seam.add(some(3, version="v1"))
    last = seam.add(some(4, finish=END, versions=[VersionSpan("v1", 0, 2)], version="v1"))
    assert last.versions == (VersionSpan("v1", 0, 4),)


def test_a_request_that_gave_nothing_changes_nothing() -> None:
    seam = Seam(PROMPT, Sampling(max_tokens=9))
    seam.open()
    seam.add(some(1, version="v1"))
    seam.open()
    seam.open()
    assert seam.add(some(2, version="v2", finish=END)).versions == (VersionSpan("v1", 0, 1), VersionSpan("v2", 1, 2))


def test_tokens_of_no_known_version_are_in_no_span() -> None:
    seam = Seam(PROMPT, Sampling(max_tokens=9))
    seam.open()
    seam.add(some(1, 2))
    seam.open()
    assert seam.add(some(3, version="v", finish=END)).versions == (VersionSpan("v", 2, 3),)


def test_the_cache_that_counts_is_the_first_prompts() -> None:
    """Later requests find the turn's own tokens in it."""
    seam = Seam(PROMPT, Sampling(max_tokens=9))
    seam.open()
    assert seam.add(replace(some(), cached_tokens=2)).cached_tokens == 2
    seam.open()
    assert seam.add(replace(some(1), cached_tokens=3)).cached_tokens == 3, "the one before gave nothing"
    seam.open()
    assert seam.add(replace(some(2), cached_tokens=4)).cached_tokens == 0


@pytest.mark.parametrize(
    ("tokens", "complete", "finish"),
    [
        ((1, 5), False, Finish(FinishReason.STOP, matched=5)),
        ((5, 1), False, None),
        ((1, 2), False, None),
        ((1, 2), True, Finish(FinishReason.STOP)),
        ((1, 2, 3), False, Finish(FinishReason.LENGTH)),
        ((1, 2, 5), False, Finish(FinishReason.STOP, matched=5)),
        ((), False, None),
    ],
)
def test_an_output_that_was_whole_when_it_broke_off(tokens: tuple[int, ...], complete: bool, finish: Finish | None) -> None:
    seam = Seam(PROMPT, Sampling(max_tokens=3))
    seam.open()
    seam.add(some(*tokens, version="v"))
    found = seam.over(Trace(end_ids=frozenset({5}), complete=complete))
    assert (found and found.finish) == finish
    assert found is None or found.versions == (VersionSpan("v", 0, len(tokens)),)


def test_a_seed_draws_other_numbers_for_later_tokens() -> None:
    seam = Seam(PROMPT, Sampling(max_tokens=9, seed=2**63 - 1))
    assert seam.sampling.seed == 2**63 - 1
    seam.open()
    seam.add(some(1, 2))
    assert seam.sampling.seed == 1
    assert Seam(PROMPT, Sampling(max_tokens=9)).sampling.seed is None


def test_a_grammar_that_has_begun_cannot_be_gone_on_with() -> None:
    seam = Seam(PROMPT, Sampling(max_tokens=9, json_schema="{}"))
    assert not seam.constrained
    seam.open()
    seam.add(some(1))
    assert seam.constrained


def test_it_must_know_how_much_may_be_sampled() -> None:
    with pytest.raises(ValueError, match="must be known"):
        Seam(PROMPT, Sampling())
