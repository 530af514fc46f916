"""What is the same in every format: blanks after an opening tag, what is no JSON, a call quoted in a string that was not escaped."""

from __future__ import annotations

import json

import pytest

from tests.parse.kit import TOOLS, run
from tests.parse.spelled import SECTIONED, SPELLED
from turnloom.parse.contract import TextDelta
from turnloom.parse.formats import parser_factory
from turnloom.types import CallStatus

VALUES = {
    # Name: (what opens a block, the rest of one).
    "hermes": ("<tool_call>", '{"name": "bash", "arguments": {"path": "a"}}</tool_call>'),
    "qwen3_coder": ("<tool_call>", "<function=bash><parameter=path>a</parameter></function></tool_call>"),
    "glm": ("<tool_call>", "bash<arg_key>path</arg_key><arg_value>a</arg_value></tool_call>"),
    "deepseek_v31": ("<｜tool▁call▁begin｜>", 'bash<｜tool▁sep｜>{"path": "a"}<｜tool▁call▁end｜>'),
    "kimi_k2": ("<|tool_call_begin|>", 'functions.bash:0<|tool_call_argument_begin|>{"path": "a"}<|tool_call_end|>'),
    "mistral": ("[TOOL_CALLS]", 'bash[ARGS]{"path": "a"}'),
    "gemma4": ("<|tool_call>", 'call:bash{path:<|"|>a<|"|>}<tool_call|>'),
    "lfm2": ("<|tool_call_start|>", "[bash(path='a')]<|tool_call_end|>"),
    "phi4": ("<|tool_call|>", '[{"name": "bash", "arguments": {"path": "a"}}]<|/tool_call|>'),
    "granite3": ("<|tool_call|>", '[{"name": "bash", "arguments": {"path": "a"}}]'),
    "cohere": ("<|START_ACTION|>", '[{"tool_name": "bash", "parameters": {"path": "a"}}]<|END_ACTION|>'),
    "aya": ("<tool_call>", '{"name": "bash", "arguments": {"path": "a"}}</tool_call>'),
}
LISTS = ("phi4", "granite3", "cohere")


@pytest.mark.parametrize("blanks", [" \n", "\n\n \t", "\n" * 700])
@pytest.mark.parametrize("form", VALUES)
def test_any_blanks_may_follow_an_opening_tag(form: str, blanks: str) -> None:
    opener, rest = VALUES[form]
    found = run(form, opener + blanks + rest)
    assert (found.calls, found.text) == ([("bash", {"path": "a"})], "")


@pytest.mark.parametrize("form", VALUES)
def test_half_a_surrogate_pair_in_any_value_can_be_encoded(form: str) -> None:
    opener, rest = VALUES[form]
    found = run(form, opener + _with(rest, "\ud83d"))
    assert found.calls == [("bash", {"path": "\ud83d"})]
    assert found.spelled[0].encode("utf-8").isascii()


def _with(rest: str, value: str) -> str:
    """The block with another value in the place of its `a`."""
    head, at, tail = rest.rpartition("a" if rest.count("a") == 1 else next(mark for mark in ('"a"', ">a<", "'a'") if mark in rest))
    return head + at.replace("a", value) + tail


@pytest.mark.parametrize("form", ["hermes", "deepseek_v31", "kimi_k2", "mistral", *LISTS])
def test_what_json_has_nowhere_breaks_a_call_at_once(form: str) -> None:
    opener, rest = VALUES[form]
    fed = opener + rest[: rest.index('"a"')] + "("
    parser = parser_factory(form, "")(TOOLS, False)
    assert parser.feed(fed) == [TextDelta(fed)]


@pytest.mark.parametrize("form", ["hermes", "deepseek_v31", "kimi_k2", "mistral", *LISTS])
def test_a_call_quoted_in_a_string_that_was_not_escaped_never_runs(form: str) -> None:
    opener, rest = VALUES[form]
    output = opener + rest.replace('"a"', f'"say "no to {opener}{rest}" twice"')
    found = run(form, output)
    assert (found.calls, found.text) == ([], output)
    assert found.statuses[0] is CallStatus.INVALID_JSON


@pytest.mark.parametrize("form", ["hermes", "deepseek_v31", "kimi_k2", "gemma4", "lfm2", "phi4", "cohere"])
def test_blanks_may_stand_before_a_closing_tag(form: str) -> None:
    opener, rest = VALUES[form]
    cut = max(rest.rfind(mark) for mark in ("</", "<｜", "<|", "<tool_call|"))
    assert run(form, opener + rest[:cut] + " \n" + rest[cut:]).calls == [("bash", {"path": "a"})]


@pytest.mark.parametrize("form", SPELLED)
def test_framing_of_any_format_is_counted(form: str) -> None:
    """What no event carries, in characters: here the newlines around the calls, and a section's tags."""
    written = SPELLED[form]([("bash", {"path": "a"})])
    parser = parser_factory(form, "")(TOOLS, False)
    parser.feed(f"x\n{written}\ny")
    parser.finish()
    [record] = parser.records
    assert parser.framing == len(written) - len(record.raw) + 2  # type: ignore[attr-defined]
    assert (form in SECTIONED) == (record.raw != written)
    assert json.loads(run(form, written).spelled[0]) == {"path": "a"}
