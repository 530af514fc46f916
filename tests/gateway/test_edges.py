"""Around a turn: before its prompt is built, while nobody reads it, in the server's log, and in what a request names."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

from tests.support.gateways import Bench, bench, user
from tests.support.wires import WIRES
from turnloom.gateway import lifecycle, respond, turn
from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Outcome, Sampling

every_dialect = pytest.mark.parametrize("name", WIRES)


class Held:
    """Building a prompt waits until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        build = turn.build_prompt

        async def held(*args: Any) -> Any:
            self.asked.set()
            await self.go.wait()
            return await build(*args)

        monkeypatch.setattr(turn, "build_prompt", held)


@every_dialect
async def test_a_client_is_kept_alive_while_its_prompt_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, held = WIRES[name], Held(monkeypatch)
    async with bench(["Hello"], keepalive=0.05) as b:
        async with b.http.post(b.handle.base_url + wire.path(stream=True), json=wire.body("hi", stream=True)) as answer:
            seen = await answer.content.readany()
            assert not b.engine.requests
            held.go.set()
            seen += await answer.read()
        assert b"Hello" in seen
        assert [t.outcome for t in (await b.session()).tree.turns.values()] == [Outcome.DELIVERED]


@every_dialect
async def test_a_session_that_is_finished_meanwhile_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, held = WIRES[name], Held(monkeypatch)
    monkeypatch.setattr(lifecycle, "DRAIN_SECONDS", 0.05)
    async with bench(["never"]) as b:
        asked = asyncio.create_task(b.post(wire.body("hi"), wire.path(stream=False)))
        await held.asked.wait()
        await b.handle.finish()
        answer = await asked
        assert answer.status == 503
        assert "closed" in str(answer.body)
        assert not (await b.session()).tree.turns
        assert (await b.session()).in_flight == 0


async def test_who_does_not_read_what_is_streamed_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "READ_SECONDS", 0.2)
    tokenizer = qwen_tokenizer("qwen2.5")
    long = Reply(text=(" " * 127 + "x") * 80_000, chunk=5_000, style="incremental")  # 10 MB: more than sockets hold
    engine = ScriptedEngine([long], tokenizer=tokenizer, end_id=tokenizer.control_tokens["<|im_end|>"], context_length=1_000_000)
    async with bench(engine=engine) as b:
        host, port = b.gateway.url.removeprefix("http://").split(":")
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, (host, int(port)))
        _, writer = await asyncio.open_connection(sock=small, limit=1)
        body = b'{"model":"m","max_tokens":9999999,"stream":true,"messages":[{"role":"user","content":"x"}]}'
        head = f"POST /s/{b.handle.key}/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        live = await b.session()
        async with asyncio.timeout(20):
            while not live.tree.turns:
                await asyncio.sleep(0.01)
        (made,) = live.tree.turns.values()
        assert made.outcome is Outcome.ORPHANED
        assert 0 < len(made.output) < 160_000, "it was still being sampled"
        writer.close()


NO_HTTP = {
    "a space in the path": "GET /s/{key} x HTTP/1.1\r\nHost: x\r\n\r\n",
    "a control character in a header": "GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\x01\r\n\r\n",
    "a blank before a colon": "GET /v1/models HTTP/1.1\r\nx-api-key : {key}\r\n\r\n",
    "no version": "GET /?key={key} HTTP/x\r\n\r\n",
    "a header without end": "GET /v1/models HTTP/1.1\r\nx-api-key: {key}" + "x" * 70_000 + "\r\n\r\n",
    "a chunk badly framed": "POST /s/{key}/v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{key}\r\n\r\n",
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP)
async def test_what_is_no_http_leaves_no_word_of_it_in_the_log(sent: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with bench() as b:
        host, port = b.gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent.replace("{key}", b.handle.key).encode())
        answer = await asyncio.wait_for(reader.read(200), 10)
        writer.close()
        assert answer.startswith(b"HTTP/1."), "it is answered"
        await asyncio.sleep(0)
    formatter = logging.Formatter()
    assert b.handle.key not in "\n".join(formatter.format(record) for record in caplog.records)


async def test_a_long_header_of_an_agent_is_taken() -> None:
    async with bench(["Hi"]) as b:
        assert (await b.post(user("hi"), **{"x-codex-turn-metadata": "x" * 20_000})).status == 200


@every_dialect
async def test_a_models_name_has_an_end(name: str) -> None:
    wire = WIRES[name]
    async with bench(["Hi"]) as b:
        path = wire.path(stream=False).replace("/m:", f"/{'m' * 300}:")
        answer = await b.post({**wire.body("hi"), "model": "m" * 300}, path)
        assert answer.status == 400
        assert "at most 256" in str(answer.body)


@every_dialect
async def test_a_reply_carries_its_turns_id_where_sdks_look_for_a_requests(name: str) -> None:
    wire = WIRES[name]
    async with bench(["Hi", "Ho"]) as b:
        for stream in (False, True):
            answer = await b.http.post(b.handle.base_url + wire.path(stream=stream), json=wire.body("hi", stream=stream))
            await answer.read()
            made = list((await b.session()).tree.turns)[-1]
            assert answer.headers["request-id"] == answer.headers["x-request-id"] == f"req_{made}"


async def test_who_takes_json_too_gets_json() -> None:
    async with bench(["Hi"]) as b:
        answer = await b.post(user("hi"), Accept="application/json, text/event-stream")
        assert answer.body["content"] == [{"type": "text", "text": "Hi"}]


async def test_each_choice_has_a_seed_of_its_own() -> None:
    async with bench(["a", "b", "c"], sampling=Sampling(seed=2**63 - 2)) as b:
        assert (await b.post({"messages": [{"role": "user", "content": "hi"}], "n": 3}, "/v1/chat/completions")).status == 200
        seeds = {2**63 - 2, 2**63 - 1, 0}
        assert {sent["sampling_params"]["sampling_seed"] for sent in b.engine.requests} == seeds
        assert {t.sampling.seed for t in (await b.session()).tree.turns.values()} == seeds


def twins() -> ScriptedEngine:
    """Two replies of the same words in other tokens, then one more."""
    tokenizer = qwen_tokenizer("qwen2.5")
    (end,) = tokenizer.encode("<|im_end|>")
    whole, split = tokenizer.encode("Hello"), tokenizer.encode("Hel") + tokenizer.encode("lo")
    replies = [Reply(ids=(*ids,), end=end) for ids in (whole, split)]
    return ScriptedEngine([*replies, "On."], tokenizer=tokenizer, end_id=end)


async def respond_to(b: Bench, **fields: Any) -> dict[str, Any]:
    answer = await b.post({"model": "m", **fields}, "/v1/responses")
    assert answer.status == 200, answer.body
    return answer.body


@pytest.mark.parametrize("number", [0, 1])
async def test_a_response_that_is_named_is_the_one_gone_on_from(number: int) -> None:
    async with bench(engine=twins()) as b:
        first = [await respond_to(b, input="hi") for _ in range(2)]
        await respond_to(b, input="more", previous_response_id=first[number]["id"])
        turns = list((await b.session()).tree.turns.values())
        assert turns[2].base == turns[number].id
        assert b.tokenizer.decode(turns[0].output.tolist()) == b.tokenizer.decode(turns[1].output.tolist())


async def test_a_response_id_that_was_tampered_with_takes_no_message_away() -> None:
    async with bench(["one", "two"]) as b:
        first = await respond_to(b, input="THE QUESTION")
        await respond_to(b, input="more", previous_response_id=first["id"] + "i")
        assert "THE QUESTION" in b.tokenizer.decode(b.engine.requests[1]["input_ids"])


@pytest.mark.parametrize("choices", [1, 3])
async def test_who_leaves_with_the_whole_reply_got_it(choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may close its connection with the last byte, before anybody here knows that it was written."""
    write = respond.Responder._write_whole
    async with bench(lambda *_: "Hello there") as b:
        live = await b.session()

        async def then_leave(self: respond.Responder) -> None:
            await write(self)
            if choices > 1:  # One reply is written by its reader itself, which goes on at once.
                for task in asyncio.all_tasks():
                    if task.get_coro().__qualname__.endswith("_choices.<locals>.take"):  # type: ignore[union-attr]
                        task.cancel()

        monkeypatch.setattr(respond.Responder, "_write_whole", then_leave)
        answer = await b.post({"messages": [{"role": "user", "content": "hi"}], "n": choices}, "/v1/chat/completions")
        assert [each["message"]["content"] for each in answer.body["choices"]] == ["Hello there"] * choices
        assert [t.outcome for t in live.tree.turns.values()] == [Outcome.DELIVERED] * choices
