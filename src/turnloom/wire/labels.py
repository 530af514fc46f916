"""Recognises what a request is for by what known agents send beside it. What it does not know is the task itself."""

from __future__ import annotations

from turnloom.types import COMPACTION, SUBAGENT, Request
from turnloom.wire.contract import Envelope

_OF_SUBAGENTS = ("x-claude-code-agent-id", "x-codex-parent-thread-id", "x-parent-session-id")
"""Headers that only a sub-agent of Claude Code, Codex or opencode sends."""

_CODEX = "x-openai-subagent"


def recognise(dialect: str, envelope: Envelope, request: Request) -> str:
    """The request's label, "" for the main agent's own."""
    headers = envelope.headers
    if _CODEX in headers:
        return COMPACTION if headers[_CODEX] == "compact" else SUBAGENT
    if any(name in headers for name in _OF_SUBAGENTS):
        return SUBAGENT
    return ""
