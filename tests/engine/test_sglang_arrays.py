"""Routed experts: what the server sends at the end of a stream, aligned with the tokens that it sampled."""

from __future__ import annotations

import base64
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from turnloom.engine.contract import Chunk
from turnloom.engine.sglang import SGLangEngine
from turnloom.engine.sglang_stream import read_experts
from turnloom.errors import ConfigError, EngineProtocol
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine, experts_at
from turnloom.testing.scripted_router import ScriptedRouter
from turnloom.types import Sampling, ids

PROMPT = ids([11, 12, 13])
OUTPUT = tuple(range(21, 41))
WIDTH = 6


@contextlib.asynccontextmanager
async def serving(*script: Reply, **options: Any) -> AsyncIterator[tuple[ScriptedEngine, SGLangEngine]]:
    async with ScriptedEngine(script, **{"experts": WIDTH, **options}) as server:
        client = SGLangEngine(server.url, arrays=("routed_experts",))
        try:
            yield server, client
        finally:
            await client.close()


async def read(client: SGLangEngine, rid: str = "r1") -> list[Chunk]:
    return [chunk async for chunk in client.sample(PROMPT, Sampling(), rid=rid)]


def of_output(*tokens: int) -> list[list[int]]:
    """Row i is the pass that sampled token i: it read the token before."""
    whole = [*PROMPT.tolist(), *tokens]
    return [experts_at(position, whole[position], WIDTH) for position in range(len(PROMPT) - 1, len(whole) - 1)]


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
@pytest.mark.parametrize("from_start", [False, True], ids=["from where it is asked", "from the prompt's start"])
async def test_experts_come_with_the_last_chunk_a_row_for_each_output_token(style: Any, from_start: bool) -> None:
    async with serving(Reply(ids=OUTPUT, end=2, chunk=7, style=style), experts_from_start=from_start) as (_, client):
        chunks = await read(client)
    assert all(not chunk.arrays for chunk in chunks[:-1])
    experts = chunks[-1].arrays["routed_experts"]
    assert experts.dtype == np.int32
    assert experts.tolist() == of_output(*OUTPUT, 2)


async def test_the_width_is_asked_for_once_and_takes_no_reply() -> None:
    async with serving(Reply(ids=OUTPUT), Reply(ids=OUTPUT)) as (server, client):
        await read(client)
        await read(client, "r2")
        first, *rest = server.requests
    assert (first["stream"], first["sampling_params"]["max_new_tokens"]) == (False, 1)
    assert [body["routed_experts_start_len"] for body in rest] == [2, 2]
    assert all(body["return_routed_experts"] for body in rest)


async def test_experts_that_are_not_asked_for_do_not_come() -> None:
    async with ScriptedEngine([Reply(ids=OUTPUT)], experts=WIDTH) as server:
        client = SGLangEngine(server.url)
        chunks = await read(client)
        await client.close()
        assert "return_routed_experts" not in server.requests[0]
        assert len(server.requests) == 1
    assert all(not chunk.arrays for chunk in chunks)


async def test_experts_of_the_wrong_length_are_a_contradiction() -> None:
    async with serving(Reply(ids=OUTPUT, fault=Fault.SHORT_EXPERTS)) as (_, client):
        with pytest.raises(EngineProtocol, match="routed_experts"):
            await read(client)


async def test_an_aborted_request_gives_the_experts_of_what_it_sampled() -> None:
    async with serving(Reply(ids=OUTPUT, chunk=3, fault=Fault.ABORT), Reply(fault=Fault.ABORT_QUEUED)) as (_, client):
        chunks = await read(client)
        queued = await read(client, "r2")
    assert chunks[-1].arrays["routed_experts"].tolist() == of_output(*OUTPUT[:10])
    assert queued[-1].arrays == {}


async def test_a_server_without_experts_is_a_warning_and_a_stream_without_them(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Reply(ids=OUTPUT), experts=0) as (_, client):
        with caplog.at_level(logging.WARNING, "turnloom.engine"):
            chunks = await read(client)
    assert not chunks[-1].arrays
    assert "--enable-return-routed-experts" in caplog.text


async def test_a_router_drops_the_wish(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedEngine(lambda *_: Reply(ids=OUTPUT), experts=WIDTH) as worker, ScriptedRouter([worker.url]) as router:
        client = SGLangEngine(router.url, arrays=("routed_experts",))
        with caplog.at_level(logging.WARNING, "turnloom.engine"):
            chunks = await read(client)
        await client.close()
    assert [i for chunk in chunks for i in chunk.ids.tolist()] == list(OUTPUT)
    assert not chunks[-1].arrays
    assert "without a router" in caplog.text


def test_an_array_that_sglang_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="dreams"):
        SGLangEngine("http://127.0.0.1:9", arrays=("dreams",))


def packed(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<i4").tobytes()).decode()


@settings(deadline=None)
@given(prompt=st.integers(1, 9), count=st.integers(0, 9), width=st.integers(1, 9), length=st.integers(0, 200))
def test_only_the_two_lengths_that_mean_something_are_read(prompt: int, count: int, width: int, length: int) -> None:
    whole = np.arange((prompt + count - 1) * width)
    tail = whole[(prompt - 1) * width :].reshape(count, width)
    assert read_experts(packed(whole), count, width, prompt).tolist() == tail.tolist()
    assert read_experts(packed(tail), count, width, prompt).tolist() == tail.tolist()
    assume(length not in (whole.size, tail.size))
    with pytest.raises(EngineProtocol):
        read_experts(packed(np.zeros(length)), count, width, prompt)


@pytest.mark.parametrize("said", [7, "x", "AAA=", "é", [1]])
def test_what_is_no_base64_of_int32_is_refused(said: Any) -> None:
    with pytest.raises(EngineProtocol):
        read_experts(said, 1, 1)
