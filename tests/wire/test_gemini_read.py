"""Requests in Gemini's dialect: bytes in, a neutral request out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from turnloom.errors import BadRequest
from turnloom.types import Message, Reasoning, Request, Text, Tool, ToolCall, ToolResult
from turnloom.wire.contract import Envelope, Reading
from turnloom.wire.gemini import GeminiDialect, contents
from turnloom.wire.refs import as_base64

DIALECT = GeminiDialect()
HI: dict[str, Any] = {"role": "user", "parts": [{"text": "hi"}]}
TURN, OTHER = "0" * 31 + "1", "0" * 31 + "2"
GENERATE = Envelope(model="m", verb="generateContent")
STREAM = Envelope(model="m", verb="streamGenerateContent", query={"alt": "sse"})
COUNT = Envelope(model="m", verb="countTokens")


def read(envelope: Envelope = GENERATE, dialect: GeminiDialect = DIALECT, **fields: Any) -> Request:
    return dialect.read(json.dumps({"contents": [HI], **fields}).encode(), envelope)


def messages(*contents: Any) -> tuple[Message, ...]:
    return read(contents=list(contents)).messages


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def call(name: str, call_id: str = "", **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args, **({"id": call_id} if call_id else {})}}


def answer(name: str, output: str, call_id: str = "") -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": output}, **({"id": call_id} if call_id else {})}}


def test_read_a_whole_request() -> None:
    request = read(
        STREAM,
        systemInstruction={"role": "user", "parts": [{"text": "Be brief."}, {"text": "Be kind."}]},
        tools=[
            {
                "functionDeclarations": [
                    {"name": "ls", "description": "List", "parametersJsonSchema": {"type": "object", "$comment": "kept"}},
                    {"name": "stop"},
                ]
            },
            {"googleSearch": {}},
            {"urlContext": {}, "codeExecution": {}},
        ],
        toolConfig={"functionCallingConfig": {"mode": "AUTO"}},
        contents=[
            user({"text": "list"}),
            model(
                {"text": "hmm", "thought": True},
                {"text": "I will", "thoughtSignature": as_base64(TURN)},
                {**call("ls", "call_1", path="."), "thoughtSignature": as_base64(TURN)},
                call("ls", "call_2"),
            ),
            user(
                answer("ls", "a", "call_1"),
                {"functionResponse": {"name": "ls", "id": "call_2", "response": {"error": "no such folder"}}},
                {"text": "go on"},
            ),
        ],
        generationConfig={
            "temperature": 0.1,
            "topK": 64,
            "stopSequences": ["END"],
            "maxOutputTokens": 10,
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 5},
        },
        safetySettings=[{"category": "HARM_CATEGORY_HATE_SPEECH", "threshold": "OFF"}],
        labels={"a": "b"},
    )
    assert request == Request(
        messages=(
            Message("system", (Text("Be brief."), Text("Be kind."))),
            Message("user", (Text("list"),)),
            Message(
                "assistant",
                (Reasoning("hmm"), Text("I will"), ToolCall("call_1", "ls", '{"path":"."}'), ToolCall("call_2", "ls", "{}")),
                ref=TURN,
            ),
            Message("tool", (ToolResult("call_1", "a"),)),
            Message("tool", (ToolResult("call_2", "no such folder", True),)),
            Message("user", (Text("go on"),)),
        ),
        tools=(Tool("ls", "List", '{"type":"object","$comment":"kept"}'), Tool("stop", "", '{"type":"object","properties":{}}')),
        max_tokens=10,
        stop=("END",),
        stream=True,
        model="m",
        declined=("googleSearch", "urlContext", "codeExecution"),
        wire={"sse": True, "thoughts": True},
    )


def test_snake_case_says_the_same() -> None:
    camel = {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": "ls", "parameters": {"type": "OBJECT", "properties": {"a_b": {"type": "STRING"}}}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED", "allowedFunctionNames": ["ls"]}},
        "contents": [
            HI,
            model({**call("ls", "c", dir_path="x", dirPath="y"), "thoughtSignature": as_base64(TURN)}),
            user({"functionResponse": {"id": "c", "name": "ls", "response": {"exit_code": 0}}}),
        ],
        "generationConfig": {
            "stopSequences": ["E"],
            "maxOutputTokens": 5,
            "responseMimeType": "application/json",
            "responseSchema": {"type": "ARRAY", "minItems": 1},
            "thinkingConfig": {"includeThoughts": True},
        },
    }
    snake = {
        "system_instruction": camel["systemInstruction"],
        "tools": [{"function_declarations": camel["tools"][0]["functionDeclarations"]}],  # type: ignore[index]
        "tool_config": {"function_calling_config": {"mode": "VALIDATED", "allowed_function_names": ["ls"]}},
        "contents": [
            HI,
            model(
                {
                    "function_call": {"id": "c", "name": "ls", "args": {"dir_path": "x", "dirPath": "y"}},
                    "thought_signature": as_base64(TURN),
                }
            ),
            user({"function_response": {"id": "c", "name": "ls", "response": {"exit_code": 0}}}),
        ],
        "generation_config": {
            "stop_sequences": ["E"],
            "max_output_tokens": 5,
            "response_mime_type": "application/json",
            "response_schema": {"type": "ARRAY", "min_items": 1},
            "thinking_config": {"include_thoughts": True},
        },
    }
    found = read(**camel)
    assert read(**snake) == found
    assert found.messages[2].calls[0].arguments == '{"dir_path":"x","dirPath":"y"}', "what a function takes is not ours to rename"
    assert found.messages[3].text == '{"exit_code":0}'
    assert json.loads(found.tools[0].parameters)["properties"] == {"a_b": {"type": "string"}}
    assert found.json_schema == '{"type":"array","minItems":1}'


def test_one_object_stands_for_a_list_of_one() -> None:
    listed = read(systemInstruction={"parts": [{"text": "s"}]}, tools=[{"functionDeclarations": [{"name": "ls"}]}])
    single = DIALECT.read(
        b'{"contents":{"parts":{"text":"hi"}},"systemInstruction":"s","tools":{"functionDeclarations":{"name":"ls"}}}', GENERATE
    )
    assert single == listed
    assert single.messages == (Message("system", (Text("s"),)), Message("user", (Text("hi"),)))


def test_the_verb_decides_on_streaming_and_alt_on_its_form() -> None:
    found = [
        read(Envelope(verb=verb, query=query)) for verb in ("generateContent", "streamGenerateContent") for query in ({}, {"alt": "sse"})
    ]
    assert [r.stream for r in found] == [False, False, True, True]
    assert [r.wire["sse"] for r in found[2:]] == [False, True]


def test_the_model_is_named_by_the_path() -> None:
    assert read(Envelope(model="models/x"), model="models/y").model == "x"
    assert read(Envelope(), model="models/y").model == "y"
    assert read(Envelope(), model=5).model == ""


def test_a_count_is_of_contents_or_of_a_whole_request() -> None:
    inner = {
        "model": "models/m",
        "contents": [HI],
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [{"functionDeclarations": [{"name": "ls"}]}],
    }
    plain = DIALECT.read(json.dumps({"contents": [HI]}).encode(), COUNT)
    whole = DIALECT.read(json.dumps({"generateContentRequest": inner}).encode(), COUNT)
    snake = DIALECT.read(json.dumps({"generate_content_request": inner}).encode(), COUNT)
    assert plain.messages == (Message("user", (Text("hi"),)),)
    assert whole.messages == (Message("system", (Text("s"),)), Message("user", (Text("hi"),)))
    assert [t.name for t in whole.tools] == ["ls"]
    assert snake == whole


def test_what_is_counted_may_end_with_the_model() -> None:
    """A chat counts its own history."""
    history = json.dumps({"contents": [HI, model({"text": "Hello."})]}).encode()
    assert [m.role for m in DIALECT.read(history, COUNT).messages] == ["user", "assistant"]
    with pytest.raises(BadRequest, match="prefilling"):
        DIALECT.read(history, STREAM)


def test_a_reply_brought_back_in_chunks_is_one_message() -> None:
    chunks = [
        {"text": "Hel", "thoughtSignature": as_base64(TURN)},
        {"text": "lo "},
        {"text": "you"},
        call("ls", "c1"),
        call("rm", "c2"),
        {"text": ""},
    ]
    whole = messages(HI, model({"text": "Hello you", "thoughtSignature": as_base64(TURN)}, *chunks[3:5]), user(answer("ls", "x", "c1")))
    assert messages(HI, *(model(chunk) for chunk in chunks), user(answer("ls", "x", "c1"))) == whole
    assert messages(HI, model(*chunks), user(answer("ls", "x", "c1"))) == whole


def test_references_that_contradict_each_other_name_no_turn() -> None:
    def ref(*signatures: str) -> str:
        return messages(HI, model(*({"text": "a", "thoughtSignature": s} for s in signatures)), HI)[1].ref

    assert ref(as_base64(TURN), as_base64(TURN)) == TURN
    assert ref(as_base64(TURN), as_base64(OTHER)) == ""
    assert ref("skip_thought_signature_validator", as_base64(TURN)) == TURN
    assert ref("skip_thought_signature_validator", "QUFB", "é", "") == ""


def test_a_part_that_carries_a_signature_alone_is_no_text() -> None:
    found = messages(HI, model({"thoughtSignature": as_base64(TURN)}), user(answer("ls", "x")))
    assert found[1] == Message("assistant", (), TURN)


def ids(found: tuple[Message, ...]) -> tuple[list[str], list[str]]:
    """The ids of the calls, and those that the results name."""
    return [c.id for m in found for c in m.calls], [p.call_id for m in found for p in m.parts if isinstance(p, ToolResult)]


def test_calls_without_ids_get_those_that_were_minted_for_the_turn() -> None:
    signed = {**call("ls"), "thoughtSignature": as_base64(TURN)}
    calls, results = ids(messages(HI, model(signed, call("rm"), call("ls")), user(answer("ls", "1"), answer("ls", "2"), answer("rm", "3"))))
    assert calls == [f"call_{TURN}00", f"call_{TURN}01", f"call_{TURN}02"]
    assert results == [calls[0], calls[2], calls[1]], "by name, then in order"


def test_calls_of_no_known_turn_get_ids_that_stay_as_the_history_grows() -> None:
    first = [HI, model(call("ls"), call("ls")), user(answer("ls", "1"), answer("ls", "2"))]
    second = [*first, model(call("ls")), user(answer("ls", "3"))]
    calls, results = ids(messages(*second))
    assert calls == results
    assert len(set(calls)) == 3
    assert ids(messages(*first))[0] == calls[:2]


def test_an_id_beside_a_signature_keeps_the_others_from_naming_the_turn() -> None:
    """What is left of several calls is not counted anew."""
    calls, _ = ids(messages(HI, model({**call("a", "mine"), "thoughtSignature": as_base64(TURN)}, call("b")), HI))
    assert calls[0] == "mine"
    assert TURN not in calls[1]


def test_responses_find_their_calls() -> None:
    def named(*responses: Any) -> list[str]:
        return ids(messages(HI, model(call("ls", "c1"), call("rm", "c2"), call("ls", "c3")), user(*responses)))[1]

    assert named(answer("ls", "", "c3"), answer("ls", ""), answer("rm", "")) == ["c3", "c1", "c2"], "an id comes before a name"
    assert named(answer("ls", "", "unknown")) == ["c1"]
    assert named(answer("mv", "", "unknown")) == ["unknown"]
    assert named(*[answer("rm", "")] * 3) == ["c2", "call_2_r01", "call_2_r02"], "a response without a call is a tool message all the same"


@pytest.mark.parametrize(
    ("response", "text", "is_error"),
    [
        ({"output": "plain"}, "plain", False),
        ({"output": {"a": [1, None]}}, '{"a":[1,null]}', False),
        ({"error": "bad"}, "bad", True),
        ({"error": {"code": 1}}, '{"code":1}', True),
        ({"result": "x"}, '{"result":"x"}', False),
        ({"output": "x", "error": "y"}, '{"output":"x","error":"y"}', False),
        ({}, "{}", False),
        (None, "", False),
    ],
)
def test_what_a_function_gave_back(response: Any, text: str, is_error: bool) -> None:
    found = messages(HI, model(call("ls", "c")), user({"functionResponse": {"id": "c", "name": "ls", "response": response}}))
    assert found[-1] == Message("tool", (ToolResult("c", text, is_error),))


def test_a_late_response_answers_the_call_whose_id_it_has() -> None:
    """The first call was still running when the user spoke and another of that name was made."""
    found = messages(
        user({"text": "go"}),
        model(call("read", "call_a", path="a")),
        user({"text": "meanwhile"}),
        model(call("read", "call_b", path="b")),
        user(answer("read", "of a", "call_a"), answer("read", "of b", "call_b")),
    )
    assert [(p.call_id, p.text) for m in found for p in m.parts if isinstance(p, ToolResult)] == [("call_a", "of a"), ("call_b", "of b")]


def test_the_role_function_is_the_users() -> None:
    assert messages(HI, model(call("ls", "c")), {"role": "function", "parts": [answer("ls", "x", "c")]})[-1].role == "tool"


PNG = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}


def test_images_are_counted_placeholders_where_the_policy_says_so() -> None:
    shown = GeminiDialect(Reading(images="placeholder"))
    pictured = {"functionResponse": {"id": "c", "name": "ls", "response": {"output": "see"}, "parts": [PNG]}}
    request = read(
        dialect=shown,
        contents=[
            user({"text": "look"}, PNG, {"file_data": {"mime_type": "application/pdf", "file_uri": "x"}}),
            model(call("ls", "c")),
            user(pictured),
        ],
    )
    assert request.messages[0].text == "look\n[image/png, 3 bytes, not shown]\n[application/pdf, not shown]"
    assert request.messages[2].text == "see\n[image/png, 3 bytes, not shown]"
    assert request.images == 3


def test_lone_surrogates_become_replacement_characters() -> None:
    body = b'{"contents":[{"parts":[{"text":"cut \\ud83d here \\ud83d\\ude00"}]}]}'
    assert DIALECT.read(body, GENERATE).messages[0].text == "cut \ufffd here 😀"


def test_function_calling_can_be_forbidden_or_narrowed() -> None:
    tools = [{"functionDeclarations": [{"name": "a"}, {"name": "b"}]}]

    def configured(**config: Any) -> tuple[bool, list[str]]:
        request = read(tools=tools, toolConfig={"functionCallingConfig": config})
        return request.call_tools, [t.name for t in request.tools]

    assert configured() == (True, ["a", "b"])
    assert configured(mode="NONE") == (False, ["a", "b"])
    assert configured(mode="VALIDATED", allowedFunctionNames=["b"]) == (True, ["b"])
    assert configured(mode="NONE", allowedFunctionNames=["b"]) == (False, ["a", "b"]), "what may not be called is shown all the same"
    assert configured(mode="auto") == (True, ["a", "b"])


def test_a_schema_in_json_schema_is_not_touched() -> None:
    plain = {"type": "object", "nullable": True, "format": "enum", "properties": {"a": {"type": ["string", "null"], "ref": "x"}}}
    declared = {"name": "f", "parametersJsonSchema": plain, "parameters": {"type": "STRING"}}
    request = read(
        tools=[{"functionDeclarations": [declared]}],
        generationConfig={"responseMimeType": "application/json", "responseJsonSchema": plain},
    )
    assert json.loads(request.tools[0].parameters) == json.loads(request.json_schema) == plain


def test_a_tool_that_is_null_is_not_declined() -> None:
    assert read(tools=[{"googleSearch": None, "urlContext": {}}]).declined == ("urlContext",)


def test_structured_output() -> None:
    def schema(**config: Any) -> str:
        return read(generationConfig={"responseMimeType": "application/json", **config}).json_schema

    assert schema() == '{"type":"object"}'
    assert schema(responseSchema={"type": "STRING", "nullable": True}) == '{"type":["string","null"]}'
    assert schema(responseJsonSchema={"type": "string"}, responseSchema={"type": "OBJECT"}) == '{"type":"string"}'
    assert schema(_responseJsonSchema={"type": "string"}) == '{"type":"string"}'
    assert read(generationConfig={"responseMimeType": "text/plain"}).json_schema == ""


def test_logprobs_of_the_chosen_tokens_can_be_asked_for() -> None:
    assert read(generationConfig={"responseLogprobs": True}).logprobs is True
    assert read(generationConfig={"responseLogprobs": False, "candidateCount": 1, "responseModalities": ["TEXT"]}).logprobs is False


@pytest.mark.parametrize(("came", "wanted"), [("5", 5), ("8.0", 8), (5, 5), (8.0, 8), (None, None)])
def test_integers_may_be_strings(came: Any, wanted: int | None) -> None:
    config = {"maxOutputTokens": came, "candidateCount": "1", "logprobs": "0"}
    assert read(generationConfig=config).max_tokens == read(generation_config={"max_output_tokens": came}).max_tokens == wanted


def test_a_long_reply_may_come_back_a_chunk_at_a_time() -> None:
    """google-genai's chats keep each chunk of a stream as a content of its own."""
    (reply, _) = messages(*[model({"text": "a"})] * 6000, HI)
    assert reply.parts == (Text("a" * 6000),)


ANSWERS = {
    "in order": lambda n: [answer("f", "x", f"c{i}") for i in range(n)],
    "in reverse": lambda n: [answer("f", "x", f"c{i}") for i in reversed(range(n))],
    "by name": lambda n: [answer("f", "x") for _ in range(n)],
    "of no call": lambda n: [answer("g", "x", "unknown") for _ in range(n)],
    "by id, then by name": lambda n: [answer("f", "x", f"c{i}") for i in range(n // 2)] + [answer("f", "x") for _ in range(n // 2)],
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_work_is_linear_in_the_calls_that_are_answered(answers: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    class Looked(ToolCall):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            nonlocal looked
            looked += 1
            return super().__getattribute__(name)

        def __eq__(self, other: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__eq__(other)

        __hash__ = ToolCall.__hash__

    monkeypatch.setattr(contents, "ToolCall", Looked)
    counts = []
    for n in (200, 800):
        looked = 0
        messages(model(*(call("f", f"c{i}") for i in range(n))), user(*answers(n)))
        counts.append(looked)
    assert counts[1] <= 4.5 * counts[0]
