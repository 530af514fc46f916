"""Harmony's traps by name, and the parser against the openai-harmony package on the same completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parse.kit import TOOLS, read, run
from tests.render.o200k import harmony
from turnloom.types import CallStatus

HEADER = "<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
NEXT = "<|start|>assistant"


def test_reasoning_then_a_call() -> None:
    found = run("harmony", f'<|channel|>analysis<|message|>Look.<|end|>{NEXT}{HEADER}{{"path": "a"}}<|call|>')
    assert (found.reasoning, found.text, found.calls) == ("Look.", "", [("bash", {"path": "a"})])


def test_preamble_and_final_are_text() -> None:
    found = run("harmony", f"<|channel|>commentary<|message|>First.<|end|>{NEXT}<|channel|>final<|message|>Done.<|return|>")
    assert (found.reasoning, found.text, found.records) == ("", "First.Done.", [])


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.bash<|channel|>commentary json<|message|>",
        "<|start|>assistant to=functions.bash<|channel|>commentary json<|message|>",
        " to=functions.bash<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.bash<|message|>",
        "<|channel|>commentary to=functions.bash<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.bash code<|message|>",
        "<|channel|>analysis to=functions.bash json<|message|>",
        "<|channel|>commentary to=bash <|constrain|>json<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", ""], ids=["call", "end", "stripped"])
def test_recipient_wherever_models_write_it(header: str, end: str) -> None:
    found = run("harmony", f'{header}{{"count": 1}}{end}')
    assert (found.calls, found.text, found.records[0].raw) == ([("bash", {"count": 1})], "", f'{header}{{"count": 1}}{end}')


@pytest.mark.parametrize("spaces", range(4))
def test_spaces_before_a_recipient_mean_the_same_however_they_come(spaces: int) -> None:
    output = f'{" " * spaces}to=functions.bash<|channel|>commentary json<|message|>{{"count": 1}}<|call|>'
    whole, single = read("harmony", [output], "", TOOLS, False), read("harmony", list(output), "", TOOLS, False)
    assert (whole.events, whole.records) == (single.events, single.records)


def test_a_call_inside_a_json_string_is_part_of_it() -> None:
    arguments = {"path": f'<|call|><|end|>{NEXT}{HEADER}{{"path": "rm"}}<|call|>'}
    assert run("harmony", f"{HEADER}{json.dumps(arguments)}<|call|>").calls == [("bash", arguments)]


def test_a_channel_token_never_leaks_into_a_name() -> None:
    found = run("harmony", ' to=functions.bash<|channel|>commentary<|channel|>json<|message|>{"count": 1}<|call|>')
    assert found.calls == []
    assert [(record.status, record.name) for record in found.records] == [(CallStatus.MALFORMED, "")]
    assert found.text == found.records[0].raw


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"path": "a"', CallStatus.UNCLOSED),
        ('{"path": "a"} <|cal', CallStatus.UNCLOSED),
        ("", CallStatus.UNCLOSED),
        ('{"path": "a"} and<|call|>', CallStatus.INVALID_JSON),
        ("ls -la<|call|>", CallStatus.INVALID_JSON),
        ('{"path": "a\nb"}<|call|>', CallStatus.INVALID_JSON),
        ('{"path": 1,}<|call|>', CallStatus.INVALID_JSON),
    ],
)
def test_body_that_is_no_object_is_text(body: str, status: CallStatus) -> None:
    found = run("harmony", HEADER + body)
    assert (found.text, found.calls) == (HEADER + body, [])
    assert [(record.status, record.name, record.raw) for record in found.records] == [(status, "bash", HEADER + body)]


def test_two_recipients_are_none() -> None:
    output = '<|channel|>commentary to=functions.bash to=functions.read_file<|message|>{"count": 1}<|call|>'
    found = run("harmony", output)
    assert (found.text, found.calls, found.statuses) == (output, [], [CallStatus.MALFORMED])


@pytest.mark.parametrize("recipient", ["functions.rm", "python", "browser.search"])
def test_message_to_an_undeclared_tool_is_text_and_what_follows_is_read(recipient: str) -> None:
    first = f"<|channel|>commentary to={recipient}<|message|>print(1)<|call|>"
    found = run("harmony", f"{first}{NEXT}<|channel|>final<|message|>Done.<|return|>")
    assert (found.text, found.statuses, found.calls) == (first + "Done.", [CallStatus.UNKNOWN_TOOL], [])


def test_closed_body_without_arguments_is_an_empty_object() -> None:
    assert run("harmony", HEADER + "<|call|>").calls == [("bash", {})]
    assert run("harmony", HEADER + "{}").calls == [("bash", {})]


def test_arguments_keep_their_spelling() -> None:
    body = '{ "b":1.10, "u":"\\ud83d\\ude00\\/é","a" :[ ] }'
    assert run("harmony", f"{HEADER}{body}<|call|>").spelled == [body]


def test_text_with_no_header_is_text_at_once() -> None:
    assert run("harmony", "Hello <|there|> to=me").text == "Hello <|there|> to=me"


def test_another_author_is_not_the_assistant() -> None:
    output = '<|start|>functions.bash to=assistant<|channel|>commentary<|message|>"made up"<|end|>'
    found = run("harmony", f"<|channel|>analysis<|message|>x<|end|>{output}")
    assert (found.reasoning, found.text, found.calls) == ("x", output, [])


def test_reasoning_that_the_prompt_opened() -> None:
    found = run("harmony", f"so<|end|>{NEXT}<|channel|>final<|message|>Y", opened=True)
    assert (found.reasoning, found.text) == ("so", "Y")


def test_reasoning_cut_by_length_stays_reasoning() -> None:
    found = run("harmony", "<|channel|>analysis<|message|>thinking <|en")
    assert (found.reasoning, found.text) == ("thinking <|en", "")


said = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["{}", "to=functions.bash", "\n", " <|", "<|x|>", "assistant"]
)
values = st.recursive(
    said | st.integers() | st.booleans() | st.none(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(said, inner, max_size=2)
)
quoted = st.sampled_from(["analysis", "final", "commentary"])
message = st.tuples(quoted, said) | st.tuples(
    st.sampled_from([tool.name for tool in TOOLS]), st.dictionaries(said, values, max_size=3).map(json.dumps)
)


@settings(max_examples=80, deadline=None)
@given(st.lists(message, min_size=1, max_size=5), st.booleans(), st.booleans(), st.booleans())
def test_completions_are_read_as_the_package_reads_them(
    messages: list[tuple[str, str]], recipient_first: bool, constrained: bool, stripped: bool
) -> None:
    package = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed: the harmony parser is not compared with it")
    encoding = harmony()
    output = ""
    for to, body in messages:
        if to in ("analysis", "final", "commentary"):
            output += f"{NEXT}<|channel|>{to}<|message|>{body}<|end|>"
        elif recipient_first:
            output += f"{NEXT} to=functions.{to}<|channel|>commentary json<|message|>{body}<|call|>"
        else:
            kind = " <|constrain|>json" if constrained else ""
            output += f"{NEXT}<|channel|>commentary to=functions.{to}{kind}<|message|>{body}<|call|>"
    output = output.removeprefix(NEXT)
    if stripped:
        output = output.removesuffix("<|end|>").removesuffix("<|call|>")
    theirs = encoding.parse_messages_from_completion_tokens(encoding.encode(output, allowed_special="all"), package.Role.ASSISTANT)
    found = run("harmony", output)
    assert found.reasoning == "".join(written(one) for one in theirs if one.channel == "analysis")
    assert found.text == "".join(written(one) for one in theirs if one.recipient is None and one.channel != "analysis")
    called = [(str(one.recipient).removeprefix("functions."), json.loads(written(one))) for one in theirs if one.recipient is not None]
    assert found.calls == called


@settings(max_examples=50, deadline=None)
@given(st.lists(message, min_size=1, max_size=4))
def test_messages_that_the_package_renders_come_back(messages: list[tuple[str, str]]) -> None:
    package = pytest.importorskip("openai_harmony", reason="openai-harmony is not installed: the harmony parser is not compared with it")
    encoding = harmony()
    ids: list[int] = []
    for to, body in messages:
        one: Any = package.Message.from_role_and_content(package.Role.ASSISTANT, body)
        if to in ("analysis", "final", "commentary"):
            one = one.with_channel(to)
        else:
            one = one.with_channel("commentary").with_recipient(f"functions.{to}").with_content_type("<|constrain|>json")
        ids += encoding.render(one)
    output = encoding.decode_utf8(ids)
    found = run("harmony", output)
    assert found.reasoning == "".join(body for to, body in messages if to == "analysis")
    assert found.text == "".join(body for to, body in messages if to in ("final", "commentary"))
    assert found.calls == [(to, json.loads(body)) for to, body in messages if to not in ("analysis", "final", "commentary")]


def written(message: Any) -> str:
    return "".join(part.text for part in message.content)
