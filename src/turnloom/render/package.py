"""Adapter to the PyPI package `renderers`: its hand-written renderers behind our contract, with our checks on what they return.

The package is given our tokenizer, so that its prompts have our ids, and it never
sees a control token's spelling in message text: that goes through it as a
placeholder and is encoded as plain text, as in the chat-template renderer.

Its bridge takes the ids of the last prompt too, to see how that ended. Our
contract holds only the sampled ids, so it gets short prompts of its own making: one that ends
in a user's message and one that ends in a tool's result. What it appends
must be the same after both, and must leave every id before it as it was.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from turnloom.errors import ConfigError, RenderError
from turnloom.imports import described
from turnloom.render.contract import Rendered, Tokenizer, Unbridgeable
from turnloom.render.shield import Edges, Shield, any_of
from turnloom.render.template import reasoning_open
from turnloom.types import Message, Text, Tool, ToolCall, ToolResult, ids

_ELSEWHERE = {"gpt-oss": "harmony", "default": "template"}
"""Renderers of the package that encode past our tokenizer, or that cannot bridge, and the one of ours to use instead."""

_CALL = ToolCall("call00000", "f", "{}")
_STAND_INS = (
    (Message("user", (Text("."),)),),
    (Message("user", (Text("."),)), Message("assistant", (_CALL,)), Message("tool", (ToolResult("call00000", "."),))),
)


class PackageRenderer:
    """`name` is one of the package's renderers, empty for the one that it knows for the tokenizer's name.

    `template_kwargs` are the controls that this renderer has. Raises ConfigError
    when the package is not there, knows no such renderer or model, or refuses the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, name: str = "", template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._lent = _LentTokenizer(tokenizer)
        self._package = _created(self._lent, name, template_kwargs or {})
        spellings = sorted({*tokenizer.control_tokens, "<think>", "</think>"}, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, spellings)))
        self._edges = Edges(tokenizer.control_tokens)
        self.end_ids = tokenizer.eos_ids | frozenset(self._package.get_stop_token_ids())
        self._stand_ins = [found for messages in _STAND_INS if (found := self._stand_in(messages))]
        if not self._stand_ins:
            raise ConfigError(f"the package renderers cannot write a prompt for the tokenizer {tokenizer.name}; use renderer `template`")

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        shield = self._shield(messages, tools)
        chat = _chat(messages, shield)
        whole, escaped = self._call(shield, lambda: self._package.render_ids(chat, tools=shield.tools, add_generation_prompt=True))
        text = self._tokenizer.decode(whole)
        left_out = _left_out(text, messages)
        if left_out is not None:
            raise RenderError(f"the package renderers does not show message {left_out} ({messages[left_out].role})")
        if tool := next((tool for tool in tools if tool.name not in text), None):
            raise RenderError(f"the package renderers does not show the tool {tool.name!r}; use renderer `template`")
        return Rendered(ids(whole), reasoning_open(text), escaped)

    def bridge(
        self, reply: Message, output: Sequence[int], new: Sequence[Message], tools: Sequence[Tool], *, calls_before: int = 0
    ) -> Rendered | Unbridgeable:
        shield = self._shield([reply, *new], tools)
        chat, sampled = _chat(new, shield, reply), [int(index) for index in output]
        appended: list[int] | None = None
        for prompt in self._stand_ins:
            before = [*prompt, *sampled]
            whole, escaped = self._call(shield, partial(self._continued, before, len(prompt), chat, shield.tools))
            if whole is None:
                return Unbridgeable("the package renderers does not continue this reply with these messages")
            if whole[: len(before)] != before:
                return Unbridgeable("the package renderers would leave out sampled tokens")
            if appended is not None and whole[len(before) :] != appended:
                return Unbridgeable("what the package renderers appends depends on how the prompt ended")
            appended = whole[len(before) :]
        text = self._tokenizer.decode(appended or ())
        left_out = _left_out(text, new)
        if left_out is not None:
            return Unbridgeable(f"the package renderers does not show a {new[left_out].role} message after the assistant's")
        return Rendered(ids(appended or ()), reasoning_open(text), escaped)

    def _continued(self, before: list[int], prompt_len: int, chat: Any, tools: Any) -> list[int] | None:
        found = self._package.bridge_to_next_turn(before[:prompt_len], before[prompt_len:], chat, tools=tools)
        return None if found is None else [int(index) for index in found.token_ids]

    def _stand_in(self, messages: Sequence[Message]) -> list[int]:
        try:
            return [int(index) for index in self.render(messages, ()).ids]
        except RenderError:
            return []

    def _shield(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Shield:
        return Shield(self._spelled, self._edges, frozenset(), messages, tools, shield_edges=True)

    def _call(self, shield: Shield, work: Callable[[], Any]) -> tuple[Any, int]:
        """The package's answer and how many shielded spellings it encoded."""
        try:
            with self._lent.shielding(shield) as shielded:
                return work(), shielded.escaped
        except RenderError:
            raise
        except Exception as error:
            raise RenderError(f"the package renderers refuses these messages: {described(error)}") from error


@dataclass(slots=True)
class _Shielded:
    """One call's shield, and the spellings that JSON may give its placeholders."""

    shield: Shield
    escapes: re.Pattern[str] | None
    escaped: int = 0


class _LentTokenizer:
    """Our tokenizer as the package asks for one. It has no offsets, which the package needs only to attribute tokens to messages."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name
        self.chat_template = tokenizer.chat_template
        self.eos_token_id = min(tokenizer.eos_ids, default=None)
        self.all_special_tokens = list(tokenizer.control_tokens)
        self._current: ContextVar[_Shielded | None] = ContextVar("shielded", default=None)

    @contextlib.contextmanager
    def shielding(self, shield: Shield) -> Iterator[_Shielded]:
        shielded = _Shielded(shield, any_of([json.dumps(mark)[1:-1] for mark in shield.spellings]))
        token = self._current.set(shielded)
        try:
            yield shielded
        finally:
            self._current.reset(token)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        shielded = self._current.get()
        if shielded is None:
            return self._tokenizer.encode(text)
        if shielded.escapes:
            text = shielded.escapes.sub(lambda match: str(json.loads(f'"{match.group()}"')), text)
        encoded: list[int] = []
        for piece, plain in shielded.shield.pieces(text):
            encoded += self._tokenizer.encode_plain(piece) if plain else self._tokenizer.encode(piece)
            shielded.escaped += plain
        return encoded

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        if tokens in self._tokenizer.control_tokens:
            return self._tokenizer.control_tokens[tokens]
        found = self._tokenizer.encode(tokens)
        return found[0] if len(found) == 1 else None


def _created(lent: _LentTokenizer, name: str, template_kwargs: Mapping[str, Any]) -> Any:
    try:
        base, configs = import_module("renderers.base"), import_module("renderers.configs")
    except ImportError as error:
        raise ConfigError(f"the renderer `renderers` needs packages: pip install 'turnloom[renderers]' ({described(error)})") from error
    models = base.MODEL_RENDERER_MAP
    known = sorted(set(models.values()) - set(_ELSEWHERE))
    chosen = name or models.get(lent.name_or_path, "")
    if chosen in _ELSEWHERE:
        raise ConfigError(f"use renderer `{_ELSEWHERE[chosen]}` instead of the {chosen!r} of the package renderers")
    if chosen not in known:
        asked = f"no renderer {name!r}" if name else f"no model {lent.name_or_path!r}"
        raise ConfigError(f"the package renderers knows {asked}; name one: renderers/NAME, where NAME is {', '.join(known)}")
    try:
        # Keeping what was sampled is the history policy of a bridge, so a new question from the user is no reason to write it anew.
        config = type(configs.config_from_name(chosen))(thinking_retention="all")
        return base.create_renderer(lent, config, chat_template_kwargs=dict(template_kwargs) or None)
    except Exception as error:
        raise ConfigError(f"the package renderers cannot make {chosen!r} for {lent.name_or_path}: {described(error)}") from error


def _chat(messages: Sequence[Message], shield: Shield, follows: Message | None = None) -> list[dict[str, Any]]:
    """Messages as the package takes them, shielded. A tool message carries the name of its call."""
    names = {c.id: c.name for c in follows.calls} if follows else {}
    chat: list[dict[str, Any]] = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role, "content": shield(message.text)}
        if message.reasoning:
            item["reasoning_content"] = shield(message.reasoning)
        if message.calls:
            names |= {c.id: c.name for c in message.calls}
            item["tool_calls"] = [_call(c, shield) for c in message.calls]
        for part in message.parts:
            if isinstance(part, ToolResult):
                item["tool_call_id"] = shield(part.call_id)
                if part.call_id in names:
                    item["name"] = shield(names[part.call_id])
        chat.append(item)
    return chat


def _call(call: ToolCall, shield: Shield) -> dict[str, Any]:
    """Arguments that are no JSON object are shown under one key rather than dropped."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    function = {"name": shield(call.name), "arguments": shield.value(arguments)}
    return {"type": "function", "id": shield(call.id), "function": function}


def _left_out(text: str, messages: Sequence[Message]) -> int | None:
    """The first message whose words are not in `text`. Users' messages and results stand in their order; a reply may lose words."""
    at = 0
    for i, message in enumerate(messages):
        words = message.text.strip()
        if not words or message.role == "assistant":
            continue
        start = 0 if message.role == "system" else at
        spellings = (words, json.dumps(words, ensure_ascii=False)[1:-1], json.dumps(words)[1:-1])
        found = next(((p, len(w)) for w in spellings if (p := text.find(w, start)) >= 0), None)
        if found is None:
            return i
        if message.role != "system":
            at = sum(found)
    return None
