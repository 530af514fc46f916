"""The agents that are run, and the page that says what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Agent:
    """A harness with its options; `dialect` is the protocol that it speaks so."""

    harness: str
    dialect: str
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def id(self) -> str:
        return "-".join(filter(None, (self.harness, self.note, self.dialect)))


@dataclass(frozen=True)
class Row:
    """What came of one run: counts, and whether its samples pass `check`."""

    agent: Agent
    version: str
    turns: int
    lineages: int
    forks: int
    check: bool


APIS = {
    "anthropic": "anthropic-messages",
    "chat": "openai-completions",
    "responses": "openai-responses",
    "gemini": "google-generative-ai",
}


def with_apis(harness: str, *dialects: str) -> list[Agent]:
    return [Agent(harness, dialect, {"api": APIS[dialect]}) for dialect in dialects]


AGENTS = [
    Agent("claude-code", "anthropic", {"bare": True}, "bare"),
    Agent("claude-code", "anthropic", {"bare": False}),
    Agent("claude-agent-sdk", "anthropic"),
    Agent("codex", "responses"),
    Agent("gemini-cli", "gemini"),
    Agent("qwen-code", "chat"),
    *with_apis("opencode", *APIS),
    *with_apis("pi", *APIS),
    Agent("continue-cn", "chat"),
    *with_apis("mini-swe-agent", "chat", "anthropic"),
    *with_apis("openai-agents", "chat", "responses"),
]

HEAD = """\
# Agents

Real agents, as their registries ship them, each on a gateway before a scripted engine. One run is one task of fifteen turns with
tools, two of them called at once: words, calls and results go out and come back through the agent's own code. A lineage is
a conversation as the gateway sees it; a fork is a turn that could not continue the one before. `check` is `turnloom check`
on the samples. `make agents` runs them all and writes this page.

It also holds Claude Code, Codex, Gemini CLI and Qwen Code on an engine that says nothing for 330 s, and looks at what agents ask
beside their task. Sub-agents of Claude Code, Codex, Gemini CLI, opencode and Qwen Code are lineages with the label `subagent`;
the summaries that Claude Code, Codex, opencode and Qwen Code ask for have the label `compaction`. pi's have none: nothing that
it sends tells them from its task.

| agent | version | dialect | turns | lineages | forks | check |
|---|---|---|---|---|---|---|
"""


def written(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        named = f"`{row.agent.harness}`" + (f" ({row.agent.note})" if row.agent.note else "")
        cells = (named, row.version, row.agent.dialect, row.turns, row.lineages, row.forks, "passes" if row.check else "fails")
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    return HEAD + "".join(lines)
