"""The reference's rows that are about the wire, in every dialect: R02, R06, R09, R10, R32, R33, R34."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.gateways import Bench, bench
from turnloom.testing.scripted_engine import Fault, Reply

Json = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
PIXEL = "iVBORw0KGgo="


@dataclass(frozen=True, slots=True)
class Spoken:
    """One dialect, as its clients speak it. `body` is a request with a tool for these words and this picture."""

    path: str
    body: Callable[[str, str], Json]
    text: Callable[[Json], str]
    ended: Callable[[Json], Any]
    ends: tuple[Any, Any, Any]
    """How a reply that stopped, was cut, or calls a tool is said to have ended."""
    calls: Callable[[Json], list[tuple[str, Any]]]
    usage: Callable[[Json], tuple[int, int]]
    model: Callable[[Json], Any]
    last: str
    """Stands in the terminal event and nowhere before it."""
    stream_path: str = ""
    stream_body: tuple[tuple[str, Any], ...] = (("stream", True),)
    count: tuple[str, Callable[[Json], int]] | None = None


def anthropic(words: str, picture: str = "") -> Json:
    shown = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}] if picture else []
    content = [{"type": "text", "text": words}, *shown]
    tools = [{"name": "ls", "description": "List", "input_schema": SCHEMA}]
    return {"model": "named", "max_tokens": 100, "messages": [{"role": "user", "content": content}], "tools": tools}


def chat(words: str, picture: str = "") -> Json:
    shown = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}] if picture else []
    tools = [{"type": "function", "function": {"name": "ls", "description": "List", "parameters": SCHEMA}}]
    return {"model": "named", "messages": [{"role": "user", "content": [{"type": "text", "text": words}, *shown]}], "tools": tools}


def responses(words: str, picture: str = "") -> Json:
    shown = [{"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}] if picture else []
    tools = [{"type": "function", "name": "ls", "description": "List", "parameters": SCHEMA}]
    return {"model": "named", "input": [{"role": "user", "content": [{"type": "input_text", "text": words}, *shown]}], "tools": tools}


def gemini(words: str, picture: str = "") -> Json:
    shown = [{"inlineData": {"mimeType": "image/png", "data": picture}}] if picture else []
    tools = [{"functionDeclarations": [{"name": "ls", "description": "List", "parametersJsonSchema": SCHEMA}]}]
    return {"contents": [{"role": "user", "parts": [{"text": words}, *shown]}], "tools": tools}


def _items(reply: Json, kind: str) -> list[Json]:
    return [item for item in reply["output"] if item["type"] == kind]


def _parts(reply: Json) -> list[Json]:
    return reply["candidates"][0]["content"]["parts"]


SPOKEN = {
    "anthropic": Spoken(
        "/v1/messages",
        anthropic,
        lambda r: "".join(b.get("text", "") for b in r["content"]),
        lambda r: r["stop_reason"],
        ("end_turn", "max_tokens", "tool_use"),
        lambda r: [(b["name"], b["input"]) for b in r["content"] if b["type"] == "tool_use"],
        lambda r: (r["usage"]["input_tokens"], r["usage"]["output_tokens"]),
        lambda r: r["model"],
        '"message_stop"',
        count=("/v1/messages/count_tokens", lambda r: r["input_tokens"]),
    ),
    "openai_chat": Spoken(
        "/v1/chat/completions",
        chat,
        lambda r: r["choices"][0]["message"]["content"] or "",
        lambda r: r["choices"][0]["finish_reason"],
        ("stop", "length", "tool_calls"),
        lambda r: [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in r["choices"][0]["message"]["tool_calls"]],
        lambda r: (r["usage"]["prompt_tokens"], r["usage"]["completion_tokens"]),
        lambda r: r["model"],
        "[DONE]",
    ),
    "openai_responses": Spoken(
        "/v1/responses",
        responses,
        lambda r: "".join(p["text"] for item in _items(r, "message") for p in item["content"]),
        lambda r: r["status"] if not _items(r, "function_call") else "calls",
        ("completed", "incomplete", "calls"),
        lambda r: [(item["name"], json.loads(item["arguments"])) for item in _items(r, "function_call")],
        lambda r: (r["usage"]["input_tokens"], r["usage"]["output_tokens"]),
        lambda r: r["model"],
        "response.completed",
        count=("/v1/responses/input_tokens", lambda r: r["input_tokens"]),
    ),
    "gemini": Spoken(
        "/v1beta/models/named:generateContent",
        gemini,
        lambda r: "".join(p.get("text", "") for p in _parts(r)),
        lambda r: r["candidates"][0]["finishReason"] if not any("functionCall" in p for p in _parts(r)) else "calls",
        ("STOP", "MAX_TOKENS", "calls"),
        lambda r: [(p["functionCall"]["name"], p["functionCall"]["args"]) for p in _parts(r) if "functionCall" in p],
        lambda r: (r["usageMetadata"]["promptTokenCount"], r["usageMetadata"]["candidatesTokenCount"]),
        lambda r: r["modelVersion"],
        '"finishReason":"STOP"',
        stream_path="/v1beta/models/named:streamGenerateContent?alt=sse",
        stream_body=(),
        count=("/v1beta/models/named:countTokens", lambda r: r["totalTokens"]),
    ),
}

every_dialect = pytest.mark.parametrize("name", SPOKEN)

CALL = '<tool_call>\n{{"name": "ls", "arguments": {{"path": "{}"}}}}\n</tool_call>'


async def ask(b: Bench, name: str, words: str = "hi", picture: str = "") -> Json:
    answer = await b.post(SPOKEN[name].body(words, picture), SPOKEN[name].path)
    assert answer.status == 200, answer.body
    return answer.body


@every_dialect
async def test_r02_two_forms_of_a_reply(name: str) -> None:
    """The dialect's form on the wire and a neutral message in the tree; the engine's finish in the dialect's words."""
    spoken = SPOKEN[name]
    replies = ["done", Reply(text="cut off", finish="length"), "I look.\n" + CALL.format("a")]
    async with bench(replies) as b:
        for said, end in zip(["done", "cut off", "I look."], spoken.ends, strict=True):
            reply = await ask(b, name)
            assert spoken.ended(reply) == end
            assert spoken.text(reply).strip() == said
            tree = (await b.session()).tree
            message = tree.reply(list(tree.turns)[-1])
            assert (message.role, message.text.strip()) == ("assistant", said)
        assert [(c.name, json.loads(c.arguments)) for c in message.calls] == spoken.calls(reply) == [("ls", {"path": "a"})]


@every_dialect
async def test_r06_streamed_as_it_is_sampled_and_the_terminal_event_after_the_record(name: str) -> None:
    """The client reads the first words while the engine holds the last ones, and no terminal event before the turn is stored."""
    from turnloom.store.memory import MemoryStore

    class Slow(MemoryStore):
        held = asyncio.Event()

        async def append(self, session_id, delta):
            await self.held.wait()
            await super().append(session_id, delta)

    store, spoken = Slow(), SPOKEN[name]
    body = {**spoken.body("hi", ""), **dict(spoken.stream_body)}
    async with bench([Reply(text="one two three four", chunk=1)], store=store) as b:
        async with b.http.post(b.handle.base_url + (spoken.stream_path or spoken.path), json=body) as answer:
            seen = ""
            while "four" not in seen:
                seen += (await asyncio.wait_for(answer.content.readany(), 10)).decode()
            assert b.engine.running == 0, "the engine is done, and the turn is not stored yet"
            assert spoken.last not in seen
            assert not (await b.session()).tree.turns
            store.held.set()
            seen += (await answer.read()).decode()
        assert spoken.last in seen
        assert len((await b.session()).tree.turns) == 1


@every_dialect
async def test_r06_an_aborted_turn_never_looks_complete(name: str) -> None:
    spoken = SPOKEN[name]
    body = {**spoken.body("hi", ""), **dict(spoken.stream_body)}
    async with bench([Reply(text="one two three four five six", chunk=1, fault=Fault.ABORT)]) as b:
        async with b.http.post(b.handle.base_url + (spoken.stream_path or spoken.path), json=body) as answer:
            seen = (await answer.read()).decode()
        assert answer.status == 200
        assert "one" in seen
        assert spoken.last not in seen
        assert "error" in seen
        assert [t.outcome for t in (await b.session()).tree.turns.values()] == ["aborted"]


@every_dialect
async def test_r09_usage_is_the_lengths_of_the_ids_and_the_model_is_echoed(name: str) -> None:
    async with bench(["some words"]) as b:
        reply = await ask(b, name)
        (turn,) = (await b.session()).tree.turns.values()
        assert (
            SPOKEN[name].usage(reply) == (turn.prompt_len, len(turn.output)) == (len(b.engine.requests[0]["input_ids"]), len(turn.output))
        )
        assert SPOKEN[name].model(reply) == "named"


@pytest.mark.parametrize("name", ["anthropic", "openai_chat", "openai_responses"])
@pytest.mark.parametrize(
    ("said", "accept", "streamed"),
    [(True, "", True), (None, "text/event-stream", True), (False, "text/event-stream", False), (None, "application/json", False)],
)
async def test_r10_streams_when_the_body_says_or_the_header_asks(name: str, said: bool | None, accept: str, streamed: bool) -> None:
    spoken = SPOKEN[name]
    async with bench(["hello"]) as b:
        body = spoken.body("hi", "") | ({} if said is None else {"stream": said})
        async with b.http.post(b.handle.base_url + spoken.path, json=body, headers={"Accept": accept} if accept else {}) as answer:
            assert answer.status == 200
            assert (answer.content_type == "text/event-stream") is streamed
            assert "hello" in await answer.text()


@pytest.mark.parametrize(("path", "kind"), [
    ("streamGenerateContent?alt=sse", "text/event-stream"),
    ("streamGenerateContent", "application/json"),
    ("generateContent", "application/json"),
])  # fmt: skip
@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_r10_geminis_path_says_whether_it_streams(version: str, path: str, kind: str) -> None:
    async with (
        bench(["hello"]) as b,
        b.http.post(f"{b.handle.base_url}/{version}/models/some/name:{path}", json=gemini("hi")) as answer,
    ):
        assert (answer.status, answer.content_type) == (200, kind)
        assert "hello" in await answer.text()


@pytest.mark.parametrize("name", [name for name, spoken in SPOKEN.items() if spoken.count])
async def test_r32_counting_gives_the_true_count(name: str) -> None:
    spoken = SPOKEN[name]
    assert spoken.count is not None
    path, tokens = spoken.count
    async with bench(["hi"]) as b:
        counted = await b.post(spoken.body("how many?", ""), path)
        assert tokens(counted.body) == spoken.usage(await ask(b, name, "how many?"))[0]
        assert len((await b.session()).tree.turns) == 1, "counting records nothing"


@every_dialect
async def test_r33_every_parallel_call_is_sent(name: str) -> None:
    async with bench(["\n".join(CALL.format(path) for path in "abc")]) as b:
        reply = await ask(b, name)
        assert SPOKEN[name].calls(reply) == [("ls", {"path": path}) for path in "abc"]
        assert SPOKEN[name].ended(reply) == SPOKEN[name].ends[2]


@every_dialect
async def test_r34_a_picture_is_refused_clearly_or_stands_as_a_placeholder(name: str) -> None:
    spoken = SPOKEN[name]
    async with bench(["never"]) as b:
        answer = await b.post(spoken.body("what is this?", PIXEL), spoken.path)
        assert answer.status == 400
        assert "images and files are not supported" in json.dumps(answer.body)
        assert b.engine.requests == []
    async with bench(["A pixel."], images="placeholder") as b:
        await ask(b, name, "what is this?", PIXEL)
        prompt = b.tokenizer.decode(b.engine.requests[0]["input_ids"])
        assert "[image/png, 8 bytes, not shown]" in prompt
        assert PIXEL not in prompt
        assert "{'" not in prompt
        async with b.http.get(f"{b.gateway.url}/metrics") as metrics:
            assert "turnloom_image_placeholders_total 1.0" in await metrics.text()
