"""What the laws are tried on: one chat template with its tokenizer, renderer, parser and profile."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnloom.errors import RenderError
from turnloom.parse.contract import ParserFactory
from turnloom.parse.formats import parser_factory
from turnloom.render.chat import ChatWriter
from turnloom.render.contract import Renderer
from turnloom.render.harmony import HarmonyRenderer
from turnloom.render.profile import Profile, find_profile, writes_calls_as_text
from turnloom.render.quirks import Quirk
from turnloom.render.shield import Shield
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing.corpus import ENTRIES, entry, load
from turnloom.testing.tokenizers import qwen_tokenizer, smollm2_tokenizer
from turnloom.tokenizer import HFTokenizer
from turnloom.types import Message, Tool

HARMONY = "harmony"
"""gpt-oss once more, with its own renderer."""

_TOKENIZERS = {"qwen2.5": lambda: qwen_tokenizer("qwen2.5"), "qwen3": lambda: qwen_tokenizer("qwen3"), "smollm2": smollm2_tokenizer}
"""Whole tokenizer folders and files, as users give them."""


@dataclass(frozen=True)
class Subject:
    """`speller` writes what the template writes; it is the renderer itself but where that has a format of its own."""

    name: str
    tokenizer: HFTokenizer
    renderer: Renderer
    speller: ChatTemplateRenderer
    parser: ParserFactory
    profile: Profile
    vocabulary: str = ""
    exact: bool = True

    @property
    def harmony(self) -> bool:
        return isinstance(self.renderer, HarmonyRenderer)

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The text of a whole prompt, for messages that spell no control token."""
        if self.harmony:
            return self.tokenizer.decode(self.renderer.render(messages, tools).ids.tolist())
        return self._written(messages, tools, True)

    def closed(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, str]:
        """The text of the template before the last message, ready for it, and with it. Raises RenderError."""
        return self._written(messages[:-1], tools, True), self._written(messages, tools, False)

    def _written(self, messages: Sequence[Message], tools: Sequence[Tool], prompt: bool) -> str:
        traits = self.speller.traits
        shield = Shield(None, None, frozenset(), messages, tools)
        shown = None if Quirk.TOOLS_AS_TEXT in traits else shield.tools
        return self.speller._apply(ChatWriter(traits, shield).whole(messages), shown, prompt)


@functools.cache
def subject_of(name: str) -> Subject:
    """Raises RenderError for a template that renders not even one user message without tools."""
    if name in _TOKENIZERS:
        return _subject(name, _TOKENIZERS[name](), {}, name, True)
    found = entry("trl/gptoss" if name == HARMONY else name)
    return _subject(name, load(found.name), found.template_kwargs, found.tokenizer, found.exact_tokenizer)


def _subject(name: str, tokenizer: HFTokenizer, kwargs: Mapping[str, Any], vocabulary: str, exact: bool) -> Subject:
    speller = ChatTemplateRenderer(tokenizer, kwargs)
    renderer: Renderer = HarmonyRenderer(tokenizer) if name == HARMONY else speller
    parser = parser_factory("auto", tokenizer.chat_template, calls_as_text=writes_calls_as_text(renderer))
    return Subject(name, tokenizer, renderer, speller, parser, find_profile(renderer, tokenizer), vocabulary, exact)


def names() -> list[str]:
    """Every template of the corpus, and gpt-oss's own renderer."""
    return [*(e.name for e in ENTRIES), HARMONY]


def refusal(name: str) -> str:
    """Why the template cannot be tried at all; empty where it can."""
    try:
        subject_of(name)
    except RenderError as error:
        return str(error)
    return ""
