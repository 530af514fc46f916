"""Streaming is real, in every dialect: what was sampled is with the client before the next token is, and silence is filled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.gateways import bench
from tests.support.wires import WIRES, Wire
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Outcome

PATIENCE = 60.0
"""Seconds after which a test that waits for ever is one that failed."""

QWEN3 = qwen_tokenizer("qwen3")
END = "<|im_end|>"
THOUGHT = "<think>\nI must look at it\n</think>\n\nOne two three"


class Lockstep:
    """An engine's gate that opens when the client has seen all that was sampled."""

    def __init__(self, wire: Wire, reply: str) -> None:
        self._wire = wire
        self._ids = QWEN3.encode(reply)
        self._raw = b""
        self._read = asyncio.Condition()
        self.steps = 0

    async def read(self, content: Any) -> bytes:
        """The client's side: reads to the end, piece by piece."""
        while piece := await content.readany():
            async with self._read:
                self._raw += piece
                self._read.notify_all()
        return self._raw

    async def __call__(self, _: dict[str, Any], count: int) -> None:
        sampled = QWEN3.decode(self._ids[:count])
        thought, _, text = sampled.partition("</think>") if "</think>" in sampled else ("", "", sampled)
        if sampled.startswith("<think>"):
            thought, text = (thought or sampled).removeprefix("<think>").strip(), "" if not thought else text

        def seen() -> bool:
            return self._wire.shown(self._raw).strip() == text.strip() and self._wire.thoughts(self._raw).strip() == thought

        async with self._read:
            await self._read.wait_for(seen)
        self.steps += 1


@pytest.mark.parametrize(
    "reply", ["One two three, four. Five!", "<think>\nI must look at it\n</think>\n\nOne two three"], ids=["text", "reasoning"]
)
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_each_token_is_with_the_client_before_the_next_is_sampled(wire: Wire, reply: str) -> None:
    gate = Lockstep(wire, reply)
    engine = ScriptedEngine([Reply(reply, chunk=1)], tokenizer=QWEN3, end_id=QWEN3.control_tokens[END], gate=gate)
    async with bench(engine=engine, tokenizer=QWEN3) as b, asyncio.timeout(PATIENCE):
        async with b.http.post(b.handle.base_url + wire.stream, json=wire.body("hi", stream=True)) as answer:
            raw = await gate.read(answer.content)
        assert gate.steps == len(QWEN3.encode(reply)) + 1, "every token, and the one that ends the reply"
        assert wire.shown(raw).strip() == reply.rpartition("</think>")[2].strip()
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.outcome is Outcome.DELIVERED


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_a_silent_engine_is_bridged_by_the_dialects_own_keepalive(wire: Wire) -> None:
    async with bench([Reply("late", fault=Fault.HANG), "Yes"], keepalive=0.05) as b, asyncio.timeout(PATIENCE):
        async with b.http.post(b.handle.base_url + wire.stream, json=wire.body("hi", stream=True)) as answer:
            assert answer.status == 200
            raw = b""
            while raw.count(wire.ping.encode()) < 3:
                raw += await answer.content.readany()
            assert b"\n:" not in raw, "comments keep no client waiting"
            assert not wire.shown(raw)
            b.engine.release()
            raw += await answer.content.read()
            assert wire.error.encode() in raw, "what ends after the first byte ends in the dialect's way"


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_an_error_before_the_first_byte_is_a_status(wire: Wire) -> None:
    async with bench([Reply("x", fault=Fault.HTTP_503)]) as b:
        answer = await b.post(wire.body("hi", stream=True), wire.stream)
        assert answer.status in (503, 529)
        assert answer.headers["Retry-After"] == "1"
        assert answer.body["error"]["message"]


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_what_breaks_inside_ends_the_stream_in_the_dialects_way(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second status line in the middle of a body."""
    from turnloom.gateway.output import Output

    plain, calls = Output.feed, 0

    def feed(self: Output, chunk: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError("a bug")
        return plain(self, chunk)

    monkeypatch.setattr(Output, "feed", feed)
    async with bench([Reply("one two three four five", chunk=1)]) as b, asyncio.timeout(PATIENCE):
        async with b.http.post(b.handle.base_url + wire.stream, json=wire.body("hi", stream=True)) as answer:
            raw = await answer.content.read()
        assert wire.shown(raw) == "one two"
        assert raw.count(wire.error.encode()) == 1
        assert b"HTTP/1.1" not in raw
        assert b"ZeroDivisionError" in raw
        (turn,) = (await b.session()).tree.turns.values()
        assert (turn.outcome, turn.error) == (Outcome.FAILED, "a bug")


LAST = {"anthropic": b"message_stop", "openai_chat": b"[DONE]", "openai_responses": b"response.completed"}


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_the_end_is_told_when_the_turn_is_on_disk(wire: Wire) -> None:
    from turnloom.store.memory import MemoryStore

    class Slow(MemoryStore):
        async def append(self, session_id: str, delta: Any) -> None:
            reached.set()
            await go.wait()
            await super().append(session_id, delta)

    reached, go = asyncio.Event(), asyncio.Event()
    last = LAST.get(wire.name, b"finishReason")
    last = {"anthropic": b"message_stop", "openai_chat": b"[DONE]", "openai_responses": b"response.completed"}.get(
        wire.name, b"finishReason"
    )
    async with bench(["One two"], store=Slow()) as b, asyncio.timeout(PATIENCE):
        async with b.http.post(b.handle.base_url + wire.stream, json=wire.body("hi", stream=True)) as answer:
            raw = b""
            await reached.wait()
            while wire.shown(raw) != "One two":
                raw += await answer.content.readany()
            assert last not in raw
            go.set()
            raw += await answer.content.read()
            assert last in raw


async def test_events_and_keepalives_are_numbered_as_they_are_sent() -> None:
    """Keepalives fall between the events wherever they may."""
    wire = WIRES["openai_responses"]
    async with bench([Reply("one two three four five six seven", chunk=1, delay=0.03)], keepalive=0.01) as b:
        async with b.http.post(b.handle.base_url + wire.stream, json=wire.body("hi", stream=True)) as answer:
            raw = (await answer.content.read()).decode()
    sent = [json.loads(line.removeprefix("data: ")) for line in raw.split("\n") if line.startswith("data: ")]
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    kinds = [event["type"] for event in sent]
    assert kinds.count("keepalive") > 1
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
