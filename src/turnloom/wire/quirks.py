"""What known clients vary from request to request, normalised before matching and rendering.

Each quirk has a name, a reason and a switch: a dialect reads only those it was given.
"""

from __future__ import annotations

from enum import StrEnum


class Quirk(StrEnum):
    BILLING_HEADER = "billing_header"
    """Claude Code's first system block may open with an `x-anthropic-billing-header:` line whose value changes with the
    conversation. It is accounting, not instruction: that line is left out, so that a changed value is not a changed
    system prompt. What follows it stays."""

    TOOL_REFERENCE = "tool_reference"
    """Claude Code's tool search answers with `tool_reference` blocks. The model reads the tool's name as text."""

    BROKEN_REPLY = "broken_reply"
    """Codex, asking again after a stream broke off, keeps the items that it had whole: of a reply whose words never ended, its
    reasoning alone. No reply begins like that, so it is left out where another reply follows it or none has come yet."""


ALL = frozenset(Quirk)

BILLING_PREFIX = "x-anthropic-billing-header:"


def without_billing_header(text: str) -> str:
    """`text` less its first line where that is the header."""
    return text.partition("\n")[2] if text.startswith(BILLING_PREFIX) else text
