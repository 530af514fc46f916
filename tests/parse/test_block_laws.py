"""The laws for the formats that follow `reader`: any cut gives the same, nothing is lost, work is linear."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parse.kit import TOOLS, check_chunking, check_nothing_lost, outputs
from turnloom.parse.formats import parser_factory

law = settings(max_examples=60, deadline=None)

JSON = '{"name": "bash", "arguments": {"path": "a}]"}}'
THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")
FORMATS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # Name: (its template, what framing is, what outputs that look like it are made of).
    "mistral": (
        "[THINK]",
        r"\n|\n?\[/?THINK\]",
        (
            *("[TOOL_CALLS]", "[TOOL_CALLS]bash[ARGS]{}", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[TOOL_CALLS]bash[ARGS]{"),
            *('bash[ARGS]{"a": "[TOOL_CALLS]"}', f"[{JSON}]", f"[TOOL_CALLS][{JSON}"),
        ),
    ),
    "gemma4": (
        "<|channel>thought",
        r"\n|\n?(<\|channel>thought|<channel\|>)",
        (
            *("<|tool_call>", "<tool_call|>", "call:bash{", "path:", '<|"|>', "<|channel>thought\n", "<channel|>"),
            '<|tool_call>call:bash{path:<|"|>}<tool_call|><|"|>}<tool_call|>',
        ),
    ),
    "lfm2": (
        "<think>",
        r"\n|\n?</?think>",
        (
            *("<|tool_call_start|>[", "]<|tool_call_end|>", "bash(", ")", "path='", "a=1", ", ", "<think>", "</think>"),
            *("<|tool_call_start|>[bash(a='", "<|tool_call_start|>[bash(a=1), nope()]<|tool_call_end|>"),
        ),
    ),
    "phi4": (
        "",
        r"\n",
        (
            f"<|tool_call|>[{JSON}]<|/tool_call|>",
            "<|tool_call|>",
            "<|/tool_call|>",
            f"[{JSON}]",
            f"<|tool_call|>[{JSON}, {JSON}",
            JSON,
            "<|tool_call|>[{",
        ),
    ),
    "granite3": (
        "",
        r"\n",
        (f"<|tool_call|>[{JSON}]", "<|tool_call|>", "]", f"[{JSON}]", f"<|tool_call|>[{JSON}, {JSON}", "<|tool_call|>[{"),
    ),
    "cohere": (
        "<|START_THINKING|>",
        r"\n|\n?<\|(START|END)_THINKING\|>|<\|(START|END)_RESPONSE\|>",
        (
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            f"<|START_ACTION|>[{JSON}]<|END_ACTION|>",
            f"<|START_ACTION|>[{JSON}",
            "]",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            *THINKING,
        ),
    ),
    "aya": (
        "<|START_RESPONSE|>",
        r"\n|<\|(START|END)_RESPONSE\|>",
        (
            *(f"<tool_call>{JSON}</tool_call>", f"<tool_call>{JSON}", "</tool_call>", "<tool_call>", "<tool_call>\n{"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
    ),
    "llama3": (
        "",
        r"\n",
        (JSON, "<|python_tag|>", ";", "bash.call(", ")", 'a="', "<|python_tag|>" + JSON, '{"name": "bash", "parameters": {'),
    ),
    "harmony": (
        "",
        r"<\|(end|call|return)\|>|(<\|start\|>assistant)?[^<]*(<\|channel\|>\w*)?[^<]*(<\|constrain\|>[^<]*)?<\|message\|>",
        (
            *("<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>json"),
            *("analysis", "commentary", "final", " to=functions.bash", " to=functions.nope", '{"path": "<|end|>"}'),
            *("<|channel|>commentary to=functions.bash<|message|>{", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            '<|start|>assistant to=functions.bash<|channel|>commentary<|message|>{"a": "<|call|>"}<|call|>',
            *("<|start|>assistant<|channel|>analysis<|message|>why<|end|>", "<|start|>assistant<|channel|>final<|message|>so<|end|>"),
            *(' to=functions.bash<|channel|>commentary<|message|>{"a": "<|call|>"}', "<|channel|>final<|message|>"),
        ),
    ),
}


@pytest.mark.parametrize("form", FORMATS)
@law
@given(data=st.data(), opened=st.booleans())
def test_any_cut_gives_the_same_events_and_records(form: str, data: Any, opened: bool) -> None:
    template, _, fragments = FORMATS[form]
    check_chunking(form, data.draw(outputs(*fragments)), data, template=template, opened=opened)


@pytest.mark.parametrize("form", FORMATS)
@law
@given(data=st.data(), opened=st.booleans())
def test_each_character_comes_out_once(form: str, data: Any, opened: bool) -> None:
    template, framing, fragments = FORMATS[form]
    check_nothing_lost(form, data.draw(outputs(*fragments)), framing, template=template, opened=opened)


@pytest.mark.parametrize("form", FORMATS)
def test_without_declared_tools_no_call_is_read(form: str) -> None:
    template, _, _ = FORMATS[form]
    parser = parser_factory(form, template)((), False)
    output = f"[TOOL_CALLS][{JSON}]<|python_tag|>{JSON}<|tool_call|>[{JSON}]<|/tool_call|>"
    output += f"<|channel|>commentary to=functions.bash<|message|>{JSON}"
    events = parser.feed(output) + parser.finish()
    assert "".join(event.text for event in events if hasattr(event, "text")) == output
    assert parser.records == []


LONG = 24_000
HOSTILE = {
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]bash[ARGS]{",
        "[TOOL_CALLS]" + "a",
        'bash[ARGS]{"',
        "[TOOL_CALLS]bash[ARGS]{}",
        "[TOOL_CALLS]bash[ARGS]{}x",
    ],
    "gemma4": ["<|tool_call>", "<|tool_call>call:bash{", '<|"|>', "<|tool_call>call:bash{}\n"],
    "lfm2": ["<|tool_call_start|>[", "'", "<|tool_call_start|>[bash()]\n"],
    "phi4": ["<|tool_call|>", "<|tool_call|>[{", "<|tool_call|>[" + JSON],
    "cohere": ["<|START_ACTION|>[{", "<|END_RESPONSE|>"],
    "llama3": ["{", JSON, " ", ";", "<|python_tag|>", "<|python_tag|>bash.call("],
    "harmony": [
        "<|start|>",
        "<|channel|>",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        " to=",
        "<|channel|>commentary to=functions.bash<|message|>{",
    ],
}


@pytest.mark.parametrize(("form", "piece"), [(form, piece) for form, pieces in HOSTILE.items() for piece in pieces])
def test_work_is_linear_in_the_output(form: str, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in characters that states look at: at most a bounded number of times each."""
    output = piece * (LONG // len(piece)) + " " * 2000 + "\n" * 2000
    looked = 0
    parser: Any = parser_factory(form, FORMATS[form][0])(TOOLS, False)
    read = parser._read

    def counted() -> None:
        nonlocal looked
        looked += len(parser._held) + sum(len(waiting) for waiting in parser._input)
        read()

    monkeypatch.setattr(parser, "_read", counted)
    for at in range(0, len(output), 16):
        parser.feed(output[at : at + 16])
    parser.finish()
    assert looked <= 64 * len(output)
