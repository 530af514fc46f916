"""A session's tree: resolve a request against it, stage what a turn adds, apply it.

`prepare` and `stage` read, `apply` and `amend` mutate. A session stages and
applies under one lock, with the store's write between them, so that what is in
the tree is always on disk.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from turnloom.core.align import sequence
from turnloom.core.index import NEWEST, Index
from turnloom.core.match import (
    CANONICAL,
    Matcher,
    RequestKeys,
    begins,
    echo_keys,
    placed,
    request_keys,
    resembles,
    several_calls,
    strict_key,
    tools_key,
    vouches,
)
from turnloom.core.order import NO_CALL, Answered, Slot, arranged, as_recorded, same_calls, slots
from turnloom.core.records import Delta, Node, Pending
from turnloom.types import NO_IDS, IntArray, Message, Outcome, Request, Text, Turn


class Tree:
    """Nodes in the order they were added (a node's id is its position), turns in the order they were committed."""

    def __init__(self, matcher: Matcher = CANONICAL) -> None:
        self.matcher = matcher
        self.nodes: list[Node] = []
        self.turns: dict[str, Turn] = {}
        self.node_of: dict[str, int] = {}
        self.failed = 0
        """How many turns have failed."""
        self.index = Index(matcher)
        self._canonical = self.index if matcher == CANONICAL else Index(CANONICAL)
        """What the canonical matcher would have found."""
        self._children: dict[int, list[int]] = {}
        self._heads: dict[bytes, int] = {}
        self._openings: dict[bytes, list[int]] = {}
        """Key -> the nodes with it that nothing but system messages stands before, under any tools."""
        self._leading: set[int] = set()
        self._reply_above: dict[int, int | None] = {}
        """A node -> the nearest assistant message on its path, itself included."""
        self._continued: set[str] = set()
        self._calls: dict[tuple[int, str], list[int]] = {}
        """(parent, id of a call) -> the replies there that made it. Ids need be unique among siblings only."""
        self._said: dict[int, tuple[bytes, ...]] = {}
        """The words of each call, where a message has several."""
        self._answered: tuple[int, Answered] | None = None
        """What the results down to the node that was added last answer, so that no path is walked up for each."""

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(self._heads.values())

    def children(self, parent: int) -> Sequence[int]:
        """In the order they were added."""
        return self._children.get(parent, ())

    def openings(self, key: bytes) -> Sequence[int]:
        """Where a history opens with this message, after its system messages; under all tools, in the order they were added."""
        return self._openings.get(key, ())

    def prepare(self, request: Request, keys: RequestKeys | None = None) -> Pending:
        """Resolve without mutating. `keys` are the request's, where they were computed already."""
        return self._prepare(self.index, request, keys or request_keys(request, self.matcher))

    def prepare_canonical(self, pending: Pending) -> Pending:
        """The same request as the canonical matcher would have resolved it."""
        keys = pending.keys
        return self._prepare(self._canonical, pending.request, replace(keys, messages=keys.canonical or keys.messages))

    def _prepare(self, index: Index, request: Request, keys: RequestKeys) -> Pending:
        head = self._heads.get(keys.tools)
        path = () if head is None else self.path(self._deepest(index, head, request, keys.messages))
        came = request.messages
        standing = tuple(arranged(came, [*(self._message(n) for n in path[1:]), *came[max(len(path) - 1, 0) :]]))
        respelled = sum(self._respelled(index, *each) for each in zip(path[1:], came, keys.messages, keys.calls, strict=False))
        for depth in range(len(path) - 1, 0, -1):
            if (turn := self.nodes[path[depth]].turn) is not None:
                if self.turns[turn].pool != request.pool:
                    return Pending(request, path, None, came, keys, standing, respelled, turn)
                return Pending(request, path, turn, came[depth:], keys, standing, respelled)
        return Pending(request, path, None, came, keys, standing, respelled)

    def _respelled(self, index: Index, node: int, came: Message, key: bytes, said: tuple[bytes, ...]) -> bool:
        if came.role != "assistant":
            return False
        if key not in index.keys[node]:
            return True
        if not said or len((recorded := self._message(node)).calls) != len(said):
            return False
        ours, theirs, known = recorded.calls, came.calls, self._said[node]
        pairs = enumerate(same_calls(recorded, came))
        return any(j is not None and theirs[i].id == ours[j].id and said[i] != known[j] for i, j in pairs)

    def levels(self, index: Index, start: int, messages: Sequence[Message], keys: Sequence[bytes], pool: str = "") -> Iterator[list[int]]:
        """The nodes that each further message matches, until one matches none. Equal siblings are all followed."""
        frontier, reply, end = [start], -1, 0
        standing: dict[int | None, list[Slot]] = {}
        for i, message in enumerate(messages):
            if message.role == "tool":
                if i >= end:
                    end = next((j for j in range(i, len(messages)) if messages[j].role == "assistant"), len(messages))
                    standing = {}
                found: list[int] = []
                for node in frontier:
                    above = self._reply_above[node]
                    if above not in standing:
                        recorded = None if above is None else self._message(above)
                        standing[above] = slots(recorded, messages[reply] if reply >= 0 else None, messages[reply + 1 : end])
                    at, place = standing[above][i - reply - 1]
                    found += index.matching(node, placed(keys[reply + 1 + at], place))
            else:
                found = [child for node in frontier for child in index.matching(node, keys[i])]
            if message.role == "assistant":
                found = self._by_evidence(index, frontier, message, keys[i], found, pool)
                reply = i
            if not found:
                return
            frontier = found if len(found) <= 2 * NEWEST else sorted(found, key=lambda n: (n in self._children, n))[-2 * NEWEST :]
            yield frontier

    def _deepest(self, index: Index, head: int, request: Request, keys: Sequence[bytes]) -> int:
        """The end of the history with the deepest delivered turn; of several the longest, then the preferred."""
        held = {head: 0}
        chosen, best = head, (0, 0, (0, False, 0))
        for depth, frontier in enumerate(self.levels(index, head, request.messages, keys, request.pool), 1):
            for node in frontier:
                turn, parent = self.nodes[node].turn, self.nodes[node].parent
                assert parent is not None, "a head matches no message"
                held[node] = held[parent] if turn is None or self._undelivered(node) else depth
                if (rank := (held[node], depth, self._preference(node, request.pool))) > best:
                    chosen, best = node, rank
        return chosen

    def _by_evidence(
        self, index: Index, frontier: Sequence[int], message: Message, key: bytes, found: Sequence[int], pool: str
    ) -> list[int]:
        """The recorded replies that this one may be: those with its key, narrowed by what vouches for one of them.

        What clients brought themselves is never narrowed away, and narrows nothing.
        """
        if len(found) >= NEWEST:  # Of so many, the index gives only some.
            found = list(dict.fromkeys((*found, *self._named(index, frontier, message, key))))
        turns = [n for n in found if self.nodes[n].turn is not None]
        if not turns and index.matcher.minted_ids:
            turns = self._by_minted_ids(frontier, message) or self._by_reference(frontier, message)
            found = [*found, *turns] or self._by_beginning(frontier, message)
        if len(turns) > 1:
            return [*(n for n in found if self.nodes[n].turn is None), *self._narrowed(message, turns, pool)]
        return list(found)

    def _named(self, index: Index, frontier: Sequence[int], message: Message, key: bytes) -> list[int]:
        """Replies with this key that call ids and references name."""
        named = [n for parent in frontier for c in message.calls for n in self._calls.get((parent, c.id), ())[-NEWEST:]]
        return [n for n in (*named, *self._referred(frontier, message)) if key in index.keys[n]]

    def _referred(self, frontier: Sequence[int], message: Message) -> list[int]:
        """The reply in this place that the message's reference names: at most one. Whose words it has is not looked at."""
        node = self.node_of.get(message.ref)
        return [node] if node is not None and self.nodes[node].parent in frontier else []

    def _narrowed(self, message: Message, found: list[int], pool: str) -> list[int]:
        """Those that minted call ids name; then references, reasoning, the order of calls, the very words, the pool that is asked."""
        call_ids = {c.id for c in message.calls}
        thought, said = message.reasoning.strip(), several_calls(message)

        def narrowed(nodes: list[int], fits: Callable[[int], bool]) -> list[int]:
            return nodes if len(nodes) == 1 else [n for n in nodes if fits(n)] or nodes

        found = narrowed(found, lambda n: any(c.id in call_ids for c in self._message(n).calls))
        found = narrowed(found, lambda n: self.nodes[n].turn == message.ref)
        if thought:
            found = narrowed(found, lambda n: self._message(n).reasoning.strip() == thought)
        if said:
            found = narrowed(found, lambda n: self._said[n] == said)
        found = narrowed(found, lambda n: _texts(self._message(n)) == _texts(message))
        if len(found) > 1:
            exact = strict_key(message)
            found = narrowed(found, lambda n: strict_key(self._message(n)) == exact)
        return narrowed(found, lambda n: self._pool(n) == pool)

    def _by_minted_ids(self, frontier: Sequence[int], message: Message) -> list[int]:
        """The reply whose every call came back under the id minted for it, with the same words around them.

        Clients fill in defaults, trim and retype a call's arguments before they
        echo it; what the model wrote is on record. Ids that two replies share
        vouch for neither.
        """
        if not message.calls:
            return []
        named = [n for parent in frontier for n in self._calls.get((parent, message.calls[0].id), ())[-2 * NEWEST :]]
        vouched = [n for n in named if vouches(self._message(n), message)]
        return vouched if len(vouched) == 1 else []

    def _by_reference(self, frontier: Sequence[int], message: Message) -> list[int]:
        """The reply that an opaque field names, where what came can still be it: ids, arguments and spacing do not count."""
        return [n for n in self._referred(frontier, message) if resembles(self._message(n), message)]

    def _by_beginning(self, frontier: Sequence[int], message: Message) -> list[int]:
        """Replies that no client got whole, and that begin with what came back."""
        children = (child for node in frontier for child in self.children(node)[-2 * NEWEST :])
        return [n for n in children if self._undelivered(n) and begins(self._message(n), message)]

    def _undelivered(self, node: int) -> bool:
        turn = self.nodes[node].turn
        return turn is not None and self.turns[turn].outcome is not Outcome.DELIVERED

    def _pool(self, node: int) -> str | None:
        turn = self.nodes[node].turn
        return None if turn is None else self.turns[turn].pool

    def _preference(self, node: int, pool: str = "") -> tuple[int, bool, int]:
        """Delivered turns before the client's own messages before turns nobody got; then those of the pool, then the newest."""
        turn = self.nodes[node].turn
        if turn is None:
            return (1, False, node)
        return (2 if self.turns[turn].outcome is Outcome.DELIVERED else 0, self.turns[turn].pool == pool, node)

    def _message(self, node: int) -> Message:
        message = self.nodes[node].message
        assert message is not None, "a head has no message"
        return message

    def path(self, node: int, start: int | None = None) -> tuple[int, ...]:
        """Node ids from the head to `node`, or from `start`, which is above it."""
        steps = [node]
        while steps[-1] != start and (parent := self.nodes[steps[-1]].parent) is not None:
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
        came = pending.request.messages
        # Results stand under the ids of the calls on record, so that what they answer is known when they are read again.
        messages = as_recorded(came, [*(self._message(n) for n in pending.path[1:]), *came[done:]])
        for message, (i, place) in zip(messages[done:], pending.slots[done:], strict=True):
            key = pending.keys.messages[i]
            known = self.index.matching(at, placed(key, place) if message.role == "tool" else key)
            at = max(known, key=lambda n: self._preference(n, pending.request.pool)) if known else add(Node(next_id(), at, message))
        add(Node(next_id(), at, reply, turn=turn.id))
        return Delta(tuple(added), turn)

    def apply(self, delta: Delta, pending: Pending | None = None) -> None:
        """Add a staged delta. Deltas apply in the order they were staged.

        `pending` is the request that it was staged for: the keys of its last
        messages, which the delta has before the reply, are not computed again.
        """
        brought = [n.id for n in delta.nodes[:-1] if n.parent is not None][::-1]
        keys = pending.keys.permuted(pending.order[::-1]) if pending else RequestKeys(b"", (), ())
        known, canonical = (dict(zip(brought, column, strict=False)) for column in (keys.messages, keys.canonical))
        for node in delta.nodes:
            if node.id != len(self.nodes):
                raise ValueError(f"node {node.id} applied out of order; {len(self.nodes)} was next")
            self.nodes.append(node)
            if node.parent is None:
                self._heads[tools_key(node.tools)] = node.id
                self._leading.add(node.id)
                self._reply_above[node.id] = None
            else:
                self._add(node.id, node.parent, known.get(node.id), canonical.get(node.id))
        self.turns[delta.turn.id] = delta.turn
        self.failed += delta.turn.outcome is Outcome.FAILED
        if delta.turn.base is not None:
            self._continued.add(delta.turn.base)

    def _add(self, node: int, parent: int, key: bytes | None, canonical: bytes | None) -> None:
        message, turn = self._message(node), self.nodes[node].turn
        if turn is not None:
            self.node_of[turn] = node
            for call_id in dict.fromkeys(c.id for c in message.calls):
                self._calls.setdefault((parent, call_id), []).append(node)
        self._reply_above[node] = node if message.role == "assistant" else self._reply_above[parent]
        if said := several_calls(message):
            self._said[node] = said
        place = self._place(node, parent) if message.role == "tool" else None
        if message.role in ("system", "user") and self._answered is not None and self._answered[0] == parent:
            self._answered = node, self._answered[1]
        grandparent = self.nodes[parent].parent
        for index, given in {id(self._canonical): (self._canonical, canonical), id(self.index): (self.index, key)}.values():
            if turn is not None:
                keys = echo_keys(message, index.matcher)
            else:
                own = index.matcher.key(message) if given is None else given
                keys = (own if place is None else placed(own, place),)
            index.add(node, parent, keys)
            if parent not in self._children and grandparent is not None:
                index.follow(parent, grandparent)
        self._children.setdefault(parent, []).append(node)
        if parent in self._leading:
            if message.role == "system":
                self._leading.add(node)
            else:
                for each in self.index.keys[node]:
                    self._openings.setdefault(each, []).append(node)

    def _place(self, node: int, parent: int) -> int:
        """Which call of the nearest reply above a result answers; the next of several under one id."""
        reply = self._reply_above[parent]
        if reply is None:
            return NO_CALL
        if self._answered is None or self._answered[0] != parent:
            answered = Answered(self._message(reply), self._message(reply))
            for each in self.path(parent, reply)[1:]:
                answered.place(self._message(each))
        else:
            answered = self._answered[1]
        self._answered = node, answered
        return answered.place(self._message(node))

    def amend(self, turn_id: str, outcome: Outcome | None = None, abort: str | None = None, acknowledged: bool = False) -> None:
        turn = self.turns[turn_id]
        outcome, known = outcome or turn.outcome, acknowledged or turn.acknowledged
        self._put(replace(turn, outcome=outcome, abort=turn.abort if abort is None else abort, acknowledged=known))

    def replace(self, turn: Turn, reply: Message) -> None:
        """A turn that was gone on with, in the place of its beginning. Raises ValueError where another turn goes on from that."""
        node = self.node_of[turn.id]
        parent, before = self.nodes[node].parent, self._message(node)
        if node in self._children or turn.id in self._continued:
            raise ValueError(f"turn {turn.id} has been gone on from as it was")
        assert parent is not None, "a reply is no head"
        self.nodes[node] = replace(self.nodes[node], message=reply)
        for call_id in dict.fromkeys(c.id for c in before.calls):
            self._calls[parent, call_id].remove(node)
        for call_id in dict.fromkeys(c.id for c in reply.calls):
            insort(self._calls.setdefault((parent, call_id), []), node)
        self._said.pop(node, None)
        if said := several_calls(reply):
            self._said[node] = said
        leading = parent in self._leading
        for index in {id(i): i for i in (self._canonical, self.index)}.values():
            old, new = index.keys[node], echo_keys(reply, index.matcher)
            index.rename(node, parent, new)
            if leading and index is self.index:
                for key in old:
                    self._openings[key].remove(node)
                for key in new:
                    insort(self._openings.setdefault(key, []), node)
        self._put(turn)

    def _put(self, turn: Turn) -> None:
        self.failed += (turn.outcome is Outcome.FAILED) - (self.turns[turn.id].outcome is Outcome.FAILED)
        self.turns[turn.id] = turn

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


def _texts(message: Message) -> list[str]:
    return [p.text for p in message.parts if isinstance(p, Text)]
