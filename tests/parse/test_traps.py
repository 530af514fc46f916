"""The traps that parsers of these formats fall into, each by name, on every format that has it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.parse.conftest import TOOLS
from tests.parse.spelled import MARKED_UP, SECTIONED, SPELLED
from turnloom.parse.contract import CallEvent
from turnloom.parse.formats import parser_factory
from turnloom.types import CallStatus

AS_JSON = [form for form in SPELLED if form not in MARKED_UP]

every = pytest.mark.parametrize("form", SPELLED)
marked_up = pytest.mark.parametrize("form", MARKED_UP)
as_json = pytest.mark.parametrize("form", AS_JSON)
sectioned = pytest.mark.parametrize("form", SECTIONED)


def arguments(parsed: Any) -> list[tuple[str, Any]]:
    return [(name, json.loads(text)) for name, text in parsed.calls]


@every
@pytest.mark.parametrize("text", ["", "Reading.\n", "Reading.\n\n"])
def test_calls_between_text(parse: Any, form: str, text: str) -> None:
    calls = [("bash", {"text": "ls -l"}), ("read_file", {"path": "a b", "count": 3})]
    parsed = parse(text + SPELLED[form](calls) + "\nDone.\n", form=form)
    assert (arguments(parsed), parsed.text) == (calls, text.removesuffix("\n") + "Done.\n")
    assert parsed.statuses == [CallStatus.OK, CallStatus.OK]


@every
def test_record_spans_are_characters_of_the_output(parse: Any, form: str) -> None:
    output = "文字\n" + SPELLED[form]([("bash", {"text": "é"}), ("rm", {}), ("bash", {})])
    parsed = parse(output, form=form)
    assert parsed.statuses == [CallStatus.OK, CallStatus.UNKNOWN_TOOL, CallStatus.OK]
    assert [output[record.start : record.end] for record in parsed.records] == [record.raw for record in parsed.records]


@every
def test_call_without_arguments_has_an_empty_object(parse: Any, form: str) -> None:
    assert parse(SPELLED[form]([("bash", {}), ("bash", {})]), form=form).calls == [("bash", "{}"), ("bash", "{}")]
    assert parse(*SPELLED[form]([("bash", {})]), form=form).calls == [("bash", "{}")]


@every
def test_closing_tags_inside_a_value_are_part_of_it(parse: Any, form: str) -> None:
    tags = sorted(set(re.findall(r"</?[^<>\n]+>|```", SPELLED[form]([("bash", {"text": "x"})]))))
    for tag in tags:
        value = f"a {tag} b\n{tag}\n{tag}"
        assert arguments(parse(SPELLED[form]([("bash", {"text": value})]), form=form)) == [("bash", {"text": value})], tag


@every
def test_braces_and_quotes_in_a_command(parse: Any, form: str) -> None:
    calls = [("bash", {"text": "mkdir a/{b,c} && echo \"}]{\" '\\n' > x"})]
    assert arguments(parse(SPELLED[form](calls), form=form)) == calls


@every
@pytest.mark.parametrize("value", ["  indented\n", "\n\n  x\n\n", "\n", " ", "", "\tx  ", "x\r\n"])
def test_whitespace_around_an_edit_argument_is_kept(parse: Any, form: str, value: str) -> None:
    calls = [("write_file", {"path": "a", "text": value})]
    assert arguments(parse(SPELLED[form](calls), form=form)) == calls


@every
@pytest.mark.parametrize("piece", [1, 2, 3, 7])
def test_characters_beyond_the_basic_plane_in_pieces(parse: Any, form: str, piece: int) -> None:
    output = SPELLED[form]([("bash", {"text": "😀 é 文"})])
    parsed = parse(*(output[at : at + piece] for at in range(0, len(output), piece)), form=form)
    assert arguments(parsed) == [("bash", {"text": "😀 é 文"})]


@as_json
def test_surrogate_pair_of_escapes_split_across_pieces(parse: Any, form: str) -> None:
    output = SPELLED[form]([("bash", {"text": "EMOJI"})]).replace("EMOJI", "\\ud83d\\ude00")
    for at in range(len(output)):
        assert parse(output[:at], output[at:], form=form).calls == [("bash", '{"text": "\\ud83d\\ude00"}')]


@every
def test_output_cut_anywhere_inside_a_call_is_text_and_no_call(parse: Any, form: str) -> None:
    output = "Hi\n" + SPELLED[form]([("bash", {"text": "ls {a,b}", "count": 2})])
    [record] = parse(output, form=form).records
    for stop in range(record.end):
        parsed = parse(output[:stop], form=form)
        assert (parsed.calls, parsed.text) == ([], output[:stop])
        assert all(status is not CallStatus.OK for status in parsed.statuses)


@every
def test_cut_call_is_recorded_as_unclosed(parse: Any, form: str) -> None:
    output = SPELLED[form]([("bash", {"text": "VALUE"})])
    at = output.index("VALUE")
    assert parse(output[:at], form=form).statuses == [CallStatus.UNCLOSED]


@marked_up
def test_missing_last_parameter_close_is_not_an_empty_call(parse: Any, form: str) -> None:
    output = SPELLED[form]([("write_file", {"path": "a", "text": "body"})])
    closer = {"glm": "</arg_value>\n", "deepseek_dsml": "</｜DSML｜parameter>\n"}.get(form, "</parameter>\n")
    head, _, tail = output.rpartition(closer)
    parsed = parse(head + tail, form=form)
    assert (parsed.statuses, parsed.text, parsed.calls) == ([CallStatus.MALFORMED], head + tail, [])


@marked_up
def test_call_after_one_with_a_missing_parameter_close_still_comes_out(parse: Any, form: str) -> None:
    output = SPELLED[form]([("write_file", {"text": "body"}), ("bash", {"text": "ls"})])
    closer = {"glm": "</arg_value>\n", "deepseek_dsml": "</｜DSML｜parameter>\n"}.get(form, "</parameter>\n")
    head, _, tail = output.partition(closer)
    parsed = parse(head + tail, form=form)
    assert (parsed.statuses, arguments(parsed)) == ([CallStatus.MALFORMED, CallStatus.OK], [("bash", {"text": "ls"})])
    assert "body" in parsed.text


@marked_up
def test_call_after_one_with_a_missing_parameter_close_does_not_wait_for_the_end(form: str) -> None:
    output = SPELLED[form]([("write_file", {"text": "body"}), ("bash", {"text": "ls"})])
    closer = {"glm": "</arg_value>\n", "deepseek_dsml": "</｜DSML｜parameter>\n"}.get(form, "</parameter>\n")
    head, _, tail = output.partition(closer)
    parser = parser_factory(form, "")(TOOLS, False)
    assert [event.name for event in parser.feed(head + tail + "\nmore") if isinstance(event, CallEvent)] == ["bash"]


@pytest.mark.parametrize("form", ["glm", "qwen3_coder"])
def test_missing_close_of_a_call_that_another_follows_is_unclosed(parse: Any, form: str) -> None:
    output = SPELLED[form]([("write_file", {"text": "body"}), ("bash", {"text": "ls"})]).replace("</tool_call>\n", "", 1)
    for text in (output, output + "\nmore"):
        parsed = parse(text, form=form)
        assert (parsed.statuses, arguments(parsed)) == ([CallStatus.UNCLOSED, CallStatus.OK], [("bash", {"text": "ls"})])


@marked_up
def test_whole_call_written_into_a_file_is_part_of_the_value(parse: Any, form: str) -> None:
    for inner in ([("bash", {"text": "rm"})], [("bash", {})], [("bash", {"text": "a"}), ("read_file", {"path": "b", "count": 1})]):
        calls = [("write_file", {"path": "doc.md", "text": f"# Calls\n{SPELLED[form](inner)}\n\nand so on\n"})]
        assert arguments(parse(SPELLED[form](calls), form=form)) == calls


@marked_up
def test_key_given_twice_is_malformed(parse: Any, form: str) -> None:
    output = SPELLED[form]([("bash", {"path": "a", "text": "b"})]).replace("path", "text")
    assert (parse(output, form=form).statuses, parse(output, form=form).text) == ([CallStatus.MALFORMED], output)


@marked_up
def test_value_that_its_type_cannot_read_is_malformed(parse: Any, form: str) -> None:
    output = SPELLED[form]([("bash", {"count": 77})]).replace("77", "seven")
    parsed = parse(output, form=form)
    assert (parsed.statuses, parsed.text) == ([CallStatus.MALFORMED], output)


@as_json
@pytest.mark.parametrize("wrong", ["{'a': 1}", '{"a": NaN}', '{"a": 1,}', '{"a": 01}', '{"a" 1}', '{"a": "\\x"}', '{"a": 1}}', "[1]"])
def test_arguments_that_are_not_strict_json_are_text(parse: Any, form: str, wrong: str) -> None:
    output = SPELLED[form]([("bash", {"a": "OBJECT"})]).replace('{"a": "OBJECT"}', wrong)
    parsed = parse(output, form=form)
    assert (parsed.calls, parsed.text) == ([], output)
    assert parsed.statuses[0] in (CallStatus.INVALID_JSON, CallStatus.MALFORMED)


@as_json
def test_arguments_keep_the_models_spelling(parse: Any, form: str) -> None:
    spelled = '{ "b":1.10, "a" : 1E300,"a":[ ],\n\t"u":"\\u00e9\\/é" }'
    output = SPELLED[form]([("bash", {"a": "OBJECT"})]).replace('{"a": "OBJECT"}', spelled)
    assert parse(output, form=form).calls == [("bash", spelled)]


@every
def test_call_to_a_tool_that_is_not_declared_is_text(parse: Any, form: str) -> None:
    output = "a\n" + SPELLED[form]([("rm", {"text": "x"})]) + "\nb"
    parsed = parse(output, form=form)
    assert (parsed.statuses, parsed.text, parsed.calls) == ([CallStatus.UNKNOWN_TOOL], output, [])
    assert parsed.records[0].name == "rm"


@every
def test_call_without_a_name_is_text(parse: Any, form: str) -> None:
    output = SPELLED[form]([("", {"text": "x"})])
    parsed = parse(output, form=form)
    assert (parsed.statuses, parsed.text) == ([CallStatus.MISSING_NAME], output)


@every
@pytest.mark.parametrize("token", ["<|im_end|>", "<｜tool▁sep｜>", "<|tool_call_begin|>", "<tool_call>"])
@pytest.mark.parametrize("name", ["{}bash", "bash{}", "ba{}sh"])
def test_control_token_never_becomes_part_of_a_name(parse: Any, form: str, token: str, name: str) -> None:
    output = SPELLED[form]([(name.format(token), {"text": "x"})])
    parsed = parse(output, form=form)
    assert parsed.statuses[0] is not CallStatus.OK
    assert [called for called, _ in parsed.calls] in ([], ["bash"])
    if parsed.calls:  # A call's own opening tag opens another attempt.
        assert name == "{}bash"
        assert token in parsed.records[0].raw
    else:
        assert parsed.text == output


@every
@pytest.mark.parametrize("length", [250, 256, 257, 1000])
def test_long_name_is_text_however_it_is_cut(parse: Any, form: str, length: int) -> None:
    output = "a\n" + SPELLED[form]([("x" * length, {"text": "x"}), ("bash", {"text": "y"})])
    parsed = parse(output, form=form)
    assert parse(*output, form=form) == parsed
    assert arguments(parsed) == [("bash", {"text": "y"})]
    assert "x" * length in parsed.text


@marked_up
@pytest.mark.parametrize("length", [1, 230, 256, 257, 1000])
def test_long_key_is_no_key_however_it_is_cut(parse: Any, form: str, length: int) -> None:
    for keys in (("text", "KEY"), ("KEY", "text")):
        output = SPELLED[form]([("bash", dict.fromkeys(keys, "x"))]).replace("KEY", "k" * length)
        parsed = parse(output, form=form)
        assert parse(*output, form=form) == parsed
        assert "k" * length in parsed.text or parsed.calls


@every
def test_no_tools_are_declared_and_calls_are_text(parse: Any, form: str) -> None:
    output = SPELLED[form]([("bash", {"text": "x"})])
    parsed = parse(output, form=form, tools=())
    assert (parsed.records, parsed.text) == ([], output)


@every
def test_call_inside_reasoning_is_reasoning(parse: Any, form: str) -> None:
    thought = SPELLED[form]([("bash", {"text": "x"})])
    parsed = parse(f"<think>{thought}</think>ok", form=form)
    assert (parsed.reasoning, parsed.text, parsed.records) == (thought, "ok", [])


@pytest.mark.parametrize("form", sorted(SPELLED.keys() - {"deepseek_v3"}))
def test_name_and_values_may_have_no_blanks_around_them(parse: Any, form: str) -> None:
    """DeepSeek V3's name ends at a newline."""
    output = SPELLED[form]([("bash", {"text": "x", "count": 1})]).replace("\n", "")
    assert arguments(parse(output, form=form)) == [("bash", {"text": "x", "count": 1})]


@sectioned
def test_section_around_a_broken_call_is_text(parse: Any, form: str) -> None:
    output = SPELLED[form]([("rm", {}), ("bash", {})])
    parsed = parse("a\n" + output, form=form)
    assert parsed.statuses == [CallStatus.UNKNOWN_TOOL, CallStatus.OK]
    assert parsed.text.startswith("a\n" + output[: parsed.records[0].end - 2].rstrip("\n"))
    assert "begin" not in parsed.text[len("a\n") + parsed.records[0].end - 2 :]


@sectioned
def test_broken_call_after_a_good_one_is_text_with_the_end_of_the_section(parse: Any, form: str) -> None:
    output = SPELLED[form]([("bash", {}), ("rm", {})])
    parsed = parse(output, form=form)
    assert (parsed.statuses, len(parsed.calls)) == ([CallStatus.OK, CallStatus.UNKNOWN_TOOL], 1)
    assert parsed.text == output[parsed.records[0].end :].removeprefix("\n")


@sectioned
def test_section_without_a_call_is_a_broken_attempt(parse: Any, form: str) -> None:
    opener = re.match(r"<[^>]+>", SPELLED[form]([]))
    assert opener is not None
    output = f"The tag {opener[0]} opens a section.\n"
    parsed = parse(output, form=form)
    assert (parsed.text, parsed.statuses) == (output, [CallStatus.UNCLOSED])
    output = f"{opener[0]}\nprose{SPELLED[form]([]).removeprefix(opener[0]).strip()} tail"
    parsed = parse(output, form=form)
    assert (parsed.text, parsed.statuses) == (output, [CallStatus.MALFORMED])
    assert parsed.records[0].end == len(output) - len(" tail")


@sectioned
def test_section_after_one_without_a_call_is_read(parse: Any, form: str) -> None:
    opener = re.match(r"<[^>]+>", SPELLED[form]([]))
    assert opener is not None
    lead = f"The tag {opener[0]} opens a section.\n"
    parsed = parse(lead + SPELLED[form]([("bash", {"text": "x"})]), form=form)
    assert (parsed.text, arguments(parsed)) == (lead, [("bash", {"text": "x"})])
    assert parsed.statuses == [CallStatus.UNCLOSED, CallStatus.OK]


@sectioned
def test_blanks_beside_a_sections_tags_beyond_framing_are_text(parse: Any, form: str) -> None:
    output = SPELLED[form]([("bash", {})])
    [record] = parse(output, form=form).records
    opener, closer = output[: record.start].rstrip(), output[record.end :].lstrip()
    for blanks, kept in (("", ""), ("\n", ""), ("\n\n", ""), ("\n \n", " "), ("\n\n\n", "\n"), (" ", " ")):
        parsed = parse(f"a\n{opener}{blanks}{record.raw}{blanks}{closer}\nb", form=form)
        assert (parsed.text, len(parsed.calls)) == (f"a{kept}{kept}b", 1)


@pytest.mark.parametrize("form", ["deepseek_v3", "deepseek_v31", "kimi_k2"])
@pytest.mark.parametrize("text", ["prose", "\nprose\n", "<"])
def test_end_of_a_section_after_text_is_text(parse: Any, form: str, text: str) -> None:
    output = SPELLED[form]([("bash", {})])
    [record] = parse(output, form=form).records
    parsed = parse(output[: record.end] + text + output[record.end :], form=form)
    assert (parsed.text, len(parsed.calls)) == (text.removeprefix("\n") + output[record.end :], 1)


def test_deepseek_call_of_another_type_than_function_is_text(parse: Any) -> None:
    output = SPELLED["deepseek_v3"]([("bash", {})]).replace("function", "plugin")
    parsed = parse(output, form="deepseek_v3")
    assert (parsed.text, parsed.statuses) == (output, [CallStatus.MALFORMED])


@pytest.mark.parametrize("form", ["minimax_m2", "deepseek_dsml"])
def test_invoke_outside_a_section_is_text(parse: Any, form: str) -> None:
    output = SPELLED[form]([("bash", {"text": "x"})])
    inside = "\n".join(output.split("\n")[1:-1])
    parsed = parse(inside, form=form)
    assert (parsed.text, parsed.records) == (inside, [])
    parsed = parse(output + "\n" + inside, form=form)
    assert (parsed.text, parsed.statuses) == (inside, [CallStatus.OK])


@pytest.mark.parametrize("form", ["deepseek_v3", "deepseek_v31", "kimi_k2"])
def test_call_whose_tags_are_control_tokens_needs_no_section(parse: Any, form: str) -> None:
    [record] = parse(SPELLED[form]([("bash", {"text": "x"})]), form=form).records
    parsed = parse(record.raw, form=form)
    assert (parsed.text, arguments(parsed)) == ("", [("bash", {"text": "x"})])


@pytest.mark.parametrize("form", ["minimax_m2", "deepseek_dsml"])
def test_section_that_is_not_closed_after_its_call_is_text(parse: Any, form: str) -> None:
    """Until then the end of the call could be part of a value."""
    output = SPELLED[form]([("bash", {"text": "x"})])
    output = output[: output.rindex("\n") + 1]
    parsed = parse(output, form=form)
    assert (parsed.text, parsed.statuses) == (output, [CallStatus.UNCLOSED])
