"""Every published template that teaches one of these formats: what it writes for a reply, `auto`'s parser reads back."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from jinja2 import Template
from jinja2.sandbox import SandboxedEnvironment
from tokenizers import Tokenizer, models

from turnloom.engine.models import package_files
from turnloom.errors import RenderError
from turnloom.parse.contract import CallEvent, ReasoningDelta, TextDelta
from turnloom.parse.formats import FORMATS, auto, parser_factory
from turnloom.testing.tokenizers import TEMPLATES
from turnloom.testing.vocabularies import LLAMA_CPP
from turnloom.tokenizer import HFTokenizer
from turnloom.types import CallStatus, Tool

TAUGHT = {
    "deepseek_dsml": "deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731",
    "deepseek_v3": "deepseek_r1_distill deepseekv3 deepseek-ai-DeepSeek-R1-Distill-Llama-8B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B "
    "llama-cpp-deepseek-r1",
    "deepseek_v31": "deepseek-ai-DeepSeek-V3.1",
    "glm": "glm4moe GLM-4.6 GLM-4.7-Flash Spark2.5 inclusionai-ling-3.0-flash poolside-Laguna-S-2.1 poolside-Laguna-XS-2.1 "
    "poolside-Laguna-XS.2",
    "kimi_k2": "Kimi-K2-Instruct Kimi-K2-Thinking moonshotai-Kimi-K2",
    "minimax_m2": "MiniMax-M2",
    "qwen3_coder": "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra qwen3_5_nothink qwen3_5_think qwen3_6 "
    "qwen3_8 NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 Qwen3-Coder Qwen3.5-4B StepFun3.5-Flash",
    "hermes": "qwen2_5 qwen3 qwen3_instruct_2507 qwen3_vl Bielik-11B-v3.0-Instruct MiMo-VL "
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B "
    "Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Reka-Edge ibm-granite-granite-4.0 ibm-granite-granite-4.1",
}
FORMAT_OF = {template: form for form, templates in TAUGHT.items() for template in templates.split()}
NULL_CONTENT = ("deepseek_r1_distill", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B")
"""They show a reply's calls, and nothing after them, only where its content is null, which the project drops as transformers does."""
REFUSED = ("Kimi-K2-Instruct", "Kimi-K2-Thinking", "llama-cpp-deepseek-r1")
"""They do what transformers forbids: append to a list, print a generator as JSON."""

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "force": {"type": "boolean"},
        "options": {"type": "object"},
        "items": {"type": "array"},
    },
}
TOOLS = [Tool(name, "does it", json.dumps(SCHEMA)) for name in ("Edit", "mcp__files__list-all")]
DECLARED = [{"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": SCHEMA}} for tool in TOOLS]
USER = {"role": "user", "content": "Do it."}
ARGUMENTS: dict[str, Any] = {
    "path": "mkdir a/{b,c} ünï 文 😀",
    "text": "  def f():\n\treturn \"x\\n\" + 'y'\n\n</tool_call> </arg_value> </parameter> ``` <think> \n  ",
    "count": -3,
    "force": True,
    "options": {"deep": {"er": [1, 2.5, None, {"q": 'a "b" \\ \n'}]}, "empty": {}},
    "items": ["a", [], "</tool_call>"],
}
CALLS = {
    "one call": [("Edit", ARGUMENTS)],
    "two calls": [("Edit", ARGUMENTS), ("mcp__files__list-all", {"path": "."})],
    "no arguments": [("mcp__files__list-all", {}), ("Edit", {"text": "\n\nx\n\n", "path": " "})],
}


@functools.cache
def templates() -> dict[str, str]:
    """Every template of both packages."""
    return {
        path.stem: path.read_text("utf-8") for data in (LLAMA_CPP, TEMPLATES) for path in package_files(data) if path.suffix == ".jinja"
    }


@functools.cache
def tokenizer(name: str) -> HFTokenizer:
    """Renders the template as the project does. Only the text matters here, so the vocabulary is empty."""
    special = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "<PAD>"}
    backend = Tokenizer(models.WordLevel({"<EOS>": 0}, unk_token="<EOS>"))
    return HFTokenizer(backend, name=name, templates={"default": templates()[name]}, special=special, eos_ids=frozenset({0}))


@functools.cache
def compiled(name: str) -> Template:
    sandbox = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False, default=list)
    return sandbox.from_string(templates()[name])


def rendered(name: str, reply: dict[str, Any] | None) -> str:
    messages = [USER] if reply is None else [USER, {"role": "assistant", **reply}]
    if name not in NULL_CONTENT + REFUSED:
        return tokenizer(name).apply_template(messages, DECLARED, generation_prompt=reply is None)
    return compiled(name).render(messages=messages, tools=DECLARED, add_generation_prompt=reply is None)


@functools.cache
def prompt_of(name: str) -> str:
    return rendered(name, None)


@functools.cache
def end_of(name: str) -> str:
    """What the template writes after a reply's text."""
    return rendered(name, {"content": "ANCHOR"}).rpartition("ANCHOR")[2]


def as_message(calls: list[tuple[str, dict[str, Any]]], *, as_text: bool) -> list[dict[str, Any]]:
    return [
        {
            "id": f"functions.{name}:{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]


def written(name: str, content: str, reasoning: str, calls: list[tuple[str, dict[str, Any]]]) -> tuple[str, bool]:
    """What the template writes for the reply from the generation prompt on, less its end of turn; and whether reasoning was open there."""
    prompt = prompt_of(name)
    reply: dict[str, Any] = {
        "content": None if name in NULL_CONTENT else content,
        **({"reasoning_content": reasoning} if reasoning else {}),
    }
    try:
        whole = rendered(name, {**reply, "tool_calls": as_message(calls, as_text=False)})
    except (RenderError, TypeError):  # A template that adds the arguments to its text wants them as text.
        whole = rendered(name, {**reply, "tool_calls": as_message(calls, as_text=True)})
    if not whole.startswith(prompt):  # It opens the reply in another way than it would be prompted.
        prompt = re.sub(r"(<think>\s*|</think>\s*)+$", "", prompt)
    assert whole.startswith(prompt)
    output = whole[len(prompt) :].removesuffix(end_of(name))
    return output, prompt.rstrip().endswith("<think>") or output.startswith("</think>")


@pytest.mark.parametrize("reasoning", ["", "I think\n\nso."], ids=["silent", "reasoned"])
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", FORMAT_OF)
def test_calls_that_a_template_writes_are_read_back(name: str, calls: str, reasoning: str) -> None:
    output, opened = written(name, "", reasoning, CALLS[calls])
    parser = parser_factory("auto", templates()[name])(TOOLS, opened)
    events = [event for char in output for event in parser.feed(char)] + parser.finish()
    found = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEvent)]
    assert found == CALLS[calls]
    assert {record.status for record in parser.records} == {CallStatus.OK}
    assert "".join(event.text for event in events if isinstance(event, TextDelta)).strip() == ""
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)).strip() in ("", reasoning)


@pytest.mark.parametrize("name", FORMAT_OF)
def test_text_before_a_call_that_a_template_writes_is_text(name: str) -> None:
    output, opened = written(name, "Reading it now.", "", CALLS["one call"])
    before, edit, _ = output.partition("Edit")
    if not edit or "Reading it now." not in before:
        pytest.skip("the template writes the text of a reply or its calls, not both in order")
    parser = parser_factory("auto", templates()[name])(TOOLS, opened)
    events = parser.feed(output) + parser.finish()
    assert "".join(event.text for event in events if isinstance(event, TextDelta)).strip() == "Reading it now."
    assert [event.name for event in events if isinstance(event, CallEvent)] == ["Edit"]


@pytest.mark.parametrize("name", FORMAT_OF)
def test_auto_chooses_the_format_that_a_published_template_teaches(name: str) -> None:
    assert auto(templates()[name]) == FORMAT_OF[name]


def test_no_other_published_template_teaches_one_of_these_formats() -> None:
    for name, template in templates().items():
        if name.removesuffix("_training") not in FORMAT_OF:
            assert not any(FORMATS[form].taught_by(template) for form in TAUGHT), name


@pytest.mark.parametrize("name", FORMAT_OF)
def test_a_training_variant_of_a_template_teaches_the_same(name: str) -> None:
    template = templates().get(f"{name}_training")
    assert template is None or auto(template) == FORMAT_OF[name]


@pytest.mark.parametrize("name", TAUGHT["kimi_k2"].split())
def test_kimi_ids_come_back_as_written(name: str) -> None:
    output, opened = written(name, "", "", CALLS["two calls"])
    parser = parser_factory("auto", templates()[name])(TOOLS, opened)
    calls = [event for event in parser.feed(output) if isinstance(event, CallEvent)]
    assert [call.written for call in calls] == ["functions.Edit:0", "functions.mcp__files__list-all:1"]
