"""Mistral's calls: named ones with and without ids, the older list, and no closing tag anywhere."""

from __future__ import annotations

import pytest

from tests.parse.kit import run
from turnloom.types import CallStatus

OPEN = "[TOOL_CALLS]"


@pytest.mark.parametrize("again", [OPEN, ""])
def test_several_calls_with_a_tag_each_or_one_for_all(again: str) -> None:
    found = run("mistral", f'{OPEN}bash[ARGS]{{"path": "}}{OPEN}x[ARGS]{{"}}{again}read_file[ARGS]{{}}')
    assert (found.calls, found.text) == ([("bash", {"path": f"}}{OPEN}x[ARGS]{{"}), ("read_file", {})], "")


def test_ids_are_kept_as_written() -> None:
    found = run("mistral", f"{OPEN}bash[CALL_ID]abc123XYZ[ARGS]{{}}{OPEN}bash[ARGS]{{}}")
    assert (found.written, [record.name for record in found.records]) == (["abc123XYZ", ""], ["bash", "bash"])


def test_name_without_the_arguments_token() -> None:
    assert run("mistral", OPEN + 'bash{"count": 1}').calls == [("bash", {"count": 1})]


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_the_older_list(blank: str) -> None:
    output = f'{OPEN}{blank}[{{"name": "bash", "arguments": {{"path": "]"}}, "id": "abc"}}, {{"name": "read_file", "arguments": {{}}}}]'
    found = run("mistral", output)
    assert (found.calls, found.text, found.written) == ([("bash", {"path": "]"}), ("read_file", {})], "", ["abc", ""])
    assert "".join(record.raw for record in found.records) == output


def test_one_bad_call_in_a_list_is_text_and_the_others_are_calls() -> None:
    found = run("mistral", f'{OPEN}[{{"name": "bash"}}, {{"name": "rm"}}, {{"name": "read_file"}}]')
    assert (found.calls, found.text) == ([("bash", {}), ("read_file", {})], ', {"name": "rm"}')
    assert found.statuses == [CallStatus.OK, CallStatus.UNKNOWN_TOOL, CallStatus.OK]


@pytest.mark.parametrize(
    ("output", "status"),
    [
        (OPEN + "rm[ARGS]{}", CallStatus.UNKNOWN_TOOL),
        (OPEN + "bash[ARGS]{'a': 1}", CallStatus.INVALID_JSON),
        (OPEN + '{"name": "bash"}', CallStatus.INVALID_JSON),
        (OPEN + "[]", CallStatus.MALFORMED),
        (OPEN + "[{} {}]", CallStatus.INVALID_JSON),
        (OPEN + "I will call bash", CallStatus.INVALID_JSON),
        (OPEN + "bash[ARGS][CALL_ID]{}", CallStatus.INVALID_JSON),
        (OPEN + 'bash[ARGS]{"path": "a', CallStatus.UNCLOSED),
        (OPEN, CallStatus.UNCLOSED),
    ],
)
def test_what_is_no_call_is_text(output: str, status: CallStatus) -> None:
    found = run("mistral", output)
    assert (found.text, found.calls, found.statuses) == (output, [], [status])


def test_a_call_only_quoted_in_a_broken_string_never_runs() -> None:
    output = f'{OPEN}bash[ARGS]{{"path": "a\n{OPEN}read_file[ARGS]{{}}"}}'
    assert (run("mistral", output).calls, run("mistral", output).text) == ([], output)


@pytest.mark.parametrize(
    ("behind", "text"), [(" I will.\n", f"{OPEN} I will."), ("\n", OPEN), (" \n\n", f"{OPEN} \n"), ("", OPEN), ("{}\n", f"{OPEN}{{}}")]
)
def test_a_tag_that_opens_no_call_is_text_alone(behind: str, text: str) -> None:
    found = run("mistral", f"{OPEN}{behind}{OPEN}bash[ARGS]{{}}")
    assert (found.text, found.calls, found.statuses) == (text, [("bash", {})], [CallStatus.INVALID_JSON, CallStatus.OK])
    assert found.records[0].raw == OPEN


def test_text_right_behind_a_call_is_text() -> None:
    found = run("mistral", OPEN + "bash[ARGS]{}Done, see bash[ARGS]{} above")
    assert (len(found.calls), found.text) == (1, "Done, see bash[ARGS]{} above")


def test_reasoning_in_its_own_tags() -> None:
    found = run("mistral", f"[THINK]{OPEN}bash[ARGS]{{}}?\n[/THINK]\n\nYes.", template="…[THINK]…")
    assert (found.reasoning, found.text, found.calls) == (f"{OPEN}bash[ARGS]{{}}?", "Yes.", [])
    assert run("mistral", "[THINK]x[/THINK]").text == "[THINK]x[/THINK]"
