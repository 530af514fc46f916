"""What the admin API answers: the shapes, from which its document is made, and how a session is put into them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from typing_extensions import TypedDict

from turnloom.core.credit import RewardRule
from turnloom.core.dump import summary
from turnloom.core.records import Node
from turnloom.gateway.pools import POLICY
from turnloom.gateway.samples import Snapshot
from turnloom.store.contract import Entry, Repeats, SessionRow, StoreStats, Usage
from turnloom.types import Turn


class Urls(TypedDict):
    anthropic: str
    openai: str
    gemini: str


class Opened(TypedDict):
    id: str
    key: str
    urls: Urls
    env: dict[str, str]


class RewardAnswer(TypedDict):
    value: float
    at: float
    lineage: str


class SamplingAnswer(TypedDict):
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | None
    stop: list[str]
    seed: int | None


class LimitsAnswer(TypedDict):
    max_turns: int | None
    max_context: int | None
    turn_timeout: float | None
    max_tokens: int | None
    max_bytes: int | None
    ttl: float | None
    idle_timeout: float | None


class Row(TypedDict):
    id: str
    status: Literal["open", "closed"]
    ended: str
    reached: list[str]
    created: float
    group: str
    rollout: str
    labels: dict[str, str]
    metadata: dict[str, Any]
    reward: float | None
    rewards: list[RewardAnswer]
    reward_rule: RewardRule
    repeats: Repeats
    sampling: SamplingAnswer
    limits: LimitsAnswer


class UsageAnswer(TypedDict):
    turns: int
    tokens: int
    bytes: int
    touched: float
    interrupted: int


class Listed(Row):
    usage: UsageAnswer


class Damaged(TypedDict):
    """A session on record that cannot be read, and why."""

    id: str
    error: str
    usage: UsageAnswer


class SessionList(TypedDict):
    sessions: list[Listed | Damaged]
    limit: int
    offset: int


class Status(Row):
    in_flight: int
    usage: UsageAnswer
    turns: int
    outcomes: dict[str, int]
    turn_labels: dict[str, int]
    prompt_tokens: int
    sampled_tokens: int
    lineages: int
    forks: dict[str, int]
    reencoded_tokens: dict[str, int]


class CallAnswer(TypedDict):
    id: str
    name: str
    arguments: str


class NodeAnswer(TypedDict):
    id: int
    parent: int | None
    role: str | None
    text: str | None
    reasoning: str | None
    calls: list[CallAnswer]
    tools: list[str]
    turn: str | None


class TurnAnswer(TypedDict):
    id: str
    index: int
    base: str | None
    fork: dict[str, Any] | None
    prompt_len: int
    kept: int
    appended: list[int]
    output: list[int]
    logprobs: list[float | None]
    finish_reason: str
    outcome: str
    label: str
    pool: str
    model: str
    versions: list[dict[str, Any]]
    pieces: list[dict[str, Any]]
    abort: str
    surplus: int
    cached_tokens: int
    calls: list[dict[str, Any]]
    error: str
    acknowledged: bool


class TreeAnswer(TypedDict):
    id: str
    nodes: list[NodeAnswer]
    turns: list[TurnAnswer]


class StoreAnswer(TypedDict):
    sessions: dict[str, int]
    turns: int
    bytes: int
    schema: int
    commits: int
    commit_seconds: float


class EngineAnswer(TypedDict):
    name: str
    running: int


class PoolAnswer(TypedDict):
    paused: bool
    running: int
    held: int
    engines: list[EngineAnswer]


class PoolsAnswer(TypedDict):
    pools: dict[str, PoolAnswer]


class ErrorBody(TypedDict):
    type: str
    message: str


class ErrorAnswer(TypedDict):
    error: ErrorBody


def opened(session_id: str, key: str, origin: str) -> Opened:
    """Where an agent finds its session, and the environment that points it there."""
    base = f"{origin}/s/{key}"
    return {
        "id": session_id,
        "key": key,
        "urls": {"anthropic": base, "openai": f"{base}/v1", "gemini": base},
        "env": {
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": key,
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": key,
            "GOOGLE_GEMINI_BASE_URL": base,
            "GEMINI_API_KEY": key,
        },
    }


def row_answer(row: SessionRow) -> Row:
    sampling, limits = row.sampling, row.limits
    return {
        "id": row.id,
        "status": "open" if row.status == "open" else "closed",
        "ended": row.ended,
        "reached": list(row.reached),
        "created": row.created,
        "group": row.group,
        "rollout": row.rollout,
        "labels": dict(row.labels),
        "metadata": dict(row.metadata),
        "reward": row.reward,
        "rewards": [{"value": each.value, "at": each.at, "lineage": each.lineage} for each in row.rewards],
        "reward_rule": row.reward_rule,
        "repeats": row.repeats,
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop),
            "seed": sampling.seed,
        },
        "limits": {
            "max_turns": limits.max_turns,
            "max_context": limits.max_context,
            "turn_timeout": limits.turn_timeout,
            "max_tokens": limits.max_tokens,
            "max_bytes": limits.max_bytes,
            "ttl": limits.ttl,
            "idle_timeout": limits.idle_timeout,
        },
    }


def listed(entry: Entry) -> Listed | Damaged:
    if entry.row is None:
        return {"id": entry.id, "error": entry.error, "usage": _usage(entry.usage)}
    return {**row_answer(entry.row), "usage": _usage(entry.usage)}


def _usage(used: Usage) -> UsageAnswer:
    return {
        "turns": used.turns,
        "tokens": used.tokens,
        "bytes": used.bytes,
        "touched": used.touched,
        "interrupted": used.interrupted,
    }


def status_answer(session: Snapshot, usage: Usage) -> Status:
    found = summary(session.tree)
    return {
        **row_answer(session.row),
        "in_flight": session.in_flight,
        "usage": _usage(usage),
        "turns": found["turns"],
        "outcomes": found["outcomes"],
        "turn_labels": found["turn_labels"],
        "prompt_tokens": found["prompt_tokens"],
        "sampled_tokens": found["sampled_tokens"],
        "lineages": found["lineages"],
        "forks": found["forks"],
        "reencoded_tokens": found["reencoded_tokens"],
    }


def tree_answer(session: Snapshot) -> TreeAnswer:
    """Nodes and turns as they are; token columns as lists."""
    tree = session.tree
    return {"id": session.row.id, "nodes": [*map(_node, tree.nodes)], "turns": [*map(_turn, tree.turns.values())]}


def _node(node: Node) -> NodeAnswer:
    said = node.message
    return {
        "id": node.id,
        "parent": node.parent,
        "role": said.role if said else None,
        "text": said.text if said else None,
        "reasoning": said.reasoning if said else None,
        "calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in said.calls] if said else [],
        "tools": [t.name for t in node.tools],
        "turn": node.turn,
    }


def _turn(turn: Turn) -> TurnAnswer:
    return {
        "id": turn.id,
        "index": turn.index,
        "base": turn.base,
        "fork": asdict(turn.fork) if turn.fork else None,
        "prompt_len": turn.prompt_len,
        "kept": turn.kept,
        "appended": turn.appended.tolist(),
        "output": turn.output.tolist(),
        "logprobs": turn.logprobs.tolist(),
        "finish_reason": turn.finish.reason,
        "outcome": turn.outcome,
        "label": turn.label,
        "pool": turn.pool or POLICY,
        "model": turn.model,
        "versions": [asdict(span) for span in turn.versions],
        "pieces": [asdict(piece) for piece in turn.pieces],
        "abort": turn.abort,
        "surplus": turn.surplus,
        "cached_tokens": turn.cached_tokens,
        "calls": [{name: getattr(c, name) for name in _OF_CALL} for c in turn.calls],
        "error": turn.error,
        "acknowledged": turn.acknowledged,
    }


_OF_CALL = ("status", "name", "start", "end", "first_token", "end_token")


def store_answer(stats: StoreStats) -> StoreAnswer:
    return {
        "sessions": dict(stats.sessions),
        "turns": stats.turns,
        "bytes": stats.bytes,
        "schema": stats.schema,
        "commits": stats.commits,
        "commit_seconds": stats.commit_seconds,
    }
