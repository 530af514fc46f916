"""A small agent on the claude-agent-sdk (`programs/claude_agent.py`), which brings Claude Code with it and needs no Node.js."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turnloom.harness.claude_code import quiet_environment
from turnloom.harness.contract import AgentContext, Launch
from turnloom.harness.install import PackagedHarness
from turnloom.harness.pip import PipAgent

VERSION = "0.2.189"
"""It carries Claude Code 2.1.332."""
PROGRAM = Path(__file__).with_name("programs") / "claude_agent.py"


class ClaudeAgentSdk(PackagedHarness):
    """`max_turns` bounds its loop. `program` is what starts another one in its place."""

    def __init__(self, *, max_turns: int = 30, version: str = VERSION, args: Sequence[str] = (), program: Sequence[str] = ()) -> None:
        super().__init__(PipAgent("claude-agent-sdk", "claude-agent-sdk", version, (str(PROGRAM),)), args, program)
        self._max_turns = max_turns

    def command(self, context: AgentContext) -> Launch:
        argv = (
            *(*context.program, "--model", context.model, "--session-id", context.session_uuid, "--max-turns", str(self._max_turns)),
            *(*self._args, "--", context.prompt),
        )
        return Launch(argv, quiet_environment(context))
