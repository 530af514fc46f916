"""Sessions whose requests go to two models, by their label or by the model they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.properties.driver import Driver
from tests.properties.engine import RecordingEngine
from tests.properties.replies import Replies
from tests.properties.subjects import Subject
from turnloom.gateway.pools import read_routes, routed
from turnloom.gateway.turn import Served
from turnloom.types import SIDE, ForkKind, Outcome, Request
from turnloom.wire.contract import Envelope

ROUTES = read_routes(["side=model:small*", "side=label:side"], ("policy", "side"))


class TwoPools(Driver):
    """The driver's subject is the policy's; `side` answers about one request in three."""

    def __init__(self, subject: Subject, replies: Replies, side: Subject, side_replies: Replies, seed: int) -> None:
        super().__init__(subject, replies, seed)
        other = RecordingEngine(side.tokenizer, side_replies, self.rng)
        other.calls = self.engine.calls
        self.subjects["side"] = side
        self.parts = replace(self.parts, others={"side": Served(other, side.tokenizer, side.renderer, side.parser, "small")})

    def _routed(self, request: Request) -> Request:
        model, label = self.rng.choices([("m", ""), ("small-1", ""), ("m", SIDE)], [66, 17, 17])[0]
        request = replace(request, model=model, label=label)
        return replace(request, pool=routed(ROUTES, request, Envelope({})))


def mixed(driver: TwoPools) -> Iterator[str]:
    """Where what one model sampled reached the other, or trains."""
    tree, found = driver.session.tree, driver.unroll()
    turns = tree.turns
    reasons = {u.turn_id: u.reason for u in found.untrained}
    for turn in turns.values():
        at = f"turn {turn.index}"
        if turn.pool != driver.requests[turn.id].pool:
            yield f"{at} is on record as the pool {turn.pool!r}'s, and another was asked"
        if turn.base is not None and turns[turn.base].pool != turn.pool:
            yield f"{at} of {turn.pool!r} goes on from ids of {turns[turn.base].pool!r}"
        if turn.pool and turn.outcome is Outcome.DELIVERED and len(turn.output) and reasons.get(turn.id) != f"pool {turn.pool}":
            yield f"{at} of {turn.pool!r} does not train for the reason {reasons.get(turn.id)!r}"
        above = [n for n in tree.path(tree.node_of[turn.id])[:-1] if tree.nodes[n].turn is not None]
        elsewhere = bool(above) and turns[tree.nodes[above[-1]].turn or ""].pool != turn.pool
        if elsewhere != (turn.fork is not None and turn.fork.kind is ForkKind.OTHER_POOL):
            yield f"{at} of {turn.pool!r} gives the reason {turn.fork} after a reply of {'another' if elsewhere else 'the same'} pool"
    trained = {i for s in found.samples for i in set(s.turn_index[s.loss_mask.astype(bool)].tolist())}
    if bad := [t.index for t in turns.values() if t.pool and t.index in trained]:
        yield f"the turns {bad} of another pool train"
