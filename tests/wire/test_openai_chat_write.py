"""Writing Chat Completions: neutral replies in, bytes out that the official SDK's own types take without a field to spare."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.support.openai_chat import CREATED, OURS, TURN, chat_reply, chunks_of, extras, head_of, stream
from turnloom.core.match import CANONICAL, echo_keys, message_key, strict_key
from turnloom.parse.contract import ReasoningDelta, TextDelta
from turnloom.types import Finish, FinishReason, Message, Reasoning, Request, Text, Tool, ToolCall
from turnloom.wire import freeform
from turnloom.wire.contract import Reply, SampledToken, SampledTokens
from turnloom.wire.json import whole_text
from turnloom.wire.openai_chat import OpenAIChatDialect

DIALECT = OpenAIChatDialect()
LENGTH = Finish(FinishReason.LENGTH)
LS = Tool("ls", "List", "{}")
PATCH = Tool("patch", "Patch", freeform.PARAMETERS, freeform=True)


def body_of(*replies: Reply) -> ChatCompletion:
    """The body as the SDK's type; no field that the type does not have, but reasoning."""
    completion = ChatCompletion.model_validate_json(DIALECT.write(replies))
    assert extras(completion) <= OURS
    return completion


def test_write_a_completion_that_the_sdk_reads() -> None:
    call = ToolCall(f"call_{TURN}00", "ls", '{"path" : "."}')
    completion = body_of(chat_reply(Reasoning("hmm"), Text("\nHi"), call, Text(" you")))
    (choice,) = completion.choices
    assert (completion.id, completion.model, completion.created) == (f"chatcmpl-{TURN}", "m", CREATED)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "tool_calls", None)
    assert (choice.message.content, choice.message.refusal, extra(choice.message)) == ("\nHi you", None, {"reasoning_content": "hmm"})
    assert [c.model_dump() for c in choice.message.tool_calls or ()] == [
        {"id": call.id, "type": "function", "function": {"name": "ls", "arguments": '{"path" : "."}'}}
    ]
    assert completion.usage is not None
    assert completion.usage.model_dump(exclude_none=True) == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def extra(model: BaseModel) -> dict[str, Any]:
    return model.model_extra or {}


@pytest.mark.parametrize(
    ("parts", "content"),
    [((), ""), ((Reasoning("hm"),), ""), ((ToolCall("c", "ls", "{}"),), None), ((Text("\n"), ToolCall("c", "ls", "{}")), "\n")],
)
def test_content_is_a_string_unless_only_calls_are_made(parts: tuple[Any, ...], content: str | None) -> None:
    reply = chat_reply(*parts)
    assert body_of(reply).choices[0].message.content == content
    assert accumulated(stream(reply)).choices[0].message.content == content


FINISHES = {
    "stop": chat_reply(Text("a")),
    "stop at a string": chat_reply(Text("a"), finish=Finish(FinishReason.STOP, "END")),
    "length": chat_reply(Text("a"), finish=LENGTH),
    "tool_calls": chat_reply(Text("a"), ToolCall("c", "ls", "{}")),
    "length before calls": chat_reply(ToolCall("c", "ls", "{}"), finish=LENGTH),
}


@pytest.mark.parametrize(("name", "reply"), FINISHES.items(), ids=FINISHES)
def test_finish_reasons(name: str, reply: Reply) -> None:
    assert body_of(reply).choices[0].finish_reason == name.split()[0]
    assert accumulated(stream(reply)).choices[0].finish_reason == name.split()[0]


def test_several_choices_share_a_prompt_and_an_id() -> None:
    replies = [chat_reply(Text(f"reply {i}"), choices=3, turn_id=f"{i:032x}", output_tokens=i + 1) for i in range(3)]
    completion = body_of(*replies)
    assert completion.id == f"chatcmpl-{0:032x}"
    assert [(c.index, c.message.content) for c in completion.choices] == [(0, "reply 0"), (1, "reply 1"), (2, "reply 2")]
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (7, 6, 13)


def test_a_custom_tools_call_is_a_string_again() -> None:
    made = chat_reply(ToolCall("c1", "patch", '{"input": "a \\"b\\"\\n\\ud800"}'), ToolCall("c2", "ls", "{}"), tools=(LS, PATCH))
    calls = [c.model_dump() for c in body_of(made).choices[0].message.tool_calls or ()]
    assert calls == [
        {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a "b"\n\ufffd'}},
        {"id": "c2", "type": "function", "function": {"name": "ls", "arguments": "{}"}},
    ]
    deltas = [d for c in chunks_of(stream(made)) for d in c["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas == [
        {"index": 0, "id": "c1", "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 0, "custom": {"input": 'a "b"\n\ufffd'}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "ls", "arguments": ""}},
        {"index": 1, "function": {"arguments": "{}"}},
    ]


@pytest.mark.parametrize("arguments", ['{"input": 1}', '{"input": "a", "more": 2}', "{}", '{"patch": "a"}'])
def test_what_is_no_one_string_reaches_the_client_as_it_was_written_and_is_said_to_be_none(arguments: str) -> None:
    (call,) = body_of(chat_reply(ToolCall("c1", "patch", arguments), tools=(PATCH,))).choices[0].message.tool_calls or ()
    assert call.type == "custom"
    assert call.custom.input == 'not {"input": string}: ' + arguments


LOGPROBS = (SampledToken("Hé", -0.5), SampledToken("\ufffd", -1.25), SampledToken("<|im_end|>", float("-inf")))


def test_logprobs_where_they_are_asked_for() -> None:
    reply = chat_reply(Text("Hé"), logprobs=True, tokens=LOGPROBS)
    (choice,) = body_of(reply).choices
    assert choice.logprobs is not None
    assert [t.model_dump() for t in choice.logprobs.content or ()] == [
        {"token": "Hé", "bytes": [72, 195, 169], "logprob": -0.5, "top_logprobs": []},
        {"token": "\ufffd", "bytes": None, "logprob": -1.25, "top_logprobs": []},
        {"token": "<|im_end|>", "bytes": list(b"<|im_end|>"), "logprob": -9999.0, "top_logprobs": []},
    ]
    sent = stream(reply, SampledTokens(LOGPROBS[:1]), TextDelta("Hé"), SampledTokens(LOGPROBS[1:]))
    assert accumulated(sent).choices[0].logprobs == choice.logprobs
    assert body_of(chat_reply(Text("a"), tokens=LOGPROBS)).choices[0].logprobs is None
    assert body_of(chat_reply(Text("a"), logprobs=True)).choices[0].model_dump()["logprobs"] == {"content": [], "refusal": None}


def test_stream_a_transcript() -> None:
    call = ToolCall(f"call_{TURN}00", "ls", '{"path": "."}')
    events = [ReasoningDelta("hm"), ReasoningDelta("m"), TextDelta(""), TextDelta("\n\n"), TextDelta("Hi"), call, TextDelta(" you")]
    sent = stream(chat_reply(Reasoning("hmm"), Text("\n\nHi"), call, Text(" you")), *events, include_usage=True, pings=1)
    assert sent.endswith(b"data: [DONE]\n\n")
    chunks = chunks_of(sent)
    for chunk in chunks:
        assert extras(ChatCompletionChunk.model_validate(chunk, strict=True)) <= OURS
        assert (chunk["id"], chunk["created"], chunk["model"], chunk["object"]) == (
            f"chatcmpl-{TURN}",
            CREATED,
            "m",
            "chat.completion.chunk",
        )
    assert [c["choices"][0]["delta"] for c in chunks if c["choices"]] == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "hm"},
        {"reasoning_content": "m"},
        {"content": "\n\n"},
        {"content": "Hi"},
        {"tool_calls": [{"index": 0, "id": call.id, "type": "function", "function": {"name": "ls", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"path": "."}'}}]},
        {"content": " you"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]] == [None] * 8 + ["tool_calls"]
    assert (chunks[1]["choices"], chunks[1]["usage"]) == ([], None), "a keepalive is a chunk without choices"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10})
    assert all(c["usage"] is None for c in chunks[:-1])


def test_no_usage_where_none_is_asked_for() -> None:
    chunks = chunks_of(stream(chat_reply(Text("Hi")), TextDelta("Hi"), pings=1))
    assert not any("usage" in chunk for chunk in chunks)
    assert [bool(c["choices"]) for c in chunks] == [True, False, True, True]


def test_choices_interleave_and_the_last_one_ends_the_stream() -> None:
    replies = [chat_reply(Text(t), choices=2, include_usage=True, output_tokens=n) for t, n in (("left", 2), ("right", 5))]
    writer = DIALECT.stream(replies[0].head)
    assert writer.content_type == "text/event-stream"
    sent = writer.ping() + writer.begin() + writer.event(TextDelta("ri"), 1) + writer.event(TextDelta("le"), 0)
    sent += writer.event(ToolCall("c1", "ls", "{}"), 1) + writer.event(TextDelta("ght"), 1) + writer.finish(replies[1], 1)
    assert b"[DONE]" not in sent
    sent += writer.event(ToolCall("c2", "ls", "{}"), 0) + writer.event(TextDelta("ft"), 0)
    end = writer.finish(replies[0], 0)
    assert [c["usage"] for c in chunks_of(end)][-1] == {"prompt_tokens": 7, "completion_tokens": 7, "total_tokens": 14}
    assert end.endswith(b"data: [DONE]\n\n")
    got = accumulated(sent + end)
    assert [(c.index, c.message.content, [t.id for t in c.message.tool_calls or ()]) for c in got.choices] == [
        (0, "left", ["c2"]),
        (1, "right", ["c1"]),
    ]


def test_every_choice_is_announced_in_order_whichever_speaks_first() -> None:
    replies = [chat_reply(Text(f"reply {i}"), choices=3) for i in range(3)]
    writer = DIALECT.stream(replies[0].head)
    opening = writer.begin()
    assert [c["choices"][0]["index"] for c in chunks_of(opening)] == [0, 1, 2]
    for i in (2, 0, 1):
        opening += writer.event(TextDelta(f"reply {i}"), i) + writer.finish(replies[i], i)
    assert [c.message.content for c in accumulated(opening).choices] == ["reply 0", "reply 1", "reply 2"]


def accumulated(sent: bytes) -> ChatCompletion:
    """What the official SDK makes of a stream. It takes any chunk: its type for one knows no call of a custom tool."""
    state: ChatCompletionStreamState[Any] = ChatCompletionStreamState()
    for chunk in chunks_of(sent):
        state.handle_chunk(ChatCompletionChunk.construct(**chunk))
    return state.current_completion_snapshot


LETTERS = st.text(st.characters(codec=None), max_size=4)
"""Any text at all, halves of surrogate pairs included."""

ESCAPES = st.sampled_from(["\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\\\", '\\"', "\\u00e9", "\\n", "ud83d", "é", "😀"])
QUOTED = st.lists(ESCAPES, max_size=6).map(lambda parts: '"' + "".join(parts) + '"')
NUMBERS = st.sampled_from(["-0", "1E300", "12345678901234567890123", "1.10", "9" * 300])
ARGUMENTS = st.lists(st.tuples(QUOTED, QUOTED | NUMBERS), max_size=3).map(
    lambda members: "{" + ", ".join(f"{key} : {value}" for key, value in members) + "}"
)
STEPS = st.lists(
    st.tuples(st.just("text"), LETTERS) | st.tuples(st.just("reasoning"), LETTERS) | st.tuples(st.sampled_from(["ls", "patch"]), ARGUMENTS),
    max_size=8,
)
ENDS = st.sampled_from([Finish(FinishReason.STOP), Finish(FinishReason.STOP, "\ud800"), LENGTH])


def played(steps: list[tuple[str, str]], finish: Finish = Finish(FinishReason.STOP), **asked: Any) -> tuple[Reply, bytes]:  # noqa: B008
    """The reply of these steps, and its stream."""
    parts: list[Any] = []
    events: list[Any] = []
    for kind, text in steps:
        if kind in ("text", "reasoning"):
            parts.append(Text(text) if kind == "text" else Reasoning(text))
            events.append(TextDelta(text) if kind == "text" else ReasoningDelta(text))
        else:
            calls = sum(isinstance(p, ToolCall) for p in parts)
            parts.append(ToolCall(f"call_{TURN}{calls:02d}", kind, text))
            events.append(parts[-1])
    reply = chat_reply(*parts, finish=finish, tools=(LS, PATCH), **asked)
    return reply, stream(reply, *events)


@given(STEPS, ENDS, st.booleans())
def test_a_stream_adds_up_to_the_body(steps: list[tuple[str, str]], finish: Finish, include_usage: bool) -> None:
    reply, sent = played(steps, finish, include_usage=include_usage)
    if not any(kind == "patch" for kind, _ in steps):
        for chunk in chunks_of(sent):
            assert extras(ChatCompletionChunk.model_validate(chunk, strict=True)) <= OURS
    body, got = json.loads(DIALECT.write([reply])), accumulated(sent).model_dump()
    (choice,), (heard,) = body["choices"], got["choices"]
    assert heard["finish_reason"] == choice["finish_reason"]
    for key in ("role", "content"):
        assert heard["message"][key] == choice["message"][key]
    assert heard["message"].get("reasoning_content", "") == choice["message"].get("reasoning_content", "")
    calls = [{k: v for k, v in c.items() if k != "index" and v is not None} for c in heard["message"]["tool_calls"] or ()]
    for call in calls:
        call.get("function", {}).pop("parsed_arguments", None)
    assert calls == choice["message"].get("tool_calls", [])
    assert (got["usage"] is not None) == include_usage
    if include_usage:
        assert {k: v for k, v in got["usage"].items() if v is not None} == body["usage"]


@given(STEPS)
def test_an_echoed_reply_is_the_reply(steps: list[tuple[str, str]]) -> None:
    """Echoed as the body had it, by a client of JSON alone."""
    reply, _ = played(steps)
    message = json.loads(DIALECT.write([reply]))["choices"][0]["message"]
    hi = {"role": "user", "content": "hi"}
    echo = DIALECT.read(json.dumps({"messages": [hi, message, hi]}).encode()).messages[1]
    assert message_key(echo) in echo_keys(whole(reply.message), CANONICAL)
    assert echo.reasoning == whole_text(reply.message.reasoning)
    assert echo.ref == (TURN if reply.message.calls else "")
    assert [c.id for c in echo.calls] == [c.id for c in reply.message.calls]


CALLED = st.one_of(
    st.tuples(st.sampled_from(["ls", "patch"]), st.dictionaries(st.sampled_from(["input", "b"]), st.text() | st.none()).map(json.dumps)),
    st.tuples(st.sampled_from(["ls", "patch"]), st.text().filter(str.strip)),
)


@given(st.text(), st.text(), st.lists(CALLED, max_size=4))
def test_a_faithful_echo_is_exact(reasoning: str, text: str, calls: list[tuple[str, str]]) -> None:
    """All that a strict matcher compares, but for what the wire cannot carry: an order other than reasoning, words, calls, where one of
    several pieces of words or reasoning ends, that arguments were blank rather than an empty object, which of a freeform call's repeated
    keys came first, and halves of surrogate pairs.
    """
    words = [step for step in (("reasoning", reasoning), ("text", text)) if step[1]]
    reply, _ = played([*words, *calls])
    message = json.loads(DIALECT.write([reply]))["choices"][0]["message"]
    hi = {"role": "user", "content": "hi"}
    echo = DIALECT.read(json.dumps({"messages": [hi, message, hi]}).encode()).messages[1]
    assert strict_key(echo) == strict_key(reply.message)


def whole(message: Message) -> Message:
    """The message with what no JSON reader takes as U+FFFD."""
    return Message("assistant", tuple(Text(whole_text(p.text)) if isinstance(p, Text) else p for p in message.parts))


@given(ARGUMENTS)
def test_what_the_model_wrote_goes_out_as_it_stands(arguments: str) -> None:
    message = json.loads(DIALECT.write([chat_reply(ToolCall("c", "ls", arguments))]))["choices"][0]["message"]
    sent = message["tool_calls"][0]["function"]["arguments"]
    assert sent == whole_text(arguments)
    orjson.loads(sent)
    lone = re.search("[\ud800-\udfff]", json.dumps(json.loads(arguments, object_pairs_hook=list), ensure_ascii=False))
    assert (sent == arguments) == (lone is None), "only what is lone changes"


def test_count_is_in_the_words_of_usage() -> None:
    assert json.loads(DIALECT.count(12)) == {"total_tokens": 12}


def test_the_names_of_the_dialect() -> None:
    assert (DIALECT.name, DIALECT.call_prefix) == ("openai_chat", "call_")
    assert len(f"{DIALECT.call_prefix}{TURN}00") <= 40, "OpenAI's clients cut longer ids"
    assert head_of(Request(messages=())).turn_id == TURN
