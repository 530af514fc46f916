"""vLLM's streams decoded: both routes give the same tokens, and nothing contradictory passes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnloom.engine.call import EventLines
from turnloom.engine.contract import Chunk
from turnloom.engine.vllm_stream import NO_LOGPROB, StreamDecoder
from turnloom.errors import EngineError, EngineOverloaded, EngineProtocol, EngineRejected, EngineUnavailable
from turnloom.types import Finish, FinishReason, VersionSpan, ids

PROMPT = ids([7, 8, 9])
ROUTES = ["generate", "completions"]
REVERSED = {"version": "a", "start": 2, "end": 1}


def payload(
    route: str, tokens: list[Any], values: list[Any], total: int | None = None, named: list[Any] | None = None, **more: Any
) -> bytes:
    named = tokens if named is None else named
    if route == "generate":
        logprobs: Any = {"content": [{"token_id": token, "logprob": value} for token, value in zip(named, values, strict=True)]}
    else:
        logprobs = {"tokens": [f"token_id:{token}" for token in named], "token_logprobs": values}
    choice = {"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": None, "stop_reason": None, **more}
    usage = None if total is None else {"prompt_tokens": 3, "completion_tokens": total}
    return orjson.dumps({"request_id": "r", "choices": [choice], "usage": usage})


def usage(**more: Any) -> bytes:
    return orjson.dumps({"choices": [], "usage": more})


def fed(*payloads: bytes, vocab_size: int | None = 10) -> tuple[list[Chunk], StreamDecoder]:
    decoder = StreamDecoder(vocab_size, PROMPT)
    return [chunk for data in payloads if (chunk := decoder.feed(data)) is not None], decoder


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [i for chunk in chunks for i in chunk.ids.tolist()]


@pytest.mark.parametrize("route", ROUTES)
@given(
    sampled=st.lists(st.tuples(st.integers(0, 9), st.floats(-20, 0, width=32)), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    counted=st.booleans(),
    bytes_cut=st.lists(st.integers(0, 9000), max_size=8),
)
def test_however_the_stream_is_cut_the_tokens_are_the_same(
    route: str, sampled: list[tuple[int, float]], cuts: list[int], counted: bool, bytes_cut: list[int]
) -> None:
    ends, payloads, start = [*sorted(min(cut, len(sampled)) for cut in cuts), len(sampled)], [], 0
    for at, end in enumerate(ends):
        new, last = sampled[start:end], at == len(ends) - 1
        more = {"finish_reason": "length" if last else None}
        payloads.append(payload(route, [t for t, _ in new], [v for _, v in new], end if counted else None, **more))
        start = end
    payloads.append(usage(prompt_tokens=3, completion_tokens=len(sampled), prompt_tokens_details={"cached_tokens": 2}))
    stream = b"".join(b"data: " + data + b"\n\n: keep-alive\n\n" for data in payloads)
    places, lines, found = sorted(min(cut, len(stream)) for cut in bytes_cut), EventLines(), []
    for begin, stop in zip([0, *places], [*places, len(stream)], strict=True):
        found += list(lines.feed(stream[begin:stop]))
    chunks, decoder = fed(*found)
    assert tokens_of(chunks) == [token for token, _ in sampled]
    assert [v for chunk in chunks for v in chunk.logprobs.tolist()] == [value for _, value in sampled]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (decoder.cached_tokens, decoder.count) == (2, len(sampled))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("tokens", "values", "total", "more"),
    [
        pytest.param([5, 6], [-1.0, None], 3, {}, id="null logprob"),
        pytest.param([5, 6], [-1.0, NO_LOGPROB], 3, {}, id="the word for no logprob"),
        pytest.param([5, 6], [-1.0, "x"], 3, {}, id="logprob no number"),
        pytest.param([5, 6], [-1.0, True], 3, {}, id="logprob a truth value"),
        pytest.param([5, 6], [-1.0, 2e-5], 3, {}, id="logprob above 0"),
        pytest.param([5, 6], [-1.0, -1.0], 3, {"named": [5, 7]}, id="another id in the logprob"),
        pytest.param([5, 6], [-1.0], 3, {"named": [5]}, id="too few logprobs"),
        pytest.param([5], [-1.0, -1.0], 2, {"named": [5, 6]}, id="too many logprobs"),
        pytest.param([5], [-1.0], 2, {"logprobs": None}, id="no logprobs"),
        pytest.param([5], [-1.0], 2, {"logprobs": {"content": None}}, id="no content"),
        pytest.param([5], [-1.0], 2, {"logprobs": {"tokens": [" yes"], "token_logprobs": [-1.0]}}, id="tokens spelled out"),
        pytest.param([5], [-1.0], 2, {"logprobs": {"content": [{"token": " yes", "logprob": -1.0}]}}, id="content spelled out"),
        pytest.param([10], [-1.0], 2, {}, id="id outside the vocabulary"),
        pytest.param([-1], [-1.0], 2, {}, id="negative id"),
        pytest.param([5.5], [-1.0], 2, {}, id="id no integer"),
        pytest.param([4, 5], [-1.0, -1.0], 2, {}, id="cumulative"),
        pytest.param([5], [-1.0], 3, {}, id="a payload lost"),
        pytest.param([5], [-1.0], 1, {}, id="a payload repeated"),
        pytest.param([5], [-1.0], 2, {"finish_reason": "bored"}, id="unknown finish"),
        pytest.param([5], [-1.0], 2, {"finish_reason": "stop", "stop_reason": 4}, id="a token after the stop token"),
        pytest.param([5], [-1.0], 2, {"finish_reason": "stop", "weight_versions": [{"version": 1}]}, id="bad spans"),
        pytest.param(
            [5], [-1.0], 2, {"finish_reason": "stop", "weight_versions": [{"version": 1, "start": 2, "end": 1}]}, id="spans reversed"
        ),
        pytest.param([5], [-1.0], 2, {"prompt_token_ids": [7, 8]}, id="prompt cut"),
        pytest.param([5], [-1.0], 2, {"index": 1}, id="another choice"),
        pytest.param(None, [-1.0], 2, {"named": [5]}, id="no ids"),
    ],
)
def test_what_contradicts_itself_is_refused(route: str, tokens: Any, values: list[Any], total: int, more: dict[str, Any]) -> None:
    decoder = StreamDecoder(10, PROMPT)
    decoder.feed(payload(route, [4], [-0.5], 1))
    with pytest.raises(EngineProtocol):
        decoder.feed(payload(route, tokens, values, total, **more))
    assert decoder.count == 1
    assert not decoder.finished


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[1]",
        b'{"usage":null}',
        b'{"choices":null}',
        b'{"choices":[{"index":0},{"index":1}]}',
        b'{"choices":[7]}',
        usage(prompt_tokens=4),
        usage(completion_tokens=1),
    ],
)
def test_what_is_no_payload_or_counts_otherwise_is_refused(data: bytes) -> None:
    with pytest.raises(EngineProtocol):
        StreamDecoder(10, PROMPT).feed(data)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("logprobs", [{"content": []}, {"tokens": [], "token_logprobs": []}, None])
def test_an_abort_keeps_what_came_before_it(route: str, logprobs: Any) -> None:
    last = payload(route, [], [], 2, finish_reason="abort", logprobs=logprobs, weight_versions=[{"version": "a", "start": 0, "end": 2}])
    chunks, decoder = fed(payload(route, [5, 6], [-1.0, -2.0], 2), last, usage(prompt_tokens=3, completion_tokens=2))
    assert tokens_of(chunks) == [5, 6]
    assert chunks[-1].finish == Finish(FinishReason.ABORT, message="the engine aborted the request")
    assert chunks[-1].versions == (VersionSpan("a", 0, 2),)
    assert decoder.finished


@pytest.mark.parametrize("route", ROUTES)
def test_an_aborts_last_chunk_that_is_not_usable_adds_nothing(route: str) -> None:
    last = payload(route, [6, 7], [-1.0], 3, named=[6], finish_reason="abort", weight_versions=[{"version": "a", "start": 0, "end": 3}])
    chunks, decoder = fed(payload(route, [5], [-1.0], 1), last, usage(prompt_tokens=3, completion_tokens=3))
    assert tokens_of(chunks) == [5]
    assert chunks[-1].versions == (VersionSpan("a", 0, 1),)
    assert decoder.count == 1


@pytest.mark.parametrize("route", ROUTES)
def test_the_last_chunk_may_come_twice_but_nothing_new_after_it(route: str) -> None:
    last = payload(route, [5], [-1.0], 1, finish_reason="length")
    empty = payload(route, [], [], 1, finish_reason="length")
    chunks, _ = fed(last, last, empty)
    assert tokens_of(chunks) == [5]
    for after in (payload(route, [5], [-1.0], 2, finish_reason="length"), payload(route, [], [], 1)):
        with pytest.raises(EngineProtocol, match="went on"):
            fed(last, after)


@pytest.mark.parametrize(("reason", "matched"), [("stop", 5), ("stop", "###"), ("stop", None), ("length", None)])
def test_the_finish_names_what_stopped_it(reason: str, matched: int | str | None) -> None:
    chunks, _ = fed(payload("generate", [4, 5], [-1.0, -1.0], 2, finish_reason=reason, stop_reason=matched))
    assert chunks[-1].finish == Finish(FinishReason(reason), matched=matched)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"error": {"message": "boom", "type": "InternalServerError", "code": 500}}, EngineUnavailable),
        ({"error": {"message": "boom", "code": 503}}, EngineOverloaded),
        ({"error": {"message": "boom", "code": 400}}, EngineRejected),
        ({"error": {"message": "boom"}}, EngineRejected),
        ({"error": "boom"}, EngineRejected),
        ({"object": "error", "message": "boom", "code": 500}, EngineUnavailable),
    ],
)
def test_an_error_payload_is_the_error_that_it_names(error: dict[str, Any], kind: type[EngineError]) -> None:
    with pytest.raises(kind, match="boom"):
        fed(payload("generate", [5], [-1.0], 1), orjson.dumps(error))


def test_ids_named_as_in_older_servers_are_read() -> None:
    logprobs = {"content": [{"token": "token_id:5", "logprob": -1.0}]}
    chunks, _ = fed(payload("generate", [5], [-1.0], 1, logprobs=logprobs))
    assert tokens_of(chunks) == [5]


def test_without_a_vocabulary_ids_are_held_to_32_bits() -> None:
    chunks, _ = fed(payload("generate", [2**31 - 1], [-1.0], 1), vocab_size=None)
    assert tokens_of(chunks) == [2**31 - 1]
    with pytest.raises(EngineProtocol):
        fed(payload("generate", [2**31], [-1.0], 1), vocab_size=None)


def test_spans_end_with_the_output() -> None:
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 9}]
    chunks, _ = fed(payload("generate", [5, 6], [-1.0, -1.0], 2, finish_reason="length", weight_versions=spans))
    assert chunks[-1].versions == (VersionSpan("a", 0, 1), VersionSpan("b", 1, 2))


def test_the_prompt_that_comes_back_is_the_one_that_was_sent() -> None:
    chunks, _ = fed(payload("completions", [5], [-1.0], 1, prompt_token_ids=PROMPT.tolist()))
    assert tokens_of(chunks) == [5]
