"""The official openai SDK's responses against the gateway: sync and async, streaming and not, its errors, its helpers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.e2e.agents import END, assert_each_prompt_continues_the_one_before, assert_lawful, hermes, trained_texts
from tests.support.gateways import Bench, bench
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import ForkKind, Outcome, Turn

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ: dict[str, Any] = {"type": "function", "name": "read", "description": "Show a file.", "parameters": SCHEMA, "strict": False}
REPLIES = [f"I look.\n{hermes('read', path='a.py')}", hermes("read", path="é/b.py") + "\n" + hermes("read", path="c.py"), "Both are empty."]
THOUGHTS = [f"<think>\nI must look.\n</think>\n\nI look.\n{hermes('read', path='a.py')}", "<think>\nEmpty.\n</think>\n\nIt is empty."]
HI: list[Any] = [{"role": "user", "content": "Hi"}]
LOOK: list[Any] = [{"role": "user", "content": "Look at the files."}]


def asked(items: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_output_tokens": 200, "instructions": "Be brief.", "tools": [READ], "input": items, **more}


def outputs(reply: Response) -> list[Any]:
    """A result for each call of a reply."""
    calls = [item for item in reply.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": c.call_id, "output": f"{json.loads(c.arguments)['path']}: empty"} for c in calls]


def echo(reply: Response) -> list[Any]:
    return [item.to_dict() for item in reply.output]


def ask_sync(client: openai.OpenAI, stream: bool, request: dict[str, Any]) -> Response:
    if not stream:
        return client.responses.create(**request)
    with client.responses.stream(**request) as events:
        return events.get_final_response()


async def ask(client: openai.AsyncOpenAI, stream: bool, request: dict[str, Any]) -> Response:
    if not stream:
        return await client.responses.create(**request)
    async with client.responses.stream(**request) as events:
        return await events.get_final_response()


def client_of(b: Bench, **changes: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": f"{b.handle.base_url}/v1", "api_key": b.handle.key, "max_retries": 0, **changes})


async def turns_of(b: Bench) -> list[Turn]:
    return list((await b.session()).tree.turns.values())


def prompts(b: Bench) -> list[str]:
    return [b.tokenizer.decode(request["input_ids"]) for request in b.engine.requests]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_tool_loop_of_three_turns(kind: str, stream: bool) -> None:
    async with bench(REPLIES) as b:
        items, replies, counts = list(LOOK), [], []
        with openai.OpenAI(base_url=f"{b.gateway.url}/v1", api_key=b.handle.key) as client:
            async with client_of(b) as aclient:
                for _ in REPLIES:
                    counted = {k: v for k, v in asked(items).items() if k != "max_output_tokens"}
                    if kind == "sync":
                        counts.append((await asyncio.to_thread(client.responses.input_tokens.count, **counted)).input_tokens)
                        replies.append(await asyncio.to_thread(ask_sync, client, stream, asked(items)))
                    else:
                        counts.append((await aclient.responses.input_tokens.count(**counted)).input_tokens)
                        replies.append(await ask(aclient, stream, asked(items)))
                    items += echo(replies[-1]) + outputs(replies[-1])

        assert [reply.status for reply in replies] == ["completed"] * 3
        assert [[item.type for item in reply.output] for reply in replies] == [
            ["message", "function_call"],
            ["function_call", "function_call"],
            ["message"],
        ]
        assert [json.loads(item.arguments) for item in replies[1].output if item.type == "function_call"] == [
            {"path": "é/b.py"},
            {"path": "c.py"},
        ]
        turns = await turns_of(b)
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 3
        assert [t.fork is None for t in turns[1:]] == [True, True]
        assert [reply.id for reply in replies] == [f"resp_{t.id}i" for t in turns]
        assert [reply.usage and reply.usage.input_tokens for reply in replies] == [t.prompt_len for t in turns] == counts
        assert [reply.usage and reply.usage.output_tokens for reply in replies] == [len(t.output) for t in turns]
        assert_each_prompt_continues_the_one_before(b, turns)
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in REPLIES]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("instructions", ["Be brief.", None])
async def test_a_loop_that_sends_only_what_is_new(instructions: str | None, stream: bool) -> None:
    async with bench(REPLIES) as b, client_of(b) as client:
        items, previous = list(LOOK), None
        for _ in REPLIES:
            reply = await ask(client, stream, asked(items, instructions=instructions, previous_response_id=previous))
            assert reply.previous_response_id == previous
            items, previous = outputs(reply), reply.id
        turns = await turns_of(b)
        assert_each_prompt_continues_the_one_before(b, turns)
        assert prompts(b)[-1].count("Be brief.") == (instructions is not None)
        (sample,) = await b.handle.finish()
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in REPLIES]


async def test_instructions_are_not_inherited_and_what_a_message_says_is() -> None:
    async with bench(["One.", "Two.", "Three."]) as b, client_of(b) as client:
        first = await ask(client, False, asked([{"role": "developer", "content": "Stay."}, *HI], instructions="Be brief."))
        second = await ask(client, False, asked(HI, instructions=None, previous_response_id=first.id))
        third = await ask(client, False, asked(HI, instructions="Be long.", previous_response_id=second.id))
        assert third.output_text == "Three."
        said = [[words in prompt for words in ("Be brief.", "Be long.", "Stay.", "One.")] for prompt in prompts(b)]
        assert said == [[True, False, True, False], [False, False, True, True], [False, True, True, True]]


async def test_an_unknown_previous_response_is_said_in_openais_words() -> None:
    async with bench(["One."]) as b, client_of(b) as client:
        for response_id in ("resp_123", f"resp_{'0' * 32}"):
            with pytest.raises(openai.BadRequestError, match=f"Previous response with id '{response_id}' not found.") as unknown:
                await ask(client, True, asked(HI, previous_response_id=response_id))
            assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
        first = await ask(client, False, asked(HI))
        other = await b.gateway.open_session()
        async with client_of(b, base_url=f"{other.base_url}/v1", api_key=other.key) as stranger:
            with pytest.raises(openai.BadRequestError, match="not found"):
                await ask(stranger, False, asked(HI, previous_response_id=first.id))


def whole_echo(items: list[Any]) -> list[Any]:
    return items


def without_words(items: list[Any]) -> list[Any]:
    """Reasoning comes back by its reference alone."""
    return [{**item, "content": None, "summary": []} if item["type"] == "reasoning" else item for item in items]


def without_ids(items: list[Any]) -> list[Any]:
    return [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]


def without_reasoning(items: list[Any]) -> list[Any]:
    return [item for item in without_ids(items) if item["type"] != "reasoning"]


@pytest.mark.parametrize("echoed", [whole_echo, without_words, without_ids, without_reasoning])
@pytest.mark.parametrize("summary", ["auto", None])
async def test_reasoning_is_sent_and_comes_back_or_does_not(summary: str | None, echoed: Any) -> None:
    async with bench(THOUGHTS, tokenizer=qwen_tokenizer("qwen3")) as b, client_of(b) as client:
        items = list(LOOK)
        replies = []
        for _ in THOUGHTS:
            replies.append(await ask(client, True, asked(items, store=False, reasoning={"summary": summary})))
            items += echoed(echo(replies[-1])) + outputs(replies[-1])
        assert [[item.type for item in reply.output] for reply in replies] == [
            ["reasoning", "message", "function_call"],
            ["reasoning", "message"],
        ]
        thought: Any = replies[0].output[0]
        assert (thought.summary if summary else thought.content)[0].text.strip() == "I must look."
        assert thought.encrypted_content
        assert replies[1].output_text == "It is empty."
        assert_each_prompt_continues_the_one_before(b, await turns_of(b))
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in THOUGHTS]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_freeform_tools_and_namespaces(stream: bool) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}
    tools = [
        {"type": "custom", "name": "patch", "description": "Apply a patch.", "format": grammar},
        {"type": "namespace", "name": "mcp__fs", "description": "Files", "tools": [READ]},
        {"type": "web_search"},
    ]
    patch = "*** Begin\n+é\n*** End"
    replies = [hermes("patch", input=patch) + "\n" + hermes("mcp__fs__read", path="a"), "Done."]
    async with bench(replies) as b, client_of(b) as client:
        first = await ask(client, stream, asked(LOOK, tools=tools))
        call, read = first.output
        assert call.type == "custom_tool_call"
        assert (call.name, call.input) == ("patch", patch)
        assert read.type == "function_call"
        assert (read.namespace, read.name, json.loads(read.arguments)) == ("mcp__fs", "read", {"path": "a"})
        given = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        await ask(client, stream, asked([*LOOK, *echo(first), given, *outputs(first)], tools=tools))
        assert_each_prompt_continues_the_one_before(b, await turns_of(b))
        shown = prompts(b)[0]
        assert [word in shown for word in ("lark grammar", "mcp__fs__read", "web_search")] == [True, True, False]


async def test_calls_and_outputs_in_turn_are_still_one_reply() -> None:
    async with bench(REPLIES[1:]) as b, client_of(b) as client:
        first = await ask(client, False, asked(LOOK))
        pairs = zip(echo(first), outputs(first), strict=True)
        await ask(client, False, asked([*LOOK, *(item for pair in pairs for item in pair)]))
        assert_each_prompt_continues_the_one_before(b, await turns_of(b))


async def test_a_reply_that_was_cut_goes_on_after_itself() -> None:
    """Codex takes `response.incomplete` for a broken stream: it keeps what it has and asks for what comes next."""
    async with bench(["One two three four five", "six.", "Done."]) as b, client_of(b) as client:
        cut = [e async for e in await client.responses.create(**asked(HI, max_output_tokens=3), stream=True)][-1]
        assert cut.type == "response.incomplete"
        assert cut.response.incomplete_details is not None
        assert cut.response.incomplete_details.reason == "max_output_tokens"
        assert cut.response.usage is not None
        assert cut.response.usage.output_tokens == 3
        more = await ask(client, True, asked([*HI, *echo(cut.response)]))
        await ask(client, False, asked([*HI, *echo(cut.response), *echo(more), {"role": "user", "content": "On."}]))
        turns = await turns_of(b)
        assert [t.fork for t in turns[1:]] == [None, None]
        assert_each_prompt_continues_the_one_before(b, turns)


async def test_what_a_broken_stream_left_is_not_in_the_way() -> None:
    """Reasoning that was whole when the stream broke comes back before the same question; the answer is asked for anew."""
    cut = Reply(THOUGHTS[1] + " And more words than that." * 4, chunk=1, fault=Fault.CUT)
    async with bench([cut, *THOUGHTS], tokenizer=qwen_tokenizer("qwen3")) as b, client_of(b) as client:
        events = [e async for e in await client.responses.create(**asked(LOOK, store=False), stream=True)]
        assert events[-1].type == "response.failed"
        remains = [e.item.to_dict() for e in events if e.type == "response.output_item.done"]
        assert [item["type"] for item in remains] == ["reasoning"]
        items = [*LOOK, *remains]
        for _ in THOUGHTS:
            reply = await ask(client, True, asked(items, store=False))
            items += echo(reply) + outputs(reply)
        failed, first, second = await turns_of(b)
        assert failed.outcome is not Outcome.DELIVERED
        assert (second.base, second.fork) == (first.id, None)
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in THOUGHTS]


class Colour(BaseModel):
    name: str


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_structured_output_where_the_engine_has_a_grammar(stream: bool) -> None:
    qwen = qwen_tokenizer("qwen2.5")
    engine = ScriptedEngine(['{"name": "red"}'], tokenizer=qwen, end_id=qwen.control_tokens[END], grammar_backend="xgrammar")
    async with bench(engine=engine, tokenizer=qwen) as b, client_of(b) as client:
        request: Any = {"model": "m", "input": HI, "text_format": Colour}
        if stream:
            async with client.responses.stream(**request) as events:
                found = (await events.get_final_response()).output_parsed
        else:
            found = (await client.responses.parse(**request)).output_parsed
        assert found == Colour(name="red")
        held = json.loads(b.engine.requests[0]["sampling_params"]["json_schema"])
        assert held["properties"]["name"]["type"] == "string"


@pytest.mark.parametrize("path", ["/v1/responses", "/s/KEY/v1/responses"])
async def test_a_websocket_is_refused_so_that_codex_posts_at_once(path: str) -> None:
    async with bench([]) as b:
        headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x" * 22 + "=="}
        async with b.http.get(b.gateway.url + path.replace("KEY", b.handle.key), headers=headers) as answer:
            assert answer.status == 426
            assert "POST" in (await answer.json())["error"]["message"]


async def test_a_history_that_was_changed_is_a_fork_whatever_its_ids_say() -> None:
    async with bench(["One.", "Two."]) as b, client_of(b) as client:
        (item,) = echo(await ask(client, False, asked(HI)))
        item["content"][0]["text"] = "Something else."
        await ask(client, False, asked([*HI, item, *HI]))
        fork = (await turns_of(b))[1].fork
        assert fork is not None
        assert fork.kind is ForkKind.HISTORY_CHANGED
        assert "Something else." in prompts(b)[1]
