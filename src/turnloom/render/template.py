"""The chat-template renderer: whole prompts, and bridges found from the template itself.

A bridge renders a short stand-in history twice, closed and continued, with an
anchor inside the last assistant message. What the template writes after the
anchor, from the end-of-turn token on, is what has to be appended to the tokens
already held; it does not matter how the template rewrites earlier history. A
template that closes the message in another way once more follows is not bridged.

Text in a message never becomes a control token: each spelling of a control
token is replaced by a placeholder before rendering and encoded as plain text
after it, so that the template's own control tokens are the only ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnloom.errors import RenderError
from turnloom.render.contract import Rendered, Tokenizer, Unbridgeable
from turnloom.render.shield import MARK_SET, MARKS, Shield
from turnloom.types import Message, Tool, ToolCall, ToolResult, ids

_PROBE_TOOL = {"type": "function", "function": {"name": "probed", "description": "probed", "parameters": {"type": "object"}}}

_REASONING_OPENERS = ("<think>",)

_TOOLS_TEXT = """# Tools

You can call these functions, each given as a JSON schema:
{schemas}

To call one, write this and stop:
<tool_call>
{{"name": "function name", "arguments": {{"parameter": "value"}}}}
</tool_call>
You then get its result."""


class ChatTemplateRenderer:
    """Renders with one tokenizer's chat template. `template_kwargs` go to every rendering (`enable_thinking`, ...)."""

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._blocks = False
        self._kwargs = dict(template_kwargs or {})
        spellings = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._inner = {s[1:-1]: s for s in spellings if s[0] in "<[" and len(s) > 2}
        self._own_marks = frozenset(tokenizer.chat_template) & MARK_SET
        self._spelling = {i: s for s, i in tokenizer.control_tokens.items()}
        self._blocks = not self._shows(_user("probed")) and self._shows([{"role": "user", "content": [{"type": "text", "text": "probed"}]}])
        call = (ToolCall("call00000", "f", "{}"),)
        plain, with_call = self._probe_close(()), self._probe_close(call)
        self._shows_calls = with_call is not None
        self._shows_tools = self._shows(_user("."), [_PROBE_TOOL])
        result = {"role": "tool", "content": "probed", "tool_call_id": "call00000", "name": "f"}
        self._shows_results = self._shows([*_user("."), _anchored(call if self._shows_calls else (), ".", None), result])
        late = [*_user("."), {"role": "assistant", "content": "opened"}, {"role": "system", "content": "probed"}, *_user(".")]
        self._late_system = "probed" in self._probe(late).partition("opened")[2]
        self._close = {False: plain or _Close(None, ""), True: with_call or plain or _Close(None, "")}
        self.end_ids = tokenizer.eos_ids | {close.end for close in self._close.values() if close.end is not None}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        text, shield = self._shielded(messages, tools, lambda shield: self._whole(messages, shield))
        hidden = self._hidden(text, messages, shield)
        if hidden is not None:
            raise RenderError(
                f"the chat template does not show message {hidden} ({messages[hidden].role}); send it in another role or place"
            )
        encoded, escaped = self._encode(text, shield)
        return Rendered(ids(encoded), _reasoning_open(text), escaped)

    def bridge(self, reply: Message, last_id: int | None, new: Sequence[Message], tools: Sequence[Tool]) -> Rendered | Unbridgeable:
        text, shield = self._shielded((reply, *new), tools, lambda shield: self._continued(reply, new, shield))
        _, found, after = text.partition(shield.anchor)
        if not found:
            return Unbridgeable("the template does not show the assistant message it is given")
        hidden = self._hidden(after, new, shield)
        if hidden is not None:
            return Unbridgeable(f"the template does not show a {new[hidden].role} message after the assistant's")
        close = self._close[bool(reply.calls)]
        if not after.startswith(close.text):
            return Unbridgeable("the template closes an assistant message differently once more follows")
        encoded, escaped = self._encode(after[len(close.text) :], shield)
        opening = encoded[0] if encoded else None
        skip = 1 if last_id is not None and last_id == (opening if close.end is None else close.end) else 0
        if close.end is not None and opening != close.end:
            return Unbridgeable(f"the template writes no {self._spelling[close.end]} after an assistant message once more follows")
        return Rendered(ids(encoded[skip:]), _reasoning_open(after), escaped)

    def _whole(self, messages: Sequence[Message], shield: Shield) -> str:
        chat = self._chat(messages, shield)
        if shield.tools and not self._shows_tools:
            chat = _with_tools_text(chat, shield.tools)
        return self._template(chat, shield.tools)

    def _continued(self, reply: Message, new: Sequence[Message], shield: Shield) -> str:
        """A stand-in history whose last reply ends in the anchor, and what follows it."""
        stand_in = [*_user("."), _anchored(reply.calls if self._shows_calls else (), shield.anchor, shield)]
        return self._template(stand_in + self._chat(new, shield, reply), shield.tools)

    def _shielded(self, messages: Sequence[Message], tools: Sequence[Tool], write: Callable[[Shield], str]) -> tuple[str, Shield]:
        """The rendered text and what was shielded in it.

        A template may put a name between the brackets of a control token
        (`<` + key + `>`). Where a text is such a name it is written a second time
        with the name shielded, and that one is taken if the brackets are there.
        """
        shield = Shield(self._control, self._inner, self._own_marks, messages, tools)
        text = write(shield)
        if shield.names:
            strict = Shield(self._control, self._inner, self._own_marks, messages, tools, shield_names=True)
            second = write(strict)
            if any(
                f"{self._inner[name][0]}{mark}{self._inner[name][-1]}" in second
                for mark, name in strict.spellings.items()
                if name in self._inner
            ):
                return second, strict
        return text, shield

    def _hidden(self, text: str, messages: Sequence[Message], shield: Shield) -> int | None:
        """The first message whose words the template left out, None where it shows all of them.

        Users' messages and tool results must stand in their order; a system
        message anywhere, since templates move it. A reply with calls may lose its
        words: some templates were trained without them.
        """
        at = 0
        for i, message in enumerate(messages):
            words = shield(message.text).strip()
            if not words or message.calls:
                continue
            start = 0 if message.role == "system" else at
            found = next(((p, len(w)) for w in _spellings(words) if (p := text.find(w, start)) >= 0), None)
            if found is None:
                return i
            if message.role != "system":
                at = found[0] + found[1]
        return None

    def _shows(self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Whether the word that a probe holds is in what the template writes."""
        return "probed" in self._probe(chat, tools)

    def _probe(self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        try:
            return self._template(chat, tools)
        except RenderError:
            return ""

    def _probe_close(self, calls: tuple[ToolCall, ...]) -> _Close | None:
        """How the template closes an assistant message; None when it does not show one like this."""
        anchor = chr(MARKS[-1])
        chat = [*_user("."), _anchored(calls, anchor, None)]
        try:
            _, found, after = self._template(chat, None, generation_prompt=False).partition(anchor)
        except RenderError:
            return None
        if not found:
            return None
        special = [i for i in self._tokenizer.encode(after) if i in self._tokenizer.special_ids and i in self._spelling]
        return _Close(special[-1], after[: after.rfind(self._spelling[special[-1]])]) if special else _Close(None, after)

    def _chat(self, messages: Sequence[Message], shield: Shield, follows: Message | None = None) -> list[dict[str, Any]]:
        """Messages as chat templates take them, from the start or after a reply. A tool message carries the name of its call."""
        names = {c.id: c.name for c in follows.calls} if follows else {}
        chat: list[dict[str, Any]] = []
        for message in messages:
            item: dict[str, Any] = {"role": message.role, "content": shield(message.text)}
            if message.reasoning:
                item["reasoning_content"] = shield(message.reasoning)
            if message.calls:
                names.update({c.id: c.name for c in message.calls})
                if self._shows_calls:
                    item["tool_calls"] = [_template_call(c, shield.value(_object(c.arguments)), shield) for c in message.calls]
                else:
                    item["content"] = shield("\n".join(filter(None, [message.text, *map(_call_text, message.calls)])))
            for part in message.parts:
                if isinstance(part, ToolResult) and not self._shows_results:
                    item = {"role": "user", "content": f"<tool_response>\n{shield(part.text)}\n</tool_response>"}
                elif isinstance(part, ToolResult):
                    item["tool_call_id"] = shield(part.call_id)
                    if part.call_id in names:
                        item["name"] = shield(names[part.call_id])
            chat.append(item)
        return chat if self._late_system else _fold_late_system(chat, keep_first=not follows)

    def _template(
        self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, generation_prompt: bool = True
    ) -> str:
        if self._blocks:
            chat = [{**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m for m in chat]
        return self._tokenizer.apply_template(chat, tools, generation_prompt=generation_prompt, **self._kwargs)

    def _encode(self, text: str, shield: Shield) -> tuple[list[int], int]:
        """Ids of rendered text, and how many shielded spellings it held."""
        if not shield.spellings:
            return self._tokenizer.encode(text), 0
        encoded: list[int] = []
        pieces = shield.placeholders().split(text)
        for i, piece in enumerate(pieces):
            if piece:
                encoded += self._tokenizer.encode_plain(shield.spellings[piece]) if i % 2 else self._tokenizer.encode(piece)
        return encoded, len(pieces) // 2


@dataclass(frozen=True, slots=True)
class _Close:
    """`text` is what follows the message's own words up to `end`, the end-of-turn token; None where the next message's opening ends it."""

    end: int | None
    text: str


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _spellings(words: str) -> Iterator[str]:
    """As they are, or inside a JSON string."""
    yield words
    yield json.dumps(words, ensure_ascii=False)[1:-1]
    yield json.dumps(words)[1:-1]


def _anchored(calls: Sequence[ToolCall], anchor: str, shield: Shield | None) -> dict[str, Any]:
    """A stand-in for a reply with these calls: the anchor is the last thing that the message says."""
    if not calls:
        return {"role": "assistant", "content": anchor}
    tool_calls = [_template_call(c, {}, shield) for c in calls]
    tool_calls[-1]["function"]["arguments"] = {"a": anchor}
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _fold_late_system(chat: Sequence[dict[str, Any]], *, keep_first: bool) -> list[dict[str, Any]]:
    """System messages that a template has no place for, as reminders: in front of the user message that follows, else
    at the end of the one before, else as a user message."""
    folded: list[dict[str, Any]] = []
    reminders: list[str] = []
    for i, item in enumerate(chat):
        if item["role"] == "system" and (i or not keep_first):
            reminders.append(f"<system-reminder>\n{item['content']}\n</system-reminder>")
            continue
        if reminders and item["role"] == "user":
            item = {**item, "content": "\n\n".join([*reminders, item["content"]])}
            reminders = []
        elif reminders:
            folded, reminders = _with_reminders(folded, reminders), []
        folded.append(item)
    return _with_reminders(folded, reminders) if reminders else folded


def _with_reminders(chat: list[dict[str, Any]], reminders: Sequence[str]) -> list[dict[str, Any]]:
    text = "\n\n".join(reminders)
    if chat and chat[-1]["role"] == "user":
        return [*chat[:-1], {**chat[-1], "content": f"{chat[-1]['content']}\n\n{text}"}]
    return [*chat, {"role": "user", "content": text}]


def _with_tools_text(chat: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools in the system text, for a template that has no place for them."""
    text = _TOOLS_TEXT.format(schemas="\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools))
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{text}"}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]


def _call_text(call: ToolCall) -> str:
    """A call as text, for a template that has no place for calls: the hermes spelling."""
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'


def _template_call(call: ToolCall, arguments: Any, shield: Shield | None) -> dict[str, Any]:
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
