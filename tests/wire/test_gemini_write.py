"""Replies in Gemini's dialect: a neutral reply in, bytes out, as google-genai and Google's JavaScript SDK read them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from google.genai import types
from google.genai._api_client import _iter_sse_lines
from hypothesis import given
from hypothesis import strategies as st

from turnloom.core.match import CANONICAL, echo_keys, message_key
from turnloom.errors import (
    BadRequest,
    BodyTooLarge,
    EngineAborted,
    EngineOverloaded,
    EngineProtocol,
    EngineRejected,
    EngineUnavailable,
    LimitReached,
    NotFound,
    PromptTooLong,
    SessionClosed,
    StoreError,
    TurnloomError,
    Unauthorized,
)
from turnloom.parse.contract import ReasoningDelta, TextDelta
from turnloom.types import Finish, FinishReason, Message, Reasoning, Request, Text, ToolCall
from turnloom.wire.contract import Envelope, Head, Reply, ReplyEvent, SampledToken, SampledTokens
from turnloom.wire.gemini import GeminiDialect
from turnloom.wire.json import whole_text
from turnloom.wire.refs import as_base64

DIALECT = GeminiDialect()
TURN = "0" * 31 + "1"
SIGNED = as_base64(TURN)
CALL = ToolCall(f"call_{TURN}00", "ls", '{"path": "."}')
GENERATE = Envelope(model="m", verb="generateContent")


def head(*, sse: bool = True, thoughts: bool = True, logprobs: bool = False) -> Head:
    return Head(TURN, "m", 0, 7, Request((), logprobs=logprobs, wire={"sse": sse, "thoughts": thoughts}))


def reply(*parts: Any, finish: Finish = Finish(FinishReason.STOP), at: Head | None = None, tokens: tuple[SampledToken, ...] = ()) -> Reply:  # noqa: B008 (frozen)
    return Reply(at or head(), Message("assistant", parts), finish, 3, tokens)


def parsed(raw: bytes | str) -> types.GenerateContentResponse:
    """As the SDK's own types, which forbid what they do not know."""
    return types.GenerateContentResponse.model_validate(json.loads(raw))


def stream(events: list[ReplyEvent], done: Reply) -> bytes:
    writer = DIALECT.stream(done.head)
    return writer.begin() + b"".join(map(writer.event, events)) + writer.finish(done)


def js_items(sent: bytes) -> list[Any]:
    """The items of an event stream as Google's JavaScript SDK cuts it: its `.` matches no end of line that JavaScript knows."""
    line, buffer, found = re.compile("\\s*data: ([^\n\r\u2028\u2029]*)(?:\n\n|\r\r|\r\n\r\n)"), sent.decode(), []
    while match := line.match(buffer):
        found.append(json.loads(match[1]))
        buffer = buffer[match.end() :]
    if buffer.strip():
        raise ValueError("Incomplete JSON segment at the end")
    return found


def py_items(sent: bytes) -> Iterator[Any]:
    for line in _iter_sse_lines([sent]):
        if line:
            yield json.loads(line.removeprefix("data: "))


def items(sent: bytes) -> list[Any]:
    """The responses of a stream of either form; of events, what both SDKs make of them."""
    if sent[:1] == b"[":
        return list(json.loads(sent))
    found = js_items(sent)
    assert list(py_items(sent)) == found
    return found


def contents(responses: list[Any]) -> list[Any]:
    return [candidate["content"] for response in responses for candidate in response["candidates"]]


def echoed(brought: list[Any]) -> Message:
    """What these contents are when they come back."""
    body = {"contents": [{"parts": [{"text": "hi"}]}, *brought, {"parts": [{"text": "on"}]}]}
    return DIALECT.read(json.dumps(body).encode(), GENERATE).messages[1]


def test_a_whole_response() -> None:
    raw = DIALECT.write([reply(Reasoning("hmm"), Text("\n"), CALL, ToolCall(f"call_{TURN}01", "rm", "{}"))])
    assert json.loads(raw) == {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {"text": "hmm", "thought": True},
                        {"text": "\n", "thoughtSignature": SIGNED},
                        {"functionCall": {"id": f"call_{TURN}00", "name": "ls", "args": {"path": "."}}, "thoughtSignature": SIGNED},
                        {"functionCall": {"id": f"call_{TURN}01", "name": "rm", "args": {}}},
                    ],
                    "role": "model",
                },
                "index": 0,
                "finishReason": "STOP",
            }
        ],
        "modelVersion": "m",
        "responseId": TURN,
        "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 3, "totalTokenCount": 10},
    }
    response = parsed(raw)
    assert [c.args for c in response.function_calls or []] == [{"path": "."}, {}]
    assert response.candidates is not None
    assert base64.b64decode(SIGNED, validate=True) == TURN.encode(), "the field is bytes"


def test_a_stream_of_events() -> None:
    events = [ReasoningDelta("hm"), ReasoningDelta("m"), TextDelta("Hi"), TextDelta(" you"), CALL, TextDelta("\n")]
    writer = DIALECT.stream(head())
    assert (writer.begin(), writer.content_type) == (b"", "text/event-stream")
    sent = [writer.ping(), *map(writer.event, events), writer.ping(), writer.finish(reply(Text("Hi you"), CALL))]
    found = items(b"".join(sent))
    for item in found:
        parsed(json.dumps(item))
    assert [content["parts"] for content in contents(found)] == [
        [{"text": "hm", "thought": True}],
        [{"text": "m", "thought": True}],
        [{"text": "Hi", "thoughtSignature": SIGNED}],
        [{"text": " you"}],
        [{"functionCall": {"id": CALL.id, "name": "ls", "args": {"path": "."}}, "thoughtSignature": SIGNED}],
        [{"text": "\n"}],
        [{"text": ""}],
    ]
    assert [item.get("usageMetadata") is not None for item in found] == [False] * 6 + [True]
    assert [item["candidates"][0].get("finishReason") for item in found] == [None] * 6 + ["STOP"]
    assert {item["responseId"] for item in found} == {TURN}


def test_a_stream_as_one_array() -> None:
    writer = DIALECT.stream(head(sse=False))
    assert writer.content_type == "application/json"
    sent = [
        writer.begin(),
        writer.ping(),
        writer.event(TextDelta("a")),
        writer.ping(),
        writer.event(CALL),
        writer.finish(reply(Text("a"), CALL)),
    ]
    assert [s[:1] for s in sent] == [b"[", b"\n", b"{", b"\n", b"\r", b"\r"]
    assert sent[4].startswith(b"\r\n,{")
    assert sent[-1].endswith(b"}]")
    assert contents(json.loads(b"".join(sent))) == contents(items(stream([TextDelta("a"), CALL], reply(Text("a"), CALL))))


def test_an_array_of_one() -> None:
    (only,) = json.loads(stream([], reply(at=head(sse=False))))
    assert only["candidates"][0]["finishReason"] == "STOP"


@pytest.mark.parametrize("sse", [True, False])
def test_reasoning_that_was_not_asked_for_is_not_shown(sse: bool) -> None:
    at = head(sse=sse, thoughts=False)
    done = reply(Reasoning("secret"), Text("Hi"), at=at)
    sent = stream([ReasoningDelta("secret"), TextDelta("Hi")], done)
    assert b"secret" not in sent + DIALECT.write([done])
    assert len(items(sent)) == 2
    assert DIALECT.stream(at).event(ReasoningDelta("secret")) == b""


@pytest.mark.parametrize("parts", [(), (Reasoning("hmm"),), (Text(""),)])
@pytest.mark.parametrize("thoughts", [True, False])
def test_a_reply_without_words_still_names_its_turn(parts: tuple[Any, ...], thoughts: bool) -> None:
    """A part in every content: google-genai's chats forget a turn that has one without."""
    done = reply(*parts, at=head(thoughts=thoughts))
    events: list[ReplyEvent] = [ReasoningDelta(p.text) if isinstance(p, Reasoning) else TextDelta(p.text) for p in parts]
    for brought in ([parsed(DIALECT.write([done]))], [parsed(json.dumps(i)) for i in items(stream(events, done))]):
        found = [c.content for response in brought for c in response.candidates or []]
        assert all(content is not None and content.parts for content in found)
        came = echoed([content.model_dump(mode="json", exclude_none=True, by_alias=True) for content in found if content])
        assert (came.text, came.ref) == ("", TURN)


@pytest.mark.parametrize(
    ("finish", "said"),
    [
        (Finish(FinishReason.STOP), "STOP"),
        (Finish(FinishReason.STOP, "END"), "STOP"),
        (Finish(FinishReason.LENGTH), "MAX_TOKENS"),
    ],
)
def test_finish_reasons(finish: Finish, said: str) -> None:
    done = reply(Text("a"), CALL, finish=finish)
    last = items(stream([TextDelta("a"), CALL], done))[-1]
    assert last["candidates"][0]["finishReason"] == json.loads(DIALECT.write([done]))["candidates"][0]["finishReason"] == said


def test_logprobs_of_every_token_go_out_once() -> None:
    tokens = tuple(SampledToken(text, logprob) for text, logprob in (("He", -0.5), ("llo", -1.5), ("<|end|>", float("-inf"))))
    done = reply(Text("Hello"), at=head(logprobs=True), tokens=tokens)
    chosen = [
        {"token": "He", "logProbability": -0.5},
        {"token": "llo", "logProbability": -1.5},
        {"token": "<|end|>", "logProbability": -9999.0},
    ]
    sent = items(stream([TextDelta("He"), SampledTokens(tokens[:1]), TextDelta("llo"), SampledTokens(tokens[1:2])], done))
    (body,) = json.loads(DIALECT.write([done]))["candidates"]
    assert body["logprobsResult"]["chosenCandidates"] == chosen
    assert [c for i in sent for c in i["candidates"][0].get("logprobsResult", {}).get("chosenCandidates", [])] == chosen
    assert sent[-1]["candidates"][0]["avgLogprobs"] == body["avgLogprobs"] == pytest.approx((-0.5 - 1.5 - 9999) / 3)
    for item in sent:
        parsed(json.dumps(item))


LETTERS = st.text(st.characters(codec=None), max_size=4).map(lambda text: re.sub("[\udc00-\udfff]", "", text)) | st.sampled_from(
    ["\u2028", "\u2029", "\x85", "\r\n\r\n", "data: {", "\\u2028"]
)
"""Any text at all, first halves of surrogate pairs and ends of lines included."""

KINDS = st.sampled_from(["text", "reasoning", "call"])


def spelled(kind: str, text: str, number: int) -> tuple[ReplyEvent, Any]:
    """A piece of a reply as an event and as a part. A call is spelled over several lines, as models do."""
    if kind == "call":
        call = ToolCall(f"call_{TURN}{number:02d}", "ls", '{\n  "a":\r\n ' + json.dumps(text, ensure_ascii=False) + "\n}")
        return call, call
    return (TextDelta(text), Text(text)) if kind == "text" else (ReasoningDelta(text), Reasoning(text))


def merged(parts: list[Any]) -> tuple[Any, ...]:
    """Parts as a reply holds them: pieces of one kind in a row are one."""
    found: list[Any] = []
    for part in (p for p in parts if isinstance(p, ToolCall) or p.text):
        if not isinstance(part, ToolCall) and found and type(found[-1]) is type(part):
            found[-1] = type(part)(found[-1].text + part.text)
        else:
            found.append(part)
    return tuple(found)


PLANS = st.lists(st.tuples(KINDS, LETTERS), max_size=6)


@given(PLANS, st.booleans(), st.booleans())
def test_any_stream_says_what_the_whole_body_says(plan: list[tuple[str, str]], sse: bool, thoughts: bool) -> None:
    """However the pieces fell, both come back as the reply itself, with its turn, its calls' ids and its words."""
    made = [spelled(kind, text, i) for i, (kind, text) in enumerate(plan)]
    done = reply(*merged([part for _, part in made]), at=head(sse=sse, thoughts=thoughts))
    sent, body = items(stream([event for event, _ in made], done)), json.loads(DIALECT.write([done]))
    for item in (*sent, body):
        parsed(json.dumps(item))
    assert sent[-1]["usageMetadata"] == body["usageMetadata"]
    streamed, at_once = echoed(contents(sent)), echoed(contents([body]))
    assert streamed == at_once
    recorded = Message("assistant", tuple(_sendable(p) for p in done.message.parts))
    shown = recorded.parts if thoughts else merged([p for p in recorded.parts if not isinstance(p, Reasoning)])
    assert message_key(streamed) == message_key(Message("assistant", shown))
    assert recorded.calls or message_key(streamed) in echo_keys(recorded, CANONICAL)
    assert streamed.ref == TURN
    assert [c.id for c in streamed.calls] == [c.id for c in recorded.calls]
    assert "".join(t.text for t in streamed.parts if isinstance(t, Text)) == "".join(t.text for t in recorded.parts if isinstance(t, Text))
    assert streamed.reasoning == (recorded.reasoning if thoughts else "")


def _sendable(part: Any) -> Any:
    """A part less what no client can bring back: lone surrogates, and the spacing of arguments."""
    if isinstance(part, ToolCall):
        return ToolCall(part.id, part.name, whole_text(part.arguments))
    return type(part)(part.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


@given(PLANS)
def test_an_echo_without_ids_or_thoughts_is_the_reply(plan: list[tuple[str, str]]) -> None:
    """pi leaves out the ids, Gemini CLI the thoughts."""
    made = [spelled(kind, text, sum(k == "call" for k, _ in plan[:i])) for i, (kind, text) in enumerate(plan)]
    done = reply(*merged([part for _, part in made]))
    content = json.loads(DIALECT.write([done]))["candidates"][0]["content"]
    kept = [part for part in content["parts"] if not part.get("thought")]
    for part in kept:
        part.get("functionCall", {}).pop("id", None)
    came = echoed([{"role": "model", "parts": kept}])
    assert came.ref == (TURN if kept else "")
    assert [c.id for c in came.calls] == [c.id for c in done.message.calls]


ESCAPES = st.sampled_from(["\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\\\", '\\"', "\\u00e9", "\\n", "ud83d", "é", "😀", "\u2028", "\x85"])
QUOTED = st.lists(ESCAPES, max_size=6).map(lambda parts: '"' + "".join(parts) + '"')
NUMBERS = st.sampled_from(["-0", "1E300", "12345678901234567890123", "1.10", "9" * 300])


@given(st.lists(st.tuples(QUOTED, QUOTED | NUMBERS), min_size=1, max_size=3))
def test_what_the_model_wrote_goes_out_as_it_stands(members: list[tuple[str, str]]) -> None:
    arguments = "{" + ", ".join(f"{key}:\n{value}" for key, value in members) + "}"
    call = ToolCall("c", "ls", arguments)
    body = DIALECT.write([reply(call)]).decode()
    assert body.partition('"args":')[2].startswith(whole_text(arguments) + "}")
    array = stream([call], reply(call, at=head(sse=False))).decode()
    assert array.partition('"args":')[2].startswith(whole_text(arguments) + "}")
    event = DIALECT.stream(head()).event(call).decode()
    pairs = {"object_pairs_hook": list, "parse_int": str, "parse_float": str}
    assert json.loads(event.removeprefix("data: "), **pairs) == json.loads(array.split("\r\n,")[0][1:], **pairs)
    orjson.loads(event.removeprefix("data: "))


ERRORS: dict[TurnloomError, tuple[int, str]] = {
    BadRequest("x"): (400, "INVALID_ARGUMENT"),
    EngineRejected("x"): (400, "INVALID_ARGUMENT"),
    PromptTooLong(9, 5): (400, "INVALID_ARGUMENT"),
    Unauthorized("x"): (401, "UNAUTHENTICATED"),
    NotFound("x"): (404, "NOT_FOUND"),
    BodyTooLarge("x"): (413, "INVALID_ARGUMENT"),
    LimitReached("x"): (429, "RESOURCE_EXHAUSTED"),
    StoreError("x"): (500, "INTERNAL"),
    EngineProtocol("x"): (500, "INTERNAL"),
    SessionClosed("x"): (503, "UNAVAILABLE"),
    EngineUnavailable("x"): (503, "UNAVAILABLE"),
    EngineOverloaded("x"): (503, "UNAVAILABLE"),
    EngineAborted("x"): (503, "UNAVAILABLE"),
}


@pytest.mark.parametrize(("error", "expected"), ERRORS.items(), ids=[type(e).__name__ for e in ERRORS])
def test_errors_have_googles_shape(error: TurnloomError, expected: tuple[int, str]) -> None:
    answer = DIALECT.error(error)
    told = json.loads(answer.body)["error"]
    assert (answer.status, told["status"]) == expected
    assert told["code"] == answer.status
    assert "x" in told["message"]
    delays = [d["retryDelay"] for d in told.get("details", []) if d["@type"].endswith("RetryInfo")]
    again, final = isinstance(error, EngineUnavailable | EngineOverloaded | EngineAborted), isinstance(error, LimitReached | SessionClosed)
    assert delays == (["1s"] if again else ["86400s"] if final else [])
    assert answer.headers.get("Retry-After") == ("1" if again else None)


def test_overflow_is_said_in_the_words_that_make_agents_compact() -> None:
    told = json.loads(DIALECT.error(PromptTooLong(9000, 8192)).body)["error"]["message"]
    assert told == "The input token count (9000) exceeds the maximum number of tokens allowed (8192)."


def test_an_unknown_key_is_told_as_google_does() -> None:
    told = json.loads(DIALECT.error(Unauthorized("no session has this key")).body)["error"]
    assert told["message"] == "API key not valid. Please pass a valid API key: no session has this key."
    assert told["details"][0]["reason"] == "API_KEY_INVALID"


@given(st.lists(st.sampled_from(["event", "ping"]), max_size=3))
def test_a_failure_mid_stream_is_no_ending(before: list[str]) -> None:
    """It must not pass for a response: an event that holds an error is one without candidates to the JavaScript SDK."""
    writer = DIALECT.stream(head())
    sent = writer.begin() + b"".join(writer.ping() if step == "ping" else writer.event(TextDelta("a")) for step in before)
    failed = writer.error(EngineAborted("gone"))
    told = json.loads(failed)["error"]
    assert (told["code"], told["status"], told["message"]) == (503, "UNAVAILABLE", "gone")
    with pytest.raises(ValueError, match="Incomplete JSON segment"):
        js_items(sent + failed)
    assert list(py_items(sent + failed))[-1]["error"] == told


def test_a_failure_in_the_array_is_its_last_item() -> None:
    writer = DIALECT.stream(head(sse=False))
    sent = writer.begin() + writer.event(TextDelta("a")) + writer.error(EngineAborted("gone"))
    assert json.loads(sent)[-1]["error"]["status"] == "UNAVAILABLE"
    assert json.loads(DIALECT.stream(head(sse=False)).begin() + DIALECT.stream(head(sse=False)).error(EngineAborted("gone")))[0]["error"]


def test_counts_and_models() -> None:
    assert json.loads(DIALECT.count(12)) == {"totalTokens": 12}
    (listed,) = json.loads(DIALECT.models(["m"]))["models"]
    assert listed == json.loads(DIALECT.model("m")) == json.loads(DIALECT.model("models/m"))
    assert listed["name"] == "models/m"
    assert "generateContent" in listed["supportedGenerationMethods"]
    assert json.loads(DIALECT.models([])) == {"models": []}
