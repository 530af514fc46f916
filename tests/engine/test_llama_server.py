"""The client of a llama.cpp server, against a scripted one: what it asks, what it makes of faults, what it leaves behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from turnloom.engine import llama_server
from turnloom.engine.contract import AbortOutcome, Chunk, Trace
from turnloom.engine.llama_completion import read_tokens
from turnloom.engine.llama_server import LlamaServerEngine
from turnloom.errors import ConfigError, EngineError, EngineOverloaded, EngineProtocol, EngineRejected, EngineUnavailable
from turnloom.types import Finish, FinishReason, Sampling, ids

PROMPT = [5, 6, 7, 8]
VOCAB = 100
CONTEXT = 64
PLAIN = 3
END = 2
Mangle = Callable[[dict[str, Any]], Any]


def value_at(position: int) -> float:
    """The logprob of the token at this position of the sequence."""
    return -0.125 * (position + 1)


@dataclass
class FakeServer:
    """Says `reply` after PROMPT, END after it. `hidden` are positions of the reply whose logprob is not reported.

    `faults` maps the number of a slice (0-based; looks are not counted) to what is
    made of its answer: a new one, a status, bytes, or None for a connection that is cut.
    `gate` holds each slice from the second on, `prefill_gate` the prefill.
    """

    reply: list[int]
    hidden: set[int] = field(default_factory=set)
    faults: dict[int, Mangle] = field(default_factory=dict)
    prefill: bytes = b""
    slots: int = 2
    slots_offered: bool = True
    loading: bool = False
    foreign: set[int] = field(default_factory=set)
    gate: asyncio.Event | None = None
    prefill_gate: asyncio.Event | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    working: dict[int, int] = field(default_factory=dict)
    slices: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/completion", self._completion)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/props", self._props)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/slots", self._slots)
        app.router.add_get("/health", self._health)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"}, status=503 if self.loading else 200)

    async def _tokenize(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": [PLAIN]})

    async def _props(self, _: web.Request) -> web.Response:
        if self.loading:
            return web.json_response({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, status=503)
        settings = {"n_ctx": CONTEXT, "params": {"top_k": 40}}
        return web.json_response(
            {"default_generation_settings": settings, "total_slots": self.slots, "model_alias": "fake", "model_path": "/m.gguf"}
        )

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "meta": {"n_vocab": VOCAB, "n_ctx": CONTEXT}}]})

    async def _slots(self, _: web.Request) -> web.Response:
        if not self.slots_offered:
            return web.json_response({"error": {"code": 501, "message": "This server does not support slots endpoint."}}, status=501)
        listed = []
        for slot in range(self.slots):
            seed = self.working.get(slot)
            listed.append({"id": slot, "is_processing": slot in self.foreign or seed is not None, "params": {"seed": seed or 0}})
        return web.json_response(listed)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.working[body["id_slot"]] = body.get("seed", -1)
        self.started.set()
        try:
            return await (self._prefill(request, body) if body["stream"] else self._slice(request, body))
        finally:
            self.working.pop(body["id_slot"], None)

    async def _prefill(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b":\n\n")
        if self.prefill_gate is not None:
            await self.prefill_gate.wait()
        last = {"content": "", "tokens": [], "stop": True, "tokens_evaluated": len(body["prompt"]), "timings": {"cache_n": 1}}
        await response.write(b'data: {"content":"x","tokens":[9],"stop":false}\n\n')
        await response.write(self.prefill or b"data: " + orjson.dumps(last) + b"\n\n")
        return response

    async def _slice(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["n_probs"] > 1 or (body["logit_bias"]):
            return web.json_response(self._answer(body))
        number = self.slices
        self.slices += 1
        if self.gate is not None and number:
            await self.gate.wait()
        if number not in self.faults:
            return web.json_response(self._answer(body))
        made = self.faults[number](self._answer(body))
        if made is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if isinstance(made, int):
            return web.json_response({"error": {"code": made, "message": f"said {made}"}}, status=made)
        return web.Response(body=made if isinstance(made, bytes) else orjson.dumps(made))

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, forced = body["prompt"], [token for token, _ in body["logit_bias"]]
        begin = len(prompt) - len(PROMPT)
        said = [*self.reply, END][begin : begin + body["n_predict"]]
        found: list[dict[str, Any]] = []
        for place, token in enumerate(forced or said):
            top = [{"id": said[0], "logprob": value_at(len(prompt))}] if body["n_probs"] >= VOCAB else []
            if forced == [PLAIN] or begin + place not in self.hidden:
                found.append({"id": token, "logprob": value_at(len(prompt) + place), "top_logprobs": top})
        answer = {"tokens": forced or said, "tokens_evaluated": len(prompt), "truncated": False, "completion_probabilities": found}
        return {**answer, "stop_type": "eos" if said[-1:] == [END] and not forced else "limit", "timings": {"cache_n": len(prompt) - 1}}


@asynccontextmanager
async def serving(fake: FakeServer, **options: Any) -> AsyncIterator[LlamaServerEngine]:
    async with TestServer(fake.app(), handler_cancellation=True) as server:
        engine = LlamaServerEngine(str(server.make_url("")), **options)
        try:
            yield engine
        finally:
            await engine.close()


async def sample(
    engine: LlamaServerEngine,
    sampling: Sampling | None = None,
    rid: str = "r",
    trace: Trace | None = None,
    into: list[Chunk] | None = None,
) -> list[Chunk]:
    got = [] if into is None else into
    async for chunk in engine.sample(ids(PROMPT), sampling or Sampling(), rid=rid, trace=trace):
        got.append(chunk)
    return got


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [t for c in chunks for t in c.ids.tolist()], [v for c in chunks for v in c.logprobs.tolist()]


def expected(reply: list[int]) -> list[float]:
    return [float(np.float32(value_at(len(PROMPT) + place))) for place in range(len(reply))]


async def test_every_token_comes_with_its_logprob_and_the_end_token_too() -> None:
    fake = FakeServer([10, 11, 12, 13, 14])
    async with serving(fake) as engine:
        chunks = await sample(engine)
    assert joined(chunks) == ([10, 11, 12, 13, 14, END], expected([*fake.reply, END]))
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish == Finish(FinishReason.STOP, matched=END)
    assert [len(chunk.ids) for chunk in chunks] == [1, 5]
    assert chunks[0].cached_tokens == 1


@pytest.mark.parametrize("hidden", [{0}, {1, 2}, {0, 3, 4}, {0, 1, 2, 3, 4}])
async def test_a_token_that_is_not_reported_is_looked_up_at_its_own_place(hidden: set[int]) -> None:
    fake = FakeServer([10, 11, 12, 13, 14], hidden)
    async with serving(fake) as engine:
        assert joined(await sample(engine)) == ([10, 11, 12, 13, 14, END], expected([*fake.reply, END]))
    looks = [body for body in fake.bodies if body["n_probs"] > 1]
    assert {tuple(body["prompt"]) for body in looks} == {tuple(PROMPT + fake.reply[:place]) for place in hidden}


async def test_nothing_but_the_sampling_shapes_the_distribution() -> None:
    fake = FakeServer([10, 11])
    async with serving(fake) as engine:
        await sample(engine, Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=1, stop=("never",)))
        await sample(engine, Sampling())
    first, *_, plain = (body for body in fake.bodies if not body["stream"])
    assert (first["temperature"], first["top_p"], first["top_k"]) == (0.7, 0.9, 20)
    assert (plain["temperature"], plain["top_p"], plain["top_k"], plain["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert first["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
    assert (first["repeat_penalty"], first["presence_penalty"], first["frequency_penalty"], first["dry_multiplier"]) == (1.0, 0, 0, 0)
    assert (first["stop"], first["grammar"], first["logit_bias"], first["ignore_eos"]) == ([], "", [], False)
    assert (first["n_probs"], first["return_tokens"], first["cache_prompt"], first["post_sampling_probs"]) == (1, True, True, False)


async def test_a_seed_gives_each_request_of_a_turn_another_draw_and_again_the_same() -> None:
    fake = FakeServer([10, 11, 12, 13, 14, 15, 16])
    async with serving(fake) as engine:
        await sample(engine, Sampling(seed=4))
        await sample(engine, Sampling(seed=4))
    asked = [(body["seed"], len(body["prompt"]), body["n_predict"]) for body in fake.bodies if not body["stream"]]
    assert asked[:3] == asked[3:]
    assert len({seed for seed, _, _ in asked}) == 3


async def test_max_tokens_ends_with_length_and_is_clamped_to_the_context() -> None:
    fake = FakeServer(list(range(10, 99)))
    async with serving(fake) as engine:
        short, whole = await sample(engine, Sampling(max_tokens=5)), await sample(engine)
    assert [len(joined(chunks)[0]) for chunks in (short, whole)] == [5, CONTEXT - len(PROMPT) - 1]
    assert all(chunks[-1].finish is not None and chunks[-1].finish.reason is FinishReason.LENGTH for chunks in (short, whole))
    assert all(len(body["prompt"]) + body["n_predict"] < CONTEXT for body in fake.bodies)


@pytest.mark.parametrize("prompt", [[], [5, VOCAB], list(range(CONTEXT))])
async def test_a_prompt_that_must_not_be_sent_never_leaves(prompt: list[int]) -> None:
    fake = FakeServer([10])
    async with serving(fake) as engine:
        with pytest.raises(EngineRejected):
            _ = [chunk async for chunk in engine.sample(ids(prompt), Sampling(), rid="r")]
        assert (await engine.capabilities()).vocab_size == VOCAB
    assert not fake.bodies


def changed(**changes: Any) -> Mangle:
    return lambda answer: {**answer, **changes}


def with_logprob(value: Any) -> Mangle:
    return lambda answer: {**answer, "completion_probabilities": [{**answer["completion_probabilities"][0], "logprob": value}]}


FAULTS: dict[str, tuple[Mangle, type[EngineError]]] = {
    "no tokens": (changed(tokens=[]), EngineProtocol),
    "more tokens than asked for": (changed(tokens=[10, 11]), EngineProtocol),
    "tokens that are no list": (changed(tokens=None), EngineProtocol),
    "an id outside the vocabulary": (changed(tokens=[VOCAB]), EngineProtocol),
    "logprobs of other tokens": (changed(tokens=[50]), EngineProtocol),
    "more logprobs than tokens": (lambda a: {**a, "completion_probabilities": a["completion_probabilities"] * 2}, EngineProtocol),
    "a null logprob": (with_logprob(None), EngineProtocol),
    "a logprob that is text": (with_logprob("-1"), EngineProtocol),
    "a logprob above 0": (with_logprob(0.1), EngineProtocol),
    "a probability that underflowed": (with_logprob(-3.4028234663852886e38), EngineProtocol),
    "a prompt that was cut": (changed(tokens_evaluated=3), EngineProtocol),
    "a context that was cut": (changed(truncated=True), EngineProtocol),
    "no JSON": (lambda _: b"hello", EngineProtocol),
    "NaN": (lambda _: b'{"tokens":[10],"completion_probabilities":[{"id":10,"logprob":NaN}]}', EngineProtocol),
    "no object": (lambda _: b"[]", EngineProtocol),
    "an error with status 200": (lambda _: {"error": {"code": 500, "message": "out of memory"}}, EngineUnavailable),
    "400": (lambda _: 400, EngineRejected),
    "503": (lambda _: 503, EngineOverloaded),
    "429": (lambda _: 429, EngineOverloaded),
    "500": (lambda _: 500, EngineUnavailable),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_each_fault_is_the_error_it_should_be_and_nothing_is_given(name: str) -> None:
    mangle, error = FAULTS[name]
    got: list[Chunk] = []
    async with serving(FakeServer([10, 11, 12], faults={0: mangle})) as engine:
        with pytest.raises(error):
            await sample(engine, into=got)
        assert joined(await sample(engine))[0] == [10, 11, 12, END], "the slot is free again"
    assert not got


async def test_a_server_without_logprobs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = FakeServer._answer
    monkeypatch.setattr(FakeServer, "_answer", lambda self, body: answer(self, body) | {"completion_probabilities": []})
    async with serving(FakeServer([10, 11])) as engine:
        with pytest.raises(EngineProtocol, match="top_logprobs"):
            await sample(engine)


@pytest.mark.parametrize(
    ("prefill", "error"),
    [
        (b'data: {"error":{"code":400,"message":"bad"}}\n\n', EngineRejected),
        (b'error: {"code":503,"message":"Loading model"}\n\n', EngineOverloaded),
        (b'data: {"stop":true,"tokens_evaluated":99}\n\n', EngineProtocol),
        (b"data: hello\n\n", EngineProtocol),
    ],
)
async def test_a_fault_in_prefill_is_the_error_it_should_be(prefill: bytes, error: type[EngineError]) -> None:
    async with serving(FakeServer([10], prefill=prefill)) as engine:
        with pytest.raises(error):
            await sample(engine)


async def test_a_cut_connection_is_unavailable_after_the_tokens_given_so_far() -> None:
    got: list[Chunk] = []
    trace = Trace()
    async with serving(FakeServer([10, 11, 12], faults={n: lambda _: None for n in range(1, 9)})) as engine:
        with pytest.raises(EngineUnavailable):
            await sample(engine, trace=trace, into=got)
        assert joined(got) == ([10], expected([10]))
        assert [await outcome for outcome in trace.aborts] == [AbortOutcome.UNVERIFIED]


async def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    fake = FakeServer([10, 11, 12], faults={1: lambda _: None})
    async with serving(fake) as engine:
        assert joined(await sample(engine))[0] == [10, 11, 12, END]


async def test_a_server_that_loads_its_model_is_overloaded_and_asked_again_later() -> None:
    fake = FakeServer([10], loading=True)
    async with serving(fake) as engine:
        with pytest.raises(EngineOverloaded, match="Loading model"):
            await sample(engine)
        assert not await engine.health()
        fake.loading = False
        assert joined(await sample(engine))[0] == [10, END]
        assert await engine.health()


async def test_an_unreachable_server_is_unavailable_and_not_healthy(unused_tcp_port: int) -> None:
    engine = LlamaServerEngine(f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(EngineUnavailable):
        await sample(engine)
    assert not await engine.health()
    await engine.close()


async def test_what_cannot_be_done_exactly_is_refused() -> None:
    async with serving(FakeServer([10])) as engine:
        able = await engine.capabilities()
        assert (able.logprob_convention, able.structured, able.context_length) == ("raw", False, CONTEXT)
        with pytest.raises(EngineRejected, match="JSON schema"):
            await sample(engine, Sampling(json_schema="{}"))
        with pytest.raises(EngineRejected, match="cannot be paused"):
            await engine.pause("abort")
        with pytest.raises(EngineRejected, match="cannot be paused"):
            await engine.resume()
    with pytest.raises(ConfigError, match="raw"):
        LlamaServerEngine("http://127.0.0.1:1", logprob_convention="temperature")


async def test_closing_between_two_slices_leaves_nothing_and_is_verified() -> None:
    fake, trace = FakeServer([10, 11, 12]), Trace()
    async with serving(fake) as engine:
        async with aclosing(engine.sample(ids(PROMPT), Sampling(), rid="r", trace=trace)) as stream:  # type: ignore[type-var]
            await anext(stream)
        assert [await outcome for outcome in trace.aborts] == [AbortOutcome.VERIFIED]
    assert fake.slices == 1


async def test_a_slice_that_runs_when_its_reader_leaves_is_seen_to_its_end() -> None:
    fake, trace = FakeServer([10, 11, 12], slots=1, gate=asyncio.Event()), Trace()
    async with serving(fake) as engine:
        reading = asyncio.create_task(sample(engine, trace=trace))
        while fake.slices < 2:
            await asyncio.sleep(0)
            await asyncio.wait({reading}, timeout=0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert fake.working
        assert fake.gate is not None
        fake.gate.set()
        assert await trace.aborts[0] is AbortOutcome.VERIFIED
        assert not fake.working
        assert fake.slices == 2
        assert joined(await sample(engine))[0] == [10, 11, 12, END], "its slot is free again"


@pytest.mark.parametrize(("offered", "outcome"), [(True, AbortOutcome.VERIFIED), (False, AbortOutcome.UNVERIFIED)])
async def test_prefill_stops_when_its_reader_leaves(offered: bool, outcome: AbortOutcome) -> None:
    fake, trace = FakeServer([10], slots_offered=offered, prefill_gate=asyncio.Event()), Trace()
    async with serving(fake) as engine:
        reading = asyncio.create_task(sample(engine, trace=trace))
        await fake.started.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert [await one for one in trace.aborts] == [outcome]
    assert not fake.slices
    assert not fake.working


async def test_prefill_that_goes_on_is_not_called_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_server, "_CHECKS", (0.0, 0.0, 0.0))
    fake, trace = FakeServer([10], prefill_gate=asyncio.Event()), Trace()
    async with serving(fake) as engine:
        reading = asyncio.create_task(sample(engine, trace=trace))
        await fake.started.wait()
        monkeypatch.setattr(fake, "working", KeepsAll(fake.working))
        reading.cancel()
        await asyncio.wait({reading})
        assert [await one for one in trace.aborts] == [AbortOutcome.UNVERIFIED]


class KeepsAll(dict[int, int]):
    def pop(self, *_: Any) -> Any:
        return None


async def test_an_abort_by_id_ends_the_stream_as_aborted() -> None:
    fake = FakeServer(list(range(10, 60)))
    async with serving(fake) as engine:
        got: list[Chunk] = []
        async for chunk in engine.sample(ids(PROMPT), Sampling(), rid="mine"):
            got.append(chunk)
            if len(got) == 1:
                assert await engine.abort("another") is AbortOutcome.VERIFIED
                assert await engine.abort("mine") is AbortOutcome.VERIFIED
        assert joined(got)[0] == [10]
        assert got[-1].finish is not None
        assert got[-1].finish.reason is FinishReason.ABORT
        assert fake.slices == 1
        assert len(joined(await sample(engine, Sampling(max_tokens=3)))[0]) == 3


async def test_an_abort_by_id_of_a_running_prefill_ends_it() -> None:
    fake = FakeServer([10], prefill_gate=asyncio.Event())
    async with serving(fake) as engine:
        reading = asyncio.create_task(sample(engine, rid="mine"))
        await fake.started.wait()
        assert await engine.abort("mine") is AbortOutcome.VERIFIED
        chunks = await reading
    assert [(len(c.ids), c.finish and c.finish.reason) for c in chunks] == [(0, FinishReason.ABORT)]


async def test_an_abort_by_id_reaches_a_turn_that_waits_for_its_slot() -> None:
    fake = FakeServer([10, 11, 12], slots=1)
    async with serving(fake) as engine:
        async with aclosing(engine.sample(ids(PROMPT), Sampling(), rid="first")) as stream:  # type: ignore[type-var]
            await anext(stream)
            waiting = asyncio.create_task(sample(engine, rid="mine"))
            while "mine" not in engine._live:
                await asyncio.sleep(0)
            assert await engine.abort("mine") is AbortOutcome.VERIFIED
            (chunk,) = await waiting
        assert chunk.finish is not None
        assert chunk.finish.reason is FinishReason.ABORT
        assert fake.slices == 1
        assert joined(await sample(engine))[0] == [10, 11, 12, END], "the slot was not lost"


async def test_a_reader_that_stops_at_the_last_chunk_holds_no_slot() -> None:
    async with serving(FakeServer([10], slots=1)) as engine:
        stream = engine.sample(ids(PROMPT), Sampling(), rid="a")
        while (await anext(stream)).finish is None:
            pass
        assert joined(await sample(engine, rid="b"))[0] == [10, END]


async def test_a_live_request_id_is_not_taken_twice() -> None:
    async with serving(FakeServer([10, 11, 12])) as engine:
        async with aclosing(engine.sample(ids(PROMPT), Sampling(), rid="r")) as stream:  # type: ignore[type-var]
            await anext(stream)
            with pytest.raises(EngineRejected, match="in use"):
                await sample(engine, rid="r")
        assert joined(await sample(engine, rid="r"))[0] == [10, 11, 12, END]


async def test_turns_keep_their_slots_and_one_too_many_waits() -> None:
    fake = FakeServer(list(range(10, 40)))
    async with serving(fake) as engine:
        results = await asyncio.gather(*(sample(engine, rid=str(n)) for n in range(5)))
    assert all(joined(chunks)[0] == [*fake.reply, END] for chunks in results)
    assert {body["id_slot"] for body in fake.bodies} == {0, 1}


async def test_no_turn_waits_for_ever_for_a_slot() -> None:
    async with serving(FakeServer([10, 11, 12], slots=1), idle_timeout=0.1) as engine:
        async with aclosing(engine.sample(ids(PROMPT), Sampling(), rid="a")) as stream:  # type: ignore[type-var]
            await anext(stream)
            with pytest.raises(EngineOverloaded, match="all slots"):
                await sample(engine, rid="b")


async def test_an_answer_that_never_comes_is_unavailable() -> None:
    async with serving(FakeServer([10], prefill_gate=asyncio.Event()), idle_timeout=0.1) as engine:
        with pytest.raises(EngineUnavailable):
            await sample(engine)


async def test_a_slot_that_another_client_uses_is_left_alone() -> None:
    fake = FakeServer([10], foreign={0})
    async with serving(fake) as engine:
        await sample(engine)
    assert {body["id_slot"] for body in fake.bodies} == {1}


async def test_prompt_logprobs_are_those_that_were_sampled() -> None:
    fake = FakeServer([10, 11, 12], {1})
    async with serving(fake) as engine:
        tokens, logprobs = joined(await sample(engine))
        found = await engine.prompt_logprobs(ids(PROMPT + tokens[:3]), len(PROMPT))
        assert found.tolist() == logprobs[:3]
        with pytest.raises(ValueError, match="start"):
            await engine.prompt_logprobs(ids(PROMPT), 0)


@pytest.mark.parametrize(
    ("tokens", "reported", "values"),
    [
        ([1, 2, 3], [1, 2, 3], [-1.0, -2.0, -3.0]),
        ([1, 2, 3], [2], [None, -1.0, None]),
        ([1, 1], [1], [None, None]),
        ([1, 1, 2], [1, 2], [None, None, -2.0]),
        ([1, 2, 1, 2], [1, 2, 2], [-1.0, -2.0, None, -3.0]),
        ([1, 2], [], [None, None]),
    ],
)
def test_reported_logprobs_stand_only_where_they_fit_in_one_way(tokens: list[int], reported: list[int], values: list[float | None]) -> None:
    found = [{"id": token, "logprob": -float(n + 1)} for n, token in enumerate(reported)]
    assert read_tokens({"tokens": tokens, "completion_probabilities": found}, len(tokens), VOCAB) == (tokens, values)


def test_logprobs_in_another_order_are_refused() -> None:
    found = [{"id": 2, "logprob": -1.0}, {"id": 1, "logprob": -1.0}]
    with pytest.raises(EngineProtocol, match="in this order"):
        read_tokens({"tokens": [1, 2], "completion_probabilities": found}, 2, VOCAB)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, None, []])
def test_a_logprob_that_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(EngineProtocol, match="logprob"):
        read_tokens({"tokens": [1], "completion_probabilities": [{"id": 1, "logprob": value}]}, 1, VOCAB)
