"""Control tokens stay the template's own: what spells one in message text is replaced before rendering and put back as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from turnloom.errors import RenderError
from turnloom.types import Message, Tool, ToolCall, ToolResult

MARKS = (*range(0x2801, 0x2900), *range(0xA000, 0xA48D))
"""Braille patterns and Yi syllables stand for what is shielded: rare, never blank, and printed as they are by Python and JSON."""

MARK_SET = frozenset(map(chr, MARKS))

_ESCAPED_MARK = re.compile(r"\\u(28[0-9a-fA-F]{2}|[aA][0-4][0-9a-fA-F]{2})")
"""The same characters as JSON text may spell them."""


class Edges:
    """What text may hold of a control token that the template's own text completes."""

    def __init__(self, spellings: Iterable[str]) -> None:
        spellings = list(spellings)
        self.control = any_of(sorted(spellings, key=len, reverse=True))
        self._longest = max(map(len, spellings), default=0)
        self._heads = frozenset(s[:n] for s in spellings for n in range(1, len(s)))
        self._tails = frozenset(s[n:] for s in spellings for n in range(1, len(s)))
        self._middles = frozenset(s[i : len(s) - k] for s in spellings for i in (1, 2) for k in (1, 2) if i + k < len(s))

    def find(self, text: str) -> list[tuple[int, int]]:
        """Where `text` could begin or end inside a control token, or, all of it, lie inside one.

        Blank ends are passed over, since templates cut them.
        """
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if start >= end:
            return []
        if end - start < self._longest and text[start:end] in self._middles:
            return [(start, end)]
        reach = range(min(self._longest - 1, end - start), 0, -1)
        tail = next((n for n in reach if text[start : start + n] in self._tails), 0)
        head = next((n for n in reach if text[end - n : end] in self._heads), 0)
        if tail + head >= end - start:
            return [(start, end)]
        return [span for span in ((start, start + tail), (end - head, end)) if span[0] < span[1]]

    def touches(self, text: str, start: int, end: int) -> bool:
        """Whether any control token that `text` spells has a character in [start, end)."""
        if self.control is None:
            return False
        at = max(0, start - self._longest + 1)
        while (found := self.control.search(text, at, end + self._longest)) and found.start() < end:
            if found.end() > start:
                return True
            at = found.start() + 1
        return False


class Shield:
    """Replaces control-token spellings in message text with placeholders that the text does not hold.

    With `shield_edges` what could be a part of one is replaced as well; else
    `edged` says whether there is any. `pieces` tells which parts the template completed.
    """

    def __init__(
        self,
        control: re.Pattern[str] | None,
        edges: Edges | None,
        taken: frozenset[str],
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        shield_edges: bool = False,
    ) -> None:
        self._control, self._edges, self._shield_edges = control, edges, shield_edges
        self.edged = False
        self.spellings: dict[str, str] = {}
        self._by_spelling: dict[str, str] = {}
        self._parts: set[str] = set()
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
        if self._control:
            text = self._control.sub(lambda match: self._mark(match.group()), text)
        spans = self._edges.find(text) if self._edges else []
        self.edged |= bool(spans)
        if self._shield_edges:
            for start, end in reversed(spans):
                text = text[:start] + self._mark(text[start:end], part=True) + text[end:]
        return text

    def value(self, value: Any) -> Any:
        """Shield every string of a JSON value, keys too."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if isinstance(value, dict):
            return {self(k): self.value(v) for k, v in value.items()}
        return value

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Rendered text with what was replaced put back: each piece, and whether it is plain text whatever it spells.

        A part of a control token is, only where the text around it completes one.
        """
        if not self.spellings:
            return [(text, False)]
        split = self._placeholders().split(text)
        # Spellings stay placeholders here, so that what is found around a part is not theirs.
        shown = [self.spellings[piece] if piece in self._parts else piece for piece in split]
        whole, at, found = "".join(shown), 0, list[tuple[str, bool]]()
        for piece, part in zip(split, shown, strict=True):
            end = at + len(part)
            if piece in self._parts:
                plain = self._edges is not None and self._edges.touches(whole, at, end)
            else:
                plain, part = piece in self.spellings, self.spellings.get(piece, piece)
            at = end
            if part and not plain and found and not found[-1][1]:
                found[-1] = (found[-1][0] + part, False)
            elif part:
                found.append((part, plain))
        return found

    def completed(self, text: str) -> bool:
        """Whether the template completes a control token that message text holds a part of."""
        return any(plain and self.is_part(piece) for piece, plain in self.pieces(text))

    def is_part(self, piece: str) -> bool:
        """Whether a plain piece is a part of a control token, not a whole spelling."""
        return self._by_spelling.get(piece) in self._parts

    def _mark(self, spelling: str, *, part: bool = False) -> str:
        if spelling not in self._by_spelling:
            self._by_spelling[spelling] = mark = self.unused()
            self.spellings[mark] = spelling
            if part:
                self._parts.add(mark)
        return self._by_spelling[spelling]

    def _placeholders(self) -> re.Pattern[str]:
        return re.compile("([" + "".join(self.spellings) + "])")


def any_of(spellings: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, spellings))) if spellings else None


def _texts(part: Any) -> tuple[str, ...]:
    if isinstance(part, ToolCall):
        return (part.name, part.arguments, part.id, part.written)
    if isinstance(part, ToolResult):
        return (part.text, part.call_id)
    return (part.text,)


def _tool_texts(tool: Tool) -> tuple[str, ...]:
    return (tool.name, tool.description, tool.parameters)


def _template_tool(tool: Tool, shield: Shield) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": shield.value(function)}
