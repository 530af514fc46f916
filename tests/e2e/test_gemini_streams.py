"""Both forms of Gemini's stream on the wire: keepalives, growth, cut and slow wires; and keys in all the places Google has for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from google import genai
from google.genai import types

from tests.e2e.test_gemini_sdk import HI, ask, ask_sync, client_of, turns_of
from tests.support.gateways import Bench, bench
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import Outcome


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_keepalives_are_not_seen(kind: str) -> None:
    """`Got` counts what the SDK yields: nothing without a candidate."""
    async with bench([Reply("one two three", chunk=1, delay=0.1)], keepalive=0.01) as b:
        client = client_of(b)
        got = await (asyncio.to_thread(ask_sync, client, True, HI) if kind == "sync" else ask(client, True, HI))
        assert got.text == "one two three"
        assert got.responses == 4


async def raw(b: Bench, query: str) -> tuple[str, bytes]:
    body = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}
    url = f"{b.handle.base_url}/v1beta/models/m:streamGenerateContent{query}"
    async with b.http.post(url, json=body) as answer:
        assert answer.status == 200
        return answer.content_type, await answer.read()


async def test_both_forms_of_a_stream_say_the_same() -> None:
    async with bench([Reply("Hello there you", chunk=1, delay=0.05)] * 2, keepalive=0.01) as b:
        kind, events = await raw(b, "?alt=sse")
        assert kind == "text/event-stream"
        kind, array = await raw(b, "")
        assert kind == "application/json"
        from_events = [json.loads(line[6:]) for line in events.decode().split("\n") if line]
        from_array = json.loads(array)
        assert len(from_array) == 4
        assert array.count(b"\n") > events.count(b"data:"), "white space between the items keeps the client waiting"
        for item in (*from_events, *from_array):
            item.pop("responseId")
            for part in item["candidates"][0]["content"]["parts"]:
                part.pop("thoughtSignature", None)
        assert from_events == from_array


async def test_the_array_grows_while_the_engine_speaks() -> None:
    async with bench([Reply("one two three four", chunk=1, fault=Fault.STALL)]) as b:
        body = {"contents": [{"parts": [{"text": "Hi"}]}]}
        async with b.http.post(f"{b.handle.base_url}/v1beta/models/m:streamGenerateContent", json=body) as answer:
            first = await answer.content.readuntil(b"}")
            assert first.startswith(b"[{")
            assert b'"one"' in first


@pytest.mark.parametrize("way", ["?key=", "x-goog-api-key", "bearer"])
async def test_a_session_is_told_by_key(way: str) -> None:
    async with bench(["Hi."]) as b:
        url, headers = f"{b.gateway.url}/v1beta/models/m:generateContent", {}
        if way == "?key=":
            url += f"?key={b.handle.key}"
        else:
            headers = {way: b.handle.key} if way != "bearer" else {"Authorization": f"Bearer {b.handle.key}"}
        body = {"contents": [{"parts": [{"text": "Hi"}]}]}
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
            assert (answer.status, (await answer.json())["candidates"][0]["finishReason"]) == (200, "STOP")


@asynccontextmanager
async def cut_up(b: Bench, size: int, pause: float = 0.0) -> AsyncIterator[str]:
    """The address of a wire to the gateway that carries its answers a few bytes at a time."""
    host, port = b.gateway.url.removeprefix("http://").split(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: int) -> None:
        while data := await reader.read(piece):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(pause if piece == size else 0)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, far_writer, 65536), carry(far_reader, writer, size), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("size", [1, 7])
async def test_characters_arrive_whole_however_the_wire_cuts_them(kind: str, size: int) -> None:
    text = "é😀𝒳 ⟨ü⟩ 漢字 👩‍👩‍👧 ﷽ \u2028line\u2029 \x85 fin"
    async with bench([Reply(text, chunk=1)]) as b, cut_up(b, size) as url:
        client = genai.Client(api_key=b.handle.key, http_options=types.HttpOptions(base_url=url))
        got = await (asyncio.to_thread(ask_sync, client, True, HI) if kind == "sync" else ask(client, True, HI))
        assert got.text == text


async def test_a_slow_reader_gets_it_all() -> None:
    async with bench([Reply("word " * 300, chunk=1)]) as b, cut_up(b, 512, pause=0.001) as url:
        client = genai.Client(api_key=b.handle.key, http_options=types.HttpOptions(base_url=url))
        assert (await ask(client, True, HI)).text == "word " * 300
        (turn,) = await turns_of(b)
        assert turn.outcome is Outcome.DELIVERED
