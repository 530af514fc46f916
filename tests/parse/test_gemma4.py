"""Gemma 4's calls: strings between their own token, bare keys, and values that are typed by how they are written."""

from __future__ import annotations

import json

import pytest

from tests.parse.kit import run
from turnloom.types import CallStatus

Q = '<|"|>'


def call(arguments: str, name: str = "bash") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def test_values_of_every_kind() -> None:
    found = run("gemma4", call(f"path:{Q}a{Q},count:-1,force:true,options:{{list:[1,2.5,{Q}x{Q},[],{{k:null}}]}}"))
    assert found.calls == [("bash", {"path": "a", "count": -1, "force": True, "options": {"list": [1, 2.5, "x", [], {"k": None}]}})]


def test_a_string_holds_anything_but_its_token() -> None:
    text = 'a}"b",c:1 <tool_call|> <|tool_call>call:bash{} \\n\n\'[{ <|" \ud83d'
    found = run("gemma4", call(f"path:{Q}{text}{Q}"))
    assert found.calls == [("bash", {"path": text})]
    found.spelled[0].encode("utf-8")


def test_no_arguments() -> None:
    assert run("gemma4", call("")).spelled == ["{}"]


def test_numbers_keep_their_spelling() -> None:
    assert run("gemma4", call("count:123456789012345678901234567890,ratio:1.10")).spelled == [
        '{"count": 123456789012345678901234567890, "ratio": 1.10}'
    ]


def test_words_that_templates_print_and_bare_text() -> None:
    assert run("gemma4", call("force:True,options:None,path:New York")).calls == [
        ("bash", {"force": True, "options": None, "path": "New York"})
    ]


@pytest.mark.parametrize("name", ["mcp__files__list-all"])
def test_several_calls_and_text_around(name: str) -> None:
    found = run("gemma4", f"One.\n{call('count:1')}{call('', name)}\nTwo.")
    assert (found.calls, found.text) == ([("bash", {"count": 1}), (name, {})], "One.Two.")


@pytest.mark.parametrize(
    ("output", "status", "name"),
    [
        (call("", "rm"), CallStatus.UNKNOWN_TOOL, "rm"),
        (call("", ""), CallStatus.MISSING_NAME, ""),
        (call("count:many"), CallStatus.MALFORMED, "bash"),
        (call("options:{a:b c}"), CallStatus.MALFORMED, "bash"),
        (call("count:1,count:2"), CallStatus.MALFORMED, "bash"),
        (call("count"), CallStatus.MALFORMED, "bash"),
        (call(f"path:{Q}a"), CallStatus.UNCLOSED, "bash"),
        ("<|tool_call>bash{}<tool_call|>", CallStatus.MALFORMED, ""),
        ("<|tool_call>call:bash{count:1} <tool_call|", CallStatus.UNCLOSED, "bash"),
        ("<|tool_call>call:bash{count:1}}<tool_call|>", CallStatus.MALFORMED, "bash"),
        (call("a:" + "[" * 300 + "]" * 300), CallStatus.MALFORMED, "bash"),
    ],
)
def test_what_is_no_call_is_text(output: str, status: CallStatus, name: str) -> None:
    found = run("gemma4", output)
    assert (found.text, found.calls) == (output, [])
    assert [(record.status, record.name) for record in found.records] == [(status, name)]


def test_reasoning_channel() -> None:
    found = run("gemma4", f"<|channel>thought\nWhy.\n<channel|>{call('')}", template="<|channel>thought")
    assert (found.reasoning, found.text, len(found.calls)) == ("Why.", "", 1)


def test_arguments_are_json_whatever_the_keys_are() -> None:
    assert json.loads(run("gemma4", call(f'a"b\\:1,{Q}x:y{Q}:2')).spelled[0]) == {'a"b\\': 1, "x:y": 2}
