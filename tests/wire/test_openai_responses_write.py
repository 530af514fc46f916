"""The Responses dialect writes: neutral reply in, bytes out. Every body and event is read with the official SDK's own types."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import InputTokenCountResponse, ParsedResponse, Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.sse import read_sse
from turnloom.core.match import message_key
from turnloom.parse.contract import ReasoningDelta, TextDelta
from turnloom.types import Finish, FinishReason, Message, Reasoning, Request, Text, ToolCall
from turnloom.wire.contract import Head, Reply, SampledToken, SampledTokens
from turnloom.wire.json import whole_text
from turnloom.wire.openai_responses import OpenAIResponsesDialect
from turnloom.wire.refs import turn_in_base64

DIALECT = OpenAIResponsesDialect()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
A = "0123456789abcdef" * 2
TOOLS = [
    {"type": "function", "name": "ls", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
    {
        "type": "namespace",
        "name": "mcp__fs",
        "description": "Files",
        "tools": [{"type": "function", "name": "read"}, {"type": "custom", "name": "note"}],
    },
]
STOP, LENGTH = Finish(FinishReason.STOP), Finish(FinishReason.LENGTH)


def asked(**fields: Any) -> Request:
    return DIALECT.read(json.dumps({"model": "m", "input": "hi", "tools": TOOLS, **fields}).encode())


def head(**fields: Any) -> Head:
    return Head(A, "m", 1700000000, 7, asked(**fields))


def reply(*parts: Any, finish: Finish = STOP, **fields: Any) -> Reply:
    return Reply(head(**fields), Message("assistant", parts), finish, 3)


def body(done: Reply) -> dict[str, Any]:
    raw = DIALECT.write([done])
    Response.model_validate_json(raw, strict=True)
    found = orjson.loads(raw)
    assert isinstance(found, dict)
    return found


def call(name: str, arguments: str, number: int = 0) -> ToolCall:
    return ToolCall(f"call_{A}{number:02d}", name, arguments)


def streamed(done: Reply, events: list[Any]) -> list[dict[str, Any]]:
    """The events of a whole stream, each valid by the SDK's own types, numbered from 0."""
    writer = DIALECT.stream(done.head)
    opening = writer.begin()
    return valid(opening + b"".join(writer.event(e) for e in events) + writer.finish(done))


def valid(sent: bytes) -> list[dict[str, Any]]:
    found = []
    for number, (name, data) in enumerate(read_sse(sent.decode())):
        assert (data["type"], data["sequence_number"]) == (name, number)
        if name != "keepalive":
            EVENT.validate_python(data, strict=True)
        found.append(data)
    return found


def test_write_a_response_that_the_sdk_reads() -> None:
    done = reply(
        Reasoning("hmm"), Text("Hi"), call("ls", '{"path": "."}'), call("patch", '{"input": "*** x"}', 1), call("mcp__fs__read", "{}", 2)
    )
    response = Response.model_validate(body(done), strict=True)
    assert (response.id, response.status, response.output_text, response.model) == (f"resp_{A}", "completed", "Hi", "m")
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "custom_tool_call", "function_call"]
    assert [item.id for item in response.output] == [f"rs_{A}00", f"msg_{A}01", f"fc_{A}02", f"ctc_{A}03", f"fc_{A}04"]
    assert all(item.id is not None and len(item.id) <= 64 for item in response.output), "pi rewrites longer ids"
    _, _, ls, patch, read = body(done)["output"]
    assert (ls["call_id"], ls["name"], ls["arguments"], "namespace" in ls) == (f"call_{A}00", "ls", '{"path": "."}', False)
    assert (patch["call_id"], patch["name"], patch["input"]) == (f"call_{A}01", "patch", "*** x")
    assert (read["name"], read["namespace"]) == ("read", "mcp__fs")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 3, 10)
    assert response.created_at == 1700000000


@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_a_response_id_says_whether_there_were_instructions(instructions: str | None) -> None:
    response_id = body(reply(Text("a"), instructions=instructions))["id"]
    request = asked(previous_response_id=response_id)
    assert (request.previous, request.wire["previous_instructed"]) == (A, instructions is not None)


def test_a_response_says_again_what_was_asked() -> None:
    wanted = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "previous_response_id": f"resp_{A}",
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": False,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "tool_choice": "none",
        "truncation": "auto",
        "user": "u",
    }
    said = body(reply(Text("a"), **wanted))
    assert {key: said[key] for key in wanted} == wanted
    assert said["tools"] == TOOLS
    bare = DIALECT.read(b'{"input": "hi"}')
    said = orjson.loads(DIALECT.write([Reply(Head(A, "", 1, 1, bare), Message("assistant", ()), STOP, 0)]))
    Response.model_validate(said, strict=True)
    assert (said["tools"], said["tool_choice"], said["parallel_tool_calls"], said["instructions"]) == ([], "auto", True, None)


def test_a_reply_without_anything_is_an_empty_message_that_can_be_carried_back() -> None:
    done = reply()
    (item,) = body(done)["output"]
    assert (item["id"], item["content"][0]["text"]) == (f"msg_{A}00", "")
    echoed = asked(input=[{"role": "user", "content": "hi"}, item, {"role": "user", "content": "on"}]).messages[1]
    assert (message_key(echoed), echoed.ref) == (message_key(done.message), A)


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("store", [True, False])
def test_reasoning_goes_out_as_it_was_asked_for(summary: str | None, store: bool) -> None:
    (item,) = body(reply(Reasoning("hmm"), reasoning={"summary": summary}, store=store))["output"]
    held = [{"type": "summary_text", "text": "hmm"}] if summary else [{"type": "reasoning_text", "text": "hmm"}]
    assert (item["summary"], item.get("content")) == ((held, None) if summary else ([], held))
    assert turn_in_base64(item.get("encrypted_content")) == ("" if store else A)


@pytest.mark.parametrize("last", [Text("cut"), Reasoning("cut"), call("ls", "{}")], ids=["text", "reasoning", "call"])
def test_a_reply_that_was_cut_is_incomplete(last: Any) -> None:
    said = body(reply(Text("whole"), last, finish=LENGTH) if not isinstance(last, Text) else reply(Reasoning("whole"), last, finish=LENGTH))
    assert (said["status"], said["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in said["output"]] == ["completed", "completed" if isinstance(last, ToolCall) else "incomplete"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "{\\"input\\": 1}"}', '{"input": 1}'),
        ('{"input": 1}', 'not {"input": string}: {"input": 1}'),
        ('{"input": "a", "b": 1}', 'not {"input": string}: {"input": "a", "b": 1}'),
        ("{}", 'not {"input": string}: {}'),
        ('{"input": "cu', 'not {"input": string}: {"input": "cu'),
    ],
)
def test_a_freeform_call_says_its_string_or_else_all_that_was_written(arguments: str, said: str) -> None:
    assert body(reply(call("patch", arguments)))["output"][0]["input"] == said


@pytest.mark.parametrize("arguments", ['{"a" : 1.10,\n "a":"\\u00e9"}', '{"a": "\\ud83d"}'])
def test_arguments_go_out_as_the_model_spelled_them(arguments: str) -> None:
    assert body(reply(call("ls", arguments)))["output"][0]["arguments"] == whole_text(arguments)


def test_stream_a_transcript() -> None:
    calls = call("ls", '{"path": "."}'), call("patch", '{"input": "*** x"}', 1)
    done = reply(Reasoning("hmm"), Text("\n\nHi you\n"), *calls, store=False)
    writer = DIALECT.stream(done.head)
    sent = writer.begin() + writer.ping()
    tokens = SampledTokens((SampledToken("h", -1.0),))
    for event in (ReasoningDelta("hm"), tokens, ReasoningDelta("m"), TextDelta("\n\n"), TextDelta("Hi you\n"), *calls):
        sent += writer.event(event)
    events = valid(sent + writer.finish(done))
    shown = [(e["type"].removeprefix("response."), e.get("output_index"), e.get("content_index"), e.get("item_id", "")[:3]) for e in events]
    assert shown == [
        ("created", None, None, ""),
        ("in_progress", None, None, ""),
        ("keepalive", None, None, ""),
        ("output_item.added", 0, None, ""),
        ("content_part.added", 0, 0, "rs_"),
        ("reasoning_text.delta", 0, 0, "rs_"),
        ("reasoning_text.delta", 0, 0, "rs_"),
        ("reasoning_text.done", 0, 0, "rs_"),
        ("content_part.done", 0, 0, "rs_"),
        ("output_item.done", 0, None, ""),
        ("output_item.added", 1, None, ""),
        ("content_part.added", 1, 0, "msg"),
        ("output_text.delta", 1, 0, "msg"),
        ("output_text.delta", 1, 0, "msg"),
        ("output_text.done", 1, 0, "msg"),
        ("content_part.done", 1, 0, "msg"),
        ("output_item.done", 1, None, ""),
        ("output_item.added", 2, None, ""),
        ("function_call_arguments.delta", 2, None, "fc_"),
        ("function_call_arguments.done", 2, None, "fc_"),
        ("output_item.done", 2, None, ""),
        ("output_item.added", 3, None, ""),
        ("custom_tool_call_input.delta", 3, None, "ctc"),
        ("custom_tool_call_input.done", 3, None, "ctc"),
        ("output_item.done", 3, None, ""),
        ("completed", None, None, ""),
    ]
    assert events[-1]["response"] == body(done)
    started = events[0]["response"]
    assert (started["status"], started["output"], started["usage"]) == ("in_progress", [], None)
    assert [e["item"]["status"] for e in events if "item" in e] == ["in_progress", "completed"] * 4


def test_stream_a_summary() -> None:
    done = reply(Reasoning("hmm"), Text("Hi"), reasoning={"summary": "auto"})
    events = streamed(done, [ReasoningDelta("hm"), ReasoningDelta("m"), TextDelta("Hi")])
    shown = [e["type"].removeprefix("response.reasoning_") for e in events if "summary_index" in e]
    assert shown == ["summary_part.added", "summary_text.delta", "summary_text.delta", "summary_text.done", "summary_part.done"]
    assert events[-1]["response"] == body(done)


def test_a_stream_that_was_cut_ends_as_incomplete() -> None:
    done = reply(Reasoning("hm"), Text("cu"), finish=LENGTH)
    events = streamed(done, [ReasoningDelta("hm"), TextDelta("cu")])
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"] == body(done)
    assert [e["item"]["status"] for e in events if e["type"] == "response.output_item.done"] == ["completed", "incomplete"]


SLOWLY = settings(deadline=None, max_examples=40)
"""The SDK's types of all events and items are slow to check, and slower the first time."""

PLAIN = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)
WORDS = st.tuples(st.sampled_from(["text", "reasoning"]), PLAIN)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | PLAIN, lambda inner: st.lists(inner, max_size=2), max_leaves=3)
ARGUMENTS = st.dictionaries(PLAIN, VALUES, max_size=3).map(json.dumps)
CALLS = st.one_of(
    st.tuples(st.sampled_from(["ls", "mcp__fs__read"]), ARGUMENTS),
    st.tuples(st.sampled_from(["patch", "mcp__fs__note"]), PLAIN.map(lambda text: json.dumps({"input": text}))),
)
PLANS = st.lists(WORDS | CALLS, max_size=8)
OPTIONS = st.fixed_dictionaries({"store": st.booleans(), "reasoning": st.sampled_from([None, {"summary": "auto"}])})


def carried_out(plan: list[tuple[str, str]]) -> tuple[list[Any], list[Any]]:
    """(the events of a plan, the parts that they come to)."""
    events: list[Any] = []
    parts: list[Any] = []
    for kind, text in plan:
        if kind not in ("text", "reasoning"):
            events.append(call(kind, text, sum(isinstance(p, ToolCall) for p in parts)))
            parts.append(events[-1])
            continue
        events.append(TextDelta(text) if kind == "text" else ReasoningDelta(text))
        part = Text if kind == "text" else Reasoning
        if parts and isinstance(parts[-1], part):
            parts[-1] = part(parts[-1].text + text)
        else:
            parts.append(part(text))
    return events, parts


@SLOWLY
@given(PLANS, OPTIONS, st.sampled_from([STOP, LENGTH]))
def test_any_stream_comes_to_the_body_that_is_not_streamed(plan: list[tuple[str, str]], options: dict[str, Any], finish: Finish) -> None:
    events, parts = carried_out(plan)
    done = reply(*parts, finish=finish, **options)
    sent = streamed(done, events)
    whole = body(done)
    assert sent[-1]["response"] == whole
    assert [e["item"] for e in sent if e["type"] == "response.output_item.done"] == whole["output"]
    assert from_deltas(sent) == whole["output"], "what a client gathers is what it is told in the end"


def from_deltas(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as a client gathers them from the pieces, with the last event's word on their status."""
    items: list[dict[str, Any]] = []
    for e in sent:
        kind = e["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(json.loads(json.dumps(e["item"])))
        elif kind == "content_part.added":
            items[e["output_index"]]["content"].append(dict(e["part"]))
        elif kind == "reasoning_summary_part.added":
            items[e["output_index"]]["summary"].append(dict(e["part"]))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[e["output_index"]]["content"][e["content_index"]]["text"] += e["delta"]
        elif kind == "reasoning_summary_text.delta":
            items[e["output_index"]]["summary"][e["summary_index"]]["text"] += e["delta"]
        elif kind in ("function_call_arguments.delta", "custom_tool_call_input.delta"):
            items[e["output_index"]]["input" if "input" in items[e["output_index"]] else "arguments"] += e["delta"]
        elif kind == "output_item.done":
            assert items[e["output_index"]]["id"] == e["item"]["id"]
            items[e["output_index"]]["status"] = e["item"]["status"]
    return items


@SLOWLY
@given(PLANS, OPTIONS)
def test_the_sdk_gathers_any_stream(plan: list[tuple[str, str]], options: dict[str, Any]) -> None:
    events, parts = carried_out(plan)
    done = reply(*parts, **options)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    last: Any = None
    for data in streamed(done, events):
        for event in state.handle_event(EVENT.validate_python(data)):
            last = event
    assert isinstance(last.response, ParsedResponse)
    gathered = last.response.to_dict()
    for item in gathered["output"]:
        for extra in ("parsed_arguments",):
            item.pop(extra, None)
        for part in item.get("content") or []:
            part.pop("parsed", None)
    assert gathered["output"] == body(done)["output"]


ANY = st.text(st.characters(codec=None), max_size=4)
"""Any text at all, halves of surrogate pairs included."""


@SLOWLY
@given(st.lists(st.tuples(st.sampled_from(["text", "reasoning", "ls", "patch"]), ANY), max_size=5))
def test_any_model_text_can_be_sent(plan: list[tuple[str, str]]) -> None:
    spelled = [(kind, text if kind in ("text", "reasoning") else json.dumps({"input": text}, ensure_ascii=False)) for kind, text in plan]
    events, parts = carried_out(spelled)
    done = reply(*parts)
    orjson.loads(DIALECT.write([done]))
    streamed(done, events)


def test_counts_and_models() -> None:
    assert InputTokenCountResponse.model_validate_json(DIALECT.count(7), strict=True).input_tokens == 7
    assert [m["id"] for m in json.loads(DIALECT.models(["a", "b"]))["data"]] == ["a", "b"]
    assert json.loads(DIALECT.model("a"))["object"] == "model"
