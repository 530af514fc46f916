"""The tags of a format, as data for the scanner in `tags`, and how to find one in text that comes in pieces."""

from __future__ import annotations

from dataclasses import dataclass

from turnloom.parse.body import TOOL_CLOSE, TOOL_OPEN


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags around one call, and the sections that hold several: each an opening and a closing tag.

    `bare`: a call may stand outside a section. False for calls whose own tag is
    ordinary text, so that it means nothing where no section was opened.
    """

    open: str = TOOL_OPEN
    close: str = TOOL_CLOSE
    sections: tuple[tuple[str, str], ...] = ()
    bare: bool = True

    @property
    def section_opens(self) -> tuple[str, ...]:
        return tuple(opener for opener, _ in self.sections)

    @property
    def section_closes(self) -> tuple[str, ...]:
        return tuple(closer for _, closer in self.sections)


def find_tag(window: str, tags: tuple[str, ...], start: int = 0) -> tuple[int, str]:
    """Where the first of the tags stands, and which; (-1, "") where none does."""
    found = [(at, tag) for tag in tags if (at := window.find(tag, start)) >= 0]
    return min(found, default=(-1, ""))


def ready(window: str, start: int, tags: tuple[str, ...]) -> int:
    """Where what could still become one of the tags starts, or the end."""
    first = {tag[0] for tag in tags}
    at = max(start, len(window) - max(map(len, tags), default=1) + 1)
    while at < len(window):
        if window[at] in first and any(tag.startswith(window[at:]) for tag in tags):
            return at
        at += 1
    return len(window)


def before_newline(window: str, start: int, stop: int) -> int:
    """`stop`, less one newline before it that is not before `start`."""
    return stop - 1 if stop > start and window[stop - 1] == "\n" else stop
