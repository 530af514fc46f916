"""`turnloom doctor` on real tokenizers and on templates that cannot do everything; the settings that choose who writes prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, one_line
from turnloom.cli.common import template_kwargs
from turnloom.errors import ConfigError
from turnloom.testing.tokenizers import qwen_directory

CLOSES_ONLY_THE_LAST = "{% for m in messages %}<|im_start|>{{ m.content }}{{ '<|im_end|>' if loop.last else '' }}{% endfor %}"


def test_qwen3_bridges_every_way_and_keeps_reasoning_only_inside_a_tool_loop(cli: Cli) -> None:
    said = cli("doctor", "--tokenizer", qwen_directory("qwen3"), "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert set(found["bridges"].values()) == {"yes"}
    assert found["reasoning"] == "kept until the next user message"
    assert found["end_tokens"] == ["<|endoftext|>", "<|im_end|>"]
    assert (found["tool_format"], found["calls_read"]) == ("hermes", True)
    assert found["quirks"] == []


def test_a_template_that_cannot_be_bridged_is_named_with_why_and_fails(cli: Cli, tmp_path: Path) -> None:
    template = tmp_path / "only.jinja"
    template.write_text(CLOSES_ONLY_THE_LAST)
    said = cli("doctor", "--tokenizer", qwen_directory("qwen3"), "--chat-template", template)
    assert said.code == 1
    assert "bridge user         the template ends an assistant message differently once more follows" in said.out
    assert "late_system_folded" not in said.out
    assert "tools_as_text" in said.out


FOREIGN_CALLS = (
    "{% for t in tools or [] %}{{ t.function.description }}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[[{{ c.function.name }}: {{ c.function.arguments | tojson }}]]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_PLACE_FOR_TOOLS = (
    "{# <|tool_call_start|> #}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NOT_READ = "  calls               not read: they reach the client as text; give --tool-format\n"


def test_calls_that_no_format_reads_are_named_and_fail(cli: Cli, tmp_path: Path) -> None:
    template = tmp_path / "foreign.jinja"
    template.write_text(FOREIGN_CALLS)
    words = ("doctor", "--tokenizer", qwen_directory("qwen3"), "--chat-template", template)
    said = cli(*words)
    assert (said.code, NOT_READ in said.out) == (1, True)
    found = json.loads(cli(*words, "--json").out)
    assert (set(found["bridges"].values()), found["calls_read"]) == ({"yes"}, False)


def test_the_format_that_is_given_is_the_one_that_is_tried(cli: Cli) -> None:
    words = ("doctor", "--tokenizer", qwen_directory("qwen3"))
    assert "  calls               read back\n" in cli(*words).out
    said = cli(*words, "--tool-format", "mistral")
    assert said.code == 1
    assert "  tool format         mistral\n" + NOT_READ in said.out
    assert "'nope'" in one_line(cli(*words, "--tool-format", "nope"))


def test_calls_that_are_written_as_text_are_read_whatever_the_template_hints_at(cli: Cli, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(NO_PLACE_FOR_TOOLS)
    said = cli("doctor", "--tokenizer", qwen_directory("qwen3"), "--chat-template", template, "--json")
    found = json.loads(said.out)
    assert (said.code, found["tool_format"], found["calls_read"]) == (0, "hermes", True)


def test_template_args_reach_every_rendering(cli: Cli) -> None:
    words = ("doctor", "--tokenizer", qwen_directory("qwen3"), "--json", "--template-arg", "enable_thinking=false")
    assert json.loads(cli(*words).out)["bridges"]["user"] == "yes"
    assert template_kwargs(["enable_thinking=false", "today=2026-01-02", 'o={"a": 1}']) == {
        "enable_thinking": False,
        "today": "2026-01-02",
        "o": {"a": 1},
    }


@pytest.mark.parametrize("word", ["novalue", "=x", "a b=1"])
def test_a_template_arg_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        template_kwargs([word])


def test_an_unknown_renderer_is_one_line(cli: Cli) -> None:
    said = cli("doctor", "--tokenizer", qwen_directory("qwen3"), "--renderer", "nope")
    assert "no renderer is called 'nope'" in one_line(said)
