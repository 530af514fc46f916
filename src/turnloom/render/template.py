"""The chat-template renderer: whole prompts, and bridges found from the template itself.

A bridge renders a short stand-in history twice, closed and continued, with an
anchor inside the last assistant message. What the template writes after the
anchor, from the end-of-turn token on, is what has to be appended to the tokens
already held; it does not matter how the template rewrites earlier history.

Text in a message never becomes a control token: each spelling of a control
token is replaced by a placeholder before rendering and encoded as plain text
after it, so that the template's own control tokens are the only ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnloom.errors import RenderError
from turnloom.render.contract import Rendered, Tokenizer, Unbridgeable
from turnloom.types import Message, Tool, ToolCall, ToolResult, ids

_PRIVATE = range(0xE000, 0xF8FF)
"""Unicode's private use area: characters that no template and hardly any text uses."""

_ESCAPED_PRIVATE = re.compile(r"\\u([eE][0-9a-fA-F]{3}|[fF][0-8][0-9a-fA-F]{2})")
"""The same characters as JSON text may spell them."""

_REASONING_OPENERS = ("<think>",)


class ChatTemplateRenderer:
    """Renders with one tokenizer's chat template. `template_kwargs` go to every rendering (`enable_thinking`, ...)."""

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        spellings = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._spelling = {i: s for s, i in tokenizer.control_tokens.items()}
        self._close = {with_call: self._probe_close(with_call) for with_call in (False, True)}
        self.end_ids = tokenizer.eos_ids | {end for end, _ in self._close.values() if end is not None}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        shield = _Shield(self._control, messages, tools)
        text = self._template(_chat(messages, shield), shield.tools)
        encoded, escaped = self._encode(text, shield)
        return Rendered(ids(encoded), _reasoning_open(text), escaped)

    def bridge(self, reply: Message, last_id: int | None, new: Sequence[Message], tools: Sequence[Tool]) -> Rendered | Unbridgeable:
        shield = _Shield(self._control, (reply, *new), tools)
        anchor = shield.unused()
        stand_in = [{"role": "user", "content": "."}, _anchored(reply, anchor, shield)]
        text = self._template(stand_in + _chat(new, shield, reply.calls), shield.tools)
        after = text.partition(anchor)[2]
        if not after:
            return Unbridgeable("the template does not render the assistant message it is given")
        end, closed = self._close[bool(reply.calls)]
        if end is None:
            if not after.startswith(closed):
                return Unbridgeable("the template closes an assistant message differently once more follows")
            encoded, escaped = self._encode(after[len(closed) :], shield)
            skip = 1 if encoded and encoded[0] == last_id else 0
        else:
            at = after.find(self._spelling[end])
            if at < 0:
                return Unbridgeable(f"the template writes no {self._spelling[end]} after an assistant message once more follows")
            encoded, escaped = self._encode(after[at:], shield)
            skip = 1 if last_id == end else 0
        return Rendered(ids(encoded[skip:]), _reasoning_open(after), escaped)

    def _probe_close(self, with_call: bool) -> tuple[int | None, str]:
        """How the template closes an assistant message: (its end-of-turn token, the text after the message)."""
        anchor = chr(_PRIVATE[-1])
        call = (ToolCall("call00000", "f", "{}"),) if with_call else ()
        chat = [{"role": "user", "content": "."}, _anchored(Message("assistant", call), anchor, None)]
        try:
            after = self._template(chat, None, generation_prompt=False).partition(anchor)[2]
        except RenderError:
            return None, ""
        special = [i for i in self._tokenizer.encode(after) if i in self._tokenizer.special_ids and i in self._spelling]
        return (special[-1] if special else None), after

    def _template(
        self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, generation_prompt: bool = True
    ) -> str:
        return self._tokenizer.apply_template(chat, tools, generation_prompt=generation_prompt, **self._kwargs)

    def _encode(self, text: str, shield: _Shield) -> tuple[list[int], int]:
        """Ids of rendered text, and how many shielded spellings it held."""
        if not shield.spellings:
            return self._tokenizer.encode(text), 0
        encoded: list[int] = []
        pieces = shield.placeholders().split(text)
        for i, piece in enumerate(pieces):
            if piece:
                encoded += self._tokenizer.encode_plain(shield.spellings[piece]) if i % 2 else self._tokenizer.encode(piece)
        return encoded, len(pieces) // 2


class _Shield:
    """Replaces control-token spellings in message text with placeholders that the text does not hold."""

    def __init__(self, control: re.Pattern[str] | None, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        self._control = control
        self.spellings: dict[str, str] = {}
        self._by_spelling: dict[str, str] = {}
        texts = [t for m in messages for p in m.parts for t in _texts(p)] + [t for tool in tools for t in _tool_texts(tool)]
        self._taken = {c for t in texts if not t.isascii() for c in t if ord(c) in _PRIVATE}
        self._taken |= {chr(int(code, 16)) for t in texts for code in _ESCAPED_PRIVATE.findall(t)}
        self.tools: list[dict[str, Any]] | None = [_template_tool(t, self) for t in tools] or None

    def unused(self) -> str:
        """A character that no text here holds."""
        for code in _PRIVATE:
            if (c := chr(code)) not in self._taken:
                self._taken.add(c)
                return c
        raise RenderError("the messages use every private-use character; send less of them")

    def __call__(self, text: str) -> str:
        return self._control.sub(self._placeholder, text) if self._control else text

    def value(self, value: Any) -> Any:
        """Shield every string of a JSON value, keys too."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if isinstance(value, dict):
            return {self(k): self.value(v) for k, v in value.items()}
        return value

    def _placeholder(self, match: re.Match[str]) -> str:
        spelling = match.group()
        if spelling not in self._by_spelling:
            self._by_spelling[spelling] = mark = self.unused()
            self.spellings[mark] = spelling
        return self._by_spelling[spelling]

    def placeholders(self) -> re.Pattern[str]:
        return re.compile("([" + "".join(self.spellings) + "])")


def _texts(part: Any) -> tuple[str, ...]:
    if isinstance(part, ToolCall):
        return (part.name, part.arguments, part.id)
    if isinstance(part, ToolResult):
        return (part.text, part.call_id)
    return (part.text,)


def _tool_texts(tool: Tool) -> tuple[str, ...]:
    return (tool.name, tool.description, tool.parameters)


def _template_tool(tool: Tool, shield: _Shield) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": shield.value(function)}


def _chat(messages: Sequence[Message], shield: _Shield, earlier_calls: Sequence[ToolCall] = ()) -> list[dict[str, Any]]:
    """Messages as chat templates take them. A tool message carries the name of the call it answers."""
    names = {c.id: c.name for c in earlier_calls}
    chat: list[dict[str, Any]] = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role, "content": shield(message.text)}
        if message.role == "assistant":
            names.update({c.id: c.name for c in message.calls})
            if message.reasoning:
                item["reasoning_content"] = shield(message.reasoning)
            if message.calls:
                item["tool_calls"] = [_template_call(c, shield.value(_object(c.arguments)), shield) for c in message.calls]
        for part in message.parts:
            if isinstance(part, ToolResult):
                item["tool_call_id"] = shield(part.call_id)
                if part.call_id in names:
                    item["name"] = shield(names[part.call_id])
        chat.append(item)
    return chat


def _anchored(reply: Message, anchor: str, shield: _Shield | None) -> dict[str, Any]:
    """A stand-in for the reply: the same calls, the anchor as its last content."""
    if not reply.calls:
        return {"role": "assistant", "content": anchor}
    calls = [_template_call(c, {}, shield) for c in reply.calls]
    calls[-1]["function"]["arguments"] = {"a": anchor}
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _template_call(call: ToolCall, arguments: Any, shield: _Shield | None) -> dict[str, Any]:
    name, call_id = (shield(call.name), shield(call.id)) if shield else (call.name, call.id)
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _object(arguments: str) -> Any:
    """The call's arguments; text that is not a JSON object is shown under one key rather than dropped."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _reasoning_open(text: str) -> bool:
    return text.rstrip().endswith(_REASONING_OPENERS)
