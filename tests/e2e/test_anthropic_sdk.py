"""The official anthropic SDK against the gateway: sync and async, streaming and not, its errors, our own agent, the embedded engine."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from tests.e2e.agents import END, assert_each_prompt_continues_the_one_before, assert_lawful, hermes, stage, trained_texts
from tests.support.gateways import Bench, bench
from turnloom import Gateway, Limits, Sample
from turnloom.engine.local import start_local
from turnloom.errors import StoreError
from turnloom.export.check import check_engine
from turnloom.export.report import EngineReport, format_engine_report
from turnloom.harness import load_harness
from turnloom.store.memory import MemoryStore
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Outcome
from turnloom.wire.anthropic.write import AnthropicStream

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS: list[Any] = [{"name": "read", "description": "Show a file.", "input_schema": SCHEMA}]
REPLIES = [f"I look.\n{hermes('read', path='a.py')}", hermes("read", path="é/b.py") + "\n" + hermes("read", path="c.py"), "Both are empty."]


def asked(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 200, "system": "Be brief.", "tools": TOOLS, "messages": messages, **more}


def results(reply: Message) -> list[Any]:
    """The next two messages of a tool loop: the reply's own blocks, and a result for each call."""
    calls = [block for block in reply.content if block.type == "tool_use"]
    given = [{"type": "tool_result", "tool_use_id": call.id, "content": f"{call.input['path']}: empty"} for call in calls]
    return [{"role": "assistant", "content": reply.content}, {"role": "user", "content": given}]


def loop(client: anthropic.Anthropic, stream: bool) -> tuple[list[Message], list[int]]:
    """Three turns; the replies, and what `count_tokens` said before each."""
    messages: list[Any] = [{"role": "user", "content": "Look at the files."}]
    replies, counts = [], []
    for _ in REPLIES:
        counted = {k: v for k, v in asked(messages).items() if k != "max_tokens"}
        counts.append(client.messages.count_tokens(**counted).input_tokens)
        if stream:
            with client.messages.stream(**asked(messages)) as events:
                replies.append(events.get_final_message())
        else:
            replies.append(client.messages.create(**asked(messages)))
        messages += results(replies[-1])
    return replies, counts


async def aloop(client: anthropic.AsyncAnthropic, stream: bool) -> tuple[list[Message], list[int]]:
    messages: list[Any] = [{"role": "user", "content": "Look at the files."}]
    replies, counts = [], []
    for _ in REPLIES:
        counted = {k: v for k, v in asked(messages).items() if k != "max_tokens"}
        counts.append((await client.messages.count_tokens(**counted)).input_tokens)
        replies.append(await ask(client, stream, asked(messages)))
        messages += results(replies[-1])
    return replies, counts


async def ask(client: anthropic.AsyncAnthropic, stream: bool, request: dict[str, Any]) -> Message:
    if not stream:
        return await client.messages.create(**request)
    async with client.messages.stream(**request) as events:
        return await events.get_final_message()


def client_of(b: Bench, **changes: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(**{"base_url": b.handle.base_url, "api_key": b.handle.key, "max_retries": 0, **changes})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_tool_loop_of_three_turns(kind: str, stream: bool) -> None:
    async with bench(REPLIES) as b:
        if kind == "sync":
            with anthropic.Anthropic(base_url=b.handle.base_url, api_key=b.handle.key) as client:
                replies, counts = await asyncio.to_thread(loop, client, stream)
        else:
            async with client_of(b) as aclient:
                replies, counts = await aloop(aclient, stream)

        assert [reply.stop_reason for reply in replies] == ["tool_use", "tool_use", "end_turn"]
        assert [[block.type for block in reply.content] for reply in replies] == [["text", "tool_use"], ["tool_use", "tool_use"], ["text"]]
        assert [block.input for block in replies[1].content if block.type == "tool_use"] == [{"path": "é/b.py"}, {"path": "c.py"}]
        turns = list((await b.session()).tree.turns.values())
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 3
        assert [reply.usage.input_tokens for reply in replies] == [t.prompt_len for t in turns] == counts
        assert [reply.usage.output_tokens for reply in replies] == [len(t.output) for t in turns]
        assert_each_prompt_continues_the_one_before(b, turns)
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in REPLIES]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_lone_surrogate_in_a_call_is_no_trouble(stream: bool) -> None:
    """A model can write the half of a pair as an escape, which is JSON; the SDK's own JSON reader refuses it."""
    reply = '<tool_call>\n{"name": "read", "arguments": {"path": "a\\ud800"}}\n</tool_call>'
    async with bench([reply, "Done."]) as b, client_of(b) as client:
        messages: list[Any] = [{"role": "user", "content": "Look."}]
        first = await ask(client, stream, asked(messages))
        (call,) = first.content
        assert call.type == "tool_use"
        assert call.input == {"path": "a\ufffd"}
        await ask(client, stream, asked(messages + results(first)))
        assert_each_prompt_continues_the_one_before(b, list((await b.session()).tree.turns.values()))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fault", "status", "kind", "expected"),
    [
        (Fault.HTTP_400, 400, "invalid_request_error", anthropic.BadRequestError),
        (Fault.HTTP_429, 529, "overloaded_error", anthropic.InternalServerError),
        (Fault.HTTP_503, 529, "overloaded_error", anthropic.InternalServerError),
        (Fault.HTTP_500, 503, "api_error", anthropic.InternalServerError),
        (Fault.WRONG_ID, 502, "api_error", anthropic.InternalServerError),
    ],
)
async def test_the_engines_errors(fault: Fault, status: int, kind: str, expected: type[anthropic.APIStatusError], stream: bool) -> None:
    async with bench([Reply("never", fault=fault)]) as b, client_of(b) as client:
        with pytest.raises(expected) as raised:
            await ask(client, stream, asked([{"role": "user", "content": "Hi"}]))
        assert (raised.value.status_code, raised.value.body["error"]["type"]) == (status, kind)
        assert (await b.handle.finish()) == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_gateways_own_errors(stream: bool) -> None:
    class Full(MemoryStore):
        async def append(self, session_id: str, delta: Any) -> None:
            if len(delta.turn.output) > 3:
                raise StoreError("the disk is full")
            await super().append(session_id, delta)

    hello: list[Any] = [{"role": "user", "content": "Hi"}]
    async with bench(["Much too long a reply", "Hi"], store=Full(), session_limits=Limits(max_turns=1)) as b, client_of(b) as client:
        async with client_of(b, base_url=b.gateway.url, api_key="guess") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await ask(stranger, stream, asked(hello))
        with pytest.raises(anthropic.BadRequestError, match="prefilling a reply is not supported"):
            await ask(client, stream, asked([*hello, {"role": "assistant", "content": "H"}]))
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 32766 maximum"):
            await ask(client, stream, asked([{"role": "user", "content": "word " * 40_000}]))
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.batches.list()
        with pytest.raises(anthropic.APIStatusError, match="the disk is full") as full:
            await ask(client, stream, asked(hello))
        assert full.value.status_code == (200 if stream else 500), "what is streaming already ends with an error event"
        assert full.value.body["error"]["type"] == "api_error"
        assert (await ask(client, stream, asked(hello))).stop_reason == "end_turn"
        async with client_of(b, max_retries=3) as patient:
            with pytest.raises(anthropic.RateLimitError, match="has used its 1 turns") as limited:
                await ask(patient, stream, asked(hello))
        assert limited.value.response.headers["x-should-retry"] == "false"
        assert limited.value.response.request.headers["x-stainless-retry-count"] == "0"
        await b.handle.finish()
        with pytest.raises(anthropic.InternalServerError, match="this session is finished") as closed:
            await ask(client, stream, asked(hello))
        assert closed.value.status_code == 503


THOUGHTS = [f"<think>\nI must look.\n</think>\n\nI look.\n{hermes('read', path='a.py')}", "<think>\nEmpty.\n</think>\n\nIt is empty."]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("echo", ["kept", "dropped", "redacted"])
async def test_thinking_comes_back_or_does_not_and_the_history_goes_on(echo: str, stream: bool) -> None:
    async with bench(THOUGHTS, tokenizer=qwen_tokenizer("qwen3")) as b, client_of(b) as client:
        messages: list[Any] = [{"role": "user", "content": "Look."}]
        thinking: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
        for _ in THOUGHTS:
            reply = await ask(client, stream, asked(messages, **thinking))
            thought, *rest = reply.content
            assert thought.type == "thinking"
            if echo == "kept":
                rest = [thought, *rest]
            elif echo == "redacted":
                rest = [{"type": "redacted_thinking", "data": thought.signature}, *rest]
            given = results(reply)[1]["content"] or "Thanks."
            messages += [{"role": "assistant", "content": rest}, {"role": "user", "content": given}]
        one, two = (await b.session()).tree.turns.values()
        assert (two.base, two.fork, two.respelled) == (one.id, None, 0)
        assert_each_prompt_continues_the_one_before(b, [one, two])
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in THOUGHTS]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_thinking_that_nobody_asked_for_is_kept_and_not_shown(stream: bool) -> None:
    async with bench(THOUGHTS, tokenizer=qwen_tokenizer("qwen3")) as b, client_of(b) as client:
        messages: list[Any] = [{"role": "user", "content": "Look."}]
        for _ in THOUGHTS:
            reply = await ask(client, stream, asked(messages))
            assert {block.type for block in reply.content} <= {"text", "tool_use"}
            given = results(reply)[1]["content"] or "Thanks."
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": given}]
        one, two = (await b.session()).tree.turns.values()
        assert (two.base, two.fork, two.respelled) == (one.id, None, 0)
        (sample,) = await b.handle.finish()
        assert trained_texts(b, sample) == [f"{reply}{END}" for reply in THOUGHTS]


async def test_a_server_tool_is_declined_by_name_and_its_client_goes_on() -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    hello: list[Any] = [{"role": "user", "content": "Hi"}]
    async with bench(["Hello."]) as b, client_of(b) as client:
        with pytest.raises(anthropic.BadRequestError, match="'web_search' runs on the provider's servers"):
            await client.messages.create(**asked(hello, tools=[search], tool_choice={"type": "tool", "name": "web_search"}))
        reply = await client.messages.create(**asked(hello, tools=[search, *TOOLS]))
        assert reply.stop_reason == "end_turn"
        (turn,) = (await b.session()).tree.turns.values()
        prompt = b.tokenizer.decode(turn.appended.tolist())
        assert "web_search" not in prompt
        assert '"read"' in prompt
        async with b.http.get(b.gateway.url + "/metrics") as answer:
            assert "turnloom_declined_tools_total 1.0" in await answer.text()


async def test_a_busy_engine_says_when_to_ask_again_and_a_wrong_key_that_it_cannot_help() -> None:
    hello: list[Any] = [{"role": "user", "content": "Hi"}]
    async with bench([Reply("never", fault=Fault.HTTP_503)]) as b, client_of(b) as client:
        with pytest.raises(anthropic.InternalServerError) as busy:
            await client.messages.create(**asked(hello))
        assert (busy.value.status_code, busy.value.response.headers["retry-after"]) == (529, "1")
        async with client_of(b, base_url=b.gateway.url, api_key="guess") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await stranger.messages.create(**asked(hello))
        assert unknown.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_keepalives_are_nothing_to_the_sdk(kind: str) -> None:
    """The engine goes on once the client's socket has had three of them."""
    pings = 0

    def counted(self: AnthropicStream) -> bytes:
        nonlocal pings
        pings += 1
        if pings == 3:
            waiting.set()
        return plain(self)

    async def gate(_: dict[str, Any], count: int) -> None:
        if count == 1:
            await waiting.wait()

    waiting, plain = asyncio.Event(), AnthropicStream.ping
    tokenizer = qwen_tokenizer("qwen2.5")
    engine = ScriptedEngine([Reply("One two three", chunk=1)], tokenizer=tokenizer, end_id=tokenizer.control_tokens[END], gate=gate)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AnthropicStream, "ping", counted)
        async with bench(engine=engine, keepalive=0.05) as b:
            if kind == "sync":
                with anthropic.Anthropic(base_url=b.handle.base_url, api_key=b.handle.key) as client:
                    reply = await asyncio.to_thread(whole_stream, client)
            else:
                async with client_of(b) as aclient:
                    reply = await ask(aclient, True, asked([{"role": "user", "content": "Hi"}]))
    assert pings >= 3
    assert [block.text for block in reply.content if block.type == "text"] == ["One two three"]


def whole_stream(client: anthropic.Anthropic) -> Message:
    with client.messages.stream(**asked([{"role": "user", "content": "Hi"}])) as events:
        return events.get_final_message()


async def test_an_engine_that_dies_mid_stream_ends_the_stream_with_an_error() -> None:
    async with bench([Reply("one two three four five six", chunk=1, fault=Fault.CUT)]) as b, client_of(b) as client:
        seen: list[str] = []

        async def read() -> None:
            async with client.messages.stream(**asked([{"role": "user", "content": "Count"}])) as events:
                async for text in events.text_stream:
                    seen.append(text)

        with pytest.raises(anthropic.APIStatusError) as raised:
            await read()
        assert raised.value.body["error"]["type"] == "api_error"
        assert "".join(seen).startswith("one")
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.outcome is not Outcome.DELIVERED
        assert len(turn.output) > 0
        assert (await b.handle.finish()) == []


async def test_what_the_sdk_retries_trains_once() -> None:
    async with bench([Reply("never", fault=Fault.HTTP_503), "Hello."]) as b, client_of(b, max_retries=2) as client:
        reply = await client.messages.create(**asked([{"role": "user", "content": "Hi"}]))
        assert [block.text for block in reply.content if block.type == "text"] == ["Hello."]
        assert len(b.engine.requests) == 2
        (sample,) = await b.handle.finish()
        assert_lawful([sample])
        assert trained_texts(b, sample) == [f"Hello.{END}"]


async def test_a_conversation_of_two_clients_at_once_stays_two_lineages() -> None:
    def answer(body: dict[str, Any], _: int) -> str:
        prompt = qwen.decode(body["input_ids"])
        return "To the left." if "left" in prompt else "To the right."

    qwen = qwen_tokenizer("qwen2.5")
    engine = ScriptedEngine(answer, tokenizer=qwen, end_id=qwen.control_tokens[END])
    async with bench(engine=engine, tokenizer=qwen) as b, client_of(b) as client:

        async def talk(side: str) -> None:
            messages: list[Any] = [{"role": "user", "content": f"Go {side}."}]
            for _ in range(3):
                reply = await ask(client, True, asked(messages))
                messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "On."}]

        await asyncio.gather(talk("left"), talk("right"))
        samples = await b.handle.finish()
        assert_lawful(samples)
        assert sorted(trained_texts(b, sample) for sample in samples) == [[f"To the left.{END}"] * 3, [f"To the right.{END}"] * 3]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_our_own_agent_on_a_task_of_three_tools(stream: bool) -> None:
    async with stage(node=False) as s:
        make, change = {"path": "notes.txt", "old": "", "new": "one\ntwo\n"}, {"path": "notes.txt", "old": "two", "new": "2"}
        s.replies = [f"I make it.\n{hermes('edit', **make)}", hermes("edit", **change) + "\n" + hermes("read", path="notes.txt")]
        s.replies += [hermes("bash", cmd="ls"), hermes("bash", command="wc -l notes.txt; exit 3"), "Done."]
        run = await s.run(load_harness("sdk-agent", stream=stream), "Make notes.txt, then change it.")
        assert (run.exit_code, run.stderr) == (0, "")
        assert run.stdout.endswith("Done.\n")
        assert await s.sandbox.read_file("notes.txt") == b"one\n2\n"
        turns = await s.turns()
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 5
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]
        context = s.bench.tokenizer.decode(sample.token_ids.tolist())
        assert "bash needs command as text" in context
        assert "2 notes.txt\n[exit code 3]" in context


@pytest.mark.engine
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_two_turns_with_a_real_model(stream: bool) -> None:
    """The embedded engine behind the gateway, then another one that recomputes every logprob."""
    with Gateway.background(engine="local:smollm2") as gateway:
        session = gateway.open_session()
        messages: list[Any] = [{"role": "user", "content": "Name a colour."}]
        with anthropic.Anthropic(base_url=session.base_url, api_key=session.key, max_retries=0) as client:
            for _ in range(2):
                request = {"model": "m", "max_tokens": 24, "messages": messages}
                if stream:
                    with client.messages.stream(**request) as events:
                        reply = events.get_final_message()
                else:
                    reply = client.messages.create(**request)
                assert reply.stop_reason in ("end_turn", "max_tokens")
                messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Another one?"}]
        assert session.stats()["forks"] == 0
        (sample,) = session.finish()
    assert_lawful([sample])
    assert sample.statuses["bridged"] == 1
    assert ((sample.turn_index >= 0) == (sample.loss_mask == 1)).all(), "every sampled token trains"
    report = asyncio.run(recomputed(sample))
    assert report.ok, "\n".join(format_engine_report(report))
    assert report.compared == int(sample.loss_mask.sum())
    assert report.max is not None
    assert report.max <= 1e-3


async def recomputed(sample: Sample) -> EngineReport:
    engine = await start_local("smollm2")
    try:
        return await check_engine([sample], engine)
    finally:
        await engine.close()
