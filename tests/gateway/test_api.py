"""The Python API, in a loop and on a thread, and what survives a restart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import anthropic
import numpy as np
import pytest

from tests.support.gateways import bench, follow, user
from turnloom import Gateway
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import BadRequest, ConfigError
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer
from turnloom.tokenizer import load_tokenizer
from turnloom.types import AbortOutcome, Outcome


def test_background_gateway_from_code_that_is_not_async() -> None:
    tokenizer = qwen_tokenizer()

    async def serve() -> ScriptedEngine:
        engine = ScriptedEngine(["Hello", "Again"], tokenizer=tokenizer, end_id=151645)
        await engine.start()
        return engine

    import threading

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    engine = asyncio.run_coroutine_threadsafe(serve(), loop).result()
    try:
        with Gateway.background(engine.url, tokenizer) as gateway:
            session = gateway.open_session(metadata={"task": 1})
            client = anthropic.Anthropic(base_url=session.base_url, api_key=session.key)
            reply = client.messages.create(model="m", max_tokens=50, messages=[{"role": "user", "content": "hi"}])
            assert reply.content[0].text == "Hello"
            assert session.stats()["turns"] == 1
            (sample,) = session.finish(reward=0.5)
            assert (sample.reward, sample.metadata["task"]) == (0.5, 1)
            assert session.samples() == [sample]
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)


async def test_a_restart_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Law 6: what the client got is there after a restart, and its next turn continues the same ids."""
    store = tmp_path / "t.db"
    engine = ScriptedEngine(["First answer", "Second answer"], tokenizer=qwen_tokenizer(), end_id=151645)
    body = user("hi")
    async with engine:
        async with bench(engine=Shared(engine), store=store) as b:
            first = await b.post(body)
            key = b.handle.key
        async with bench(engine=Shared(engine), store=store) as b:
            async with b.http.post(
                b.gateway.url + "/v1/messages", json=follow(body, first.body, "more"), headers={"x-api-key": key}
            ) as answer:
                assert answer.status == 200
            one, two = engine.requests
            assert two["input_ids"][: len(one["input_ids"])] == one["input_ids"]
            sessions = (await b.admin("GET", "/sessions"))[1]["sessions"]
            assert sorted(s["usage"]["turns"] for s in sessions) == [0, 2]
            assert sorted([(await b.admin("GET", f"/sessions/{s['id']}"))[1]["lineages"] for s in sessions]) == [0, 1]


class Shared:
    """A scripted engine that outlives one gateway."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.url = engine.url

    async def __aenter__(self) -> Shared:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


async def test_finish_waits_for_turns_in_flight_then_cancels_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.gateway.lifecycle.DRAIN_SECONDS", 0.2)
    async with bench([Reply(text="never", fault=Fault.HANG)]) as b:
        asked = asyncio.create_task(b.post(user("hi", stream=True)))
        await b.engine.wait_running(1)
        assert await b.handle.finish(reward=0.0) == []
        await b.engine.wait_running(0)
        (turn,) = (await b.session()).tree.turns.values()
        assert (turn.outcome, turn.error) == (Outcome.ABORTED, "the session was closed")
        answer = await asked
        assert (answer.status, answer.body["error"]["type"]) == (503, "api_error")


async def test_finish_ends_a_stream_that_has_begun_in_the_dialects_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.gateway.lifecycle.DRAIN_SECONDS", 0.2)
    async with bench([Reply(text="a b c d e f g h", chunk=1, fault=Fault.STALL)]) as b:
        asked = asyncio.create_task(b.post(user("hi", stream=True)))
        await b.engine.wait_running(1)
        await asyncio.sleep(0.2)
        await b.handle.finish()
        events = (await asked).events
        assert [events[0][0], events[-1][0]] == ["message_start", "error"]
        assert "message_stop" not in [name for name, _ in events]


async def test_a_client_that_never_reads_its_reply_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.gateway.respond.READ_SECONDS", 0.3)
    long = Reply(text=(" " * 127 + "x") * 80_000, chunk=50_000, style="incremental")  # 10 MB: more than sockets hold
    engine = ScriptedEngine([long], tokenizer=qwen_tokenizer(), end_id=151645, context_length=2_000_000)
    async with bench(engine=engine) as b:
        host, port = b.gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        body = json.dumps(user("hi", max_tokens=1_000_000)).encode()
        head = f"POST /s/{b.handle.key}/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        session = await b.session()
        async with asyncio.timeout(60):
            while not (session.tree.turns and session.in_flight == 0):
                await asyncio.sleep(0.05)
        (turn,) = session.tree.turns.values()
        assert turn.outcome is Outcome.ORPHANED
        writer.close()


async def test_stopping_the_gateway_keeps_what_is_in_flight_on_record(tmp_path: Path) -> None:
    from turnloom.store.sqlite import SQLiteStore

    engine = ScriptedEngine([Reply(text="a b c d e f g h", chunk=1, fault=Fault.STALL)], tokenizer=qwen_tokenizer(), end_id=151645)
    async with engine:
        async with aiohttp.ClientSession() as client:
            async with bench(engine=Shared(engine), store=tmp_path / "t.db") as b:
                url, session_id = b.handle.base_url + "/v1/messages", b.handle.id
                asked = asyncio.create_task(client.post(url, json=user("hi", stream=True)))
                await engine.wait_running(1)
                await asyncio.sleep(0.1)
            asked.cancel()
        assert engine.running == 0, "stopping waits until nothing is left behind"
    store = SQLiteStore(tmp_path / "t.db", read_only=True)
    await store.open()
    (delta,) = await store.deltas(session_id)
    await store.close()
    assert (delta.turn.outcome, delta.turn.error) == (Outcome.ABORTED, "the session was closed")
    assert len(delta.turn.output) > 0
    assert delta.turn.abort == AbortOutcome.VERIFIED


async def test_the_turn_timeout_ends_the_turn_as_aborted() -> None:
    from turnloom.store.contract import Limits

    async with bench([Reply(text="slow", fault=Fault.HANG)], session_limits=Limits(turn_timeout=0.2)) as b:
        answer = await b.post(user("hi"))
        assert (answer.status, answer.body["error"]["type"]) == (529, "overloaded_error")
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.outcome is Outcome.ABORTED
        await b.engine.wait_running(0)


async def test_keepalives_while_the_engine_is_silent() -> None:
    async with bench([Reply(text="late", fault=Fault.HANG)], keepalive=0.05) as b:
        async with b.http.post(b.handle.base_url + "/v1/messages", json=user("hi", stream=True)) as answer:
            seen = b""
            while seen.count(b"event: ping") < 3:
                seen += await asyncio.wait_for(answer.content.readany(), 10)
            assert seen.startswith(b"event: message_start")
            b.engine.release()
            assert b"event: error" in seen + await answer.read()


async def test_two_turns_of_one_session_at_once_keep_their_own_tokens() -> None:
    async with bench(lambda body, index: Reply(text=f"answer {index}", chunk=1, delay=0.01)) as b:
        answers = await asyncio.gather(*(b.post(user(f"question {i}", stream=i % 2 == 0)) for i in range(8)))
        assert all(a.status == 200 for a in answers)
        session = await b.session()
        assert sorted(t.index for t in session.tree.turns.values()) == list(range(8))
        samples = session.unroll().samples
        assert len(samples) == 8
        sent = {tuple(r["input_ids"]) for r in b.engine.requests}
        assert {tuple(s.token_ids[: s.prompt_len].tolist()) for s in samples} == sent
        assert np.isclose(sum(s.weight for s in samples), 1.0)


async def test_turns_that_start_together_have_their_reasons_too() -> None:
    """What a turn has to do with the others is known when it is committed, not when it is asked."""
    async with bench(lambda body, index: Reply(text=f"answer {index}", chunk=1, delay=0.01)) as b:
        await asyncio.gather(*(b.post(user(f"question {i}")) for i in range(4)))
        turns = list((await b.session()).tree.turns.values())
        assert [t.fork.kind if t.fork else None for t in turns] == [None] + ["new_conversation"] * 3
        first = await b.post(user("base"))
        await asyncio.gather(*(b.post(follow(user("base"), first.body, f"branch {i}")) for i in range(3)))
        turns = list((await b.session()).tree.turns.values())[5:]
        assert len({t.base for t in turns}) == 1
        assert [t.fork.kind if t.fork else None for t in turns] == [None, "branched", "branched"]


async def test_a_signature_names_its_turn() -> None:
    """Two replies with the same words: the one whose signature came back is the one that goes on."""
    async with bench(["<think>\none\n</think>\n\nsame", "<think>\ntwo\n</think>\n\nsame", "next"], tokenizer=qwen_tokenizer("qwen3")) as b:
        body = {**user("hi"), "thinking": {"type": "adaptive"}}
        first = await b.post(body)
        await b.post(body)
        thinking, text = first.body["content"]
        echoed = {"content": [{**thinking, "thinking": ""}, text]}
        await b.post(follow(body, echoed, "go on"))
        one, _, third = (await b.session()).tree.turns.values()
        assert third.base == one.id


async def test_a_gateway_that_is_not_started_says_so() -> None:
    with pytest.raises(ConfigError, match="not started"):
        await Gateway("http://127.0.0.1:1", qwen_tokenizer()).open_session()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.1", "gateway.example", "127.0.0.1.example"])
def test_beyond_this_machine_the_admin_key_must_be_set(host: str) -> None:
    with pytest.raises(ConfigError, match="needs an admin key"):
        Gateway(host=host)
    Gateway(host=host, admin_key="secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_on_this_machine_no_admin_key_is_needed(host: str) -> None:
    Gateway(host=host)


async def test_a_taken_port_is_one_clear_line() -> None:
    async with bench() as b:
        port = int(b.gateway.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="choose another --port"):
            await Gateway(SGLangEngine(b.engine.url), b.tokenizer, port=port).start()


@pytest.mark.parametrize("value", [float("nan"), 2**70, object(), {1: "x"}], ids=["NaN", "integer", "object", "key"])
async def test_metadata_that_could_not_be_exported_is_refused_when_it_comes(value: object) -> None:
    async with bench() as b:
        with pytest.raises(BadRequest, match="metadata"):
            await b.gateway.open_session(metadata={"value": value})


async def test_the_calls_that_the_prompt_teaches_are_read_where_the_template_has_no_place_for_tools() -> None:
    template = (
        "{# <|tool_call_start|> #}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load_tokenizer(str(qwen_directory("qwen3")), chat_template=template)
    call = '<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'
    tools = [{"name": "ls", "description": "List", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}]
    async with bench([call], tokenizer=tokenizer) as b:
        reply = await b.post(user("hi", tools=tools))
        assert [block["type"] for block in reply.body["content"]] == ["tool_use"]
