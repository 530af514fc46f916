"""How `turnloom serve` stops, as a real process whose engine samples no further until it is told to."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cli.test_serve import Served, serving
from tests.support.gateways import user
from tests.support.sse import read_sse
from tests.support.wires import WIRES
from turnloom.store.sqlite import SQLiteStore
from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer
from turnloom.types import Outcome, Turn

WORDS = "one two three four five six"
LONG = "600"
"""Seconds of a drain that no test waits for."""


@dataclass
class Slow:
    """A gateway's process, and an engine that holds each reply back after its first two chunks until `go`."""

    served: Served
    engine: ScriptedEngine
    go: asyncio.Event
    http: aiohttp.ClientSession
    store: Path
    session: dict[str, Any] = field(default_factory=dict)

    async def begin(self, text: str = "hi") -> Streaming:
        """Ask, and read until the first words are here."""
        answer = await self.http.post(self.session["urls"]["anthropic"] + "/v1/messages", json=user(text, stream=True))
        streaming = Streaming(answer)
        while "one" not in streaming.text:
            await streaming.more()
        return streaming

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.served.process.send_signal(number)

    async def draining(self) -> None:
        """Return when it says that it is not ready."""
        async with asyncio.timeout(20):
            while (await self.healthz())[0] != 503:
                await asyncio.sleep(0.01)

    async def healthz(self) -> tuple[int, Any]:
        async with self.http.get(self.served.url + "/healthz") as answer:
            return answer.status, await answer.json()

    async def ended(self) -> tuple[int, str, str]:
        out, err = await asyncio.to_thread(self.served.process.communicate, timeout=30)
        return self.served.process.returncode, out, err

    async def turns(self) -> list[Turn]:
        """What is on record, the process gone."""
        store = SQLiteStore(self.store, read_only=True)
        await store.open()
        try:
            return [delta.turn for delta in await store.deltas(self.session["id"]) if delta.turn is not None]
        finally:
            await store.close()


@dataclass
class Streaming:
    answer: aiohttp.ClientResponse
    raw: bytes = b""

    @property
    def text(self) -> str:
        return WIRES["anthropic"].shown(self.raw)

    async def more(self) -> bool:
        data = await self.answer.content.readany()
        self.raw += data
        return bool(data)

    async def rest(self) -> list[tuple[str, dict[str, Any]]]:
        """All events, when the stream is over."""
        while await self.more():
            pass
        return read_sse(self.raw.decode())


@asynccontextmanager
async def slow(path: Path, *options: str, script: Any = None) -> AsyncIterator[Slow]:
    go, tokenizer = asyncio.Event(), qwen_tokenizer("qwen2.5")

    async def gate(_: Any, sent: int) -> None:
        if sent >= 2:
            await go.wait()

    script = script or (lambda _, index: Reply(WORDS, chunk=1))
    end = tokenizer.control_tokens["<|im_end|>"]
    engine = ScriptedEngine(script, tokenizer=tokenizer, end_id=end, model=str(qwen_directory()), gate=gate)
    store = path / "t.db"
    async with engine, aiohttp.ClientSession() as http:
        manager = serving(engine.url, store, *options)
        served = await asyncio.to_thread(manager.__enter__)
        try:
            it = Slow(served, engine, go, http, store)
            it.session = await asyncio.to_thread(served.open)
            yield it
        finally:
            go.set()
            await asyncio.to_thread(manager.__exit__, None, None, None)


async def test_a_turn_in_flight_is_delivered_and_no_new_one_is_taken(tmp_path: Path) -> None:
    async with slow(tmp_path, "--drain", LONG) as it:
        stream = await it.begin()
        assert (await it.healthz())[0] == 200
        it.signal()
        await it.draining()
        for wire in WIRES.values():
            async with it.http.post(f"{it.served.url}/s/{it.session['key']}{wire.whole}", json=wire.body("more")) as refused:
                assert refused.status == 503, wire.name
                assert "stopping" in json.dumps(await refused.json())
        assert len(it.engine.requests) == 1
        it.go.set()
        events = await stream.rest()
        assert (stream.text, events[-1][0]) == (WORDS, "message_stop")
        code, out, err = await it.ended()
        assert (code, err) == (0, "")
        assert out == f"turnloom: stopping; 1 turn in flight has {LONG} s, a second signal ends it now\n"
        (turn,) = await it.turns()
        assert (turn.outcome, turn.acknowledged) == (Outcome.DELIVERED, True)


async def test_a_turn_that_outlasts_the_drain_is_on_record_as_far_as_it_came(tmp_path: Path) -> None:
    async with slow(tmp_path, "--drain", "0.3") as it:
        stream = await it.begin()
        it.signal()
        events = await stream.rest()
        assert events[-1][0] == "error"
        assert (await it.ended())[0] == 0
        assert sorted(p.name for p in tmp_path.iterdir()) == ["t.db", "t.db.lock"], "all is in one file"
        (turn,) = await it.turns()
        assert turn.outcome is Outcome.ABORTED
        assert 0 < len(turn.output) < len(qwen_tokenizer("qwen2.5").encode(WORDS))
        assert len(turn.logprobs) == len(turn.output)
        assert turn.abort == "verified", "its engine was told to stop, and that was seen through"
        assert not it.engine.live


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once_and_loses_nothing_that_was_told(tmp_path: Path, second: signal.Signals) -> None:
    async with slow(tmp_path, "--drain", LONG) as it:
        it.go.set()
        whole = await it.begin("first")
        await whole.rest()
        it.go.clear()
        await it.begin("second")
        it.signal()
        await it.draining()
        it.signal(second)
        code, _, err = await it.ended()
        assert (code, err) == (128 + second, "")
        (turn,) = await it.turns()
        assert turn.outcome is Outcome.DELIVERED


async def test_connections_that_are_idle_do_not_keep_it(tmp_path: Path) -> None:
    async with slow(tmp_path, "--drain", LONG) as it:
        host, _, port = it.served.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /api/hello HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        _, silent = await asyncio.open_connection(host, int(port))
        it.signal()
        assert (await it.ended())[:2] == (0, "turnloom: stopping\n")
        writer.close()
        silent.close()


async def test_a_signal_before_it_serves_ends_it(tmp_path: Path) -> None:
    """Its engine took the connection and says nothing."""
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *_words(f"sglang://127.0.0.1:{port}", tmp_path / "t.db"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        await asyncio.wait_for(asked.wait(), 30)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 143
    finally:
        if process.returncode is None:
            process.kill()
        server.close()


def _words(engine: str, store: Path) -> list[str]:
    return [sys.executable, "-m", "turnloom.cli.main", "serve", "--engine", engine, "--port", "0", "--store", str(store)]


async def test_log_lines_of_the_process_are_objects_with_session_and_turn(tmp_path: Path) -> None:
    async with slow(tmp_path, "--log-format", "json", "--log-level", "info", "--access-log") as it:
        it.go.set()
        reply = await it.begin()
        await reply.rest()
        turn = reply.answer.headers["x-request-id"].removeprefix("req_")
        it.signal()
        code, _, err = await it.ended()
    assert code == 0
    lines = [json.loads(line) for line in err.splitlines()]
    (end,) = [line for line in lines if line["logger"] == "turnloom.turn"]
    assert {"session": it.session["id"], "turn": turn, "outcome": "delivered", "level": "info"}.items() <= end.items()
    paths = [line["path"] for line in lines if line["logger"] == "turnloom.access"]
    assert "/s/…/v1/messages" in paths
    assert it.session["key"] not in err
    assert it.served.key not in err
