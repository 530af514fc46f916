"""Control tokens stay the template's own: what spells one in message text is replaced before rendering and put back as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnloom.errors import RenderError
from turnloom.types import Message, Tool, ToolCall, ToolResult

MARKS = (*range(0x2801, 0x2900), *range(0xA000, 0xA48D))
"""Braille patterns and Yi syllables stand for what is shielded: rare, never blank, and printed as they are by Python and JSON."""

MARK_SET = frozenset(map(chr, MARKS))

_ESCAPED_MARK = re.compile(r"\\u(28[0-9a-fA-F]{2}|[aA][0-4][0-9a-fA-F]{2})")
"""The same characters as JSON text may spell them."""


class Shield:
    """Replaces control-token spellings in message text with placeholders that the text does not hold."""

    def __init__(
        self,
        control: re.Pattern[str] | None,
        inner: Mapping[str, str],
        taken: frozenset[str],
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        shield_names: bool = False,
    ) -> None:
        self._control, self._inner, self._shield_names = control, inner, shield_names
        self.names: set[str] = set()
        """Texts met that are a control token less its brackets."""
        self.spellings: dict[str, str] = {}
        self._by_spelling: dict[str, str] = {}
        texts = [t for m in messages for p in m.parts for t in _texts(p)] + [t for tool in tools for t in _tool_texts(tool)]
        self._taken = set(taken).union(*(MARK_SET.intersection(t) for t in texts if not t.isascii()))
        self._taken |= {chr(int(code, 16)) for t in texts for code in _ESCAPED_MARK.findall(t)}
        self.anchor = self.unused()
        self.tools: list[dict[str, Any]] | None = [_template_tool(t, self) for t in tools] or None

    def unused(self) -> str:
        """A character that no text here holds."""
        for code in MARKS:
            if (c := chr(code)) not in self._taken:
                self._taken.add(c)
                return c
        raise RenderError("the messages use every braille pattern and Yi syllable at once; send fewer of them")

    def __call__(self, text: str) -> str:
        if text in self._inner:
            self.names.add(text)
            return self._mark(text) if self._shield_names else text
        return self._control.sub(lambda match: self._mark(match.group()), text) if self._control else text

    def value(self, value: Any) -> Any:
        """Shield every string of a JSON value, keys too."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if isinstance(value, dict):
            return {self(k): self.value(v) for k, v in value.items()}
        return value

    def _mark(self, spelling: str) -> str:
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


def _template_tool(tool: Tool, shield: Shield) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": shield.value(function)}
