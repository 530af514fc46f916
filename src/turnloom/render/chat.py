"""Messages as a chat template takes them, with its quirks written around."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from turnloom.render.quirks import Item, Quirk, Traits, probe_call, probe_result
from turnloom.render.shield import Shield
from turnloom.types import Message, ToolCall, ToolResult

_TOOLS_TEXT = """# Tools

You can call these functions, each given as a JSON schema:
{schemas}

To call one, write this and stop:
<tool_call>
{{"name": "function name", "arguments": {{"parameter": "value"}}}}
</tool_call>
You then get its result."""

_NINE = re.compile(r"[A-Za-z0-9]{9}")
_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class ChatWriter:
    """Writes one request's messages.

    `follows` is the reply that they come after, where it is not among them, and
    `calls_before` how many calls the history before that reply has.
    """

    def __init__(self, traits: Traits, shield: Shield, follows: Message | None = None, calls_before: int = 0) -> None:
        self._traits = traits
        self._shield = shield
        self._calls: dict[str, ToolCall] = {}
        self._shown_ids: dict[str, str] = {}
        self._follows = follows
        self._calls_before = calls_before
        if follows:
            self._know(follows)

    def whole(self, messages: Sequence[Message]) -> list[Item]:
        """A whole history."""
        chat = self._items(messages)
        if self._shield.tools and Quirk.TOOLS_AS_TEXT in self._traits:
            chat = _with_tools_text(chat, self._shield.tools)
        if Quirk.LATE_SYSTEM_FOLDED in self._traits:
            chat = _fold_late_system(chat, keep_first=True)
        if Quirk.SYSTEM_IN_USER in self._traits:
            chat = _fold_first_system(chat)
        return self._alternating(chat)

    def after(self, messages: Sequence[Message]) -> list[Item]:
        """What comes after the reply that is followed."""
        chat = self._items(messages)
        if Quirk.LATE_SYSTEM_FOLDED in self._traits:
            chat = _fold_late_system(chat, keep_first=False)
        return self._alternating(chat)

    def stand_in(self, anchor: str) -> list[Item]:
        """A short history that ends in the reply that is followed, saying nothing but the anchor, which is its last word."""
        quirks = self._traits.quirks
        rounds = range(self._calls_before if Quirk.COUNTS_CALLS in quirks else 0)
        earlier = [item for i in rounds for item in (probe_call(quirks, ".", first=i), probe_result(quirks, ".", i))]
        return [{"role": "user", "content": "."}, *earlier, self._anchored(anchor)]

    def _anchored(self, anchor: str) -> Item:
        calls = self._follows.calls if self._follows and Quirk.CALLS_AS_TEXT not in self._traits else ()
        if not calls:
            return {"role": "assistant", "content": anchor}
        if Quirk.ONE_CALL in self._traits:
            calls = calls[-1:]
        empty = [self._call(call, {}) for call in calls[:-1]]
        return {"role": "assistant", "content": "", "tool_calls": [*empty, self._call(calls[-1], {"a": anchor})]}

    def _items(self, messages: Sequence[Message]) -> list[Item]:
        chat: list[Item] = []
        for message in messages:
            if message.role == "assistant":
                chat.append(self._assistant(message))
            elif message.role == "tool":
                chat += [self._result(part) for part in message.parts if isinstance(part, ToolResult)]
            else:
                chat.append({"role": message.role, "content": self._shield(message.text)})
        return _one_call_each(chat) if Quirk.ONE_CALL in self._traits else chat

    def _assistant(self, message: Message) -> Item:
        self._know(message)
        # Blank text before a call is the format's own, which the template writes itself.
        spoken = "" if message.calls and not message.text.strip() else message.text
        item: Item = {"role": "assistant", "content": self._shield(spoken)}
        if Quirk.EMPTY_REFUSED in self._traits and not message.text and not message.calls:
            item["content"] = " "
        if message.reasoning and not (spoken and message.calls and Quirk.REASONING_WITHOUT_CALLS in self._traits):
            item[self._traits.reasoning_key] = self._shield(message.reasoning)
        if message.calls and Quirk.CALLS_AS_TEXT in self._traits:
            item["content"] = "\n".join(filter(None, [item["content"], *map(self._call_text, message.calls)]))
        elif message.calls:
            item["tool_calls"] = [self._call(c, self._arguments(c)) for c in message.calls]
        return item

    def _result(self, part: ToolResult) -> Item:
        if Quirk.RESULTS_AS_TEXT in self._traits:
            return {"role": "user", "content": f"<tool_response>\n{self._shield(part.text)}\n</tool_response>"}
        item = {"role": "tool", "content": self._shield(part.text), "tool_call_id": self._shield(self._shown(part.call_id))}
        if part.call_id in self._calls:
            item["name"] = self._shield(self._calls[part.call_id].name)
        return item

    def _arguments(self, call: ToolCall) -> Any:
        value = _object(call.arguments)
        if Quirk.ARGUMENTS_AS_JSON not in self._traits:
            return self._shield.value(value)
        return self._shield(call.arguments if value.keys() != {"arguments"} else json.dumps(value, ensure_ascii=False))

    def _call(self, call: ToolCall, arguments: Any) -> Item:
        if isinstance(arguments, dict) and Quirk.ARGUMENTS_AS_JSON in self._traits:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": self._shield(call.name), "arguments": arguments}
        return {"type": "function", "id": self._shield(self._shown(call.id)), "function": function}

    def _call_text(self, call: ToolCall) -> str:
        """A call for a template that has no place for calls: the hermes spelling. Its tags are not the message's text and become tokens."""
        name, arguments = self._shield(json.dumps(call.name)), self._shield(call.arguments)
        return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'

    def _know(self, message: Message) -> None:
        for call in message.calls:
            if Quirk.FUNCTION_IDS in self._traits:
                self._shown_ids[call.id] = call.written or f"functions.{call.name}:{self._calls_before + len(self._shown_ids)}"
            elif Quirk.NINE_LETTER_IDS in self._traits and _NINE.fullmatch(call.written):
                self._shown_ids[call.id] = call.written
            self._calls[call.id] = call

    def _shown(self, call_id: str) -> str:
        """The id as the template reads it."""
        if call_id in self._shown_ids:
            return self._shown_ids[call_id]
        if Quirk.NINE_LETTER_IDS in self._traits and not _NINE.fullmatch(call_id):
            number = int.from_bytes(blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
            return "".join(_BASE62[number // 62**i % 62] for i in range(9))
        return call_id

    def _alternating(self, chat: list[Item]) -> list[Item]:
        if Quirk.USER_IN_RESULT in self._traits:
            chat = _join(chat, "tool", "user")
        return _join(chat, "user", "user") if Quirk.USERS_MERGED in self._traits else chat


def _join(chat: Sequence[Item], before: str, role: str) -> list[Item]:
    """Each message of `role` that follows one of `before` becomes the end of it."""
    joined: list[Item] = []
    for item in chat:
        if joined and item["role"] == role and joined[-1]["role"] == before:
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{item['content']}"}
        else:
            joined.append(item)
    return joined


def _one_call_each(chat: Sequence[Item]) -> list[Item]:
    """Every message with several calls as one message a call, each before its own result."""
    split: list[Item] = []
    at = 0
    while at < len(chat):
        item = chat[at]
        at += 1
        calls = item.get("tool_calls", ())
        if len(calls) < 2:
            split.append(item)
            continue
        results: list[Item] = []
        while at < len(chat) and chat[at]["role"] == "tool":
            results.append(chat[at])
            at += 1
        ids = [call["id"] for call in calls]
        for i, call in enumerate(calls):
            split.append({**(item if i == 0 else {"role": "assistant", "content": ""}), "tool_calls": [call]})
            answers = [r for r in results if r["tool_call_id"] == call["id"]]
            if ids.count(call["id"]) > 1:
                answers = answers[:1]
            split += answers
            results = [r for r in results if r not in answers]
        split += results
    return split


def _fold_first_system(chat: Sequence[Item]) -> list[Item]:
    if not chat or chat[0]["role"] != "system":
        return list(chat)
    text, rest = chat[0]["content"], list(chat[1:])
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{text}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _fold_late_system(chat: Sequence[Item], *, keep_first: bool) -> list[Item]:
    """System messages that a template has no place for, as reminders: in front of the user message that follows, else
    at the end of the one before, else as a user message."""
    folded: list[Item] = []
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


def _with_reminders(chat: list[Item], reminders: Sequence[str]) -> list[Item]:
    text = "\n\n".join(reminders)
    if chat and chat[-1]["role"] == "user":
        return [*chat[:-1], {**chat[-1], "content": f"{chat[-1]['content']}\n\n{text}"}]
    return [*chat, {"role": "user", "content": text}]


def _with_tools_text(chat: list[Item], tools: Sequence[Mapping[str, Any]]) -> list[Item]:
    """The tools in the system text, for a template that has no place for them."""
    text = _TOOLS_TEXT.format(schemas="\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools))
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{text}"}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]


def _object(arguments: str) -> Any:
    """The call's arguments; text that is not a JSON object is shown under one key rather than dropped."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}
