"""Every template of the corpus that teaches one of these formats: what it writes for a reply, `auto`'s parser reads back."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.parse.kit import TOOLS, Result, run
from turnloom.engine.models import package_files
from turnloom.errors import RenderError
from turnloom.parse.formats import FORMATS, auto
from turnloom.testing import corpus
from turnloom.testing.families import FAMILIES
from turnloom.testing.tokenizers import trl_template
from turnloom.testing.vocabularies import LLAMA_CPP
from turnloom.tokenizer import HFTokenizer
from turnloom.types import CallStatus

MINE = ("harmony", "gemma4", "mistral", "lfm2", "phi4", "granite3", "cohere", "llama3")
DECLARED = [
    {"type": "function", "function": {"name": tool.name, "description": "does it", "parameters": json.loads(tool.parameters)}}
    for tool in TOOLS
]
USER = {"role": "user", "content": "Do it."}
PLAIN: dict[str, Any] = {
    "path": "mkdir a/{b,c}[0] ünï 文 😀",
    "count": -3,
    "force": True,
    "options": {"deep": {"er": [1, 2.5, "x"]}, "empty": {}},
}
HARD: dict[str, Any] = {
    **PLAIN,
    "path": '  say "it\'s" \\n \\\\ \n\t}]) ;<tool_call|> [/ARGS][TOOL_CALLS] <|/tool_call|> ``` \n',
    "options": {"quoted": 'a "b" \\ \n}', "null": None, "list": [{"a": []}, "]"]},
}
UNESCAPED = ("trl/lfm2_2_5", "trl/lfm2_2_5_v2")
"""These write strings between quotes as they are, so that one with a quote or a backslash cannot be told apart."""
ONE_CALL = ("llama3", "harmony")


@functools.cache
def load(name: str) -> HFTokenizer:
    """The entry's template without its vocabulary, which rendering does not need."""
    from tokenizers import Tokenizer, models

    source, _, stem = name.partition("/")
    if source == "trl":
        text = trl_template(stem)
    else:
        text = next(path for path in package_files(LLAMA_CPP) if path.stem == stem).read_text("utf-8")
    family = FAMILIES[corpus.entry(name).family]
    special = {f"{key}_token": getattr(family, key) for key in ("bos", "eos", "pad") if getattr(family, key)}
    backend = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    return HFTokenizer(backend, name=name, templates={"default": text}, special=special, eos_ids=frozenset())


@functools.cache
def entries() -> list[str]:
    found = [entry.name for entry in corpus.ENTRIES if auto(load(entry.name).chat_template) in MINE]
    assert {auto(load(name).chat_template) for name in found} >= {"harmony", "gemma4", "lfm2", "llama3", "mistral", "cohere"}
    return found


def rendered(name: str, reply: dict[str, Any] | None) -> str:
    kwargs = corpus.entry(name).template_kwargs
    messages = [USER] if reply is None else [USER, {"role": "assistant", **reply}]
    return load(name).apply_template(messages, DECLARED, generation_prompt=reply is None, **kwargs)


@functools.cache
def prompt_of(name: str) -> str:
    return rendered(name, None)


def written(name: str, calls: list[tuple[str, dict[str, Any]]], **reply: Any) -> tuple[str, bool]:
    """What the template writes for the reply after the generation prompt, less its end of turn; and whether reasoning was open there."""
    message = {
        "content": "",
        **reply,
        "tool_calls": [
            {"id": f"abcdefgh{index}", "type": "function", "function": {"name": called, "arguments": arguments}}
            for index, (called, arguments) in enumerate(calls)
        ],
    }
    prompt, whole = prompt_of(name), rendered(name, message)
    while not whole.startswith(prompt):  # The prompt opens the reply in another way than the history shows it.
        cut = max(prompt.rfind("<|START_"), prompt.rfind("<|END_"), prompt.rfind("<|channel>"))
        assert cut > len(prompt) - 40, (prompt[-80:], whole[-300:])
        prompt = prompt[:cut]
    output = whole[len(prompt) :].rstrip("\n")
    if calls[0][0] not in output:
        pytest.skip("the template shows no calls")
    for end in FAMILIES[corpus.entry(name).family].ends:
        output = output.partition(end)[0]
    return output, prompt.endswith("<|START_THINKING|>")


def read_back(name: str, output: tuple[str, bool]) -> Result:
    return run("auto", output[0], template=load(name).chat_template, opened=output[1])


@pytest.mark.parametrize("name", entries())
def test_a_call_that_a_template_writes_is_read_back(name: str) -> None:
    calls = [("read_file", PLAIN if name in UNESCAPED else HARD)]
    found = read_back(name, written(name, calls))
    assert found.calls == calls
    assert (found.statuses, found.text.strip()) == ([CallStatus.OK], "")


@pytest.mark.parametrize("name", [name for name in entries() if auto(load(name).chat_template) not in ONE_CALL])
def test_several_calls_that_a_template_writes_are_read_back_in_order(name: str) -> None:
    calls = [("bash", PLAIN), ("mcp__files__list-all", {}), ("bash", {"path": ""})]
    found = read_back(name, written(name, calls))
    assert found.calls == calls
    assert (found.statuses, found.text.strip()) == ([CallStatus.OK] * 3, "")


@pytest.mark.parametrize("name", [name for name in entries() if auto(load(name).chat_template) in ONE_CALL])
def test_a_call_without_arguments_that_a_template_writes_is_read_back(name: str) -> None:
    assert read_back(name, written(name, [("bash", {})])).calls == [("bash", {})]


@pytest.mark.parametrize("name", entries())
def test_reasoning_that_a_template_writes_before_a_call_is_reasoning(name: str) -> None:
    thought = "I think\n\nso: {it}"
    reply = {"thinking": thought} if FORMATS["harmony"].taught_by(load(name).chat_template) else {"reasoning_content": thought}
    try:
        output = written(name, [("bash", {"count": 1})], **reply)
    except RenderError as error:
        pytest.skip(f"the template takes no reasoning so: {error}")
    if thought not in output[0]:
        pytest.skip("the template leaves reasoning out")
    found = read_back(name, output)
    assert (found.reasoning, found.text.strip(), found.calls) == (thought, "", [("bash", {"count": 1})])


def test_mistral_ids_come_back_as_written() -> None:
    names = [name for name in entries() if "[CALL_ID]" in load(name).chat_template]
    if not names:
        pytest.skip("the corpus has no template with [CALL_ID]")
    for name in names:
        assert read_back(name, written(name, [("bash", {}), ("bash", {})])).written == ["abcdefgh0", "abcdefgh1"]
