"""What a chat template cannot do, found by asking it: each a named quirk that says how the renderer writes around it.

A template is asked with small conversations. One that refuses a message, or
leaves out what it says, has no place for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from turnloom.errors import RenderError

Item = dict[str, Any]
Apply = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, bool], str]
"""(chat, tools, with the generation prompt) -> the template's text. Raises RenderError."""

WORD = "probed"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "described",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]},
    },
}


class Quirk(StrEnum):
    CONTENT_BLOCKS = "content_blocks"
    """Content is shown only as a list of blocks, so it is given as one."""
    EMPTY_TOOLS = "empty_tools"
    """The template reads a list of tools even where there is none, so it is given an empty one."""
    TOOLS_AS_TEXT = "tools_as_text"
    """No place for tools: they are described in the system message, with calls in the hermes spelling."""
    CALLS_AS_TEXT = "calls_as_text"
    """No place for calls, or none for tools: calls stand in the assistant's text, in the hermes spelling."""
    RESULTS_AS_TEXT = "results_as_text"
    """No place for tool results: each is a user message in `<tool_response>` tags."""
    ARGUMENTS_AS_JSON = "arguments_as_json"
    """Arguments are given to the template as JSON text, not as an object."""
    NINE_LETTER_IDS = "nine_letter_ids"
    """Call ids must be nine letters or digits: the id that the model wrote, or a digest of that form."""
    FUNCTION_IDS = "function_ids"
    """Call ids are read as `functions.NAME:INDEX`: the id that the model wrote, or one of that form."""
    ONE_CALL = "one_call"
    """One call a message: a reply with several is shown as several, each before its result."""
    COUNTS_CALLS = "counts_calls"
    """What is written after a call depends on how many calls came before it: a bridge's stand-in history has as many."""
    SYSTEM_IN_USER = "system_in_user"
    """No system message, or none while a tool result stands last: it stands in front of the first user message."""
    EMPTY_REFUSED = "empty_refused"
    """A reply without words and calls is refused: a space stands for it."""
    LATE_SYSTEM_FOLDED = "late_system_folded"
    """A system message after the first place is folded forward, as a reminder, into the user message that follows."""
    USERS_MERGED = "users_merged"
    """User and assistant must alternate: user messages that follow one another become one."""
    USER_IN_RESULT = "user_in_result"
    """No user message may follow a tool result: its text stands after the result's."""
    REASONING_WITHOUT_CALLS = "reasoning_without_calls"
    """A reply with words and calls is refused with its reasoning, so that is left out."""


@dataclass(frozen=True, slots=True)
class Traits:
    """`reasoning_key` is the field in which the template reads a reply's reasoning."""

    quirks: frozenset[Quirk]
    reasoning_key: str = "reasoning_content"

    def __contains__(self, quirk: Quirk) -> bool:
        return quirk in self.quirks


def find_traits(template: Apply) -> Traits:
    """Ask the template what it can do."""
    found: set[Quirk] = set()

    def shows(chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, prompt: bool = True) -> bool:
        return WORD in _ask(template, chat, tools, prompt)

    if not shows(_user(WORD)) and shows([{"role": "user", "content": as_blocks(WORD)}]):
        found.add(Quirk.CONTENT_BLOCKS)
        template = _in_blocks(template)
    if not shows(_user(WORD)) and shows(_user(WORD), ()):
        found.add(Quirk.EMPTY_TOOLS)
        template = _with_a_list(template)
    if "described" not in _ask(template, _user("."), [PROBE_TOOL], True):
        found.add(Quirk.TOOLS_AS_TEXT)
    tools = None if Quirk.TOOLS_AS_TEXT in found else [PROBE_TOOL]
    # A model that is taught to write calls as text is shown them so.
    found |= _call_quirks(template, tools) if tools else {Quirk.CALLS_AS_TEXT}
    call = probe_call(found, ".")
    dull = probe_result(found, ".")
    if not shows([*_user("."), call, probe_result(found, WORD)], tools):
        found.add(Quirk.RESULTS_AS_TEXT)
    elif not shows([*_user("."), call, dull, *_user(WORD)], tools):
        found.add(Quirk.USER_IN_RESULT)
    first = [*_user("."), probe_call(found, WORD), dull]
    second = [*_user("."), call, dull, probe_call(found, WORD, first=1), probe_result(found, ".", 1)]
    after = [_ask(template, chat, tools, True).partition(WORD) for chat in (first, second)]
    if Quirk.CALLS_AS_TEXT not in found and all(word for _, word, _ in after) and after[0][2] != after[1][2]:
        found.add(Quirk.COUNTS_CALLS)
    in_result = Quirk.RESULTS_AS_TEXT not in found and not shows([_system(WORD), *_user("."), call, dull], tools)
    if in_result or not shows([_system(WORD), *_user(".")]):
        found.add(Quirk.SYSTEM_IN_USER)
    if not shows([*_user("."), _said(""), *_user(WORD)]) and shows([*_user("."), _said(" "), *_user(WORD)]):
        found.add(Quirk.EMPTY_REFUSED)
    late = [*_user("."), _said("opened"), _system(WORD), *_user(".")]
    if WORD not in _ask(template, late, None, True).partition("opened")[2]:
        found.add(Quirk.LATE_SYSTEM_FOLDED)
    if not shows([*_user("."), _said("."), *_user("."), *_user(WORD)]):
        found.add(Quirk.USERS_MERGED)
    key = _reasoning_key(template, call, tools)
    spoken = {**call, "content": "words"}
    thinking = {**spoken, key: "."}
    if _ask(template, [*_user("."), spoken, dull], tools, True) and not _ask(template, [*_user("."), thinking, dull], tools, True):
        found.add(Quirk.REASONING_WITHOUT_CALLS)
    return Traits(frozenset(found), key)


def probe_call(quirks: Collection[Quirk], word: str, count: int = 1, first: int = 0) -> Item:
    """An assistant message with calls, the last argument being `word`; a plain one where the template shows no calls."""
    if Quirk.CALLS_AS_TEXT in quirks:
        return _said(word)
    calls = []
    for i in range(count):
        arguments: Any = {"a": word if i == count - 1 else "."}
        if Quirk.ARGUMENTS_AS_JSON in quirks:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": "probe_tool", "arguments": arguments}
        calls.append({"type": "function", "id": probe_id(quirks, first + i), "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def probe_result(quirks: Collection[Quirk], text: str, number: int = 0) -> Item:
    """The result of a probe's call."""
    return {"role": "tool", "content": text, "tool_call_id": probe_id(quirks, number), "name": "probe_tool"}


def probe_id(quirks: Collection[Quirk], number: int = 0) -> str:
    return f"call{number:05d}" if Quirk.NINE_LETTER_IDS in quirks else f"call_0123456789{number:06d}"


def as_blocks(text: str) -> list[Item]:
    return [{"type": "text", "text": text}]


def _call_quirks(template: Apply, tools: Sequence[Mapping[str, Any]] | None) -> set[Quirk]:
    """How a call has to be given for the template to show it as the model would write it."""
    ways: list[set[Quirk]] = [set(), {Quirk.NINE_LETTER_IDS}, {Quirk.ARGUMENTS_AS_JSON}, {Quirk.ARGUMENTS_AS_JSON, Quirk.NINE_LETTER_IDS}]
    for chosen in ways:
        for after, prompt in (([], False), ([probe_result(chosen, ".")], True)):
            shown = _ask(template, [*_user("."), probe_call(chosen, WORD), *after], tools, prompt)
            if WORD in shown and "{'a'" not in shown:
                if re.search(rf"<\|tool_call_begin\|>\s*{probe_id(chosen)}", shown):
                    chosen.add(Quirk.FUNCTION_IDS)
                if WORD not in _ask(template, [*_user("."), probe_call(chosen, WORD, 2), *after], tools, prompt):
                    chosen.add(Quirk.ONE_CALL)
                return chosen
    return {Quirk.CALLS_AS_TEXT}


def _reasoning_key(template: Apply, call: Item, tools: Sequence[Mapping[str, Any]] | None) -> str:
    for key in ("reasoning_content", "reasoning", "thinking"):
        for chat in ([*_user("."), {**_said("."), key: WORD}], [*_user("."), {**call, key: WORD}]):
            if WORD in _ask(template, chat, tools, False):
                return key
    return "reasoning_content"


def _ask(template: Apply, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, prompt: bool) -> str:
    """The template's answer, empty where it refuses."""
    try:
        return template(chat, tools, prompt)
    except RenderError:
        return ""


def _in_blocks(template: Apply) -> Apply:
    return lambda chat, tools, prompt: template([with_blocks(m) for m in chat], tools, prompt)


def _with_a_list(template: Apply) -> Apply:
    return lambda chat, tools, prompt: template(chat, tools or (), prompt)


def with_blocks(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": as_blocks(content)} if isinstance(content, str) else message


def _user(text: str) -> list[Item]:
    return [{"role": "user", "content": text}]


def _system(text: str) -> Item:
    return {"role": "system", "content": text}


def _said(text: str) -> Item:
    return {"role": "assistant", "content": text}
