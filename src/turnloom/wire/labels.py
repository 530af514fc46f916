"""Recognises what a request is for by what known agents send: their headers, the tools they name, the shape of the history.

What it does not know is the task itself. An agent is known by its own headers or
its User-Agent; of any other client nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from turnloom.types import COMPACTION, SIDE, SUBAGENT, Request
from turnloom.wire.contract import Envelope

_OF_SUBAGENTS = ("x-claude-code-agent-id", "x-openai-subagent", "x-codex-parent-thread-id", "x-parent-session-id")
"""Headers that only a sub-agent of Claude Code, Codex or opencode sends."""

_CLAUDE_COMPACTS = "fallback-credit-"
"""Claude Code names this beta when it asks for a summary of its history, and never else."""

_AGENTS = ("claude-cli", "geminicli", "qwencode", "opencode")
"""How the User-Agent of an agent begins whose main requests always bring tools."""


def recognise(dialect: str, envelope: Envelope, request: Request) -> str:
    """The request's label, "" for the main agent's own."""
    headers, agent = envelope.headers, _agent(envelope.headers)
    if _codex_kind(headers) == "compaction" or _CLAUDE_COMPACTS in headers.get("anthropic-beta", ""):
        return COMPACTION
    if any(name in headers for name in _OF_SUBAGENTS):
        return SUBAGENT
    if agent and not request.tools:
        return _without_tools(agent, request)
    names = {tool.name for tool in request.tools}
    if (agent == "geminicli" and "complete_task" in names) or (agent == "qwencode" and "agent" not in names):
        return SUBAGENT
    return ""


def _without_tools(agent: str, request: Request) -> str:
    """A summary of a history brings it, in free words; titles, routers and checks ask about less, or for an answer in a schema.

    opencode brings the history as one text, and asks for a title with two.
    """
    asked = [part for message in request.messages if message.role == "user" for part in message.parts]
    has_history = any(message.role == "assistant" for message in request.messages) or (agent == "opencode" and len(asked) == 1)
    return COMPACTION if has_history and not request.json_schema else SIDE


def _agent(headers: Mapping[str, str]) -> str:
    named = headers.get("user-agent", "").lower()
    return next((agent for agent in _AGENTS if named.startswith(agent)), "")


def _codex_kind(headers: Mapping[str, str]) -> str:
    """What Codex says in its own words that this request is."""
    try:
        said = json.loads(headers.get("x-codex-turn-metadata", "{}"))
    except (ValueError, RecursionError):
        return ""
    kind = said.get("request_kind") if isinstance(said, dict) else None
    return kind if isinstance(kind, str) else ""
