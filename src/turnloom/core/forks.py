"""Why a history did not continue a held one, in words and tokens a person can act on.

A fork is compared with the nearest recorded sequence: that of a turn under the
place where the request departs from what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from turnloom.core.align import agreement
from turnloom.core.match import CANONICAL
from turnloom.core.tree import Pending, Tree
from turnloom.types import Fork, ForkKind, IntArray, Message

Decode = Callable[[Sequence[int]], str]

SHOWN_TOKENS = 12
"""How many ids a fork decodes on each side."""

Found = tuple[Fork, str | None]
"""A fork and the turn whose sequence is nearest."""


def explain(tree: Tree, pending: Pending, prompt: IntArray | None = None, decode: Decode | None = None) -> Fork | None:
    """Why a request does not simply go on from what is held, by the nearest history.

    None for a session's first turn, and where the request continues tokens that
    no other turn has continued yet. The tokens are compared where both `prompt`
    and `decode` are given.
    """
    if pending.base is None:
        found = _new_sequence(tree, pending) if tree.turns else None
    else:
        found = _shared_sequence(tree, pending) if tree.continued(pending.base) else None
    if found is None:
        return None
    fork, nearest = found
    fork = replace(fork, joined_by=_joined_by(tree, pending))
    return fork if prompt is None or decode is None else compare(fork, tree.held(nearest), prompt, decode)


def compare(fork: Fork, recorded: IntArray, prompt: IntArray, decode: Decode) -> Fork:
    """The fork with the first id that differs and the text from there on, recorded and as it came.

    Where both sides begin with the same text, the detail shows how each splits it.
    """
    at = agreement(recorded, prompt)
    sides = [part[at : at + SHOWN_TOKENS].tolist() for part in (recorded, prompt)]
    before, now = map(decode, sides)
    detail = fork.detail
    if before and now and (before.startswith(now) or now.startswith(before)):
        split = ["|".join(decode([token]) for token in side[:4]) for side in sides]
        detail += f"; the same text in other tokens: recorded {split[0]!r}, came {split[1]!r}"
    return replace(fork, detail=detail, token_index=at, recorded=before, came=now)


def _shared_sequence(tree: Tree, pending: Pending) -> Found:
    matched, messages = len(pending.path) - 1, pending.request.messages
    end = pending.path[-1]
    if matched == len(messages):
        return Fork(ForkKind.RESAMPLED, matched, "the same prompt was asked again"), _turn_under(tree, end)
    detail, nearest = _difference(tree, end, messages[matched])
    return Fork(ForkKind.BRANCHED, matched, detail), nearest


def _new_sequence(tree: Tree, pending: Pending) -> Found:
    messages, keys = pending.request.messages, pending.keys.messages
    matched = len(pending.path) - 1
    if pending.path and matched == len(messages):
        return Fork(ForkKind.RESAMPLED, matched, "the same prompt was asked again"), _turn_under(tree, pending.path[-1])
    if pending.path and _has_user(messages[:matched]):
        detail, nearest = _difference(tree, pending.path[-1], messages[matched])
        return Fork(ForkKind.HISTORY_CHANGED, matched, detail), nearest
    for head in tree.heads:
        depth, node = _follow(tree, [head], keys)
        if (not pending.path or head != pending.path[0]) and _has_user(messages[:depth]):
            return Fork(ForkKind.TOOLS_CHANGED, 0, _tools_difference(tree, head, pending)), _turn_under(tree, node)
    if messages and messages[0].role == "system":
        for head in tree.heads:
            others = [n for n in tree.children(head) if (m := tree.nodes[n].message) and m.role == "system"]
            depth, node = _follow(tree, others, keys[1:])
            if _has_user(messages[1 : 1 + depth]):
                return Fork(ForkKind.SYSTEM_CHANGED, 0, _difference(tree, head, messages[0])[0]), _turn_under(tree, node)
    nearest = _turn_under(tree, pending.path[-1]) if pending.path else next(reversed(tree.turns))
    return Fork(ForkKind.NEW_CONVERSATION, max(matched, 0), "nothing recorded begins with these messages"), nearest


def _follow(tree: Tree, start: Sequence[int], keys: Sequence[bytes]) -> tuple[int, int]:
    """How many keys a history goes on with from one of `start`, and the node where it ends."""
    frontier, depth = list(start), 0
    for key in keys:
        found = [c for node in frontier for c in tree.matching_children(node, key)]
        if not found:
            break
        frontier, depth = found, depth + 1
    return depth, frontier[-1] if frontier else -1


def _turn_under(tree: Tree, node: int) -> str | None:
    """The first turn on the newest way down, or the node's own where nothing follows."""
    while children := tree.children(node):
        node = children[-1]
        if tree.nodes[node].turn is not None:
            break
    return tree.nodes[node].turn


def _joined_by(tree: Tree, pending: Pending) -> str:
    """The canonical matcher, where it would have found a turn further on in this history."""
    if tree.matcher == CANONICAL or not pending.path:
        return ""
    frontier: Sequence[int] = pending.path[-1:]
    for message in pending.request.messages[len(pending.path) - 1 :]:
        key = CANONICAL.key(message)
        children = [c for node in frontier for c in tree.children(node)]
        frontier = [c for c in children if (m := tree.nodes[c].message) is not None and CANONICAL.key(m) == key]
        if any(tree.nodes[node].turn is not None for node in frontier):
            return "matching=canonical"
    return ""


def _has_user(messages: Sequence[Message]) -> bool:
    return any(m.role == "user" for m in messages)


def _difference(tree: Tree, parent: int, message: Message) -> tuple[str, str | None]:
    """The first words that differ from the nearest recorded sibling of the same role, and a turn under that."""
    siblings = [(n, m) for n in tree.children(parent) if (m := tree.nodes[n].message) is not None]
    same_role = [(n, m) for n, m in siblings if m.role == message.role]
    if not same_role:
        roles = ", ".join(sorted({m.role for _, m in siblings})) or "nothing"
        return f"{message.role} message where {roles} was recorded", _turn_under(tree, parent)
    node, sibling = same_role[-1]
    recorded, came = _shown(sibling), _shown(message)
    at = next((i for i, (a, b) in enumerate(zip(recorded, came, strict=False)) if a != b), min(len(recorded), len(came)))
    start = max(0, at - 20)
    detail = f"{message.role} text differs at character {at}: recorded {recorded[start : at + 40]!r}, came {came[start : at + 40]!r}"
    return detail, tree.nodes[node].turn or _turn_under(tree, node)


def _shown(message: Message) -> str:
    return message.text + "".join(f"\n{c.name}({c.arguments})" for c in message.calls)


def _tools_difference(tree: Tree, head: int, pending: Pending) -> str:
    recorded = {t.name: t for t in tree.nodes[head].tools}
    came = {t.name: t for t in pending.request.tools}
    added = sorted(came.keys() - recorded.keys())
    removed = sorted(recorded.keys() - came.keys())
    changed = sorted(n for n in came.keys() & recorded.keys() if came[n] != recorded[n])
    parts = [f"{word} {', '.join(names)}" for word, names in (("added", added), ("removed", removed), ("changed", changed)) if names]
    return "tools " + ("; ".join(parts) or "reordered")
