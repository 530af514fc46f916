"""Whether a request asks for a reply that is on record: the rule, and where such replies are found. It generates nothing.

Three things look alike on the wire: a client that did not get its reply and asks
again, one that got it and wants another (best of n), and one that starts anew. A
request that says which it is, is believed. Of one that does not:

- a reply that nobody got is what it asks for: one whose client left, or that was
  cut off; and one that was stored and of which nobody knows whether it arrived,
  since the gateway stopped meanwhile;
- a reply that arrived is not asked for again, nor is one that some later request
  goes on from: another one is sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from turnloom.core.tree import Tree
from turnloom.errors import BadRequest
from turnloom.types import FinishReason, Outcome, Request, Turn


class Answer(StrEnum):
    NEW = "new"
    """A turn is made."""
    REPLAY = "replayed"
    """The recorded reply is whole, and is written again."""
    RESUME = "resumed"
    """The recorded reply is a beginning; sampling goes on where it ends."""


@dataclass(frozen=True, slots=True)
class Intent:
    """What a request says of itself, beside its idempotency key: that it was made before, or that `another` reply is wanted."""

    again: bool = False
    another: bool = False


SILENT = Intent()


@dataclass(frozen=True, slots=True)
class Identity:
    """Two requests with one identity ask for one reply. A key of the client's own stands for its request; else what it asks does."""

    fingerprint: str
    idempotency: str
    choice: int

    @property
    def place(self) -> tuple[str, int]:
        return (f"key {self.idempotency}" if self.idempotency else self.fingerprint, self.choice)


def identity(request: Request, choice: int) -> Identity | None:
    """None where nobody looked at the request's bytes."""
    return Identity(request.fingerprint, request.idempotency, choice) if request.fingerprint else None


class Answers:
    """The last reply to each request of one session."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._last: dict[tuple[str, int], str | None] = {}
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn) -> None:
        if turn.fingerprint:
            self._last[Identity(turn.fingerprint, turn.idempotency, turn.choice).place] = turn.id

    def begun(self, asked: Identity) -> None:
        """Another turn is being made for it: who asks again means that one, whatever becomes of it, not a reply before it."""
        if asked.place in self._last:
            self._last[asked.place] = None

    def find(self, tree: Tree, asked: Identity, intent: Intent, model: str, pool: str) -> tuple[Answer, Turn | None]:
        """What the request is to be answered with, and the turn on record. Raises BadRequest for a key that came with another request."""
        known = self._last.get(asked.place)
        if known is None or (intent.another and not asked.idempotency):
            return Answer.NEW, None
        turn = tree.turns[known]
        check_same(asked, turn.fingerprint)
        if turn.model != model or turn.pool != pool:
            return Answer.NEW, None
        found = _answer(turn, bool(asked.idempotency) or intent.again, gone_on(tree, turn))
        return found, None if found is Answer.NEW else turn


def check_same(asked: Identity, fingerprint: str) -> None:
    """Raises BadRequest where an idempotency key came with another request before."""
    if asked.idempotency and asked.fingerprint != fingerprint:
        raise BadRequest("this Idempotency-Key came with another request before; give each request a key of its own")


def gone_on(tree: Tree, turn: Turn) -> bool:
    """Some later request has this turn's reply in its history."""
    node = tree.node_of.get(turn.id)
    return tree.continued(turn.id) or (node is not None and bool(tree.children(node)))


def whole(turn: Turn) -> bool:
    """Its output ends as replies end."""
    return turn.finish.reason is not FinishReason.ABORT


def _answer(turn: Turn, said: bool, continued: bool) -> Answer:
    """`said`: the request says that it was made before."""
    if turn.outcome is Outcome.FAILED:
        return Answer.NEW
    if whole(turn):
        unheard = turn.outcome is not Outcome.DELIVERED or not turn.acknowledged
        return Answer.REPLAY if said or (unheard and not continued) else Answer.NEW
    # What goes on from a beginning has it as it is. A grammar cannot go on in the middle.
    return Answer.NEW if continued or turn.sampling.json_schema else Answer.RESUME
