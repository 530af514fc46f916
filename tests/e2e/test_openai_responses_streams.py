"""The official openai SDK's responses when something goes wrong, and streams that are slow, cut into pieces or broken off."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.e2e.agents import END, assert_lawful, trained_texts
from tests.e2e.test_openai_responses_sdk import HI, ask, asked, client_of, turns_of
from tests.support.gateways import bench
from tests.support.sse import read_sse
from turnloom import Limits
from turnloom.errors import StoreError
from turnloom.store.memory import MemoryStore
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import Outcome


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fault", "status", "kind", "expected"),
    [
        (Fault.HTTP_400, 400, "invalid_request_error", openai.BadRequestError),
        (Fault.HTTP_429, 503, "server_error", openai.InternalServerError),
        (Fault.HTTP_503, 503, "server_error", openai.InternalServerError),
        (Fault.HTTP_500, 503, "server_error", openai.InternalServerError),
        (Fault.WRONG_ID, 502, "server_error", openai.InternalServerError),
    ],
)
async def test_the_engines_errors(fault: Fault, status: int, kind: str, expected: type[openai.APIStatusError], stream: bool) -> None:
    async with bench([Reply("never", fault=fault)]) as b, client_of(b) as client:
        with pytest.raises(expected) as raised:
            await ask(client, stream, asked(HI))
        assert (raised.value.status_code, raised.value.type) == (status, kind)
        assert (await b.handle.finish()) == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_gateways_own_errors(stream: bool) -> None:
    class Full(MemoryStore):
        async def append(self, session_id: str, delta: Any) -> None:
            if len(delta.turn.output) > 3:
                raise StoreError("the disk is full")
            await super().append(session_id, delta)

    async with bench(["Much too long a reply", "Hi"], store=Full(), session_limits=Limits(max_turns=1)) as b, client_of(b) as client:
        async with client_of(b, base_url=f"{b.gateway.url}/v1", api_key="guess") as stranger:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await ask(stranger, stream, asked(HI))
        assert unknown.value.code == "invalid_api_key"
        with pytest.raises(openai.BadRequestError, match=r"input\.0\.role: must be") as strange:
            await ask(client, stream, asked([{"role": "critic", "content": "H"}]))
        assert strange.value.param == "input[0].role"
        with pytest.raises(openai.BadRequestError, match="Your input exceeds the context window of this model") as long:
            await ask(client, stream, asked([{"role": "user", "content": "word " * 40_000}]))
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")
        if stream:
            last = [e async for e in await client.responses.create(**asked(HI), stream=True)][-1]
            assert last.type == "response.failed"
            assert last.response.error is not None
            assert (last.response.error.code, "the disk is full" in last.response.error.message) == ("server_error", True)
        else:
            with pytest.raises(openai.InternalServerError, match="the disk is full"):
                await ask(client, stream, asked(HI))
        assert (await ask(client, stream, asked(HI))).output_text == "Hi"
        async with client_of(b, max_retries=3) as patient:
            with pytest.raises(openai.RateLimitError, match="has used its 1 turns") as limited:
                await ask(patient, stream, asked(HI))
        assert limited.value.code == "insufficient_quota"
        assert limited.value.response.request.headers["x-stainless-retry-count"] == "0"
        await b.handle.finish()
        with pytest.raises(openai.InternalServerError, match="this session is finished") as closed:
            await ask(client, stream, asked(HI))
        assert closed.value.status_code == 503


async def test_an_engine_that_dies_mid_stream_ends_the_stream_as_failed() -> None:
    async with bench([Reply("one two three four five six", chunk=1, fault=Fault.CUT)]) as b, client_of(b) as client:
        events = [e async for e in await client.responses.create(**asked(HI), stream=True)]
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta").startswith("one")
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        assert events[-1].response.error.code in ("server_error", "rate_limit_exceeded")
        (turn,) = await turns_of(b)
        assert turn.outcome is not Outcome.DELIVERED
        assert len(turn.output) > 0
        assert (await b.handle.finish()) == []


async def test_what_the_sdk_retries_trains_once() -> None:
    async with bench([Reply("never", fault=Fault.HTTP_503), "Hello."]) as b, client_of(b, max_retries=2) as client:
        assert (await ask(client, False, asked(HI))).output_text == "Hello."
        assert len(b.engine.requests) == 2
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"Hello.{END}"]


async def test_keepalives_are_numbered_events_and_no_matter_to_the_sdk() -> None:
    async with bench([Reply("one two three", chunk=1, delay=0.2)] * 2, keepalive=0.01) as b, client_of(b) as client:
        events: list[Any] = [e async for e in await client.responses.create(**asked(HI), stream=True)]
        assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert "keepalive" in {e.type for e in events}, "an engine twenty keepalives slow"
        assert (await ask(client, True, asked(HI))).output_text == "one two three"


async def test_characters_arrive_whole_however_the_engine_cuts_them() -> None:
    text = "é😀𝒳 ⟨ü⟩ 漢字 👩‍👩‍👧 ﷽ fin"
    async with bench([Reply(text, chunk=1)]) as b, client_of(b) as client:
        events = [e async for e in await client.responses.create(**asked(HI), stream=True)]
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == text
        assert len(deltas) > 5
        assert not any("\ufffd" in d for d in deltas)


async def test_a_slow_reader_gets_everything() -> None:
    text = "word " * 20_000
    async with bench([Reply(text, chunk=50)]) as b:
        async with b.http.post(f"{b.handle.base_url}/v1/responses", json={"model": "m", "input": "Hi", "stream": True}) as answer:
            sent = await answer.content.readany()
            await asyncio.sleep(0.5)
            async for piece in answer.content.iter_chunked(1024):
                sent += piece
        events = read_sse(sent.decode())
        assert "".join(data["delta"] for name, data in events if name == "response.output_text.delta") == text
        assert events[-1][0] == "response.completed"
        assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == text


async def test_the_first_words_come_before_the_engine_is_done() -> None:
    async with bench([Reply("one two three four five six seven", chunk=1, fault=Fault.STALL)]) as b, client_of(b) as client:
        stream = await client.responses.create(**asked(HI), stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        else:
            pytest.fail("the stream ended before a word came")
        await stream.close()
