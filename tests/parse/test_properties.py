"""The parser's laws, on random outputs: no cut changes anything, no character is lost, what is well-formed comes back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnloom.types import CallStatus

law = settings(deadline=None)

FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=read_file>",
    "<function=rm>",
    "</function>",
    "<parameter=path>",
    "<parameter=count>",
    "</parameter>",
    '{"name": "read_file", "arguments": {"path": "a"}}',
    '{"name": "bash", "arguments": {"text": "</tool_call>"',
    '"arguments":',
    "<tool_call>\n<function=read_file>\n<parameter=path>\nx\n</parameter>\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>',
    "\n",
    "\n\n",
    " ",
    "{",
    "}",
    '"',
    "\\",
    "\\ud83d",
    "\\ude00",
    "<",
    ">",
    "</",
    "<tool",
    "=",
    "文",
    "\x00",
    "word",
]
OUTPUT = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=25).map("".join)
FORMS = st.sampled_from(["hermes", "qwen3_coder", "none"])
STRINGS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=6).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)
BLANKS = st.sampled_from(["", "\n", " ", "\n\n"])

AMBIGUOUS = re.compile(
    r"</parameter>\s*(<parameter=[^<>\n]+>|</function>\s*</tool_call>)"
    r"|<function=[^<>\n]+>\s*(<parameter=|</function>)"
    r"|<tool_call>\s*(<function=|\{)"
)
"""What the docstring of `xml_body` says cannot be told from the block's own structure."""

NESTED_AMBIGUOUS = re.compile(rf"</parameter>\s*</function>|{AMBIGUOUS.pattern}")


def cut(output: str, data: Any) -> list[str]:
    at = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    return [output[a:b] for a, b in zip([0, *at], [*at, len(output)], strict=True)]


@law
@given(OUTPUT, FORMS, st.booleans(), st.data())
def test_any_chunking_gives_the_same_events_and_records(parse: Any, output: str, form: str, opened: bool, data: Any) -> None:
    whole = parse(output, form=form, reasoning_open=opened)
    assert parse(*output, form=form, reasoning_open=opened) == whole
    assert parse(*cut(output, data), form=form, reasoning_open=opened) == whole


@law
@given(OUTPUT, FORMS, st.booleans())
def test_every_character_is_accounted_for_exactly_once(parse: Any, account: Any, output: str, form: str, opened: bool) -> None:
    parsed = parse(output, form=form, reasoning_open=opened, reasoning=True)
    assert (parsed.reasoning, parsed.text) == account(output, parsed, reasoning_open=opened)
    for record in parsed.records:
        assert output[record.start : record.end] == record.raw
        assert record.raw.startswith("<tool_call>")
        assert record.status is CallStatus.OK or record.raw in parsed.text
    assert all(a.end <= b.start for a, b in zip(parsed.records, parsed.records[1:], strict=False))


@law
@given(OUTPUT, FORMS)
def test_a_call_that_comes_out_is_a_declared_tool_with_an_object_of_arguments(parse: Any, output: str, form: str) -> None:
    for name, arguments in parse(output, form=form).calls:
        assert name in ("read_file", "write_file", "bash")
        assert isinstance(json.loads(arguments), dict)
        arguments.encode("utf-8")


@law
@given(st.text().filter(lambda text: "think>" not in text and "tool_call>" not in text), FORMS, st.booleans())
def test_garbage_never_raises_and_passes_through(parse: Any, output: str, form: str, opened: bool) -> None:
    parsed = parse(output, form=form, reasoning_open=opened)
    assert (parsed.reasoning or parsed.text) == output


@law
@given(st.dictionaries(STRINGS, JSON, max_size=4), st.booleans(), st.booleans(), BLANKS, BLANKS)
def test_random_json_calls_round_trip(parse: Any, arguments: dict[str, Any], ascii_only: bool, as_string: bool, a: str, b: str) -> None:
    spelled = json.dumps(arguments, ensure_ascii=ascii_only)
    value = json.dumps(spelled) if as_string else spelled
    output = f'before\n<tool_call>{a}{{"name": "bash", "arguments": {value}}}{b}</tool_call>\nafter'
    parsed = parse(output)
    assert parsed.calls == [("bash", spelled)]
    assert parsed.text == "beforeafter"


def xml_call(name: str, arguments: dict[str, str], newline: str) -> str:
    inner = "".join(f"<parameter={key}>{newline}{value}{newline}</parameter>{newline}" for key, value in arguments.items())
    return f"<tool_call>{newline}<function={name}>{newline}{inner}</function>{newline}</tool_call>"


@law
@given(
    st.dictionaries(st.sampled_from(["path", "text", "undeclared"]), STRINGS.filter(lambda s: not AMBIGUOUS.search(s)), max_size=3),
    st.sampled_from(["hermes", "qwen3_coder"]),
)
def test_random_xml_calls_round_trip_their_strings_verbatim(parse: Any, arguments: dict[str, str], form: str) -> None:
    parsed = parse("before\n" + xml_call("bash", arguments, "\n") + "\nafter", form=form)
    assert [(name, json.loads(text)) for name, text in parsed.calls] == [("bash", arguments)]
    assert parsed.text == "beforeafter"


@law
@given(st.dictionaries(st.sampled_from(["path", "text"]), STRINGS.filter(lambda s: not AMBIGUOUS.search(s)), max_size=2))
def test_random_xml_calls_round_trip_with_no_newlines_around_tags(parse: Any, arguments: dict[str, str]) -> None:
    stripped = {key: value.removeprefix("\n").removesuffix("\n") for key, value in arguments.items()}
    [(_, text)] = parse(xml_call("bash", arguments, "")).calls
    assert json.loads(text) == stripped


@law
@given(
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.dictionaries(STRINGS, JSON, max_size=3)
    | st.lists(JSON, max_size=3)
)
def test_random_xml_values_round_trip_by_their_type(parse: Any, value: Any) -> None:
    spelled = json.dumps(value)
    if AMBIGUOUS.search(spelled):
        return
    key = {int: "count", float: "ratio", dict: "options", list: "items"}[type(value)]
    assert parse(xml_call("bash", {key: spelled}, "\n")).calls == [("bash", f'{{"{key}": {spelled}}}')]


@law
@given(st.dictionaries(st.sampled_from(["path", "text"]), STRINGS.filter(lambda s: not NESTED_AMBIGUOUS.search(s)), min_size=1, max_size=2))
def test_a_whole_call_inside_a_value_is_part_of_the_value(parse: Any, inner: dict[str, str]) -> None:
    quoted = f"see:\n{xml_call('read_file', inner, chr(10))}\nand {xml_call('bash', {}, chr(10))} too"
    parsed = parse(xml_call("write_file", {"path": "doc.md", "text": quoted}, "\n"))
    assert [(name, json.loads(text)) for name, text in parsed.calls] == [("write_file", {"path": "doc.md", "text": quoted})]


@law
@given(st.lists(st.sampled_from(["json", "xml", "broken"]), max_size=6), st.data())
def test_several_calls_in_one_output_all_come_out_in_order(parse: Any, kinds: list[str], data: Any) -> None:
    spelled = {
        "json": '<tool_call>\n{"name": "bash", "arguments": {"n": 1}}\n</tool_call>',
        "xml": "<tool_call>\n<function=bash>\n<parameter=count>\n1\n</parameter>\n</function>\n</tool_call>",
        "broken": '<tool_call>\n{"name": "bash", "arguments": {"n": 1}\n</tool_call>',
    }
    output = data.draw(BLANKS).join(spelled[kind] for kind in kinds)
    parsed = parse(output)
    assert parsed.statuses == [CallStatus.INVALID_JSON if kind == "broken" else CallStatus.OK for kind in kinds]
    assert parsed.text.count("<tool_call>") == kinds.count("broken")


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "none"])
def test_an_empty_output_gives_nothing(parse: Any, form: str) -> None:
    assert parse(form=form).events == []
    assert parse("", form=form).events == []
