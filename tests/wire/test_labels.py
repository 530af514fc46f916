"""What requests of known agents are recognised as, by what they were seen to send."""

from __future__ import annotations

import json

import pytest

from turnloom.types import COMPACTION, SIDE, SUBAGENT, Message, Request, Text, Tool
from turnloom.wire.contract import Envelope
from turnloom.wire.labels import recognise

ASKED = (Message("system", (Text("s"),)), Message("user", (Text("u"),)))
LATER = (*ASKED, Message("assistant", (Text("a"),)), Message("user", (Text("again"),)))
BASH, AGENT, DONE = (Tool(name, "", "{}") for name in ("bash", "agent", "complete_task"))

CLAUDE = {"user-agent": "claude-cli/2.1.332 (external, sdk-cli)", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"}
CODEX = {"user-agent": "codex_exec/0.171.0", "originator": "codex_exec", "x-codex-window-id": "t:0"}
GEMINI = {"user-agent": "GeminiCLI-tui/0.61.0/m (linux; x64; terminal)"}
QWEN = {"user-agent": "QwenCode/0.15.10 (linux; x64)"}
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23", "x-session-id": "ses_1"}


def codex_says(kind: object) -> dict[str, str]:
    return {**CODEX, "x-codex-turn-metadata": json.dumps({"request_kind": kind, "turn_id": "1"})}


RECOGNISED = {
    "claude, main": (CLAUDE, Request(LATER, (BASH,)), ""),
    "claude, sub-agent": ({**CLAUDE, "x-claude-code-agent-id": "a1"}, Request(ASKED, (BASH,)), SUBAGENT),
    "claude, compaction": ({**CLAUDE, "anthropic-beta": "effort-1,fallback-credit-2026-06-01"}, Request(LATER, (BASH,)), COMPACTION),
    "claude, title": (CLAUDE, Request(ASKED, json_schema="{}"), SIDE),
    "codex, main": (codex_says("turn"), Request(LATER, (BASH,)), ""),
    "codex, compaction": (codex_says("compaction"), Request(LATER), COMPACTION),
    "codex, sub-agent": ({**codex_says("turn"), "x-openai-subagent": "collab_spawn"}, Request(ASKED, (BASH,)), SUBAGENT),
    "codex, a sub-agent's compaction": ({**codex_says("compaction"), "x-openai-subagent": "collab_spawn"}, Request(LATER), COMPACTION),
    "codex, metadata that is no JSON": ({**CODEX, "x-codex-turn-metadata": "{"}, Request(LATER, (BASH,)), ""),
    "codex, metadata of another shape": (codex_says(["compaction"]), Request(LATER, (BASH,)), ""),
    "gemini, main": (GEMINI, Request(LATER, (BASH,)), ""),
    "gemini, sub-agent": (GEMINI, Request(ASKED, (BASH, DONE)), SUBAGENT),
    "gemini, router": (GEMINI, Request(LATER, json_schema="{}"), SIDE),
    "gemini, compression": (GEMINI, Request(LATER), COMPACTION),
    "qwen, main": (QWEN, Request(LATER, (BASH, AGENT)), ""),
    "qwen, sub-agent": (QWEN, Request(ASKED, (BASH,)), SUBAGENT),
    "qwen, compaction": (QWEN, Request(LATER), COMPACTION),
    "opencode, main": (OPENCODE, Request(LATER, (BASH,)), ""),
    "opencode, sub-agent": ({**OPENCODE, "x-parent-session-id": "ses_0"}, Request(ASKED, (BASH,)), SUBAGENT),
    "opencode, title": (OPENCODE, Request((*ASKED, *ASKED)), SIDE),
    "opencode, title in one message": (OPENCODE, Request((Message("user", (Text("a title"), Text("of this"))),)), SIDE),
    "opencode, compaction": (OPENCODE, Request(ASKED), COMPACTION),
    "a script without tools": ({"user-agent": "OpenAI/Python 3.57.0"}, Request(ASKED), ""),
    "a script of many turns": ({}, Request(LATER), ""),
    "an agent's name inside another's": ({"user-agent": "wrapped claude-cli/2"}, Request(ASKED), ""),
}


@pytest.mark.parametrize(("headers", "request_", "label"), RECOGNISED.values(), ids=RECOGNISED)
def test_recognised(headers: dict[str, str], request_: Request, label: str) -> None:
    assert recognise("any", Envelope(headers), request_) == label


@pytest.mark.parametrize("depth", [10, 100_000])
def test_metadata_of_any_depth_is_survived(depth: int) -> None:
    assert recognise("openai_responses", Envelope({"x-codex-turn-metadata": "[" * depth}), Request(ASKED)) == ""
