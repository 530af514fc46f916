"""The stream decoder: whatever way a server cuts its stream, the tokens are the same, and nothing contradictory passes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from turnloom.engine.call import EventLines
from turnloom.engine.contract import Chunk
from turnloom.engine.http import error_for_status
from turnloom.engine.sglang_stream import StreamDecoder
from turnloom.errors import EngineOverloaded, EngineProtocol, EngineRejected, EngineUnavailable
from turnloom.types import FinishReason, VersionSpan

TOKENS = [5, 5, 6, 5]
VALUES = [-0.5, -0.5, -1.5, -0.25]


def payload(ids: list[Any], triples: list[Any], total: Any, finish: Any = None, **meta: Any) -> bytes:
    about = {"completion_tokens": total, "output_token_logprobs": triples, "finish_reason": finish, **meta}
    return orjson.dumps({"text": "", "output_ids": ids, "meta_info": about})


def triples(start: int, end: int) -> list[list[Any]]:
    return [[VALUES[i], TOKENS[i], None] for i in range(start, end)]


def fed(*payloads: bytes, vocab_size: int | None = 10) -> list[Chunk]:
    decoder = StreamDecoder(vocab_size)
    return [chunk for data in payloads if (chunk := decoder.feed(data)) is not None]


@settings(deadline=None)
@given(
    sampled=st.lists(st.tuples(st.integers(0, 9), st.floats(-20, 0, width=32)), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    styles=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=9, max_size=9),
)
def test_any_mixture_of_cumulative_and_incremental_gives_the_same_tokens(
    sampled: list[tuple[int, float]], cuts: list[int], styles: list[tuple[bool, bool]]
) -> None:
    ends = [*sorted(min(cut, len(sampled)) for cut in cuts), len(sampled)]
    payloads, start = [], 0
    for end, (ids_cumulative, values_cumulative) in zip(ends, styles, strict=False):
        ids = [token for token, _ in sampled[0 if ids_cumulative else start : end]]
        values = [[value, token, None] for token, value in sampled[0 if values_cumulative else start : end]]
        payloads.append(payload(ids, values, end, {"type": "stop"} if len(payloads) == len(ends) - 1 else None))
        start = end
    chunks = fed(*payloads)
    assert [i for chunk in chunks for i in chunk.ids.tolist()] == [token for token, _ in sampled]
    assert [v for chunk in chunks for v in chunk.logprobs.tolist()] == [value for _, value in sampled]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


Tokens = list[tuple[int, float]]


def spoil(data: st.DataObject, told: dict[str, Any], held: int, end: int) -> None:
    """Make one payload contradict itself, its count or what came before; each time in one place only."""
    ids, values = told["output_ids"], told["meta_info"]["output_token_logprobs"]
    lengths = st.integers(0, 2 * end + 2)
    kind = data.draw(st.sampled_from(["ids", "values", "count", "other id", "no number", "rewritten"]))
    if kind == "count":
        told["meta_info"]["completion_tokens"] = count = data.draw(lengths)
        assume(count < held or not {len(ids), len(values)} <= {count, count - held})
    elif kind in ("ids", "values"):
        column: list[Any] = ids if kind == "ids" else values
        length = data.draw(lengths)
        assume(length not in (end, end - held))
        column[:] = [*column, *[5 if kind == "ids" else [-1.0, 5, None]] * length][:length]
    elif kind == "rewritten":
        assume(held and len(ids) == end)
        at = data.draw(st.integers(0, held - 1))
        ids[at] = (ids[at] + 1) % 10
    else:
        assume(end > held)
        at = data.draw(st.integers(held - end, -1))
        if kind == "other id":
            values[at][1] = (values[at][1] + 1) % 10
        else:
            values[at][0] = data.draw(st.sampled_from([None, "x", 1.0, False, []]))


@settings(deadline=None, max_examples=300)
@given(
    sampled=st.lists(st.tuples(st.integers(0, 9), st.floats(-20, 0, width=32)), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=5),
    styles=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=6, max_size=6),
    data=st.data(),
)
def test_any_inconsistency_is_refused_and_what_came_before_it_stands(
    sampled: Tokens, cuts: list[int], styles: list[tuple[bool, bool]], data: st.DataObject
) -> None:
    ends = [*sorted(min(cut, len(sampled)) for cut in cuts), len(sampled)]
    wrong = data.draw(st.integers(0, len(ends) - 1))
    decoder, start, got = StreamDecoder(10), 0, list[tuple[int, float]]()
    for number, (end, (ids_cumulative, values_cumulative)) in enumerate(zip(ends, styles, strict=False)):
        ids = [token for token, _ in sampled[0 if ids_cumulative else start : end]]
        values = [[value, token, None] for token, value in sampled[0 if values_cumulative else start : end]]
        told = orjson.loads(payload(ids, values, end, {"type": "stop"} if number == len(ends) - 1 else None))
        if number == wrong:
            spoil(data, told, start, end)
            with pytest.raises(EngineProtocol):
                decoder.feed(orjson.dumps(told))
            break
        chunk = decoder.feed(orjson.dumps(told))
        assert chunk is not None
        got += zip(chunk.ids.tolist(), chunk.logprobs.tolist(), strict=True)
        start = end
    assert got == sampled[: decoder.count]


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(payload([5, 5, 6], triples(0, 3), 4), id="ids shorter than the count"),
        pytest.param(payload(TOKENS, triples(0, 3), 4), id="logprobs shorter than the count"),
        pytest.param(payload(TOKENS, triples(0, 4), 3), id="more than the count"),
        pytest.param(payload([5], triples(0, 1), 1), id="tokens taken back"),
        pytest.param(payload([6, 5, 6, 5], triples(0, 4), 4), id="a token changed"),
        pytest.param(payload(TOKENS, [*triples(0, 3), [-0.2, 7, None]], 4), id="another id in the logprob"),
        pytest.param(payload(TOKENS, [*triples(0, 3), [None, 5, None]], 4), id="null logprob"),
        pytest.param(payload(TOKENS, [*triples(0, 3), ["x", 5, None]], 4), id="logprob no number"),
        pytest.param(payload(TOKENS, [*triples(0, 3), [2e-5, 5, None]], 4), id="logprob above 0"),
        pytest.param(payload(TOKENS, triples(0, 4), 4, prompt_tokens=8), id="prompt with a token more"),
        pytest.param(payload(TOKENS, triples(0, 4), 4, prompt_tokens=6), id="prompt cut"),
        pytest.param(payload([], [], 2, prompt_tokens=6), id="prompt cut and nothing new"),
        pytest.param(payload(TOKENS, [*triples(0, 3), 5], 4), id="triple no list"),
        pytest.param(payload([5, 5, 6, 10], [*triples(0, 3), [-1.0, 10, None]], 4), id="id outside the vocabulary"),
        pytest.param(payload([5, 5, 6, True], [*triples(0, 3), [-1.0, True, None]], 4), id="true"),
        pytest.param(payload([5, 5, 6, -1], [*triples(0, 3), [-1.0, -1, None]], 4), id="negative id"),
        pytest.param(payload(TOKENS, None, 4), id="no logprobs"),  # type: ignore[arg-type]
        pytest.param(payload(TOKENS, triples(0, 4), None), id="no count"),
        pytest.param(payload(None, triples(0, 4), 4), id="no ids"),  # type: ignore[arg-type]
        pytest.param(payload(TOKENS, triples(0, 4), 4, {"type": "bored"}), id="unknown finish"),
        pytest.param(payload(TOKENS, triples(0, 4), 4, {"type": "stop"}, weight_versions=[{"version": 1}]), id="bad spans"),
        pytest.param(b'{"text":""}', id="no meta_info"),
        pytest.param(b"[1]", id="no object"),
        pytest.param(b"{", id="no JSON"),
    ],
)
def test_what_contradicts_itself_is_refused(second: bytes) -> None:
    decoder = StreamDecoder(10, prompt_len=7)
    decoder.feed(payload([5, 5], triples(0, 2), 2, prompt_tokens=7))
    with pytest.raises(EngineProtocol):
        decoder.feed(second)
    assert decoder.count == 2


def test_an_incremental_chunk_that_repeats_the_last_token_is_new() -> None:
    """[5] then [5]: only the count tells a second token from the first one again."""
    chunks = fed(payload([5], triples(0, 1), 1), payload([5], triples(1, 2), 2))
    assert [chunk.ids.tolist() for chunk in chunks] == [[5], [5]]
    again = fed(payload([5], triples(0, 1), 1), payload([5], triples(0, 1), 1))
    assert [chunk.ids.tolist() for chunk in again] == [[5], []]


ABORT = {"type": "abort", "message": "Aborted", "status_code": None}


@pytest.mark.parametrize("last", [payload([6], triples(0, 3), 3, ABORT), payload([], [], 0, ABORT), payload([6], [], 3, ABORT)])
def test_a_collapsed_last_chunk_of_an_abort_adds_nothing(last: bytes) -> None:
    chunks = fed(payload([5, 5], triples(0, 2), 2), last)
    assert [i for chunk in chunks for i in chunk.ids.tolist()] in ([5, 5], [5, 5, 6])
    assert chunks[-1].finish is not None
    assert chunks[-1].finish.reason is FinishReason.ABORT


def test_a_collapsed_chunk_is_dropped_when_it_hides_tokens() -> None:
    chunks = fed(payload([5], triples(0, 1), 1), payload([5], triples(0, 4), 4, ABORT))
    assert [chunk.ids.tolist() for chunk in chunks] == [[5], []]


LAST = payload(TOKENS, triples(0, 4), 4, {"type": "length", "length": 4})


@pytest.mark.parametrize("again", [LAST, payload([], [], 4, {"type": "stop"}), payload([5], triples(3, 4), 4, {"type": "stop"})])
def test_the_last_chunk_may_come_twice(again: bytes) -> None:
    assert len(fed(LAST, again)) == 1


@pytest.mark.parametrize(
    "more",
    [
        payload([1], [[-1.0, 1, None]], 5),
        payload([*TOKENS, 1], [*triples(0, 4), [-1.0, 1, None]], 5, {"type": "stop"}),
        payload([5, 5, 6, 6], triples(0, 4), 4, {"type": "stop"}),
        payload(TOKENS, triples(0, 4), 4),
        payload(7, [], 4, {"type": "stop"}),  # type: ignore[arg-type]
    ],
    ids=["a token", "a token and an end", "another token", "no end", "no list"],
)
def test_nothing_new_comes_after_the_last_chunk(more: bytes) -> None:
    with pytest.raises(EngineProtocol):
        fed(LAST, more)


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, EngineRejected), (422, EngineRejected), (429, EngineOverloaded), (503, EngineOverloaded), (500, EngineUnavailable)],
)
def test_a_status_is_the_same_error_wherever_it_comes(status: int, error: type[Exception]) -> None:
    assert type(error_for_status(status, "x")) is error
    with pytest.raises(error):
        fed(payload([], [], 0, ABORT | {"status_code": status}))
    with pytest.raises(error):
        fed(orjson.dumps({"error": {"message": "x", "code": status}}))


def test_an_error_event_without_a_status_is_a_refusal() -> None:
    with pytest.raises(EngineRejected, match="too long"):
        fed(orjson.dumps({"error": {"message": "too long"}}))


def test_spans_end_with_the_output() -> None:
    spans = [{"version": "a", "start": 0, "end": 3}, {"version": "b", "start": 3, "end": 99}]
    (chunk,) = fed(payload(TOKENS, triples(0, 4), 4, {"type": "stop"}, weight_versions=spans, weight_version="b"))
    assert chunk.versions == (VersionSpan("a", 0, 3), VersionSpan("b", 3, 4))


def test_rounding_may_leave_a_logprob_just_above_zero() -> None:
    (chunk,) = fed(payload([5], [[8e-6, 5, None]], 1))
    assert chunk.logprobs.tolist() == [pytest.approx(8e-6)]


def test_an_aborted_chunk_that_counts_another_prompt_adds_nothing() -> None:
    decoder = StreamDecoder(10, prompt_len=7)
    decoder.feed(payload([5], triples(0, 1), 1, prompt_tokens=7))
    last = decoder.feed(payload([5, 5], triples(0, 2), 2, ABORT, prompt_tokens=6))
    assert last is not None
    assert (last.ids.tolist(), decoder.count) == ([], 1)


def test_each_token_has_the_version_of_the_payload_that_brought_it() -> None:
    chunks = fed(
        payload([5], triples(0, 1), 1, weight_version="a"),
        payload([5, 5], triples(0, 2), 2, weight_version="a"),
        payload([5, 5], triples(0, 2), 2, weight_version="b"),
        payload([6], triples(0, 3), 3),
        payload([5], triples(3, 4), 4, {"type": "stop"}, weight_version="b"),
    )
    assert [chunk.versions for chunk in chunks[:-1]] == [()] * 4
    assert chunks[-1].versions == (VersionSpan("a", 0, 2), VersionSpan("b", 3, 4))


def test_the_last_payload_adds_no_version_to_tokens_that_came_before() -> None:
    chunks = fed(payload([5], triples(0, 1), 1, weight_version="a"), payload([], [], 1, {"type": "stop"}, weight_version="b"))
    assert chunks[-1].versions == (VersionSpan("a", 0, 1),)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 3)), max_size=8))
def test_versions_are_the_payloads_own_for_any_stream(plan: list[tuple[str | None, int]]) -> None:
    payloads, total, expected = [], 0, []
    for at, (version, new) in enumerate(plan):
        total += new
        expected += [version] * new
        meta = {} if version is None else {"weight_version": version}
        finish = {"type": "stop"} if at == len(plan) - 1 else None
        payloads.append(payload([5] * new, [[-1.0, 5, None]] * new, total, finish, **meta))
    spans = fed(*payloads)[-1].versions if plan else ()
    found: list[str | None] = [None] * total
    for span in spans:
        found[span.start : span.end] = [span.version] * (span.end - span.start)
    assert found == expected
    assert all(a.version != b.version or a.end < b.start for a, b in pairwise(spans)), "equal neighbours are one span"


def test_spans_past_the_tokens_that_are_kept_are_left_out() -> None:
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 4}]
    chunks = fed(payload([5], triples(0, 1), 1), payload([5], [], 4, ABORT, weight_versions=spans))
    assert chunks[-1].versions == (VersionSpan("a", 0, 1),)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"").strip()), max_size=6), st.data())
def test_lines_are_whole_wherever_the_bytes_are_cut(payloads: list[bytes], data: st.DataObject) -> None:
    end = data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n: ping\n\n"]))
    stream = b"".join(b"data: " + body + end for body in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    lines, found = EventLines(), []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += list(lines.feed(stream[start:stop]))
    assert found == payloads
