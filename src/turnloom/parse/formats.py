"""The output formats by name, and which one a prompt teaches. Knows no format itself.

A new format is a new file with its Format, and its line here. The first format
whose sign a template has is the one it teaches, so where one sign is part of
another the narrower stands first; FORMATS says where that is.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.errors import ConfigError
from turnloom.imports import load_object
from turnloom.parse import adapters, cohere, deepseek, gemma4, glm, harmony, invoke, json_body, kimi, lfm2, llama3, mistral, phi4, xml_body
from turnloom.parse.contract import Parser, ParserFactory
from turnloom.parse.format import THINK, Format, ReasoningTags
from turnloom.parse.tags import tagged
from turnloom.types import Tool

AUTO = "auto"
FALLBACK = "hermes"

NONE = Format("none", lambda template: False, tagged(), reads_reasoning=False)

FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        invoke.DEEPSEEK_DSML,
        invoke.MINIMAX_M2,
        kimi.FORMAT,
        deepseek.V3,
        deepseek.V31,
        glm.FORMAT,
        harmony.FORMAT,
        gemma4.FORMAT,
        mistral.FORMAT,
        lfm2.FORMAT,
        # Before Granite, whose sign is the opening tag that Phi's calls have as well.
        phi4.FORMAT,
        phi4.GRANITE,
        # Before Aya, whose sign is the answer's tags that Command has as well.
        cohere.FORMAT,
        cohere.AYA,
        llama3.FORMAT,
        # Before Hermes, which reads both bodies: a template that shows both is read strictly.
        xml_body.FORMAT,
        json_body.FORMAT,
        NONE,
    )
}

_READS_HERMES = (json_body.FORMAT.name, cohere.AYA.name)

REASONING: tuple[ReasoningTags, ...] = (
    THINK,
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("<|channel>thought", "<channel|>"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<mm:think>", "</mm:think>"),
)
"""The reasoning tags that templates teach; the first pair of which a template has either is its own."""


def auto(chat_template: str) -> str:
    """The name of the format that the template teaches; the fallback where it teaches none that is known."""
    return next((known.name for known in FORMATS.values() if known.taught_by(chat_template)), FALLBACK)


def taught_format(chat_template: str, calls_as_text: bool) -> str:
    """The name of the format that a prompt teaches.

    `calls_as_text`: the template has no place for tools or for calls, so that the
    renderer writes them in the hermes spelling; the template's own format is kept
    only where it reads that one.
    """
    own = auto(chat_template)
    return FALLBACK if calls_as_text and own not in _READS_HERMES else own


def reasoning_tags(chat_template: str) -> ReasoningTags | None:
    return next((tags for tags in REASONING if tags.opener in chat_template or tags.closer in chat_template), None)


def parser_factory(
    name: str, chat_template: str, *, calls_as_text: bool = False, reasoning: bool | None = None, tokenizer: object = None
) -> ParserFactory:
    """The factory for a format's name, for `auto`, for an engine's tool parser or for an import path of a ParserFactory.

    An engine's parser is `sglang:NAME` or `vllm:NAME`, NAME being what its
    `--tool-call-parser` takes (`adapters`); vLLM's need the model's `transformers`
    `tokenizer`. An import path is `package.module:Name`.

    `calls_as_text`: as for `taught_format`, which is what `auto` means.

    `reasoning`: read reasoning tags, those of the template, else `<think>`. None:
    when the template has them (a model that was never taught them writes them as
    text), and never with `none`. Raises ConfigError for a name that is none of these, and
    where the engine is not installed.
    """
    engine, _, kind = name.partition(":")
    if engine == "sglang":
        return adapters.sglang(kind)
    if engine == "vllm":
        return adapters.vllm(kind, tokenizer)
    if ":" in name:
        return _imported(name)
    chosen = FORMATS.get(taught_format(chat_template, calls_as_text) if name == AUTO else name)
    if chosen is None:
        raise ConfigError(
            f"no output format is called {name!r}: use {AUTO}, {', '.join(FORMATS)} or package.module:Name, or sglang:NAME or vllm:NAME"
        )
    taught = reasoning_tags(chat_template)
    if reasoning is None:
        reasoning = chosen.reads_reasoning and taught is not None
    tags = (taught or THINK) if reasoning else None

    def factory(tools: Sequence[Tool], reasoning_open: bool) -> Parser:
        return chosen.build(tools, reasoning_open, tags)

    return factory


def _imported(path: str) -> ParserFactory:
    found = load_object(path, "the output format")
    if not callable(found):
        raise ConfigError(f"the output format {path!r} is not a ParserFactory: it cannot be called")
    factory: ParserFactory = found
    return factory
