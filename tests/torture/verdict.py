"""What a tortured store must hold, against what the agents read and what the engine was asked and gave."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.torture.agents import Agent, Life
from tests.torture.engine import marks
from turnloom.core.tree import Tree
from turnloom.errors import StoreError
from turnloom.export.check import check_samples
from turnloom.gateway.session import Session
from turnloom.store.fsck import check
from turnloom.store.sqlite import SQLiteStore
from turnloom.testing.scripted_reply import logprob_at
from turnloom.tokenizer import HFTokenizer
from turnloom.types import Outcome, Turn


@dataclass(frozen=True)
class Asked:
    """One request that the engine got. `first` is the prompt that its reply began after, `planned` the whole of that reply."""

    mark: str
    turn: str
    at: float
    first: tuple[int, ...]
    given: int
    planned: tuple[int, ...]


def asked_of(log: Path) -> Iterator[Asked]:
    for line in log.read_text("utf-8").splitlines():
        entry = json.loads(line)
        prompt, given = entry["prompt"], entry["given"]
        yield Asked(entry["mark"], entry["rid"][:32], entry["at"], tuple(prompt[: len(prompt) - given]), given, tuple(entry["planned"]))


class Verdict:
    """`kills` are the moments at which gateways were killed, in order; what is wrong is in `found`."""

    def __init__(self, path: Path, log: Path, kills: Sequence[float], tokenizer: HFTokenizer) -> None:
        self.path, self.kills, self.tokenizer = path, kills, tokenizer
        self.asked: dict[str, list[Asked]] = {}
        """By session."""
        for each in asked_of(log):
            self.asked.setdefault(each.mark.rpartition("-")[0], []).append(each)
        self.counted: Counter[str] = Counter()
        self.found: list[str] = []
        self._ended = [0.0] * (len(kills) + 1)
        """Of the turns on record, the last that each gateway stored."""
        self._lost: dict[str, list[float]] = {}
        """By session, when the engine was asked for turns that are not on record."""
        self._interrupted: dict[str, int] = {}

    async def give(self, agents: Sequence[Agent]) -> None:
        self.found += [f"fsck: {problem}" for problem in check(self.path).problems]
        store = SQLiteStore(self.path, read_only=True)
        await store.open()
        try:
            for agent in agents:
                self.counted += agent.counted
                for life in agent.lives:
                    self.found += [f"{life.id}: {line}" for line in await self._of(store, life)]
            for agent in agents:
                for life in agent.lives:
                    self.found += [f"{life.id}: {line}" for line in self._counts(life)]
        finally:
            await store.close()

    async def _of(self, store: SQLiteStore, life: Life) -> list[str]:
        row = await store.session(life.id)
        if row is None:
            return ["it was opened, and is gone"]
        tree = Tree()
        try:
            for delta in await store.deltas(life.id):
                tree.apply(delta)
        except (StoreError, ValueError) as error:
            return [f"it cannot be read: {error}"]
        self._interrupted[life.id] = (await store.usage(life.id)).interrupted
        session, asked = Session(row, store, tree), self.asked.get(life.id, [])
        self._note(life, tree, asked)
        return [*_told(session, life), *self._turns(tree, asked), *_replies(tree, life), *_trained(session)]

    def _note(self, life: Life, tree: Tree, asked: Sequence[Asked]) -> None:
        """What the counts are of, and what the figures are."""
        counted, marks_gone_on = self.counted, set()
        told = {got.turn: got.at for got in life.got}
        for turn in tree.turns.values():
            at = bisect_left(self.kills, turn.ended)
            self._ended[at] = max(self._ended[at], turn.ended)
            counted[turn.outcome] += 1
            resumed = any("came again" in piece.why for piece in turn.pieces)
            counted["resumed"] += resumed
            if resumed:
                marks_gone_on.add(self._mark(tree, turn))
            counted["killed: on record, not told"] += at < len(self.kills) and self.kills[at] < told.get(turn.id, 0)
        fresh = {each.turn: each for each in asked if not each.given and each.mark not in marks_gone_on}
        self._lost[life.id] = [each.at for turn_id, each in fresh.items() if turn_id not in tree.turns]
        counted["interrupted"] += self._interrupted[life.id]

    def _counts(self, life: Life) -> Iterator[str]:
        """Turns that were being made are counted: those after whose beginning something was stored, and no more than there can be."""
        stored = [at for at in self._lost.get(life.id, ()) if at < self._ended[bisect_left(self.kills, at)]]
        said = self._interrupted.get(life.id, 0)
        if not len(stored) <= said <= life.struck:
            yield f"{said} turns count as interrupted; at least {len(stored)} were, and {life.struck} kills met one"

    def _mark(self, tree: Tree, turn: Turn) -> str:
        held = tree.held(turn.id)
        return marks(self.tokenizer.decode(held[: len(held) - len(turn.output)].tolist()))[-1]

    def _turns(self, tree: Tree, asked: Sequence[Asked]) -> Iterator[str]:
        """Every turn is what the engine was asked and gave; no request has two; each goes on from the one before it, on record or not."""
        answers: Counter[str] = Counter()
        whole: dict[str, tuple[int, ...]] = {}
        for turn in tree.turns.values():
            held = tuple(tree.held(turn.id).tolist())
            prompt, output, mark = held[: len(held) - len(turn.output)], tuple(turn.output.tolist()), self._mark(tree, turn)
            answers[mark] += 1
            whole[mark] = held
            if not any(each.first == prompt and each.planned[: len(output)] == output for each in asked):
                yield f"turn {turn.index} ({mark}) was never asked for with this prompt, or holds what was not sampled"
            said = [logprob_at(len(prompt) + i, token) for i, token in enumerate(output)]
            if not np.array_equal(turn.logprobs, np.array(said, np.float32)):
                yield f"turn {turn.index} ({mark}) has other logprobs than the engine gave"
        yield from (f"{mark} has {count} turns" for mark, count in answers.items() if count > 1)
        for each in asked:
            session, _, number = each.mark.rpartition("-")
            before = whole.get(f"{session}-{int(number) - 1}", ())
            if each.first[: len(before)] != before:
                yield f"a prompt of {each.mark} does not begin with the ids of the turn before it"


def _told(session: Session, life: Life) -> Iterator[str]:
    """What the admin API answered is so."""
    row = session.row
    if life.reward is not None and (row.status, row.reward) != ("closed", life.reward):
        yield f"it was finished with {life.reward}, and is {row.status} with {row.reward}"
    if life.reward is not None:
        now = [(s.token_ids.tolist(), s.loss_mask.tolist(), s.reward) for s in session.unroll().samples]
        if now != [(s["token_ids"], s["loss_mask"], s["reward"]) for s in life.samples]:
            yield "its samples are others than those that were given"


def _replies(tree: Tree, life: Life) -> Iterator[str]:
    """What the agent read is on record, once, in one lineage; and nothing else is there as delivered."""
    delivered = {turn.id: turn for turn in tree.turns.values() if turn.outcome is Outcome.DELIVERED}
    last: Turn | None = None
    for got in life.got:
        turn = delivered.pop(got.turn, None)
        if turn is None:
            there = tree.turns.get(got.turn)
            yield f"{got.mark} was answered by turn {got.turn}, which is {there.outcome if there else 'not on record'}"
            continue
        reply = tree.reply(turn.id)
        calls = tuple((c.name, json.dumps(json.loads(c.arguments), sort_keys=True, ensure_ascii=False)) for c in reply.calls)
        if (reply.text.strip(), calls) != (got.text.strip(), got.calls):
            yield f"{got.mark}: the agent read {got.text!r} {got.calls}, and {reply.text!r} {calls} is on record"
        if turn.base != (last.id if last else None) or turn.fork is not None:
            yield f"{got.mark} left its lineage: it goes on from {turn.base}, after {last and last.id}: {turn.fork}"
        last = turn
    if delivered:
        yield f"delivered, and no agent has them: {sorted(delivered)}"


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
