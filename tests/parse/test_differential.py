"""Our parsers against SGLang's on the same outputs. Skipped where SGLang is not installed: `pip install sglang`.

On what templates write both must find the same calls. Where an output is one
that SGLang is known to lose something of, ours must lose nothing, whatever SGLang does.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from turnloom.errors import ConfigError
from turnloom.parse import adapters
from turnloom.parse.contract import CallEvent, ParserFactory, TextDelta
from turnloom.parse.formats import parser_factory
from turnloom.types import Tool

Calls = list[tuple[str, dict[str, Any]]]

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "count": {"type": "integer"}, "force": {"type": "boolean"}, "options": {"type": "object"}},
}
TOOLS = [Tool(name, "does it", json.dumps(SCHEMA)) for name in ("bash", "read_file")]
Q = '<|"|>'


def _json(calls: Calls, arguments: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, arguments: given}, ensure_ascii=False) for name, given in calls]


def _tags(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _json(calls))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _coder(calls: Calls) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in given.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"

    return "\n".join(one(name, given) for name, given in calls)


def _glm(calls: Calls) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in given.items())
        return f"<tool_call>{name}\n{inner}</tool_call>"

    return "\n".join(one(name, given) for name, given in calls)


def _gemma(calls: Calls) -> str:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return f"{Q}{given}{Q}"
        if isinstance(given, dict):
            return "{" + ",".join(f"{key}:{value(one)}" for key, one in given.items()) + "}"
        return json.dumps(given)

    return "".join(f"<|tool_call>call:{name}{value(given)}<tool_call|>" for name, given in calls)


def _lfm2(calls: Calls) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def _harmony(calls: Calls) -> str:
    """After reasoning: SGLang looks for the second message's header in a whole output."""
    header = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    written = "".join(f"{header.format(name)}{json.dumps(given)}<|call|>" for name, given in calls)
    return f"<|channel|>analysis<|message|>Hm.<|end|>{written}"


def _kimi(calls: Calls) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(given)}<|tool_call_end|>"
        for index, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


WRITERS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    # SGLang's name: (ours, how the format writes calls).
    "qwen25": ("hermes", _tags),
    "hermes": ("hermes", _tags),
    "qwen3_coder": ("qwen3_coder", _coder),
    "glm45": ("glm", _glm),
    "kimi_k2": ("kimi_k2", _kimi),
    "llama3": ("llama3", lambda calls: "; ".join(_json(calls, "parameters"))),
    "mistral": ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)),
    "gemma4": ("gemma4", _gemma),
    "lfm2": ("lfm2", _lfm2),
    "gpt-oss": ("harmony", _harmony),
}
PIECE = re.compile(r"<\|.*?\|>|</?tool_call\|?>|\[[A-Z_]+\]|[^<\[]{1,5}|.", re.DOTALL)
"""About a token: an engine gets a control token whole."""
SIMPLE: Calls = [("bash", {"path": "src/a.py", "count": 3, "force": True})]
TWO: Calls = [*SIMPLE, ("read_file", {"path": "mkdir a/{b,c}"})]
NESTED: Calls = [("bash", {"path": "naïve 文", "options": {"a": {"b": "c"}}})]
TRAPS: dict[str, Calls] = {
    "tags in a string": [("bash", {"path": "</tool_call> </parameter> </arg_value> [TOOL_CALLS] <|call|> <tool_call|> }]"})],
    "blanks at the edges": [("bash", {"path": "  x \n"})],
    "no arguments": [("bash", {})],
    "quotes and backslashes": [("bash", {"path": 'say "it\'s" \\n'})],
}

installed = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: not compared with its tool parsers"
)


def calls_of(factory: ParserFactory, pieces: list[str]) -> tuple[Calls, str]:
    parser = factory(TOOLS, False)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    found = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEvent)]
    return found, "".join(event.text for event in events if isinstance(event, TextDelta))


@installed
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("calls", [SIMPLE, TWO, NESTED], ids=["one", "two", "nested"])
@pytest.mark.parametrize("name", WRITERS)
def test_sglang_reads_what_templates_write_as_we_do(name: str, calls: Calls, stream: bool) -> None:
    ours, write = WRITERS[name]
    output = write(calls)
    pieces = PIECE.findall(output) if stream else [output]
    assert calls_of(parser_factory(ours, ""), pieces)[0] == calls
    assert calls_of(adapters.sglang(name, stream=stream), pieces)[0] == calls


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", WRITERS)
def test_ours_lose_nothing_where_engines_are_known_to(name: str, trap: str) -> None:
    ours, write = WRITERS[name]
    assert calls_of(parser_factory(ours, ""), list(write(TRAPS[trap])))[0] == TRAPS[trap]


@installed
def test_sglangs_parsers_are_formats_by_import_path() -> None:
    output = _tags(SIMPLE)
    assert calls_of(parser_factory("turnloom.parse.adapters:sglang_qwen25", ""), [output]) == (SIMPLE, "")
    with pytest.raises(ConfigError, match="no tool parser 'nope'; it has: "):
        parser_factory("turnloom.parse.adapters:sglang_nope", "")


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install sglang"):
        parser_factory("turnloom.parse.adapters:sglang_qwen25", "")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install vllm"):
        adapters.vllm("hermes", None)
