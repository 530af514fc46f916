"""Formats by name, from a chat template, and from an import path."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from turnloom.errors import ConfigError
from turnloom.parse.formats import FORMATS, auto, parser_factory, taught_format
from turnloom.types import Tool

HERMES = (
    r"""{{- "Return a json object within XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call>" }}"""
)
HERMES_RAW = """{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}"""
CODER = r"""{{- 'Use:\n\n<tool_call>\n<function=example>\n<parameter=a>\nvalue\n</parameter>\n</function>\n</tool_call>' }}"""
GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="tool">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>'
XML_CALL = "<tool_call><function=bash></function></tool_call>"
JSON_CALL = '<tool_call>{"name": "bash"}</tool_call>'
TOOLS = [Tool("bash", "", "{}")]


def run(name: str, template: str, output: str, *, reasoning_open: bool = False, reasoning: bool | None = None) -> list[str]:
    parser = parser_factory(name, template, reasoning=reasoning)(TOOLS, reasoning_open)
    return [type(event).__name__ for event in parser.feed(output) + parser.finish()]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (HERMES, "hermes"),
        (HERMES_RAW, "hermes"),
        (CODER, "qwen3_coder"),
        (GLM, "glm"),
        (MINIMAX, "minimax_m2"),
        ("{{ messages }}", "hermes"),
        ("", "hermes"),
    ],
)
def test_auto_chooses_what_the_template_teaches(template: str, name: str) -> None:
    assert auto(template) == name


@pytest.mark.parametrize("template", ["", CODER, GLM, "<|tool_call_start|>"])
def test_calls_that_the_renderer_writes_as_text_are_read_whatever_the_template_teaches(template: str) -> None:
    assert taught_format(template, calls_as_text=False) == auto(template)
    assert taught_format(template, calls_as_text=True) == "hermes"
    parser = parser_factory("auto", template, calls_as_text=True)(TOOLS, False)
    assert [type(event).__name__ for event in parser.feed(JSON_CALL) + parser.finish()] == ["CallEvent"]


def test_aya_keeps_its_answers_tags_where_calls_are_text() -> None:
    assert taught_format("<|START_RESPONSE|>", calls_as_text=True) == "aya"
    parser = parser_factory("auto", "<|START_RESPONSE|>", calls_as_text=True)(TOOLS, False)
    assert [type(event).__name__ for event in parser.feed(JSON_CALL) + parser.finish()] == ["CallEvent"]


def test_a_format_that_is_named_is_read_even_where_calls_are_text() -> None:
    parser = parser_factory("lfm2", "", calls_as_text=True)(TOOLS, False)
    assert [type(event).__name__ for event in parser.feed(JSON_CALL) + parser.finish()] == ["TextDelta"]


@pytest.mark.parametrize("template", ["", HERMES, CODER])
def test_xml_calls_to_declared_tools_are_read_whatever_the_template(template: str) -> None:
    assert run("auto", template, XML_CALL) == ["CallEvent"]


@pytest.mark.parametrize("template", ["", HERMES])
def test_json_calls_are_read_unless_the_template_teaches_another_body(template: str) -> None:
    assert run("auto", template, JSON_CALL) == ["CallEvent"]
    assert run("auto", CODER, JSON_CALL) == ["TextDelta"]


def test_reasoning_is_read_only_where_the_template_has_its_tags() -> None:
    output = "<think>a</think>b"
    assert run("auto", "…<think>…", output) == ["ReasoningDelta", "TextDelta"]
    assert run("hermes", "…</think>…", output) == ["ReasoningDelta", "TextDelta"]
    assert run("auto", "", output) == ["TextDelta"]
    assert run("auto", "", output, reasoning=True) == ["ReasoningDelta", "TextDelta"]
    assert run("auto", "<think>", output, reasoning=False) == ["TextDelta"]


def test_format_none_reads_nothing_unless_asked_for_reasoning() -> None:
    output = "<think>a</think>b" + XML_CALL
    assert run("none", "<think>", output) == ["TextDelta"]
    assert run("none", "<think>", output, reasoning_open=True) == ["TextDelta"]
    assert run("none", "", output, reasoning=True) == ["ReasoningDelta", "TextDelta"]


def test_each_factory_call_makes_a_fresh_parser() -> None:
    factory = parser_factory("hermes", "")
    first, second = factory(TOOLS, False), factory(TOOLS, False)
    first.feed(JSON_CALL)
    assert (len(first.records), second.records) == (1, [])


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'hermez': use auto, .*hermes, .*none or package"):
        parser_factory("hermez", "")
    assert {"qwen3_coder", "hermes", "none"} <= set(FORMATS)


def test_import_path_gives_a_users_own_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("my_formats")
    module.Mine = parser_factory("none", "")
    module.number = 3
    monkeypatch.setitem(sys.modules, "my_formats", module)
    assert parser_factory("my_formats:Mine", "") is module.Mine
    with pytest.raises(ConfigError, match="cannot be called"):
        parser_factory("my_formats:number", "")


def test_engines_parsers_are_formats_and_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt.function_call.function_call_parser", "vllm", "vllm.tool_parsers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="pip install sglang"):
        parser_factory("sglang:qwen25", "")
    with pytest.raises(ConfigError, match="pip install vllm"):
        parser_factory("vllm:hermes", "")


def test_a_parser_of_vllm_needs_the_models_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        @staticmethod
        def get_tool_parser(name: str) -> Any:
            return lambda tokenizer: tokenizer.parser

    module: Any = ModuleType("vllm.tool_parsers")
    module.ToolParserManager = Manager
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", module)
    with pytest.raises(ConfigError, match="'hermes' needs the model's tokenizer"):
        parser_factory("vllm:hermes", "")
    found = SimpleNamespace(content="Hi", tool_calls=[SimpleNamespace(function=SimpleNamespace(name="bash", arguments="{}"))])
    tokenizer = SimpleNamespace(parser=SimpleNamespace(extract_tool_calls=lambda output, request: found))
    parser = parser_factory("vllm:hermes", "", tokenizer=tokenizer)(TOOLS, False)
    assert [type(event).__name__ for event in parser.feed("any") + parser.finish()] == ["TextDelta", "CallEvent"]


@pytest.mark.parametrize(("before", "after"), [("phi4", "granite3"), ("cohere", "aya"), ("qwen3_coder", "hermes")])
def test_a_format_whose_sign_is_the_narrower_is_asked_first(before: str, after: str) -> None:
    assert list(FORMATS).index(before) < list(FORMATS).index(after)


@pytest.mark.parametrize("path", ["no_such_module:Mine", "json:NoSuchName", ":Mine", "json:"])
def test_import_path_that_cannot_be_imported_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        parser_factory(path, "")
