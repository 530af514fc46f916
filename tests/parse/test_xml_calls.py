"""Calls with an XML body: the traps that engines' parsers fall into, each by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnloom.types import CallStatus, Tool

BASH = "<tool_call>\n<function=bash>\n<parameter=text>\n{}\n</parameter>\n</function>\n</tool_call>"


def body(inner: str, name: str = "bash") -> str:
    return f"<tool_call><function={name}>{inner}</function></tool_call>"


def arguments(parsed: Any) -> dict[str, Any]:
    [(_, text)] = parsed.calls
    return json.loads(text)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_declared_tool_without_any_newline_under_every_format(parse: Any, form: str) -> None:
    call = "<tool_call><function=read_file><parameter=path>README.md</parameter></function></tool_call>"
    parsed = parse("我先读取文件。" + call, form=form)
    assert (parsed.text, parsed.calls) == ("我先读取文件。", [("read_file", '{"path": "README.md"}')])


def test_call_as_templates_write_it(parse: Any) -> None:
    parsed = parse("Hi\n\n" + BASH.format("ls\n  -l"))
    assert (parsed.text, parsed.calls) == ("Hi\n", [("bash", '{"text": "ls\\n  -l"}')])


def test_string_loses_one_framing_newline_and_nothing_else(parse: Any) -> None:
    assert arguments(parse(BASH.format("\n  a \t\n"))) == {"text": "\n  a \t\n"}
    assert arguments(parse(body("<parameter=text>  a </parameter>"))) == {"text": "  a "}


@pytest.mark.parametrize(("value", "text"), [("", ""), ("\n", ""), ("\n\n", ""), ("\n\n\n", "\n"), ("a\n", "a"), ("\na", "a")])
def test_framing_newlines_of_empty_and_one_sided_values(parse: Any, value: str, text: str) -> None:
    assert arguments(parse(body(f"<parameter=text>{value}</parameter>"))) == {"text": text}


@pytest.mark.parametrize(
    "value",
    [
        "a </parameter> b",
        "a </parameter>",
        "a </function> b",
        "</function>",
        "</parameter></function>",
        "</parameter>\n</function>\nmore",
        "a </tool_call> b",
        "sed 's#</tool_call>#<tool_call>#'",
        "</function>\n</tool_call>\nmore",
        "</parameter>\n</tool_call>",
        "a</tool_call>\n<tool_call> prose {",
        "grep '<tool_call>' x",
        "grep '<function=' x",
        "grep '<parameter=' x",
        "</parameter> <parameter= no key",
        "</parameter>\n<parameter=\n",
        "</parameter><parameter=" + "k" * 300 + ">",
        "<function=bash>",
        "<function=bash> alone",
        "<function=>\n<parameter=a>",
        "<parameter=text>",
        "<think>x</think>",
        "a < b > c </ d",
        '{"name": "bash"}',
        "<tool_call>{}</tool_call>",
    ],
)
def test_tags_inside_a_value_stay_in_the_value(parse: Any, value: str) -> None:
    for pieces in ((BASH.format(value),), tuple(BASH.format(value))):
        parsed = parse(*pieces)
        assert (arguments(parsed), parsed.text, parsed.statuses) == ({"text": value}, "", [CallStatus.OK])


@pytest.mark.parametrize(
    "quoted",
    [
        BASH.format("inner"),
        "doc:\n" + BASH.format("one") + "\n" + BASH.format("two") + "\nend",
        "<tool_call><function=bash></function></tool_call>",
        "<tool_call><function=bash></function></tool_call>\n<tool_call><function=bash></function></tool_call>",
        "<function=bash><parameter=a>1</parameter>\n<parameter=b>2</parameter></function>",
        BASH.format(BASH.format("twice")),
        BASH.format("<function=bash></function>"),
    ],
)
def test_whole_call_quoted_in_a_value_is_part_of_it(parse: Any, quoted: str) -> None:
    output = f"<tool_call><function=write_file><parameter=path>a</parameter><parameter=text>\n{quoted}\n</parameter></function></tool_call>"
    assert arguments(parse(output)) == {"path": "a", "text": quoted}


def test_several_parameters_keep_their_order(parse: Any) -> None:
    [(_, text)] = parse(
        body("\n<parameter=text>\nb\n</parameter>\n<parameter=path>\na\n</parameter>\n<parameter=count>3</parameter>\n")
    ).calls
    assert text == '{"text": "b", "path": "a", "count": 3}'


@pytest.mark.parametrize("blank", ["", "\n", " \n\t"])
def test_call_without_arguments(parse: Any, blank: str) -> None:
    assert parse(*f"<tool_call>{blank}<function=bash>{blank}</function>{blank}</tool_call>").calls == [("bash", "{}")]


def test_duplicate_parameter_is_malformed(parse: Any) -> None:
    output = body("<parameter=text>1</parameter><parameter=text>2</parameter>")
    parsed = parse(output)
    assert (parsed.statuses, parsed.text) == ([CallStatus.MALFORMED], output)


@pytest.mark.parametrize(
    "inner",
    [
        "<parameter=text>ls</function></tool_call>",
        "<parameter=text>\nls\n</function>\n</tool_call>",
        "<parameter=text>ls</parameter></tool_call>",
        "<parameter=text>ls</tool_call>",
        "<parameter=text>ls</parameter></function> and more</tool_call>",
        "</tool_call>",
        "</parameter></function></tool_call>",
        "stray</function></tool_call>",
        "<b>stray</b></function></tool_call>",
        "</function> stray</tool_call>",
        "</function></function></tool_call>",
        "<function=bash></function></tool_call>",
        "<parameter=></parameter></function></tool_call>",
        "<parameter=\n></parameter></function></tool_call>",
    ],
)
@pytest.mark.parametrize("after", ["", "\ntext", "\n" + BASH.format("next")])
def test_missing_or_stray_tag_is_malformed_text_and_the_next_call_is_whole(parse: Any, inner: str, after: str) -> None:
    bad = f"<tool_call><function=bash>{inner}"
    for pieces in ((bad + after,), tuple(bad + after)):
        parsed = parse("a\n", *pieces)
        assert (parsed.records[0].status, parsed.records[0].name, parsed.records[0].raw) == (CallStatus.MALFORMED, "bash", bad)
        assert parsed.text.startswith("a\n" + bad)
        assert len(parsed.calls) == (1 if "<tool_call>" in after else 0)


def test_json_call_right_after_a_malformed_xml_one_is_whole(parse: Any) -> None:
    parsed = parse('<tool_call><function=bash><parameter=text>x</function></tool_call>\n<tool_call>{"name": "bash"}</tool_call>')
    assert (parsed.statuses, parsed.calls) == ([CallStatus.MALFORMED, CallStatus.OK], [("bash", "{}")])


def test_missing_closing_tool_tag_leaves_the_next_call_whole(parse: Any) -> None:
    parsed = parse(body("<parameter=text>1</parameter>").removesuffix("</tool_call>") + "\n" + BASH.format("2"))
    assert parsed.statuses == [CallStatus.UNCLOSED, CallStatus.OK]
    assert arguments(parsed) == {"text": "2"}


def test_missing_every_closer_never_merges_two_calls(parse: Any) -> None:
    output = "<tool_call><function=bash><parameter=text>1\n" + BASH.format("2")
    parsed = parse(output)
    assert (parsed.statuses, parsed.text) == ([CallStatus.UNCLOSED], output)


def test_call_quoted_in_a_value_that_is_cut_does_not_run(parse: Any) -> None:
    output = "<tool_call><function=write_file><parameter=text>end with </tool_call>, as in " + BASH.format("rm") + " and"
    parsed = parse(output)
    assert (parsed.statuses, parsed.text) == ([CallStatus.UNCLOSED], output)


def test_header_named_in_prose_leaves_the_next_call_whole(parse: Any) -> None:
    prose = "Start with <tool_call><function=bash> and go on. "
    parsed = parse(prose + BASH.format("x"))
    assert (parsed.statuses, parsed.text) == ([CallStatus.UNCLOSED, CallStatus.OK], prose)


def test_header_closed_by_a_new_opener_is_unclosed(parse: Any) -> None:
    parsed = parse("<tool_call><function=bash></function>\n" + BASH.format("x"))
    assert parsed.statuses == [CallStatus.UNCLOSED, CallStatus.OK]


@pytest.mark.parametrize("cut", range(len("<tool_call>"), len(BASH.format("x"))))
def test_call_cut_by_length_is_unclosed_text(parse: Any, cut: int) -> None:
    output = BASH.format("x")[:cut]
    parsed = parse(output)
    assert (parsed.statuses, parsed.text) == ([CallStatus.UNCLOSED], output)
    assert parsed.records[0].name == ("bash" if "bash>" in output else "")


@pytest.mark.parametrize("by_character", [False, True])
def test_key_has_at_most_256_characters(parse: Any, by_character: bool) -> None:
    for length, status in ((256, CallStatus.OK), (257, CallStatus.MALFORMED)):
        output = body(f"<parameter={'k' * length}>x</parameter>")
        assert parse(*(output if by_character else [output])).statuses == [status]


def test_header_that_is_no_name_leaves_the_next_call_whole(parse: Any) -> None:
    parsed = parse("<tool_call><function=\n> prose " + BASH.format("x"))
    assert parsed.statuses == [CallStatus.UNCLOSED, CallStatus.OK]


@pytest.mark.parametrize("header", ["<function=bash<|im_sep|>>", "<function=bash\n>", f"<function={'x' * 257}>", "<function=bash<"])
def test_header_that_is_no_name_is_malformed(parse: Any, header: str) -> None:
    output = f"<tool_call>{header}<parameter=text>x</parameter></function></tool_call>"
    for pieces in ((output,), tuple(output)):
        parsed = parse(*pieces)
        assert (parsed.statuses, parsed.text) == ([CallStatus.MALFORMED], output)


def test_unknown_tool_is_text_and_the_record_has_its_name(parse: Any) -> None:
    output = body("<parameter=text>x</parameter>", "rm_rf")
    parsed = parse(output)
    assert (parsed.statuses, parsed.text, parsed.records[0].name) == ([CallStatus.UNKNOWN_TOOL], output, "rm_rf")


def test_call_without_a_name(parse: Any) -> None:
    output = body("<parameter=text>x</parameter>", "")
    parsed = parse(output)
    assert (parsed.statuses, parsed.text) == ([CallStatus.MISSING_NAME], output)


def test_values_are_typed_by_the_schema(parse: Any) -> None:
    inner = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in {
            "path": "12",
            "count": "12",
            "ratio": "1.50",
            "force": "True",
            "options": '{"a": "</parameter>"}',
            "items": "[1,\n2]",
            "nothing": "null",
            "either": "12",
            "undeclared": "12",
        }.items()
    )
    [(_, text)] = parse(body(inner)).calls
    assert text == (
        '{"path": "12", "count": 12, "ratio": 1.50, "force": true, "options": {"a": "</parameter>"}, '
        '"items": [1,\n2], "nothing": null, "either": 12, "undeclared": "12"}'
    )


def test_value_that_its_type_cannot_read_is_malformed(parse: Any) -> None:
    output = body("<parameter=count>three</parameter>")
    parsed = parse(output)
    assert (parsed.statuses, parsed.text) == ([CallStatus.MALFORMED], output)


def test_surrogate_escape_in_an_object_value_can_be_sent(parse: Any) -> None:
    [(_, text)] = parse(body(r'<parameter=options>{"a": "\ud800"}</parameter>')).calls
    assert text.encode("utf-8") == rb'{"options": {"a": "\ud800"}}'


def test_tool_whose_schema_is_no_object_has_string_parameters(parse: Any) -> None:
    for parameters in ("", "[]", "{", '{"properties": 3}'):
        parsed = parse(body("<parameter=n>1</parameter>"), tools=[Tool("bash", "", parameters)])
        assert arguments(parsed) == {"n": "1"}


def test_function_outside_a_tool_call_is_text(parse: Any) -> None:
    output = "<function=bash><parameter=text>x</parameter></function>"
    parsed = parse(output)
    assert (parsed.text, parsed.records) == (output, [])
