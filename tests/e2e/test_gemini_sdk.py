"""The official google-genai SDK against the gateway: sync and async, whole and streamed, under v1 and v1beta; its chats, its errors."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel

from tests.e2e.agents import END, assert_each_prompt_continues_the_one_before, assert_lawful, hermes, trained_texts
from tests.support.gateways import Bench, bench
from turnloom import Limits
from turnloom.errors import StoreError
from turnloom.store.memory import MemoryStore
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Outcome, Turn

READ = types.FunctionDeclaration(
    name="read",
    description="Show a file.",
    parameters=types.Schema(type=types.Type.OBJECT, properties={"path": types.Schema(type=types.Type.STRING)}, required=["path"]),
)
REPLIES = [f"I look.\n{hermes('read', path='a.py')}", hermes("read", path="é/b.py") + "\n" + hermes("read", path="c.py"), "Both are empty."]
HI: list[Any] = [types.Content(role="user", parts=[types.Part(text="Hi")])]
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@dataclass
class Got:
    """A reply however it came: the contents that a client would bring back, and the last response, which has the usage."""

    contents: list[types.Content] = field(default_factory=list)
    last: types.GenerateContentResponse = field(default_factory=types.GenerateContentResponse)
    responses: int = 0

    def add(self, response: types.GenerateContentResponse) -> None:
        assert response.candidates, "every response that a client sees has a candidate"
        assert response.candidates[0].content is not None
        self.contents.append(response.candidates[0].content)
        self.last = response
        self.responses += 1

    @property
    def parts(self) -> list[types.Part]:
        return [part for content in self.contents for part in content.parts or ()]

    @property
    def text(self) -> str:
        return "".join(part.text or "" for part in self.parts if not part.thought)

    @property
    def thought(self) -> str:
        return "".join(part.text or "" for part in self.parts if part.thought)

    @property
    def calls(self) -> list[types.FunctionCall]:
        return [part.function_call for part in self.parts if part.function_call]

    @property
    def finish(self) -> str:
        assert self.last.candidates
        return str(self.last.candidates[0].finish_reason and self.last.candidates[0].finish_reason.value)

    @property
    def usage(self) -> tuple[Any, Any]:
        assert self.last.usage_metadata is not None
        return self.last.usage_metadata.prompt_token_count, self.last.usage_metadata.candidates_token_count


def client_of(b: Bench, version: str = "", **changes: Any) -> genai.Client:
    options = types.HttpOptions(base_url=b.gateway.url, api_version=version or None, **changes.pop("http", {}))
    return genai.Client(**{"api_key": b.handle.key, "http_options": options, **changes})


def ask_sync(client: genai.Client, stream: bool, contents: list[Any], **config: Any) -> Got:
    got = Got()
    request: dict[str, Any] = {"model": "m", "contents": contents, "config": types.GenerateContentConfig(**config)}
    for response in client.models.generate_content_stream(**request) if stream else [client.models.generate_content(**request)]:
        got.add(response)
    return got


async def ask(client: genai.Client, stream: bool, contents: list[Any], **config: Any) -> Got:
    got = Got()
    request: dict[str, Any] = {"model": "m", "contents": contents, "config": types.GenerateContentConfig(**config)}
    if not stream:
        got.add(await client.aio.models.generate_content(**request))
        return got
    async for response in await client.aio.models.generate_content_stream(**request):
        got.add(response)
    return got


def results(got: Got) -> list[types.Content]:
    """The next contents of a tool loop: the reply as it came, and a response for each call."""
    given = [
        types.Part(function_response=types.FunctionResponse(id=c.id, name=c.name, response={"output": f"{(c.args or {})['path']}: empty"}))
        for c in got.calls
    ]
    return [*got.contents, types.Content(role="user", parts=given)]


AGENT: dict[str, Any] = {
    "system_instruction": "Be brief.",
    "tools": [types.Tool(function_declarations=[READ])],
    "max_output_tokens": 200,
    "temperature": 0.1,
}


async def turns_of(b: Bench) -> list[Turn]:
    return list((await b.session()).tree.turns.values())


@BOTH
@pytest.mark.parametrize("version", ["", "v1beta"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_tool_loop_of_three_turns(kind: str, version: str, stream: bool) -> None:
    async with bench(REPLIES) as b:
        client = client_of(b, version)
        contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="Look at the files.")])]
        replies: list[Got] = []
        for _ in REPLIES:
            asking = (
                asyncio.to_thread(ask_sync, client, stream, contents, **AGENT) if kind == "sync" else ask(client, stream, contents, **AGENT)
            )
            replies.append(await asking)
            contents += results(replies[-1])

        assert [got.finish for got in replies] == ["STOP"] * 3
        assert [got.text.strip() for got in replies] == ["I look.", "", "Both are empty."]
        assert [c.args for c in replies[1].calls] == [{"path": "é/b.py"}, {"path": "c.py"}]
        turns = await turns_of(b)
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 3
        assert [t.fork is None for t in turns[1:]] == [True, True]
        assert [c.id for c in replies[1].calls] == [f"call_{turns[1].id}00", f"call_{turns[1].id}01"]
        assert [got.last.response_id for got in replies] == [t.id for t in turns]
        assert [got.usage for got in replies] == [(t.prompt_len, len(t.output)) for t in turns]
        assert_each_prompt_continues_the_one_before(b, turns)
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in REPLIES]


@BOTH
@pytest.mark.parametrize("echo", ["kept", "unthought", "bare"])
async def test_reasoning_and_ids_come_back_or_do_not(echo: str, stream: bool) -> None:
    """Gemini CLI leaves out the thoughts; pi the ids; what is left still names the turn."""
    replies = [
        f"<think>\nI must look.\n</think>\n\n{hermes('read', path='a.py')}\n{hermes('read', path='a.py')}",
        "<think>\nEmpty.\n</think>\n\nBoth are empty.",
    ]
    async with bench(replies, tokenizer=qwen_tokenizer("qwen3")) as b:
        client, contents = client_of(b), [types.Content(role="user", parts=[types.Part(text="Look.")])]
        for _ in replies:
            got = await ask(client, stream, contents, **AGENT, thinking_config=types.ThinkingConfig(include_thoughts=True))
            brought = [
                types.Content.model_validate(content.model_dump()) for content in (*results(got),) if content.parts and content.parts[0]
            ]
            for content in brought:
                content.parts = [p for p in content.parts or () if echo == "kept" or not p.thought]
                for part in content.parts:
                    for named in (part.function_call, part.function_response):
                        if named and echo == "bare":
                            named.id = None
            contents += [content for content in brought if content.parts]
        assert got.thought.strip() == "Empty."
        assert got.text.strip() == "Both are empty."
        turns = await turns_of(b)
        assert [t.fork is None for t in turns[1:]] == [True]
        assert_each_prompt_continues_the_one_before(b, turns)
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in replies]


@BOTH
async def test_reasoning_is_kept_on_record_where_it_is_not_asked_for(stream: bool) -> None:
    async with bench(["<think>\nHm.\n</think>\n\nHello."], tokenizer=qwen_tokenizer("qwen3")) as b:
        got = await ask(client_of(b), stream, HI)
        assert (got.text.strip(), got.thought) == ("Hello.", "")
        (sample,) = await b.handle.finish()
        assert trained_texts(b, sample) == [f"<think>\nHm.\n</think>\n\nHello.{END}"]


@BOTH
@pytest.mark.parametrize("keepalive", [15.0, 0.01], ids=["quick", "slow"])
async def test_a_chat_that_calls_its_functions_itself(stream: bool, keepalive: float) -> None:
    """Automatic function calling; the chat keeps its history through keepalives and brings it back in chunks."""
    seen: list[str] = []

    def read(path: str) -> str:
        """Show a file.

        Args:
            path: Where it is.
        """
        seen.append(path)
        return f"{path}: empty"

    replies = [*REPLIES, "You asked for files."]
    async with bench([Reply(text, chunk=3, delay=0.05) for text in replies], keepalive=keepalive) as b:
        chat = client_of(b).aio.chats.create(model="m", config=types.GenerateContentConfig(tools=[read], system_instruction="Be brief."))
        for text, answer in (("Look at the files.", "Both are empty."), ("What did I ask?", "You asked for files.")):
            if stream:
                said = "".join([chunk.text or "" async for chunk in await chat.send_message_stream(text) if not chunk.function_calls])
            else:
                said = (await chat.send_message(text)).text or ""
            assert said.endswith(answer)
        assert seen == ["a.py", "é/b.py", "c.py"]
        turns = await turns_of(b)
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 4
        assert [t.fork is None for t in turns[1:]] == [True] * 3
        assert_each_prompt_continues_the_one_before(b, turns)
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in replies]


async def test_a_chat_survives_an_empty_reply() -> None:
    async with bench(["", "There."]) as b:
        chat = client_of(b).aio.chats.create(model="m")
        assert "".join([chunk.text or "" async for chunk in await chat.send_message_stream("Are you there?")]) == ""
        assert (await chat.send_message("Well?")).text == "There."
        turns = await turns_of(b)
        assert turns[1].base == turns[0].id
        assert_each_prompt_continues_the_one_before(b, turns)


async def test_counting_tokens_says_what_the_prompt_will_have() -> None:
    async with bench(["Hi."]) as b:
        client = client_of(b)
        counted = await client.aio.models.count_tokens(model="m", contents=HI)
        got = await ask(client, False, HI)
        (turn,) = await turns_of(b)
        assert counted.total_tokens == got.usage[0] == turn.prompt_len
        whole = {
            "model": "models/m",
            "contents": [{"parts": [{"text": "Hi"}]}],
            "systemInstruction": {"parts": [{"text": "Be brief. " * 20}]},
        }
        answer = await b.post({"generateContentRequest": whole}, "/v1beta/models/m:countTokens")
        assert answer.body["totalTokens"] > counted.total_tokens
        assert len(await turns_of(b)) == 1, "a count is no turn"


async def test_models_are_listed_and_shown() -> None:
    async with bench() as b:
        client = client_of(b)
        (listed,) = [model async for model in await client.aio.models.list(config={"query_base": True})]
        shown = await client.aio.models.get(model="anything")
        assert listed.name is not None
        assert listed.name.startswith("models/")
        assert shown.name == "models/anything"
        assert "generateContent" in (listed.supported_actions or ())


@BOTH
async def test_logprobs_are_those_on_record(stream: bool) -> None:
    async with bench([Reply("Hé 😀.", chunk=1)]) as b:
        client, chosen = client_of(b), []
        request: dict[str, Any] = {"model": "m", "contents": HI, "config": types.GenerateContentConfig(response_logprobs=True)}
        responses = [await client.aio.models.generate_content(**request)] if not stream else []
        if stream:
            responses = [response async for response in await client.aio.models.generate_content_stream(**request)]
        for response in responses:
            found = response.candidates and response.candidates[0].logprobs_result
            chosen += (found and found.chosen_candidates) or []
        (turn,) = await turns_of(b)
        assert [t.log_probability for t in chosen] == pytest.approx(turn.logprobs.tolist())
        assert "".join(t.token or "" for t in chosen).endswith(END)
        assert responses[-1].candidates
        assert responses[-1].candidates[0].avg_logprobs == pytest.approx(float(turn.logprobs.mean()))


class Colour(BaseModel):
    name: str


@BOTH
async def test_structured_output_where_the_engine_has_a_grammar(stream: bool) -> None:
    qwen = qwen_tokenizer("qwen2.5")
    engine = ScriptedEngine(['{"name": "red"}'], tokenizer=qwen, end_id=qwen.control_tokens[END], grammar_backend="xgrammar")
    async with bench(engine=engine, tokenizer=qwen) as b:
        got = await ask(client_of(b), stream, HI, response_mime_type="application/json", response_schema=Colour)
        assert json.loads(got.text) == {"name": "red"}
        held = json.loads(b.engine.requests[0]["sampling_params"]["json_schema"])
        assert held["properties"]["name"]["type"] == "string"


@BOTH
async def test_a_stop_string_and_a_limit(stream: bool) -> None:
    async with bench(["one END two", "one two three four five six"]) as b:
        client = client_of(b)
        stopped = await ask(client, stream, HI, stop_sequences=["END"])
        assert (stopped.text, stopped.finish) == ("one ", "STOP")
        cut = await ask(client, stream, HI, max_output_tokens=3)
        assert (cut.finish, cut.usage[1]) == ("MAX_TOKENS", 3)


@BOTH
async def test_server_side_tools_are_declined_and_the_rest_goes_on(stream: bool) -> None:
    async with bench(["Hi."]) as b:
        tools = [types.Tool(google_search=types.GoogleSearch(), code_execution=types.ToolCodeExecution(), function_declarations=[READ])]
        assert (await ask(client_of(b), stream, HI, tools=tools)).text == "Hi."
        prompt = b.tokenizer.decode(b.engine.requests[0]["input_ids"])
        assert "read" in prompt
        assert "oogle" not in prompt


@BOTH
@pytest.mark.parametrize(
    ("fault", "code", "status", "expected"),
    [
        (Fault.HTTP_400, 400, "INVALID_ARGUMENT", errors.ClientError),
        (Fault.HTTP_429, 503, "UNAVAILABLE", errors.ServerError),
        (Fault.HTTP_503, 503, "UNAVAILABLE", errors.ServerError),
        (Fault.HTTP_500, 503, "UNAVAILABLE", errors.ServerError),
        (Fault.WRONG_ID, 500, "INTERNAL", errors.ServerError),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_engines_errors(kind: str, fault: Fault, code: int, status: str, expected: type[errors.APIError], stream: bool) -> None:
    async with bench([Reply("never", fault=fault)]) as b:
        client = client_of(b)
        with pytest.raises(expected) as raised:
            await (asyncio.to_thread(ask_sync, client, stream, HI) if kind == "sync" else ask(client, stream, HI))
        assert (raised.value.code, raised.value.status) == (code, status)
        assert ("RetryInfo" in str(raised.value.details)) == (code == 503)
        assert (await b.handle.finish()) == []


@BOTH
async def test_the_gateways_own_errors(stream: bool) -> None:
    class Full(MemoryStore):
        async def append(self, session_id: str, delta: Any) -> None:
            if len(delta.turn.output) > 3:
                raise StoreError("the disk is full")
            await super().append(session_id, delta)

    async with bench(["Much too long a reply", "Hi"], store=Full(), session_limits=Limits(max_turns=1)) as b:
        client = client_of(b)
        with pytest.raises(errors.ClientError, match="API key not valid") as unknown:
            await ask(client_of(b, api_key="guess"), stream, HI)
        assert (unknown.value.code, unknown.value.status) == (401, "UNAUTHENTICATED")
        with pytest.raises(errors.ClientError, match="prefilling a reply is not supported"):
            await ask(client, stream, [*HI, types.Content(role="model", parts=[types.Part(text="H")])])
        with pytest.raises(
            errors.ClientError, match=r"The input token count \(\d+\) exceeds the maximum number of tokens allowed \(32766\)"
        ):
            await ask(client, stream, [types.Content(role="user", parts=[types.Part(text="word " * 40_000)])])
        with pytest.raises(errors.ClientError) as missing:
            await client.aio.models.embed_content(model="m", contents="a")
        assert (missing.value.code, missing.value.status) == (404, "NOT_FOUND")
        with pytest.raises(errors.ServerError, match="the disk is full") as full:
            await ask(client, stream, HI)
        assert full.value.code == 500
        assert (await ask(client, stream, HI)).finish == "STOP"
        with pytest.raises(errors.ClientError, match="has used its 1 turns") as limited:
            await ask(client, stream, HI)
        assert (limited.value.code, limited.value.status) == (429, "RESOURCE_EXHAUSTED")
        await b.handle.finish()
        with pytest.raises(errors.ServerError, match="this session is finished") as closed:
            await ask(client, stream, HI)
        assert closed.value.code == 503


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_engine_that_dies_mid_stream_is_an_error_after_what_came(kind: str) -> None:
    async with bench([Reply("one two three four five six", chunk=1, fault=Fault.CUT)]) as b:
        client, seen = client_of(b), Got()

        def read_sync() -> None:
            for response in client.models.generate_content_stream(model="m", contents=HI):
                seen.add(response)

        async def read() -> None:
            async for response in await client.aio.models.generate_content_stream(model="m", contents=HI):
                seen.add(response)

        with pytest.raises(errors.ServerError):
            await (asyncio.to_thread(read_sync) if kind == "sync" else read())
        assert seen.text.startswith("one")
        assert seen.finish == "None"
        (turn,) = await turns_of(b)
        assert turn.outcome is not Outcome.DELIVERED
        assert len(turn.output) > 0
        assert (await b.handle.finish()) == []


async def test_what_the_sdk_retries_trains_once() -> None:
    async with bench([Reply("never", fault=Fault.HTTP_503), "Hello."]) as b:
        retries = types.HttpRetryOptions(attempts=3, initial_delay=0.01, max_delay=0.02, jitter=0.0)
        got = await ask(client_of(b, http={"retry_options": retries}), False, HI)
        assert got.text == "Hello."
        assert len(b.engine.requests) == 2
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"Hello.{END}"]
