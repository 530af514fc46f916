"""Reads the items of `input` as messages.

A reply is several items on this wire, one after another, and one assistant
message here. Which items belong together is told by the turn that their ids
name, and where they name none, by their standing together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from turnloom.errors import BadRequest
from turnloom.types import Message, Part, Reasoning, Text, ToolCall, ToolResult
from turnloom.wire import fields, freeform
from turnloom.wire.contract import Reading
from turnloom.wire.fields import MAX_MESSAGES, MAX_PARTS, string
from turnloom.wire.json import text_of
from turnloom.wire.openai_responses.content import Content
from turnloom.wire.openai_responses.ids import place_of, turn_of
from turnloom.wire.openai_responses.tools import Toolbox
from turnloom.wire.quirks import Quirk
from turnloom.wire.refs import turn_in_base64

_Item = Mapping[str, Any]

_SKIPPED = ("configuration_update", "context_compaction")
"""Marks that say nothing to the model. (A compaction of which there is content is not among them.)"""


class ItemReader:
    """One request's. `toolbox` gains the tools that items bring."""

    def __init__(self, reading: Reading, toolbox: Toolbox) -> None:
        self._quirks = reading.quirks
        self._content = Content(reading)
        self._toolbox = toolbox
        self._messages: list[Message] = []
        self._reply = -1
        """Where the last reply stands among the messages, while only results of its calls have followed it."""
        self._items = 0
        """How many items the last reply has."""
        self._named_words = False
        """Whether the last words of the last reply came with the id that they were sent with."""
        self._readers: Mapping[str, Callable[[_Item, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "local_shell_call": lambda item, where: self._provider_call(item, "local_shell", "action", where),
            "local_shell_call_output": self._output,
            "shell_call": lambda item, where: self._provider_call(item, "shell", "action", where),
            "shell_call_output": self._output,
            "apply_patch_call": lambda item, where: self._provider_call(item, "apply_patch", "operation", where),
            "apply_patch_call_output": self._output,
            "web_search_call": self._web_search,
            "additional_tools": lambda item, where: self._toolbox.add(item.get("tools"), f"{where}.tools"),
        }

    @property
    def images(self) -> int:
        return self._content.images

    def read(self, value: Any) -> list[Message]:
        if isinstance(value, str):
            return [Message("user", self._content.user(value, "input"))]
        for i, item in enumerate(fields.objects(value, "input", MAX_MESSAGES)):
            self._item(item, f"input.{i}")
        return _without_remains(self._messages) if Quirk.BROKEN_REPLY in self._quirks else self._messages

    def _item(self, item: _Item, where: str) -> None:
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        if kind == "item_reference" or (kind is None and "id" in item):
            raise BadRequest(f"{where}: items are not stored, so none can be referred to; send the item itself, or previous_response_id")
        if kind in ("compaction", "compaction_summary") or (kind == "context_compaction" and item.get("encrypted_content")):
            raise BadRequest(
                f"{where}: only the provider's servers can read a {fields.shown(kind)} item; send a summary as a message in its place"
            )
        if kind in _SKIPPED:
            return
        reader = self._readers.get(str(kind))
        if reader is None:
            raise BadRequest(
                f"{where}.type: {fields.shown(kind)} is not supported here; send messages, reasoning, function calls and their outputs"
            )
        reader(item, where)

    def _message(self, item: _Item, where: str) -> None:
        role, content, at = item.get("role"), item.get("content"), f"{where}.content"
        if role == "assistant":
            self._say(self._content.assistant(content, at), turn_of(item.get("id")), where, item=item.get("id"), words=True)
        elif role == "user":
            self._add(Message("user", self._content.user(content, at)))
        elif role in ("system", "developer"):
            texts = self._content.texts(content, at)
            if any(t.text for t in texts):
                self._add(Message("system", texts))
        else:
            raise BadRequest(f'{where}.role: must be "user", "assistant", "system" or "developer", not {fields.shown(role)}')

    def _add(self, message: Message) -> None:
        self._messages.append(message)
        if message.role != "tool":
            self._reply = -1

    def _say(self, parts: tuple[Part, ...], ref: str, where: str, *, item: object = None, words: bool = False) -> None:
        """A piece of a reply. `item` is the id of the item that it came as."""
        place = place_of(item, ref)
        if self._goes_on(ref, place, words):
            last = self._messages[self._reply]
            if len(last.parts) + len(parts) > MAX_PARTS:
                raise BadRequest(f"{where}: a reply has more than {MAX_PARTS} items")
            self._messages[self._reply] = replace(last, parts=last.parts + parts, ref=last.ref or ref)
            self._items += 1
        else:
            self._reply, self._items = len(self._messages), 1
            self._messages.append(Message("assistant", parts, ref))
        self._named_words = place is not None if words else self._items > 1 and self._named_words

    def _goes_on(self, ref: str, place: int | None, words: bool) -> bool:
        """Whether a piece is of the last reply: both name the same turn, or they stand together and nothing tells them apart.

        A client may have written words of its own above or below a reply. It drops the ids of all words or of none, and
        no more pieces of a reply stand before one than its place in that reply.
        """
        if self._reply < 0:
            return False
        last = self._messages[self._reply]
        if self._reply < len(self._messages) - 1 or (ref and last.ref):
            return bool(ref) and ref == last.ref
        if not ref:
            return not (words and self._named_words)
        if place is None:
            return True
        return self._items <= place and not (words and any(isinstance(p, Text | ToolCall) for p in last.parts))

    def _reasoning(self, item: _Item, where: str) -> None:
        """Its own words, or else their summary: a reply of ours holds only one of the two."""
        text = _joined(item.get("content"), f"{where}.content") or _joined(item.get("summary"), f"{where}.summary")
        ref = fields.only((turn_of(item.get("id")), turn_in_base64(item.get("encrypted_content"))))
        self._say((Reasoning(text),) if text else (), ref, where, item=item.get("id"))

    def _function_call(self, item: _Item, where: str) -> None:
        arguments = fields.optional_string(item, "arguments", where)
        self._call(item, self._toolbox.called(string(item, "name", where), item.get("namespace")), arguments or "{}", where)

    def _custom_call(self, item: _Item, where: str) -> None:
        name = self._toolbox.called(string(item, "name", where), item.get("namespace"))
        self._call(item, name, freeform.arguments_of(string(item, "input", where)), where)

    def _provider_call(self, item: _Item, name: str, holder: str, where: str) -> None:
        """A call of a tool that only a provider's model is taught, as a call of a tool with that name."""
        action = item.get(holder)
        if not isinstance(action, dict):
            raise BadRequest(f"{where}.{holder}: must be an object")
        self._call(item, name, text_of(action), where)

    def _call(self, item: _Item, name: str, arguments: str, where: str) -> None:
        call = ToolCall(string(item, "call_id", where), name, arguments)
        self._say((call,), fields.only((turn_of(call.id), turn_of(item.get("id")))), where, item=item.get("id"))

    def _output(self, item: _Item, where: str) -> None:
        """The call's id; where a local shell's output has none, its own stands for it."""
        key = "id" if item.get("call_id") is None and item.get("type") == "local_shell_call_output" else "call_id"
        text = self._content.output(item.get("output"), f"{where}.output")
        self._add(Message("tool", (ToolResult(string(item, key, where), text),)))

    def _web_search(self, item: _Item, where: str) -> None:
        """A provider's server searched and told nobody else what it found: that it did is all there is to say."""
        action = item.get("action")
        self._say((Text(f"[web search {text_of(action)}]" if action else "[web search]"),), turn_of(item.get("id")), where)


def _without_remains(messages: list[Message]) -> list[Message]:
    """Without reasoning that led to nothing, where another reply follows at once or none yet."""

    def remains(i: int) -> bool:
        message, after = messages[i], messages[i + 1].role if i + 1 < len(messages) else "assistant"
        return message.role == after == "assistant" and not any(isinstance(p, Text | ToolCall) for p in message.parts)

    return [message for i, message in enumerate(messages) if not remains(i)]


def _joined(value: Any, where: str) -> str:
    return "\n\n".join(string(part, "text", f"{where}.{i}") for i, part in enumerate(fields.objects(value, where, MAX_PARTS)))
