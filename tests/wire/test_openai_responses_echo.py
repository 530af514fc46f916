"""What clients carry back of a Responses reply is read as that reply, and their own words beside it as theirs."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.test_openai_responses import USER, A, B, called, messages, said, without_id
from tests.wire.test_openai_responses_write import DIALECT, OPTIONS, PLANS, SLOWLY, WORDS, asked, carried_out, reply
from tests.wire.test_openai_responses_write import A as TURN
from turnloom.core.match import message_key, strict_key
from turnloom.wire import freeform
from turnloom.wire.refs import as_base64


def thought(turn: str, number: int = 0) -> dict[str, Any]:
    words = [{"type": "reasoning_text", "text": "hmm"}]
    return {"type": "reasoning", "id": f"rs_{turn}{number:02d}", "summary": [], "content": words, "encrypted_content": as_base64(turn)}


OWN = {"role": "assistant", "content": "Earlier words."}
SIDE_BY_SIDE: dict[str, tuple[list[dict[str, Any]], list[tuple[str, int]]]] = {
    "own words, then a reply with reasoning": ([OWN, thought(A), said(A, "x", 1)], [("", 1), (A, 2)]),
    "own words, then reasoning alone": ([OWN, thought(A)], [("", 1), (A, 1)]),
    "own words, then a reply whose reasoning was dropped": ([OWN, said(A, "x", 1)], [("", 1), (A, 1)]),
    "own words, then calls alone": ([OWN, called(A, "ls")], [("", 1), (A, 1)]),
    "own words of another's id, then a reply": ([{**OWN, "id": "msg_1"}, said(A, "x")], [("", 1), (A, 1)]),
    "own empty words, then a reply": ([{**OWN, "content": ""}, said(A, "x")], [(A, 1)]),
    "more than can stand before a call": (
        [OWN, without_id(thought(A)) | {"encrypted_content": None}, called(A, "ls", 1)],
        [("", 2), (A, 1)],
    ),
    "a reply, then own words": ([thought(A), said(A, "x", 1), OWN], [(A, 2), ("", 1)]),
    "a reply with a call, then own words": ([said(A, "x"), called(A, "ls", 1), OWN], [(A, 2), ("", 1)]),
    "own words on both sides": ([OWN, said(A, "x"), OWN], [("", 1), (A, 1), ("", 1)]),
    "two replies": ([thought(A), said(A, "x", 1), thought(B), said(B, "y", 1)], [(A, 2), (B, 2)]),
    "a reply that kept call ids only": ([without_id(said(A, "x")), without_id(called(A, "ls"))], [(A, 2)]),
    "a reply that kept call ids and encrypted reasoning": (
        [without_id(thought(A)), without_id(said(A, "x")), without_id(called(A, "ls")), without_id(said(A, "y"))],
        [(A, 4)],
    ),
    "words without an id, then encrypted reasoning of the same reply": ([without_id(said(A, "x")), without_id(thought(A))], [(A, 2)]),
    "reasoning that lost its id, then words with one": ([{"type": "reasoning", "summary": []}, said(A, "x", 1)], [(A, 1)]),
    "reasoning with an id, then words that lost theirs": ([thought(A), without_id(said(A, "x"))], [(A, 2)]),
    "words that lost their id, then a call with one": ([without_id(said(A, "x")), called(A, "ls", 1)], [(A, 2)]),
}


@pytest.mark.parametrize(("items", "replies"), SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
def test_replies_and_the_clients_own_words_stand_side_by_side(items: list[dict[str, Any]], replies: list[tuple[str, int]]) -> None:
    assert [(m.ref, len(m.parts)) for m in messages(USER, *items, USER) if m.role == "assistant"] == replies


WRITTEN = st.one_of(
    st.dictionaries(st.sampled_from(["input", "b"]), st.text() | st.integers() | st.none(), max_size=2).map(json.dumps),
    st.text(),
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.just("input"), inner, max_size=1)).map(json.dumps),
)
"""Arguments of a freeform tool's shape, of other ones, and what is no JSON at all."""
FREEFORM = st.recursive(WRITTEN, lambda inner: inner.map(lambda text: json.dumps({"input": freeform.string_of(text)})), max_leaves=3)


@SLOWLY
@given(FREEFORM)
def test_a_freeform_call_is_read_back_as_it_was_written(arguments: str) -> None:
    """Also where the string that a model meant is what other arguments look like."""
    found = freeform.arguments_of(freeform.string_of(arguments))
    assert found == arguments or json.loads(found) == json.loads(arguments)


@given(st.text())
def test_a_clients_own_freeform_string_is_given_back_as_it_came(string: str) -> None:
    assert freeform.string_of(freeform.arguments_of(string)) == string


def codex(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """It keeps ids and encrypted content, and leaves reasoning's own words out."""
    return [{**item, "content": None} if item["type"] == "reasoning" else item for item in items]


def opencode(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """It keeps call ids, encrypted content and words, and writes the arguments anew."""
    kept = []
    for item in items:
        item = {key: value for key, value in item.items() if key not in ("id", "status")}
        kept.append({**item, "arguments": json.dumps(json.loads(item["arguments"]))} if item["type"] == "function_call" else item)
    return kept


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A script that keeps what a chat would."""
    words = ({"role": "assistant", "content": i["content"][0]["text"]} if i["type"] == "message" else i for i in items)
    return [{k: v for k, v in i.items() if k not in ("id", "status")} for i in words if i.get("type") != "reasoning"]


@pytest.mark.parametrize("client", [list, codex, opencode, bare])
@settings(deadline=None)
@given(PLANS.filter(bool), OPTIONS)
def test_any_reply_that_is_echoed_is_the_reply_that_was_sent(client: Any, plan: list[tuple[str, str]], options: dict[str, Any]) -> None:
    _, parts = carried_out(plan)
    done = reply(*parts, **options)
    items = client(orjson.loads(DIALECT.write([done]))["output"])
    request = asked(input=[{"role": "user", "content": "hi"}, *items, {"role": "user", "content": "on"}])
    echoed = [m for m in request.messages if m.role == "assistant"]
    if not items:
        assert echoed == []
        return
    (message,) = echoed
    assert message_key(message) == message_key(done.message)
    carried = any("id" in i or "call_id" in i or "encrypted_content" in i for i in items)
    assert message.ref == (TURN if carried else "")
    if client is list:
        assert [type(p) for p in message.parts] == [type(p) for p in parts]
        assert message.reasoning == done.message.reasoning


@SLOWLY
@given(
    st.lists(
        WORDS
        | st.tuples(st.sampled_from(["ls", "mcp__fs__read"]), WRITTEN)
        | st.tuples(st.sampled_from(["patch", "mcp__fs__note"]), FREEFORM),
        max_size=8,
    ),
    OPTIONS,
    st.booleans(),
)
def test_a_faithful_echo_is_exact(plan: list[tuple[str, str]], options: dict[str, Any], namespace: bool) -> None:
    """All that a strict matcher compares, but for what the wire cannot carry: that a function's arguments were no text at all
    rather than an empty object, which of a freeform call's repeated keys came first, and halves of surrogate pairs.
    """
    _, parts = carried_out([(kind, "{}" if kind in ("ls", "mcp__fs__read") and not text else text) for kind, text in plan])
    done = reply(*parts, **options)
    items = [{k: v for k, v in i.items() if namespace or k != "namespace"} for i in orjson.loads(DIALECT.write([done]))["output"]]
    own = {"role": "assistant", "content": "Earlier words."}
    user = {"role": "user", "content": "hi"}
    below = [own] if any(item["type"] == "message" and item["content"][0]["text"] for item in items) else []
    read = asked(input=[user, own, *items, *below, user], **options).messages
    assert [m.role for m in read] == ["user", "assistant", "assistant", *(m["role"] for m in below), "user"]
    assert strict_key(read[2]) == strict_key(done.message)
    assert read[2].ref == TURN
