"""Lists of JSON calls between tags: Phi-4-mini, Granite 3 (no closing tag), Command (names of its own, answer in tags); Aya."""

from __future__ import annotations

import json

import pytest

from tests.parse.kit import run
from turnloom.parse.formats import auto
from turnloom.testing.tokenizers import trl_template
from turnloom.types import CallStatus

PHI4 = ("phi4", "<|tool_call|>", "<|/tool_call|>", "name", "arguments")
GRANITE = ("granite3", "<|tool_call|>", "", "name", "arguments")
COHERE = ("cohere", "<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters")
each = pytest.mark.parametrize(
    ("form", "opener", "closer", "name", "arguments"), [PHI4, GRANITE, COHERE], ids=["phi4", "granite3", "cohere"]
)


@each
def test_calls_in_a_list(form: str, opener: str, closer: str, name: str, arguments: str) -> None:
    calls = [
        {name: "bash", arguments: {"path": f"]}} {closer}", "options": {"a": [{}]}}},
        {name: "read_file", arguments: {}},
        {name: "bash"},
    ]
    for indent in (None, 4):
        found = run(form, f"One.\n{opener}{json.dumps(calls, indent=indent)}{closer}\nTwo.")
        assert found.calls == [(str(call[name]), call.get(arguments, {})) for call in calls]
        assert found.text == "One.Two."


@each
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("[]", CallStatus.MALFORMED),
        ("[1]", CallStatus.INVALID_JSON),
        ("[{,}]", CallStatus.INVALID_JSON),
        ('[{"a": 1}]', CallStatus.MISSING_NAME),
    ],
)
def test_a_list_without_calls_is_text(
    form: str, opener: str, closer: str, name: str, arguments: str, body: str, status: CallStatus
) -> None:
    output = f"a\n{opener}{body}{closer}\nb"
    found = run(form, output)
    assert (found.text, found.calls, found.statuses) == (output, [], [status])


@each
def test_a_list_that_never_ends_is_text(form: str, opener: str, closer: str, name: str, arguments: str) -> None:
    output = f'{opener}[{{"{name}": "bash"}}'
    found = run(form, output)
    assert (found.text, found.statuses) == (output, [CallStatus.UNCLOSED])


@each
def test_a_call_behind_a_tag_that_opened_none_comes_out(form: str, opener: str, closer: str, name: str, arguments: str) -> None:
    found = run(form, f'{opener}prose {opener}[{{"{name}": "bash"}}]{closer}')
    assert (found.text, found.calls) == (f"{opener}prose ", [("bash", {})])
    assert found.statuses == [CallStatus.UNCLOSED if closer else CallStatus.INVALID_JSON, CallStatus.OK]


def test_cohere_ids_are_kept_as_written() -> None:
    assert run("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "bash", "parameters": {}}]<|END_ACTION|>').written == ["0"]


def test_cohere_response_tags_are_framing() -> None:
    found = run("cohere", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hi\n<|END_RESPONSE|>", template="<|START_THINKING|>")
    assert (found.reasoning, found.text) == ("Hm.", "Hi\n")


@pytest.mark.parametrize("name", ["cohere2", "cohere2_training"])
def test_aya_answers_in_command_response_tags_and_calls_as_it_is_taught(name: str) -> None:
    template = trl_template(name)
    assert auto(template) == "aya"
    found = run("auto", "Hi\n<|END_RESPONSE|>", template=template)  # The prompt opens the answer.
    assert (found.text, found.records) == ("Hi\n", [])
    call = '<tool_call>\n{"name": "bash", "arguments": {"path": "a"}}\n</tool_call>'
    found = run("auto", f"<|START_RESPONSE|>Now:\n{call}<|END_RESPONSE|>", template=template)
    assert (found.text, found.calls) == ("Now:", [("bash", {"path": "a"})])
    assert run("auto", "Hi<|END_RESPONSE|>", template=template, tools=()).text == "Hi"
