"""The output formats by name, and which one a chat template teaches.

A format is one entry of FORMATS: how to see that a template teaches it, and how
to make its parser. A new one is a new file with its parser and a new entry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnloom.errors import ConfigError
from turnloom.imports import load_object
from turnloom.parse.body import Body
from turnloom.parse.contract import Parser, ParserFactory
from turnloom.parse.json_body import JsonBody
from turnloom.parse.tags import THINK_CLOSE, THINK_OPEN, TagParser
from turnloom.parse.xml_body import XmlBody
from turnloom.types import Tool

AUTO = "auto"
FALLBACK = "hermes"

_XML_CALL = re.compile(r"<tool_call>(?:\\n|\s)*<function=")
_JSON_CALL = re.compile(r"<tool_call>(?:\\n|\s)*\{\\?[\"']")

Build = Callable[[Sequence[Tool], bool, bool], Parser]
"""(declared tools, reasoning already opened by the prompt, read reasoning tags) -> a fresh parser."""


@dataclass(frozen=True, slots=True)
class Format:
    """`taught_by` looks at a chat template's text; formats are asked in order."""

    name: str
    taught_by: Callable[[str], bool]
    build: Build
    reads_reasoning: bool = True
    """False: reasoning tags stay text unless asked for."""


def _tagged(*bodies: type[Body]) -> Build:
    def build(tools: Sequence[Tool], reasoning_open: bool, reasoning: bool) -> Parser:
        return TagParser(tools, reasoning_open, bodies=bodies, reasoning=reasoning)

    return build


def _never(template: str) -> bool:
    return False


FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        Format("qwen3_coder", lambda template: bool(_XML_CALL.search(template)), _tagged(XmlBody)),
        # JSON or XML bodies; also what the renderer teaches a model whose template has no place for tools.
        Format(FALLBACK, lambda template: bool(_JSON_CALL.search(template)), _tagged(JsonBody, XmlBody)),
        Format("none", _never, _tagged(), reads_reasoning=False),
    )
}


def auto(chat_template: str) -> str:
    """The name of the format that the template teaches; the fallback where it teaches none that is known."""
    return next((known.name for known in FORMATS.values() if known.taught_by(chat_template)), FALLBACK)


def parser_factory(name: str, chat_template: str, *, reasoning: bool | None = None) -> ParserFactory:
    """The factory for a format's name, for `auto`, or for an import path `package.module:Name` of a ParserFactory.

    `reasoning`: read `<think>` tags. None: when the template has them (a model
    that was never taught them writes them as text), and never with `none`.
    Raises ConfigError for a name that is neither.
    """
    if ":" in name:
        return _imported(name)
    chosen = FORMATS.get(auto(chat_template) if name == AUTO else name)
    if chosen is None:
        raise ConfigError(f"no output format is called {name!r}: use {AUTO}, {', '.join(FORMATS)} or package.module:Name")
    if reasoning is None:
        reasoning = chosen.reads_reasoning and (THINK_OPEN in chat_template or THINK_CLOSE in chat_template)

    def factory(tools: Sequence[Tool], reasoning_open: bool) -> Parser:
        return chosen.build(tools, reasoning_open, reasoning)

    return factory


def _imported(path: str) -> ParserFactory:
    found = load_object(path, "the output format")
    if not callable(found):
        raise ConfigError(f"the output format {path!r} is not a ParserFactory: it cannot be called")
    factory: ParserFactory = found
    return factory
