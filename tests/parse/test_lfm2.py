"""LFM2's calls, spelled as Python spells them, and never evaluated."""

from __future__ import annotations

import pytest

from tests.parse.kit import run
from turnloom.types import CallStatus

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


def test_values_of_every_kind() -> None:
    output = f"""{OPEN}[bash(path='a', count=-1, force=True, options={{"k": [1.5, null, true, 'x']}}), read_file()]{CLOSE}"""
    found = run("lfm2", output)
    assert found.calls == [("bash", {"path": "a", "count": -1, "force": True, "options": {"k": [1.5, None, True, "x"]}}), ("read_file", {})]
    assert "".join(record.raw for record in found.records) == output


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"'it\'s'", "it's"),
        (r'"say \"hi\""', 'say "hi"'),
        (r"'a\\nb\n'", "a\\nb\n"),
        (r"'\d+ \('", "\\d+ \\("),
        ("'two\nlines'", "two\nlines"),
        (r"'\ud83d\ude00 \u00e9 \x41'", "😀 é A"),
        (r"'\ud83d'", "\ud83d"),
        (f"')]{CLOSE} [('", f")]{CLOSE} [("),
        ('"it\'s"', "it's"),
        ("''", ""),
    ],
)
def test_strings(written: str, meant: str) -> None:
    assert run("lfm2", f"{OPEN}[bash(path={written})]{CLOSE}").calls == [("bash", {"path": meant})]


@pytest.mark.parametrize(
    "body",
    [
        *("bash('positional')", "bash(path=open('x'))", "bash(path='a' + 'b')", "bash(path=f'{x}')", "bash(path='a', path='b')"),
        *("bash(path=x)", "bash(1=2)", "bash", "", "bash() read_file()", "(bash())", "bash(count=1_000)", "bash(count=0x10)"),
        *("bash(count=inf)", "bash(options={1: 2})"),
    ],
)
def test_anything_but_plain_values_by_name_is_malformed_text(body: str) -> None:
    output = f"a\n{OPEN}[{body}]{CLOSE}\nb"
    found = run("lfm2", output)
    assert (found.text, found.calls, found.statuses) == (output, [], [CallStatus.MALFORMED])


def test_an_undeclared_tool_is_text_and_the_others_are_calls() -> None:
    found = run("lfm2", f"{OPEN}[rm(path='/'), bash()]{CLOSE}")
    assert (found.calls, found.text, found.statuses) == ([("bash", {})], f"{OPEN}[rm(path='/')", [CallStatus.UNKNOWN_TOOL, CallStatus.OK])


@pytest.mark.parametrize("output", [f"{OPEN}[bash(path='a", f"{OPEN}[bash()]", OPEN])
def test_a_block_that_never_ends_is_text(output: str) -> None:
    found = run("lfm2", output)
    assert (found.text, found.statuses) == (output, [CallStatus.UNCLOSED])
