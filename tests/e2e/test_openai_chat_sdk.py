"""The official openai SDK's chat completions against the gateway: sync and async, streaming and not, its errors, its helpers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from tests.e2e.agents import END, assert_each_prompt_continues_the_one_before, assert_lawful, hermes, trained_texts
from tests.support.gateways import Bench, bench
from turnloom import Limits
from turnloom.errors import StoreError
from turnloom.store.memory import MemoryStore
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Outcome, Turn

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "read", "description": "Show a file.", "parameters": SCHEMA}}]
REPLIES = [f"I look.\n{hermes('read', path='a.py')}", hermes("read", path="é/b.py") + "\n" + hermes("read", path="c.py"), "Both are empty."]
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def asked(messages: list[Any], **more: Any) -> dict[str, Any]:
    system = {"role": "system", "content": "Be brief."}
    return {"model": "m", "max_completion_tokens": 200, "tools": TOOLS, "messages": [system, *messages], **more}


def results(reply: ChatCompletion) -> list[Any]:
    """The next messages of a tool loop: the reply as the SDK holds it, and a result for each call."""
    message = reply.choices[0].message
    calls = message.tool_calls or []
    given = [{"role": "tool", "tool_call_id": c.id, "content": f"{json.loads(c.function.arguments)['path']}: empty"} for c in calls]
    return [message.model_dump(), *given]


def ask_sync(client: openai.OpenAI, stream: bool, request: dict[str, Any]) -> ChatCompletion:
    if not stream:
        return client.chat.completions.create(**request)
    with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as events:
        for _ in events:
            pass
        return events.get_final_completion()


async def ask(client: openai.AsyncOpenAI, stream: bool, request: dict[str, Any]) -> ChatCompletion:
    if not stream:
        return await client.chat.completions.create(**request)
    async with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as events:
        async for _ in events:
            pass
        return await events.get_final_completion()


def client_of(b: Bench, **changes: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": f"{b.handle.base_url}/v1", "api_key": b.handle.key, "max_retries": 0, **changes})


async def turns_of(b: Bench) -> list[Turn]:
    return list((await b.session()).tree.turns.values())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_tool_loop_of_three_turns(kind: str, stream: bool) -> None:
    async with bench(REPLIES) as b:
        messages: list[Any] = [{"role": "user", "content": "Look at the files."}]
        replies: list[ChatCompletion] = []
        with openai.OpenAI(base_url=f"{b.gateway.url}/v1", api_key=b.handle.key) as client:
            async with client_of(b) as aclient:
                for _ in REPLIES:
                    asking = (
                        asyncio.to_thread(ask_sync, client, stream, asked(messages))
                        if kind == "sync"
                        else ask(aclient, stream, asked(messages))
                    )
                    replies.append(await asking)
                    messages += results(replies[-1])

        assert [reply.choices[0].finish_reason for reply in replies] == ["tool_calls", "tool_calls", "stop"]
        assert [reply.choices[0].message.content for reply in replies] == ["I look.", None, "Both are empty."]
        assert [json.loads(c.function.arguments) for c in calls_of(replies[1])] == [{"path": "é/b.py"}, {"path": "c.py"}]
        turns = await turns_of(b)
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 3
        assert [t.fork is None for t in turns[1:]] == [True, True]
        assert [reply.id for reply in replies] == [f"chatcmpl-{t.id}" for t in turns]
        assert [c.id for c in calls_of(replies[1])] == [f"call_{turns[1].id}00", f"call_{turns[1].id}01"]
        assert [reply.usage and reply.usage.prompt_tokens for reply in replies] == [t.prompt_len for t in turns]
        assert [reply.usage and reply.usage.completion_tokens for reply in replies] == [len(t.output) for t in turns]
        assert_each_prompt_continues_the_one_before(b, turns)
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in REPLIES]


def calls_of(reply: ChatCompletion) -> list[Any]:
    return list(reply.choices[0].message.tool_calls or ())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("echo", ["kept", "dropped", "trimmed"])
async def test_reasoning_is_sent_and_comes_back_or_does_not(echo: str, stream: bool) -> None:
    replies = [f"<think>\nI must look.\n</think>\n\nI look.\n{hermes('read', path='a.py')}", "<think>\nEmpty.\n</think>\n\nIt is empty."]
    async with bench(replies, tokenizer=qwen_tokenizer("qwen3")) as b, client_of(b) as client:
        messages: list[Any] = [{"role": "user", "content": "Look."}]
        for _ in replies:
            reply = await ask(client, stream, asked(messages))
            message, *given = results(reply)
            thought = message.pop("reasoning_content")
            if echo != "dropped":
                message["reasoning_content"] = thought.strip() if echo == "trimmed" else thought
            messages += [message, *given]
        assert "I must look." in messages[1].get("reasoning_content", "I must look.")
        assert reply.choices[0].message.content == "It is empty."
        turns = await turns_of(b)
        assert [t.fork is None for t in turns[1:]] == [True]
        assert_each_prompt_continues_the_one_before(b, turns)
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in replies]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_custom_tool_takes_and_gives_a_string(stream: bool) -> None:
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Apply a patch."}}
    replies = [hermes("patch", input="*** Begin\n+é\n*** End"), "Done."]
    async with bench(replies) as b, client_of(b) as client:
        messages: list[Any] = [{"role": "user", "content": "Patch."}]
        request = {"model": "m", "messages": messages, "tools": [tool]}
        if stream:
            calls: dict[int, dict[str, str]] = {}
            async for chunk in await client.chat.completions.create(**request, stream=True):
                for delta in chunk.choices[0].delta.tool_calls or ():
                    sent = delta.to_dict()
                    custom: Any = sent["custom"]
                    call = calls.setdefault(delta.index, {"id": str(sent.get("id")), "name": custom.get("name"), "input": ""})
                    call["input"] += custom["input"]
            ((_, made),) = calls.items()
        else:
            (call_made,) = calls_of(await client.chat.completions.create(**request))
            made = {"id": call_made.id, "name": call_made.custom.name, "input": call_made.custom.input}
        assert (made["name"], made["input"]) == ("patch", "*** Begin\n+é\n*** End")
        echo = {"id": made["id"], "type": "custom", "custom": {"name": made["name"], "input": made["input"]}}
        messages += [{"role": "assistant", "tool_calls": [echo]}, {"role": "tool", "tool_call_id": made["id"], "content": "ok"}]
        assert (await client.chat.completions.create(**request)).choices[0].message.content == "Done."
        assert_each_prompt_continues_the_one_before(b, await turns_of(b))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_several_choices_are_a_turn_each_and_any_of_them_goes_on(stream: bool) -> None:
    replies = ["One.", f"Two.\n{hermes('read', path='a')}", "Three."]
    async with bench([*replies, "On."]) as b, client_of(b) as client:
        reply = await ask(client, stream, asked(HI, n=3))
        assert [c.index for c in reply.choices] == [0, 1, 2]
        assert sorted(str(c.message.content).strip() for c in reply.choices) == ["One.", "Three.", "Two."]
        turns = await turns_of(b)
        assert len(turns) == 3
        assert reply.id.removeprefix("chatcmpl-") in {t.id for t in turns}
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (turns[0].prompt_len, sum(len(t.output) for t in turns))
        (second,) = [c for c in reply.choices if c.message.tool_calls]
        assert second.finish_reason == "tool_calls"
        call = (second.message.tool_calls or [])[0]
        await ask(
            client, stream, asked([*HI, second.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "a: empty"}])
        )
        last = (await turns_of(b))[-1]
        assert last.base is not None
        assert call.id.startswith(f"call_{last.base}")
        samples = await b.handle.finish()
        assert_lawful(samples)
        trained = sorted(text for sample in samples for text in trained_texts(b, sample))
        assert trained == sorted(f"{text}{END}" for text in [*replies, "On."])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_logprobs_are_those_on_record(stream: bool) -> None:
    async with bench(["Hé 😀."]) as b, client_of(b) as client:
        reply = await ask(client, stream, asked(HI, logprobs=True))
        (turn,) = await turns_of(b)
        found = reply.choices[0].logprobs
        assert found is not None
        assert [t.logprob for t in found.content or ()] == pytest.approx(turn.logprobs.tolist())
        assert "".join(t.token for t in found.content or ()).endswith(END)


async def test_usage_in_a_stream_only_where_it_is_asked_for() -> None:
    async with bench(["Hi.", "Hi."]) as b, client_of(b) as client:
        for options in ({}, {"stream_options": {"include_usage": True}}):
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked(HI), stream=True, **options)]
            assert [bool(chunk.choices) for chunk in chunks].count(False) == len(options)
            assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [bool(options)]


class Colour(BaseModel):
    name: str


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_structured_output_where_the_engine_has_a_grammar(stream: bool) -> None:
    qwen = qwen_tokenizer("qwen2.5")
    engine = ScriptedEngine(['{"name": "red"}'], tokenizer=qwen, end_id=qwen.control_tokens[END], grammar_backend="xgrammar")
    async with bench(engine=engine, tokenizer=qwen) as b, client_of(b) as client:
        request: Any = {"model": "m", "messages": HI, "response_format": Colour}
        if stream:
            async with client.chat.completions.stream(**request) as events:
                async for _ in events:
                    pass
                found = (await events.get_final_completion()).choices[0].message.parsed
        else:
            found = (await client.chat.completions.parse(**request)).choices[0].message.parsed
        assert found == Colour(name="red")
        held = json.loads(b.engine.requests[0]["sampling_params"]["json_schema"])
        assert held["properties"]["name"]["type"] == "string"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_stop_string_and_a_limit(stream: bool) -> None:
    async with bench(["one END two", "one two three four five six"]) as b, client_of(b) as client:
        stopped = await ask(client, stream, {"model": "m", "messages": HI, "stop": "END"})
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one ", "stop")
        cut = await client.chat.completions.create(model="m", messages=HI, max_tokens=3)
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage is not None
        assert cut.usage.completion_tokens == 3


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
        assert (raised.value.response.headers.get("retry-after") == "1") == (fault in (Fault.HTTP_429, Fault.HTTP_503))
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
        assert (unknown.value.code, unknown.value.type) == ("invalid_api_key", "invalid_request_error")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 32766 tokens") as long:
            await ask(client, stream, asked([{"role": "user", "content": "word " * 40_000}]))
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="no grammar backend"):
            await client.chat.completions.create(model="m", messages=HI, response_format={"type": "json_object"})
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="a")
        with pytest.raises(openai.APIError, match="the disk is full") as full:
            await ask(client, stream, asked(HI))
        assert isinstance(full.value, openai.InternalServerError) is not stream, "what is streaming already ends with an error event"
        assert full.value.code == "server_error"
        assert (await ask(client, stream, asked(HI))).choices[0].finish_reason == "stop"
        async with client_of(b, max_retries=3) as patient:
            with pytest.raises(openai.RateLimitError, match="has used its 1 turns") as limited:
                await ask(patient, stream, asked(HI))
        assert limited.value.code == "insufficient_quota"
        assert limited.value.response.request.headers["x-stainless-retry-count"] == "0"
        await b.handle.finish()
        with pytest.raises(openai.InternalServerError, match="this session is finished") as closed:
            await ask(client, stream, asked(HI))
        assert closed.value.status_code == 503


async def test_an_engine_that_dies_mid_stream_ends_the_stream_with_an_error() -> None:
    async with bench([Reply("one two three four five six", chunk=1, fault=Fault.CUT)]) as b, client_of(b) as client:
        seen: list[str] = []

        async def listen() -> None:
            async for chunk in await client.chat.completions.create(**asked(HI), stream=True):
                seen.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="Internal server error"):
            await listen()
        assert "".join(seen).startswith("one")
        (turn,) = await turns_of(b)
        assert turn.outcome is not Outcome.DELIVERED
        assert len(turn.output) > 0
        assert (await b.handle.finish()) == []


async def test_what_the_sdk_retries_trains_once() -> None:
    async with bench([Reply("never", fault=Fault.HTTP_503), "Hello."]) as b, client_of(b, max_retries=2) as client:
        reply = await ask(client, False, asked(HI))
        assert reply.choices[0].message.content == "Hello."
        assert len(b.engine.requests) == 2
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"Hello.{END}"]


async def test_keepalives_are_chunks_without_choices_and_no_matter_to_the_sdk() -> None:
    async with bench([Reply("one two three", chunk=1, delay=0.2)] * 2, keepalive=0.01) as b, client_of(b) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked(HI), stream=True)]
        assert [chunk for chunk in chunks if not chunk.choices], "an engine twenty keepalives slow"
        assert (await ask(client, True, asked(HI))).choices[0].message.content == "one two three"


async def test_characters_arrive_whole_however_the_engine_cuts_them() -> None:
    text = "é😀𝒳 ⟨ü⟩ 漢字 👩‍👩‍👧 ﷽ fin"
    async with bench([Reply(text, chunk=1)]) as b, client_of(b) as client:
        deltas = [c.choices[0].delta.content or "" async for c in await client.chat.completions.create(**asked(HI), stream=True)]
        assert "".join(deltas) == text
        assert len([d for d in deltas if d]) > 5
        assert not any("\ufffd" in d for d in deltas)


async def test_a_slow_reader_gets_everything() -> None:
    text = "word " * 10_000
    async with bench([Reply(text, chunk=10, style="incremental")]) as b:
        body = {"model": "m", "messages": HI, "stream": True}
        async with b.http.post(f"{b.handle.base_url}/v1/chat/completions", json=body) as answer:
            await answer.content.readany()
            await asyncio.sleep(0.5)
            sent = b""
            async for piece in answer.content.iter_chunked(1024):
                sent += piece
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in sent.split(b"\n\n")[1:-2] if line]
        assert sent.endswith(b"data: [DONE]\n\n")
        heard = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        assert len(heard) > len(text) // 2
        assert text.endswith(heard)


async def test_a_body_cut_into_single_bytes() -> None:
    async with bench(["Hé."]) as b:

        async def dribbled() -> Any:
            for byte in json.dumps({"model": "m", "messages": [{"role": "user", "content": "é😀"}]}, ensure_ascii=False).encode():
                yield bytes([byte])

        async with b.http.post(f"{b.handle.base_url}/v1/chat/completions", data=dribbled()) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == "Hé."
        assert "é😀" in b.tokenizer.decode(b.engine.requests[0]["input_ids"])


async def test_models() -> None:
    async with bench() as b, client_of(b) as client:
        (model,) = [model async for model in client.models.list()]
        assert (await client.models.retrieve(model.id)).id == model.id == "scripted"
        async with client_of(b, base_url=f"{b.gateway.url}/v1", api_key="guess") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_what_clients_vary_makes_no_fork() -> None:
    """Null content as an empty string, one string as a list of one part with a moved cache mark, arguments spelled anew."""
    async with bench(REPLIES) as b, client_of(b) as client:
        messages: list[Any] = [{"role": "user", "content": "Look at the files."}]
        for turn, _ in enumerate(REPLIES):
            reply = await ask(client, True, asked(messages))
            message, *given = results(reply)
            message["content"] = message["content"] or ""
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
            mark = {"cache_control": {"type": "ephemeral"}} if turn else {}
            messages[0] = {"role": "user", "content": [{"type": "text", "text": "Look at the files.", **mark}]}
            messages += [message, *given]
        assert_each_prompt_continues_the_one_before(b, await turns_of(b))


async def test_a_conversation_may_open_with_the_system_alone_and_server_tools_are_left_out() -> None:
    async with bench(["Hello.", "Still here."]) as b, client_of(b) as client:
        messages: list[Any] = [{"role": "developer", "content": "Greet."}]
        request: Any = {"model": "m", "messages": messages, "tools": [*TOOLS, {"type": "web_search_preview"}]}
        first = await client.chat.completions.create(**request)
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And now?"}]
        await client.chat.completions.create(**request)
        assert_each_prompt_continues_the_one_before(b, await turns_of(b))
        prompt = b.tokenizer.decode(b.engine.requests[0]["input_ids"])
        assert ("web_search" in prompt, '"read"' in prompt) == (False, True)
