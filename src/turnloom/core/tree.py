"""A session's tree: resolve a request against it, stage what a turn adds, apply it.

`prepare` and `stage` read, `apply` and `amend` mutate. A session stages and
applies under one lock, with the store's write between them, so that what is in
the tree is always on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from turnloom.core.align import sequence
from turnloom.core.match import CANONICAL, Matcher, RequestKeys, begins, call_key, echo_keys, request_keys, same_words, tools_key
from turnloom.core.records import Delta, Node
from turnloom.types import NO_IDS, IntArray, Message, Outcome, Reasoning, Request, Turn


@dataclass(frozen=True, slots=True)
class Pending:
    """Where a request attaches. `path` are the matched nodes, head first; empty when no head has these tools.

    `base` is the deepest turn on the path: its tokens can be continued. `tail`
    are the request's messages after the base turn's reply, or all of them.
    `respelled` counts replies on the path that no key matched, but their call ids or their beginning did.
    """

    request: Request
    path: tuple[int, ...]
    base: str | None
    tail: tuple[Message, ...]
    keys: RequestKeys
    respelled: int = 0


class Tree:
    """Nodes in the order they were added (a node's id is its position), turns in the order they were committed."""

    def __init__(self, matcher: Matcher = CANONICAL) -> None:
        self.matcher = matcher
        self.nodes: list[Node] = []
        self.turns: dict[str, Turn] = {}
        self.node_of: dict[str, int] = {}
        self._children: dict[int, list[int]] = {}
        self._matching: dict[tuple[int, bytes], list[int]] = {}
        self._keys: dict[int, tuple[bytes, ...]] = {}
        self._heads: dict[bytes, int] = {}
        self._continued: set[str] = set()
        self._calls: dict[tuple[int, str], list[int]] = {}
        """(parent, id of a call) -> the replies there that made it. Ids need be unique among siblings only."""

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(self._heads.values())

    def matching_children(self, parent: int, key: bytes) -> Sequence[int]:
        return self._matching.get((parent, key), ())

    def children(self, parent: int) -> Sequence[int]:
        """In the order they were added."""
        return self._children.get(parent, ())

    def prepare(self, request: Request, keys: RequestKeys | None = None) -> Pending:
        """Resolve without mutating. `keys` are the request's, where they were computed already."""
        keys = keys or request_keys(request, self.matcher)
        head = self._heads.get(keys.tools)
        if head is None:
            return Pending(request, (), None, request.messages, keys)
        path = self.path(self._deepest(head, request.messages, keys.messages))
        respelled = sum(key not in self._keys[node] for node, key in zip(path[1:], keys.messages, strict=False))
        for depth in range(len(path) - 1, 0, -1):
            if (turn := self.nodes[path[depth]].turn) is not None:
                return Pending(request, path, turn, request.messages[depth:], keys, respelled)
        return Pending(request, path, None, request.messages, keys)

    def _deepest(self, head: int, messages: Sequence[Message], keys: Sequence[bytes]) -> int:
        """The end of the longest matching history. Equal siblings are all followed; evidence, then recency, decides."""
        frontier = [head]
        for message, key in zip(messages, keys, strict=True):
            found = [child for node in frontier for child in self.matching_children(node, key)]
            if not found and message.role == "assistant" and self.matcher.minted_ids:
                found = self._by_minted_ids(frontier, message) or self._by_beginning(frontier, message)
            if not found:
                break
            frontier = self._by_evidence(message, found)
        return max(frontier, key=self._preference)

    def _by_minted_ids(self, frontier: Sequence[int], message: Message) -> list[int]:
        """The reply whose every call came back under the id minted for it, with the same words around them.

        Clients fill in defaults, trim and retype a call's arguments before they
        echo it; what the model wrote is on record. Ids that two replies share
        vouch for neither.
        """
        if not message.calls:
            return []
        named = {n for parent in frontier for n in self._calls.get((parent, message.calls[0].id), ())}
        vouched = [n for n in named if _vouch(self._message(n), message)]
        return vouched if len(vouched) == 1 else []

    def _by_beginning(self, frontier: Sequence[int], message: Message) -> list[int]:
        """Replies that no client got whole, and that begin with what came back."""
        children = (child for node in frontier for child in self.children(node))
        return [n for n in children if self._undelivered(n) and begins(self._message(n), message)]

    def _undelivered(self, node: int) -> bool:
        turn = self.nodes[node].turn
        return turn is not None and self.turns[turn].outcome is not Outcome.DELIVERED

    def _by_evidence(self, message: Message, found: list[int]) -> list[int]:
        """Of equal siblings, those that minted call ids name; then signatures, reasoning word for word, the order of calls."""
        if message.role != "assistant" or len(found) == 1:
            return found
        call_ids, refs = {c.id for c in message.calls}, {p.ref for p in message.parts if isinstance(p, Reasoning)}
        thought, calls = message.reasoning.strip(), [call_key(c) for c in message.calls]

        def narrowed(nodes: list[int], fits: Callable[[int], bool]) -> list[int]:
            return [n for n in nodes if fits(n)] or nodes

        found = narrowed(found, lambda n: any(c.id in call_ids for c in self._message(n).calls))
        found = narrowed(found, lambda n: self.nodes[n].turn in refs)
        if thought:
            found = narrowed(found, lambda n: self._message(n).reasoning.strip() == thought)
        return narrowed(found, lambda n: [call_key(c) for c in self._message(n).calls] == calls)

    def _preference(self, node: int) -> tuple[int, int]:
        """Delivered turns before the client's own messages before turns nobody got; then the newest."""
        turn = self.nodes[node].turn
        if turn is None:
            return (1, node)
        return (2 if self.turns[turn].outcome is Outcome.DELIVERED else 0, node)

    def _message(self, node: int) -> Message:
        message = self.nodes[node].message
        assert message is not None, "a head has no message"
        return message

    def path(self, node: int) -> tuple[int, ...]:
        """Node ids from the head to `node`."""
        steps = [node]
        while (parent := self.nodes[steps[-1]].parent) is not None:
            steps.append(parent)
        return tuple(reversed(steps))

    def messages(self, node: int) -> tuple[Message, ...]:
        """The history that ends at `node`."""
        return tuple(self._message(n) for n in self.path(node)[1:])

    def stage(self, pending: Pending, reply: Message, turn: Turn) -> Delta:
        """What committing `turn` adds. Messages that another turn committed meanwhile are found again, not added twice."""
        added: list[Node] = []

        def add(node: Node) -> int:
            added.append(node)
            return node.id

        def next_id() -> int:
            return len(self.nodes) + len(added)

        if pending.path:
            at, done = pending.path[-1], len(pending.path) - 1
        else:
            head = self._heads.get(pending.keys.tools)
            at = add(Node(next_id(), None, tools=pending.request.tools)) if head is None else head
            done = 0
        for message, key in zip(pending.request.messages[done:], pending.keys.messages[done:], strict=True):
            known = self.matching_children(at, key)
            at = max(known, key=self._preference) if known else add(Node(next_id(), at, message))
        add(Node(next_id(), at, reply, turn=turn.id))
        return Delta(tuple(added), turn)

    def apply(self, delta: Delta, keys: Sequence[bytes] = ()) -> None:
        """Add a staged delta. Deltas apply in the order they were staged.

        `keys` are those of the delta's last messages before the reply, where they
        were computed already.
        """
        known = dict(zip([n.id for n in delta.nodes[:-1]][::-1], reversed(keys), strict=False))
        for node in delta.nodes:
            if node.id != len(self.nodes):
                raise ValueError(f"node {node.id} applied out of order; {len(self.nodes)} was next")
            self.nodes.append(node)
            if node.parent is None:
                self._heads[tools_key(node.tools)] = node.id
                continue
            self._index(node.id, node.parent, known.get(node.id))
        self.turns[delta.turn.id] = delta.turn
        if delta.turn.base is not None:
            self._continued.add(delta.turn.base)

    def _index(self, node: int, parent: int, key: bytes | None) -> None:
        message, turn = self._message(node), self.nodes[node].turn
        if turn is None:
            keys: tuple[bytes, ...] = (self.matcher.key(message) if key is None else key,)
        else:
            keys = echo_keys(message, self.matcher)
            self.node_of[turn] = node
            for call_id in dict.fromkeys(c.id for c in message.calls):
                self._calls.setdefault((parent, call_id), []).append(node)
        self._keys[node] = keys
        self._children.setdefault(parent, []).append(node)
        for each in keys:
            self._matching.setdefault((parent, each), []).append(node)

    def amend(self, turn_id: str, outcome: Outcome) -> None:
        self.turns[turn_id] = replace(self.turns[turn_id], outcome=outcome)

    def chain(self, turn_id: str) -> list[Turn]:
        """The turns whose tokens make up this turn's sequence, first to last."""
        turns = [self.turns[turn_id]]
        while (base := turns[-1].base) is not None:
            turns.append(self.turns[base])
        turns.reverse()
        return turns

    def held(self, turn_id: str | None) -> IntArray:
        """Every id of the turn's sequence, prompt and output [n]: what a bridge continues."""
        return NO_IDS if turn_id is None else sequence(self.chain(turn_id))

    def continued(self, turn_id: str) -> bool:
        """Whether some turn goes on from this one's tokens."""
        return turn_id in self._continued

    def reply(self, turn_id: str) -> Message:
        return self._message(self.node_of[turn_id])


def _vouch(recorded: Message, came: Message) -> bool:
    """Whether the ids of all calls are those minted for `recorded`, under their names, with the same words.

    opencode renames a call that it could not read to `invalid` and keeps its id.
    """
    minted, echoed = {c.id: c.name for c in recorded.calls}, {c.id: c.name for c in came.calls}
    if minted.keys() != echoed.keys() or len(came.calls) != len(recorded.calls) or len(minted) != len(recorded.calls):
        return False
    return same_words(recorded, came) and all(echoed[i] in (name, "invalid") for i, name in minted.items())
