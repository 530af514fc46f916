"""What a tortured store must hold, against what the agents read and what the engine was asked and gave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tests.torture.agents import Agent
from tests.torture.engine import marks
from turnloom.core.tree import Tree
from turnloom.export.check import check_samples
from turnloom.gateway.session import Session
from turnloom.store.fsck import check
from turnloom.store.sqlite import SQLiteStore
from turnloom.testing.scripted_reply import logprob_at
from turnloom.tokenizer import HFTokenizer
from turnloom.types import Outcome, Turn

Asked = dict[tuple[int, ...], list[tuple[int, ...]]]
"""Prompt of a reply's beginning -> the outputs that were planned after it."""


def asked_of(log: Path) -> Asked:
    found: Asked = {}
    for line in log.read_text("utf-8").splitlines():
        entry = json.loads(line)
        prompt, given = entry["prompt"], entry["given"]
        found.setdefault(tuple(prompt[: len(prompt) - given]), []).append(tuple(entry["planned"]))
    return found


async def violations(path: Path, log: Path, agents: Sequence[Agent], tokenizer: HFTokenizer) -> tuple[list[str], Counter[str]]:
    """What is wrong, and what was counted on the way."""
    counted: Counter[str] = Counter()
    found = [f"fsck: {problem}" for problem in check(path).problems]
    asked = asked_of(log)
    store = SQLiteStore(path, read_only=True)
    await store.open()
    try:
        for agent in agents:
            session_id = f"s{agent.number}"
            row = await store.session(session_id)
            if row is None:
                found.append(f"{session_id} is gone")
                continue
            tree = Tree()
            for delta in await store.deltas(session_id):
                tree.apply(delta)
            counted["interrupted"] += (await store.usage(session_id)).interrupted
            found += [f"{session_id}: {line}" for line in _session(Session(row, store, tree), agent, asked, tokenizer, counted)]
    finally:
        await store.close()
    return found, counted


def _session(session: Session, agent: Agent, asked: Asked, tokenizer: HFTokenizer, counted: Counter[str]) -> Iterator[str]:
    tree = session.tree
    delivered: dict[str, list[Turn]] = {}
    for turn in tree.turns.values():
        held = tree.held(turn.id)
        prompt = held[: len(held) - len(turn.output)]
        mark = marks(tokenizer.decode(prompt.tolist()))[-1]
        counted[turn.outcome] += 1
        counted["resumed"] += any("came again" in piece.why for piece in turn.pieces)
        if turn.outcome is Outcome.DELIVERED:
            delivered.setdefault(mark, []).append(turn)
        output = tuple(turn.output.tolist())
        if not any(planned[: len(output)] == output for planned in asked.get(tuple(prompt.tolist()), ())):
            yield f"turn {turn.index} ({mark}) was never asked for with this prompt, or holds what was not sampled"
        said = [logprob_at(len(prompt) + i, token) for i, token in enumerate(output)]
        if not np.array_equal(turn.logprobs, np.array(said, np.float32)):
            yield f"turn {turn.index} ({mark}) has other logprobs than the engine gave"
    last: Turn | None = None
    for got in agent.got:
        turns = delivered.pop(got.mark, [])
        if len(turns) != 1:
            yield f"{got.mark} was answered, and is on record {len(turns)} times"
            continue
        turn, reply = turns[0], tree.reply(turns[0].id)
        calls = tuple((c.name, json.dumps(json.loads(c.arguments), sort_keys=True, ensure_ascii=False)) for c in reply.calls)
        if (reply.text.strip(), calls) != (got.text.strip(), got.calls):
            yield f"{got.mark}: the agent read {got.text!r} {got.calls}, and {reply.text!r} {calls} is on record"
        if turn.base != (last.id if last else None) or turn.fork is not None:
            yield f"{got.mark} left its lineage: it goes on from {turn.base}, after {last and last.id}: {turn.fork}"
        if last is not None and turn.kept != last.prompt_len + len(last.output):
            yield f"{got.mark} keeps {turn.kept} ids of {last.prompt_len + len(last.output)}"
        last = turn
    if delivered:
        yield f"delivered, and no agent has them: {sorted(delivered)}"
    yield from _trained(session)


def _trained(session: Session) -> Iterator[str]:
    unrolled = session.unroll()
    trained: Counter[int] = Counter()
    for sample in unrolled.samples:
        trained.update(sample.turn_index[sample.loss_mask == 1].tolist())
    for turn in session.tree.turns.values():
        due = len(turn.output) if turn.outcome is Outcome.DELIVERED else 0
        if trained[turn.index] != due:
            yield f"of turn {turn.index}'s ids {trained[turn.index]} train, and {due} must"
    if unrolled.samples and not (report := check_samples(unrolled.samples)).ok:
        yield f"its samples do not pass their check: {report.findings}"
