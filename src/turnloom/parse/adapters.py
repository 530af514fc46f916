"""The tool parsers of SGLang and vLLM, where installed, as ParserFactories: to compare with, or to see what an engine made of an output.

They keep their own losses, so what `contract` promises does not hold here: what
they drop is gone, they strip blanks, and they say nothing of a call that failed.
Calls come out at the end; where in the output one stands is not known, so each
record's text is the whole output. Reasoning is not read.

As an output format: `sglang:NAME` or `vllm:NAME`, where NAME is what
`--tool-call-parser` takes. vLLM's need a tokenizer; where a caller has none, a
module of one's own makes the factory: `FACTORY = adapters.vllm("hermes", tokenizer)`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from turnloom.errors import ConfigError
from turnloom.parse import strict_json
from turnloom.parse.contract import CallEvent, ParseEvent, Parser, ParserFactory, TextDelta
from turnloom.types import CallRecord, CallStatus, Tool

_SGLANG = "sglang_"

Found = tuple[str, list[tuple[str, str]]]
"""(visible text, calls as names and argument texts) in one output."""


class _WholeParser:
    """Reads the output once it is over."""

    def __init__(self, read: Callable[[str], Found]) -> None:
        self.records: list[CallRecord] = []
        self._read = read
        self._pieces: list[str] = []

    def feed(self, text: str) -> list[ParseEvent]:
        self._pieces.append(text)
        return []

    def finish(self) -> list[ParseEvent]:
        output, self._pieces = "".join(self._pieces), []
        if not output:
            return []
        text, calls = self._read(output)
        return [*([TextDelta(text)] if text else []), *_events(output, calls, self.records)]


class _StreamParser:
    """Gives each piece to SGLang's streaming parser as it comes; pieces of its calls are put together."""

    def __init__(self, engine: Any) -> None:
        self.records: list[CallRecord] = []
        self._engine = engine
        self._pieces: list[str] = []
        self._calls: dict[int, tuple[str, str]] = {}

    def feed(self, text: str) -> list[ParseEvent]:
        self._pieces.append(text)
        return self._take(*self._engine.parse_stream_chunk(text))

    def finish(self) -> list[ParseEvent]:
        output, self._pieces = "".join(self._pieces), []
        if not output:
            return []
        events = self._take(*self._engine.parse_stream_end())
        return [*events, *_events(output, [self._calls[index] for index in sorted(self._calls)], self.records)]

    def _take(self, text: str | None, items: Sequence[Any]) -> list[ParseEvent]:
        for item in items:
            name, arguments = self._calls.get(item.tool_index, ("", ""))
            self._calls[item.tool_index] = (name + (item.name or ""), arguments + (item.parameters or ""))
        return [TextDelta(text)] if text else []


def sglang(name: str, *, stream: bool = False) -> ParserFactory:
    """SGLang's tool parser `name`; `stream`: its streaming half, which is other code. Raises ConfigError."""
    kind = _load("sglang.srt.function_call.function_call_parser", "SGLang").FunctionCallParser
    protocol = _load("sglang.srt.entrypoints.openai.protocol", "SGLang")
    if name not in kind.ToolCallParserEnum:
        raise ConfigError(f"SGLang has no tool parser {name!r}; it has: {', '.join(sorted(kind.ToolCallParserEnum))}")

    def factory(tools: Sequence[Tool], reasoning_open: bool) -> Parser:
        engine = kind([protocol.Tool.model_validate(_declared(tool)) for tool in tools], name)

        def read(output: str) -> Found:
            text, items = engine.parse_non_stream(output)
            return text or "", [(item.name or "", item.parameters) for item in items]

        return _StreamParser(engine) if stream else _WholeParser(read)

    return factory


def vllm(name: str, tokenizer: Any) -> ParserFactory:
    """vLLM's tool parser `name`, with the model's `transformers` tokenizer, for whole outputs. Raises ConfigError."""
    manager = _load("vllm.tool_parsers", "vLLM").ToolParserManager
    if tokenizer is None:
        raise ConfigError(
            f"vLLM's tool parser {name!r} needs the model's tokenizer: name a factory from turnloom.parse.adapters.vllm instead"
        )
    try:
        kind = manager.get_tool_parser(name)
    except KeyError:
        raise ConfigError(f"vLLM has no tool parser {name!r}; it has: {', '.join(manager.list_registered())}") from None

    def factory(tools: Sequence[Tool], reasoning_open: bool) -> Parser:
        declared = [SimpleNamespace(type="function", function=SimpleNamespace(**_declared(tool)["function"])) for tool in tools]
        takes_tools = "tools" in inspect.signature(kind).parameters
        engine = kind(tokenizer, declared) if takes_tools else kind(tokenizer)

        def read(output: str) -> Found:
            found = engine.extract_tool_calls(output, SimpleNamespace(tools=declared, tool_choice="auto"))
            return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

        return _WholeParser(read)

    return factory


def __getattr__(name: str) -> ParserFactory:
    if name.startswith(_SGLANG):
        return sglang(name.removeprefix(_SGLANG))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _events(output: str, calls: Sequence[tuple[str, str]], records: list[CallRecord]) -> list[ParseEvent]:
    events: list[ParseEvent] = []
    for name, arguments in calls:
        good = strict_json.is_object(arguments)
        record = CallRecord(CallStatus.OK if good else CallStatus.MALFORMED, name, output, 0, len(output))
        records.append(record)
        events.append(CallEvent(name, arguments, record) if good else TextDelta(arguments))
    return events


def _declared(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}}


def _load(module: str, engine: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{engine}'s tool parsers need {engine} itself: pip install {engine.lower()} ({error})") from error
