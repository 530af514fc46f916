"""Bad input over the real socket: a clear error in Anthropic's shape with the right status, and no session harmed."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from tests.support.gateways import Bench, bench, user
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Outcome

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}

BAD: dict[str, tuple[Any, int, str]] = {
    "malformed JSON": (b'{"messages": [', 400, "invalid_request_error"),
    "not UTF-8": (b'{"messages": "\xff\xfe"}', 400, "invalid_request_error"),
    "no object": (b'"hi"', 400, "invalid_request_error"),
    "empty body": (b"", 400, "invalid_request_error"),
    "empty messages": ({"messages": []}, 400, "invalid_request_error"),
    "empty message": (user(""), 400, "invalid_request_error"),
    "wrong role": ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error"),
    "forced server tool": (user("x", tools=[SEARCH], tool_choice={"type": "tool", "name": "web_search"}), 400, "invalid_request_error"),
    "forced tool": (user("x", tool_choice={"type": "any"}), 400, "invalid_request_error"),
    "image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error"),
    "many stops": (user("x", stop_sequences=[f"\x00{i}" for i in range(100_000)]), 400, "invalid_request_error"),
    "too long": (user("word " * 3000), 400, "invalid_request_error"),
    "huge": (b'{"x": "' + b"a" * (64 * 2**20) + b'"}', 413, "request_too_large"),
}


async def _still_works(b: Bench) -> None:
    answer = await b.post(user("still there?"))
    assert answer.status == 200
    assert answer.body["content"][0]["text"] == "Yes"


@pytest.mark.parametrize(("body", "status", "kind"), BAD.values(), ids=BAD)
async def test_bad_input_is_refused_and_harms_nothing(body: Any, status: int, kind: str) -> None:
    engine = ScriptedEngine(["Yes"], tokenizer=qwen_tokenizer(), end_id=151645, context_length=2048)
    async with bench(engine=engine) as b:
        answer = await b.post(body)
        assert answer.status == status
        assert answer.body["type"] == "error"
        assert answer.body["error"]["type"] == kind
        assert len(answer.body["error"]["message"]) > 10
        assert not b.engine.requests
        assert not (await b.session()).tree.nodes
        await _still_works(b)


WHOLE = json.dumps(user("x")).encode()
COMPRESSED = {
    "no gzip": ("gzip", b"0123456789"),
    "no deflate": ("deflate", b"\x00" * 20),
    "gzip cut off": ("gzip", gzip.compress(WHOLE)[:-12]),
    "gzip with one byte changed": ("gzip", gzip.compress(WHOLE)[:-8] + bytes(8)),
}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(("encoding", "raw"), COMPRESSED.values(), ids=COMPRESSED)
async def test_a_body_that_cannot_be_decompressed_is_the_clients_error(
    encoding: str, raw: bytes, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(["Yes"]) as b:
        answer = await b.post(raw, path, **{"Content-Encoding": encoding})
        assert (answer.status, answer.body["error"]["type"]) == (400, "invalid_request_error")
        await _still_works(b)
    assert not caplog.records


async def test_a_compressed_body_is_read_and_its_limit_is_that_of_the_text() -> None:
    async with bench(["Yes"]) as b:
        bomb = gzip.compress(b'{"x": "' + b"a" * (33 * 2**20) + b'"}')
        assert (await b.post(bomb, **{"Content-Encoding": "gzip"})).status == 413
        assert (await b.post(gzip.compress(WHOLE), **{"Content-Encoding": "gzip"})).status == 200


async def test_a_long_prompt_is_encoded_off_the_event_loop() -> None:
    """Other requests are answered while one of half a million tokens is being encoded."""
    engine = ScriptedEngine(["Yes"], tokenizer=qwen_tokenizer(), end_id=151645, context_length=2048)
    async with bench(engine=engine) as b:
        long = asyncio.create_task(b.post(user("word " * 500_000)))
        answered = 0
        while not long.done():
            async with b.http.get(b.gateway.url + "/api/hello") as answer:
                answered += answer.status == 200
        assert answered > 20
        assert (await long).status == 400
        assert "prompt is too long" in (await long).body["error"]["message"]
        await _still_works(b)


async def test_unknown_routes_and_methods_have_the_same_shape() -> None:
    async with bench() as b:
        for method, path, kind in (
            ("GET", "/nothing", "not_found_error"),
            ("GET", "/v1/messages", "not_found_error"),
            ("POST", "/s/x/v1/messages/batches", "not_found_error"),
            ("GET", "/v1/nothing", "invalid_request_error"),
            ("DELETE", "/v1/chat/completions", "invalid_request_error"),
            ("GET", "/v1/responses/resp_1", "invalid_request_error"),
        ):
            async with b.http.request(method, b.gateway.url + path) as answer:
                assert answer.status == 404, path
                assert (await answer.json())["error"]["type"] == kind
        async with b.http.post(b.gateway.url + "/v1beta/models/m:embedContent") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["status"] == "NOT_FOUND"


async def test_probes_that_agents_make_are_answered() -> None:
    async with bench() as b:
        for method, path in (("HEAD", "/"), ("GET", "/api/hello"), ("HEAD", "/api/hello")):
            for base in (b.gateway.url, b.handle.base_url):
                async with b.http.request(method, base + path) as answer:
                    assert answer.status == 200
        async with b.http.get(b.handle.base_url + "/v1/models") as answer:
            assert (await answer.json())["data"][0]["id"] == "scripted"


FAULTS = {
    "refused": (Reply(text="x", fault=Fault.HTTP_400), 400, "invalid_request_error"),
    "overloaded": (Reply(text="x", fault=Fault.HTTP_503), 529, "overloaded_error"),
    "connection reset": (Reply(text="x", fault=Fault.RESET), 503, "api_error"),
    "aborted": (Reply(text="a b c d e f", fault=Fault.ABORT), 529, "overloaded_error"),
    "cut": (Reply(text="a b c d e f", fault=Fault.CUT), 503, "api_error"),
    "null logprob": (Reply(text="a b c d e f", fault=Fault.NULL_LOGPROB), 502, "api_error"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reply", "status", "kind"), FAULTS.values(), ids=FAULTS)
async def test_engine_faults_reach_the_client_and_the_record(reply: Reply, status: int, kind: str, stream: bool) -> None:
    async with bench([reply, "Yes"]) as b:
        answer = await b.post(user("x", stream=stream))
        if answer.events:
            assert answer.events[-1][0] == "error"
            assert answer.events[-1][1]["error"]["type"] == kind
        else:
            assert (answer.status, answer.body["error"]["type"]) == (status, kind)
        session = await b.session()
        (turn,) = session.tree.turns.values()
        assert turn.outcome in (Outcome.ABORTED, Outcome.FAILED)
        assert turn.error
        assert session.unroll().samples == ()
        await _still_works(b)


TOOL = {"name": "f", "input_schema": {"type": "object"}}
ARGUMENTS = {
    "infinity": ('{"n": 1e999}', False),
    "five thousand digits": ('{"n": ' + "9" * 5000 + ', "a": "\\ud800"}', False),
    "a long integer": ('{"n": 12345678901234567890123, "m": -0}', True),
    "half a pair": ('{"a": "\\ud800", "n": 12345678901234567890123, "b": "\\\\ud800 \\ud83d\\ude00"}', True),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("arguments", "called"), ARGUMENTS.values(), ids=ARGUMENTS)
async def test_what_the_model_wrote_is_never_the_clients_fault(arguments: str, called: bool, stream: bool) -> None:
    """What no client could hold comes as text; everything else as it was written."""
    written = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    async with bench([written, "Yes"]) as b:
        answer = await b.post(user("x", tools=[TOOL], max_tokens=9000, stream=stream))
        (turn,) = (await b.session()).tree.turns.values()
        assert (answer.status, turn.outcome) == (200, Outcome.DELIVERED)
        deltas = [data["delta"] for name, data in answer.events if name == "content_block_delta"]
        if called:
            sent = json.loads("".join(d["partial_json"] for d in deltas)) if stream else answer.body["content"][0]["input"]
            assert sent == json.loads(arguments.replace('"\\ud800"', '"\ufffd"'))
        else:
            assert ("".join(d["text"] for d in deltas) if stream else answer.body["content"][0]["text"]) == written
        await _still_works(b)


async def test_a_store_that_fails_is_an_error_and_never_a_reply() -> None:
    from turnloom.errors import StoreError
    from turnloom.store.memory import MemoryStore

    class Full(MemoryStore):
        async def append(self, session_id, delta):
            raise StoreError("the disk is full; free some space")

    async with bench(["Yes"] * 2, store=Full()) as b:
        answer = await b.post(user("x"))
        assert (answer.status, answer.body["error"]["message"]) == (500, "the disk is full; free some space")
        streamed = await b.post(user("x", stream=True))
        assert streamed.events[-1][0] == "error"
        assert "message_stop" not in [name for name, _ in streamed.events]
        assert not (await b.session()).tree.turns


async def test_an_error_page_never_holds_a_key() -> None:
    async with bench() as b:
        answer = await b.post({"messages": []})
        assert b.handle.key not in json.dumps(answer.body)
