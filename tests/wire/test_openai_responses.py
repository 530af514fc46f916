"""The Responses dialect reads: bytes in, neutral request out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnloom.errors import BadRequest, UnknownResponse
from turnloom.types import Message, Reasoning, Request, Text, Tool, ToolCall, ToolResult
from turnloom.wire.contract import COUNT, Envelope, Reading
from turnloom.wire.openai_responses import OpenAIResponsesDialect
from turnloom.wire.quirks import ALL, Quirk
from turnloom.wire.refs import as_base64

DIALECT = OpenAIResponsesDialect()
A, B = "a" * 32, "0123456789abcdef" * 2
USER = {"role": "user", "content": "hi"}


def read(dialect: OpenAIResponsesDialect = DIALECT, **fields: Any) -> Request:
    return dialect.read(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def messages(*items: Any) -> tuple[Message, ...]:
    return read(input=list(items)).messages


def said(turn: str, text: str, number: int = 0) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": f"msg_{turn}{number:02d}", "content": content, "status": "completed"}


def called(turn: str, name: str, number: int = 0, **more: Any) -> dict[str, Any]:
    ids = {"id": f"fc_{turn}{number:02d}", "call_id": f"call_{turn}{number:02d}"}
    return {"type": "function_call", "name": name, "arguments": "{}", **ids, **more}


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != "id"}


def answered(turn: str, output: Any, number: int = 0) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{turn}{number:02d}", "output": output}


def test_read_a_whole_request() -> None:
    request = read(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "list"}]},
            {
                "type": "reasoning",
                "id": f"rs_{A}00",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hmm"}],
                "encrypted_content": as_base64(A),
            },
            said(A, "I will", 1),
            called(A, "ls", 2, arguments='{"path": "."}'),
            answered(A, [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], 2),
            {"type": "message", "role": "user", "content": "go on"},
        ],
        tools=[{"type": "function", "name": "ls", "description": "List", "parameters": {"type": "object"}, "strict": False}],
        max_output_tokens=10,
        stream=True,
        temperature=0.1,
        reasoning={"effort": "high", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        client_metadata={},
        prompt_cache_key="k",
    )
    assert request.messages == (
        Message("system", (Text("Be brief."),)),
        Message("system", (Text("Be kind."),)),
        Message("user", (Text("list"),)),
        Message("assistant", (Reasoning("hmm"), Text("I will"), ToolCall(f"call_{A}02", "ls", '{"path": "."}')), A),
        Message("tool", (ToolResult(f"call_{A}02", "a\nb"),)),
        Message("user", (Text("go on"),)),
    )
    assert request.tools == (Tool("ls", "List", '{"type":"object"}'),)
    assert (request.max_tokens, request.stream, request.model, request.call_tools) == (10, True, "m", True)
    assert (request.instructed, request.previous, request.declined, request.json_schema) == (True, "", (), "")
    assert (request.wire["encrypted"], request.wire["summary"]) == (True, True)


def test_a_string_is_one_user_message_and_equals_its_longer_spellings() -> None:
    part = {"type": "input_text", "text": "hi"}
    spellings = ["hi", [USER], [{"role": "user", "content": [part]}], [{"type": "message", "role": "user", "content": [part]}]]
    assert {read(input=each).messages for each in spellings} == {(Message("user", (Text("hi"),)),)}


def test_instructions_that_are_empty_are_none() -> None:
    assert (read(instructions="").instructed, read(instructions=None).instructed, read().messages[0].role) == (False, False, "user")


def test_items_of_one_turn_are_one_message_and_those_of_two_are_two() -> None:
    found = messages(USER, said(A, "cut"), said(B, "whole"), called(B, "ls", 1), answered(B, "x", 1))
    assert [(m.role, len(m.parts), m.ref) for m in found] == [("user", 1, ""), ("assistant", 1, A), ("assistant", 2, B), ("tool", 1, "")]


def test_items_that_name_no_turn_go_with_those_they_stand_beside() -> None:
    bare = {"role": "assistant", "content": "I look."}
    found = messages(USER, bare, without_id(called(A, "ls")), answered(A, "x"), bare, USER)
    assert [(m.role, len(m.parts), m.ref) for m in found[1:4]] == [("assistant", 2, A), ("tool", 1, ""), ("assistant", 1, "")]


@pytest.mark.parametrize("text", ["Our reply.", ""])
def test_words_that_name_a_turn_do_not_go_on_with_the_clients_own(text: str) -> None:
    """A request may end with a reply of the client's; ours is another one after it."""
    own = {"role": "assistant", "content": "Earlier words."}
    found = messages(USER, own, said(A, text), called(A, "ls", 1), answered(A, "x", 1), USER)
    assert [(m.role, m.ref) for m in found] == [("user", ""), ("assistant", ""), ("assistant", A), ("tool", ""), ("user", "")]
    assert found[1].parts == (Text("Earlier words."),)


def test_a_piece_that_says_nothing_is_no_part_of_a_reply() -> None:
    """An empty reply goes out as an empty message, and comes back as it stands on record."""
    assert messages(USER, said(A, ""), USER)[1] == Message("assistant", (), A)


def test_a_call_without_its_namespace_is_of_the_one_tool_of_that_name() -> None:
    group = [{"type": "namespace", "name": n, "tools": [{"type": "function", "name": f} for f in ("read", n)]} for n in ("a", "b")]
    found = read(
        tools=[*group, {"type": "function", "name": "ls"}], input=[USER, *(called(A, n, i) for i, n in enumerate(("a", "read", "ls")))]
    )
    assert [c.name for c in found.messages[1].calls] == ["a__a", "read", "ls"]


def test_counting_needs_nothing_to_answer() -> None:
    body = json.dumps({"input": [{"role": "assistant", "content": "I look."}]}).encode()
    assert len(DIALECT.read(body, Envelope(verb=COUNT)).messages) == 1
    with pytest.raises(BadRequest, match="at least one user message"):
        DIALECT.read(body)


def test_calls_of_one_turn_with_their_outputs_between_them_are_one_message() -> None:
    """Scripts append each call and its output in turn; the reply had both calls before any output."""
    found = messages(USER, called(A, "ls"), answered(A, "x"), called(A, "cat", 1), answered(A, "y", 1))
    assert [m.role for m in found] == ["user", "assistant", "tool", "tool"]
    assert [c.name for c in found[1].calls] == ["ls", "cat"]


def test_a_reply_ends_where_the_user_speaks_whatever_its_ids_say() -> None:
    assert [m.role for m in messages(USER, said(A, "one"), USER, said(A, "two"), USER)] == ["user", "assistant"] * 2 + ["user"]


@pytest.mark.parametrize("after", [[], [said(B, "whole")]], ids=["at the end", "before the next reply"])
def test_reasoning_that_led_to_nothing_is_left_out(after: list[Any]) -> None:
    """What Codex keeps of a stream that broke off is the reasoning it had whole; then it asks again."""
    remains = {"type": "reasoning", "id": f"rs_{A}00", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert messages(USER, remains, *after) == messages(USER, *after)
    plain = OpenAIResponsesDialect(Reading(ALL - {Quirk.BROKEN_REPLY}))
    assert read(plain, input=[USER, remains, *after]).messages != messages(USER, *after), "the quirk can be switched off"
    kept = messages(USER, remains, USER)[1]
    assert kept == Message("assistant", (Reasoning("hm"),), A), "a reply that was reasoning alone stays"


def test_a_reply_may_stand_last() -> None:
    """After a stream that ended early Codex asks for what comes next; it is not a prefill."""
    assert messages(USER, said(A, "One two"))[-1] == Message("assistant", (Text("One two"),), A)


REFERENCES = {
    "a message's id": said(A, "x"),
    "a call's id alone": {"type": "function_call", "call_id": f"call_{A}00", "name": "ls", "arguments": "{}"},
    "a call's item id alone": {"type": "function_call", "id": f"fc_{A}00", "call_id": "own", "name": "ls", "arguments": "{}"},
    "a freeform call": {"type": "custom_tool_call", "id": f"ctc_{A}00", "call_id": "own", "name": "ls", "input": "x"},
    "encrypted content": {"type": "reasoning", "summary": [], "content": None, "encrypted_content": as_base64(A)},
    "a reasoning's id": {"type": "reasoning", "id": f"rs_{A}00", "summary": []},
}


@pytest.mark.parametrize("item", REFERENCES.values(), ids=REFERENCES)
def test_every_opaque_field_names_the_turn(item: dict[str, Any]) -> None:
    assert messages(USER, item, USER)[1].ref == A


FOREIGN = [
    "msg_123",
    f"msg_{A}",
    f"{A}00",
    f"msg_{A}0x",
    f"chatcmpl-tool-{A}",
    "",
    None,
    7,
    f"msg_{'g' * 32}00",
    f"msg_{A.upper()}00",
    A * 20,
]


@pytest.mark.parametrize("item_id", FOREIGN)
def test_ids_that_we_did_not_write_name_nothing(item_id: Any) -> None:
    assert messages(USER, {**said(A, "x"), "id": item_id}, USER)[1].ref == ""


def test_fields_that_contradict_each_other_name_nothing() -> None:
    reasoning = {"type": "reasoning", "id": f"rs_{A}00", "summary": [], "encrypted_content": as_base64(B)}
    assert messages(USER, reasoning, USER)[1].ref == ""


def test_refusals_and_foreign_summaries_are_read() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    summary = {"type": "reasoning", "id": "rs_x", "summary": [{"type": "summary_text", "text": t} for t in ("a", "b")]}
    assert messages(USER, summary, refusal, USER)[1].parts == (Reasoning("a\n\nb"), Text("No."))


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '{"b":1,"a":1}'])
def test_arguments_stay_as_they_came(arguments: str) -> None:
    assert messages(USER, called(A, "ls", arguments=arguments), answered(A, "x"))[1].calls[0].arguments == arguments


@pytest.mark.parametrize("arguments", ["", None])
def test_no_arguments_are_an_empty_object(arguments: str | None) -> None:
    assert messages(USER, called(A, "ls", arguments=arguments), answered(A, "x"))[1].calls[0].arguments == "{}"


def test_freeform_calls_and_their_outputs() -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": '*** "Begin"\n'}
    found = messages(USER, call, {"type": "custom_tool_call_output", "call_id": "c", "output": "done"})
    assert json.loads(found[1].calls[0].arguments) == {"input": '*** "Begin"\n'}
    assert found[2].parts == (ToolResult("c", "done"),)


def test_tools_of_every_kind() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    request = read(
        tools=[
            {"type": "function", "name": "ls"},
            {"type": "custom", "name": "note", "description": "Write.", "format": {"type": "text"}},
            {"type": "custom", "name": "apply_patch", "description": "Patch.", "format": grammar},
            {
                "type": "namespace",
                "name": "mcp__fs",
                "description": "Files",
                "tools": [{"type": "function", "name": "read"}, {"type": "x"}],
            },
            {"type": "web_search", "filters": {}},
            {"type": "local_shell"},
            {"type": "tool_search", "execution": "client"},
            {"type": "mcp", "server_label": "docs"},
        ]
    )
    assert [(t.name, t.freeform, t.namespace) for t in request.tools] == [
        ("ls", False, ""),
        ("note", True, ""),
        ("apply_patch", True, ""),
        ("mcp__fs__read", False, "mcp__fs"),
    ]
    assert [t.description for t in request.tools] == [
        "",
        "Write.",
        "Patch.\n\nThe text in `input` must follow this lark grammar:\nstart: /x/",
        "",
    ]
    assert json.loads(request.tools[2].parameters) == {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert request.declined == ("x", "web_search", "local_shell", "tool_search", "docs")


def test_additional_tools_join_the_others() -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "cat"}, {"type": "web_search"}]}
    request = read(tools=[{"type": "function", "name": "ls"}], input=[more, USER])
    assert ([t.name for t in request.tools], request.declined, len(request.messages)) == (["ls", "cat"], ("web_search",), 1)
    again = read(tools=[{"type": "function", "name": "cat", "description": "old"}], input=[more, USER])
    assert [(t.name, t.description) for t in again.tools] == [("cat", "")], "the later one stands"


def test_calls_of_a_namespace_have_its_name_before_theirs() -> None:
    call = messages(USER, called(A, "read", namespace="mcp__fs"), answered(A, "x"))[1].calls[0]
    assert call.name == "mcp__fs__read"
    assert messages(USER, called(A, "read", namespace=None), answered(A, "x"))[1].calls[0].name == "read"


def test_provider_items_in_history_are_said_in_words() -> None:
    shell = {"type": "local_shell_call", "id": "lsh", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"}
    search = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "tea"}}
    found = messages(USER, shell, {"type": "local_shell_call_output", "id": "c", "output": "a"}, search, USER)
    assert found[1].calls == (ToolCall("c", "local_shell", '{"type":"exec","command":["ls"]}'),)
    assert found[2].parts == (ToolResult("c", "a"),)
    assert found[3].text == '[web search {"type":"search","query":"tea"}]'


def test_marks_say_nothing() -> None:
    marks = [{"type": "configuration_update", "reasoning": {"effort": "low"}}, {"type": "context_compaction"}]
    assert messages(*marks, USER) == messages(USER)


PNG = "data:image/png;base64,iVBORw0KGgo="
IMAGES = {
    "a data URL": ({"type": "input_image", "detail": "auto", "image_url": PNG}, "[image/png, 8 bytes, not shown]"),
    "an address": ({"type": "input_image", "image_url": "https://example.com/a,b.png"}, "[image, not shown]"),
    "a file's id": ({"type": "input_image", "file_id": "file_1"}, "[image, not shown]"),
    "a file": (
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"},
        "[application/pdf, 3 bytes, not shown]",
    ),
    "a bare file": ({"type": "input_file", "file_data": "AAAA"}, "[file, 3 bytes, not shown]"),
    "a data URL that is not base64": ({"type": "input_file", "file_data": "data:text/plain,AAAA"}, "[text/plain, not shown]"),
    "a file's address": ({"type": "input_file", "file_url": "https://example.com/a"}, "[file, not shown]"),
}


@pytest.mark.parametrize(("part", "shown"), IMAGES.values(), ids=IMAGES)
def test_images_and_files_by_policy(part: dict[str, Any], shown: str) -> None:
    items = [{"role": "user", "content": [part]}, called(A, "look"), answered(A, [{"type": "input_text", "text": "see"}, part])]
    request = read(OpenAIResponsesDialect(Reading(images="placeholder")), input=items)
    assert (request.messages[0].text, request.messages[2].text, request.images) == (shown, f"see\n{shown}", 2)
    with pytest.raises(BadRequest, match=r"input\.0\.content\.0: images and files are not supported"):
        read(input=items)


def test_structured_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    held = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    assert json.loads(read(text=held).json_schema) == schema
    assert read(text={"format": {"type": "json_object"}}).json_schema == '{"type":"object"}'
    assert {read(text=t).json_schema for t in ({"format": {"type": "text"}}, {"verbosity": "low"}, {"format": None}, None)} == {""}


@pytest.mark.parametrize(
    ("store", "include", "encrypted"),
    [(None, None, False), (True, [], False), (False, None, True), (True, ["reasoning.encrypted_content"], True), (None, ["x"], False)],
)
def test_who_keeps_the_history_gets_encrypted_content(store: bool | None, include: list[str] | None, encrypted: bool) -> None:
    assert read(store=store, include=include).wire["encrypted"] is encrypted


SUMMARIES: list[tuple[Any, bool]] = [
    *((said, False) for said in (None, {}, {"summary": None}, {"summary": "none"})),
    *(({"summary": said}, True) for said in ("auto", "concise", "detailed")),
    ({"generate_summary": "auto"}, True),
]


@pytest.mark.parametrize(("reasoning", "summary"), SUMMARIES)
def test_reasoning_is_summed_up_where_that_is_asked_for(reasoning: Any, summary: bool) -> None:
    assert read(reasoning=reasoning).wire["summary"] is summary


@pytest.mark.parametrize("instructed", [False, True])
def test_previous_response_id(instructed: bool) -> None:
    request = read(previous_response_id=f"resp_{A}{'i' if instructed else ''}")
    assert (request.previous, request.wire["previous_instructed"]) == (A, instructed)
    output = [answered(A, "x")]
    assert read(previous_response_id=f"resp_{A}", input=output).messages[0].role == "tool"


@pytest.mark.parametrize("response_id", ["resp_123", A, f"resp_{A}x", f"resp_{A}ii", f"msg_{A}", f" resp_{A}"])
def test_a_previous_response_id_that_we_did_not_write_is_unknown(response_id: str) -> None:
    with pytest.raises(UnknownResponse) as caught:
        read(previous_response_id=response_id)
    assert caught.value.response_id == response_id


@pytest.mark.parametrize(("choice", "calls"), [(None, True), ("auto", True), ("none", False)])
def test_tool_choice(choice: str | None, calls: bool) -> None:
    assert read(tool_choice=choice).call_tools is calls


@pytest.mark.parametrize(("said", "asked"), [({}, None), ({"stream": None}, None), ({"stream": True}, True), ({"stream": False}, False)])
@pytest.mark.parametrize("accept", ["text/event-stream", "application/json"])
def test_the_body_decides_on_streaming_where_it_says(said: dict[str, Any], asked: bool | None, accept: str) -> None:
    found = DIALECT.read(json.dumps({"input": "a", **said}).encode(), Envelope({"accept": accept})).stream
    assert found is (accept == "text/event-stream" if asked is None else asked)


def test_lone_surrogates_become_replacement_characters() -> None:
    assert DIALECT.read(b'{"input":"cut \\ud83d here \\ud83d\\ude00"}').messages[0].text == "cut \ufffd here \U0001f600"
