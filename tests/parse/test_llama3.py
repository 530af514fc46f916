"""Llama 3's bare JSON: when a reply is a call and when it only looks like one; and what follows its tag."""

from __future__ import annotations

import pytest

from tests.parse.kit import run
from turnloom.types import CallStatus

BASH = '{"name": "bash", "parameters": {"path": "a}"}}'
READ = '{"name": "read_file", "parameters": {}}'
TAG = "<|python_tag|>"


def test_a_reply_that_is_one_object_is_a_call() -> None:
    found = run("llama3", BASH)
    assert (found.calls, found.text, found.records[0].raw) == ([("bash", {"path": "a}"})], "", BASH)


@pytest.mark.parametrize("separator", [";", "; ", "\n", "\n\n", ""])
def test_several_objects(separator: str) -> None:
    found = run("llama3", f"{BASH}{separator}{READ}\n")
    assert (found.calls, found.text) == ([("bash", {"path": "a}"}), ("read_file", {})], "")
    assert "".join(record.raw for record in found.records) == f"{BASH}{separator}{READ}\n"


@pytest.mark.parametrize("behind", [" is what I would call.", "\n\nDone.", "}", "]", ", " + READ])
def test_an_object_with_more_behind_it_is_no_call(behind: str) -> None:
    found = run("llama3", BASH + behind)
    assert (found.calls, found.text) == ([], BASH + behind)
    assert [(record.status, record.name) for record in found.records] == [(CallStatus.MALFORMED, "bash")]


def test_an_object_behind_text_is_text() -> None:
    found = run("llama3", f"Calling: {BASH}")
    assert (found.calls, found.text, found.records) == ([], f"Calling: {BASH}", [])


@pytest.mark.parametrize("answer", ['{"answer": 42}', '{"user": {"name": "bash"}}', "{}", "{x | x > 0}", "{", '{ "a": [1, 2] }\n{"b": {}}'])
def test_an_answer_in_json_is_text_and_no_attempt(answer: str) -> None:
    found = run("llama3", answer)
    assert (found.text, found.calls, found.records) == (answer, [], [])


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ('{"name": "rm", "parameters": {}}', CallStatus.UNKNOWN_TOOL),
        ('{"name": "Ada", "age": 36}', CallStatus.UNKNOWN_TOOL),
        ('{"parameters": {"a": 1}}', CallStatus.MISSING_NAME),
        ('{"name": "bash", "parameters": [1]}', CallStatus.MALFORMED),
        ('{"name": "bash", "parameters": {"a": 1,}}', CallStatus.INVALID_JSON),
        ('{"name": "bash", "parameters": {"a": "x\ny"}}', CallStatus.INVALID_JSON),
        ('{"name": "bash", "parameters": {"a": 1}', CallStatus.UNCLOSED),
    ],
)
@pytest.mark.parametrize("tag", ["", TAG])
def test_what_is_no_declared_tools_call_is_text(output: str, status: CallStatus, tag: str) -> None:
    found = run("llama3", tag + output)
    assert (found.text, found.calls, found.statuses) == (tag + output, [], [status])
    assert found.records[0].raw == tag + output


def test_calls_behind_the_tag_with_text_around() -> None:
    found = run("llama3", f"Now:\n{TAG}{BASH}; {READ}\nThat was it.")
    assert (found.calls, found.text) == ([("bash", {"path": "a}"}), ("read_file", {})], "Now:That was it.")


def test_newlines_around_what_is_no_call_are_text() -> None:
    output = f'Now:\n{TAG}{{"name": "rm", "parameters": {{}}}}\nmore'
    assert run("llama3", output).text == output


@pytest.mark.parametrize("twice", ['"name": "read_file", ', '"arguments": {}, '])
def test_a_member_given_twice_is_malformed(twice: str) -> None:
    output = f'{{{twice}"name": "bash", "parameters": {{}}}}'
    found = run("llama3", output)
    assert (found.text, found.calls, found.statuses) == (output, [], [CallStatus.MALFORMED])


def test_half_a_surrogate_pair_in_arguments_is_spelled_as_its_escape() -> None:
    assert run("llama3", '{"name": "bash", "parameters": {"path": "\ud83d"}}').spelled == ['{"path": "\\ud83d"}']


def test_a_call_behind_the_tag_comes_out_before_the_reply_ends() -> None:
    from turnloom.parse.formats import parser_factory
    from turnloom.types import Tool

    parser = parser_factory("llama3", "")([Tool("bash", "", "{}")], False)
    assert len(parser.feed(TAG + BASH)) == 1


def test_builtin_form_with_plain_values() -> None:
    found = run("llama3", TAG + 'bash.call(path="a)b, c=\\"d\\"", count=-1, force=True)')
    assert found.calls == [("bash", {"path": 'a)b, c="d"', "count": -1, "force": True})]


@pytest.mark.parametrize(
    "code", ["bash.call(path=f(x))", "bash.call('positional')", "bash.call(path='a' + 'b')", "bash.call(path='a', path='b')"]
)
def test_builtin_form_with_code_is_malformed(code: str) -> None:
    found = run("llama3", TAG + code)
    assert (found.text, found.calls, found.statuses) == (TAG + code, [], [CallStatus.MALFORMED])


@pytest.mark.parametrize("code", ["print('hi')", "import os\nos.remove('x')", "x = 1"])
def test_code_behind_the_tag_is_text(code: str) -> None:
    found = run("llama3", TAG + code)
    assert (found.text, found.statuses) == (TAG + code, [CallStatus.MALFORMED])


def test_the_tag_inside_a_string_is_part_of_it() -> None:
    assert run("llama3", '{"name": "bash", "parameters": {"path": "<|python_tag|>{}"}}').calls == [("bash", {"path": "<|python_tag|>{}"})]


def test_newline_between_objects_that_are_no_calls_and_the_tag_frames_the_tag() -> None:
    found = run("llama3", f"{BASH}\n\n{TAG}{READ}")
    assert (found.text, found.calls, found.statuses) == (f"{BASH}\n", [("read_file", {})], [CallStatus.MALFORMED, CallStatus.OK])
