"""What the bodies written in tags share: a walk over the tags, and the call made of typed parameters. Knows no tag itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from turnloom.parse import schema, strict_json
from turnloom.parse.body import MAX_LABEL, Attempt, Broken, Ended, undeclared
from turnloom.types import CallStatus, Tool

_LABEL = re.compile(r"[^<>\n]*")


@dataclass(slots=True)
class Parameter:
    """`key` as written in its tag; the value is [start, end) of the block."""

    key: str
    start: int
    end: int = -1


class TagWalk:
    """Hands over each tag, the text between tags, and each label (a name or key that a tag leaves open)."""

    fault: ClassVar[CallStatus] = CallStatus.MALFORMED
    tags: ClassVar[tuple[str, ...]]

    def __init__(self, at: int) -> None:
        self._at = at
        self._carry = ""
        self._label: str | None = None
        """The label being read; None between tags."""

    def feed(self, text: str) -> Ended | Broken | None:
        window, self._carry = self._carry + text, ""
        i = 0
        verdict: Ended | Broken | None = None
        while i < len(window) and verdict is None and not self._carry:
            if self._label is not None:
                i, verdict = self._read_label(window, i)
            else:
                i, verdict = self._read(window, i)
        self._at += len(window) - len(self._carry)
        return verdict

    def _read(self, window: str, i: int) -> tuple[int, Ended | Broken | None]:
        """The text up to the next tag, and the tag. Returns where to go on."""
        at = window.find("<", i)
        stop = len(window) if at < 0 else at
        gap = window[i:stop]
        verdict = self._between(gap.lstrip(), self._at + i) if gap else None
        if at < 0 or verdict is not None:
            return stop, verdict
        tag = self._tag(window, at)
        if tag is None:
            self._carry = window[at:]
            return at, None
        return at + len(tag), self._read_tag(tag, self._at + at)

    def _tag(self, window: str, at: int) -> str | None:
        """The tag at `at`, else the bare `<`; None when more text could make it a tag."""
        for tag in self.tags:
            if window.startswith(tag, at):
                return tag
        rest = window[at : at + max(map(len, self.tags))]
        return None if any(tag.startswith(rest) for tag in self.tags) else "<"

    def _read_label(self, window: str, i: int) -> tuple[int, Ended | Broken | None]:
        """More of a label. One that is too long is none."""
        found = _LABEL.match(window, i)
        assert found is not None
        assert self._label is not None
        end = found.end()
        self._label += window[i:end]
        if end == len(window) and len(self._label) <= MAX_LABEL:
            return end, None
        label, self._label = self._label, None
        return self._labelled(label if len(label) <= MAX_LABEL else None, window, end)

    def _between(self, bare: str, at: int) -> Ended | Broken | None:
        """The text between two tags that starts at `at`, without the blanks before it; it may come in pieces."""
        raise NotImplementedError

    def _read_tag(self, tag: str, at: int) -> Ended | Broken | None:
        """One of the tags, or the bare `<` of anything else."""
        raise NotImplementedError

    def _labelled(self, label: str | None, window: str, end: int) -> tuple[int, Ended | Broken | None]:
        """A whole label, None where it is none, and where it ends. Returns where to go on."""
        raise NotImplementedError


def typed_call(name: str, parameters: Iterable[tuple[str, str]], tools: Mapping[str, Tool], *, framed: bool) -> list[Attempt]:
    """The call of parameters written as bare text. `framed`: the format puts a newline on each side of a value."""
    return call_of(name, parameters, tools, lambda text, allowed: schema.encode(text, allowed, framed=framed))


def call_of(
    name: str, parameters: Iterable[tuple[str, str]], tools: Mapping[str, Tool], encode: Callable[[str, frozenset[str]], str | None]
) -> list[Attempt]:
    """`encode` gives the JSON text of a value as it was written, by the types allowed; None: it cannot be read.

    A key given twice is malformed: which was meant is not ours to choose.
    """
    if (failed := undeclared(name, tools)) is not None:
        return [failed]
    root = schema.load(tools[name].parameters)
    written: dict[str, str] = {}
    for key, text in parameters:
        value = encode(text, schema.types_of(key, root))
        if value is None or key in written:
            return [Attempt(CallStatus.MALFORMED, name)]
        written[key] = value
    return [Attempt(CallStatus.OK, name, strict_json.spell(written))]
