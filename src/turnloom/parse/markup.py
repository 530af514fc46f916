"""The tags of a format, as data for the scanner in `tags`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnloom.parse.body import TOOL_CLOSE, TOOL_OPEN


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags around one block, and the sections that hold several: each an opening and a closing tag.

    `close` empty: the block's body ends it. `bare`: a block may stand outside a
    section; False for blocks whose own tag is ordinary text, so that it means
    nothing where no section was opened. `framing`: tags around visible text that
    nobody should see. `again`: whether the text right behind a call opens another
    without a tag: True, False, or None while that is not decided.
    """

    open: str = TOOL_OPEN
    close: str = TOOL_CLOSE
    sections: tuple[tuple[str, str], ...] = ()
    bare: bool = True
    framing: tuple[str, ...] = ()
    again: Callable[[str], bool | None] | None = None

    @property
    def section_opens(self) -> tuple[str, ...]:
        return tuple(opener for opener, _ in self.sections)

    @property
    def section_closes(self) -> tuple[str, ...]:
        return tuple(closer for _, closer in self.sections)
