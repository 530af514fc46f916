"""Why a history did not continue a held one, in words a person can act on."""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.core.tree import Pending, Tree
from turnloom.types import Fork, ForkKind, Message


def explain(tree: Tree, pending: Pending) -> Fork | None:
    """Why a request does not simply go on from what is held, by the nearest history.

    None for a session's first turn, and where the request continues tokens that
    no other turn has continued yet.
    """
    if pending.base is None:
        return _new_sequence(tree, pending) if tree.turns else None
    return _shared_sequence(tree, pending) if tree.continued(pending.base) else None


def _shared_sequence(tree: Tree, pending: Pending) -> Fork:
    matched, messages = len(pending.path) - 1, pending.request.messages
    end = pending.path[-1]
    if matched == len(messages):
        return Fork(ForkKind.RESAMPLED, matched, "the same prompt was asked again")
    return Fork(ForkKind.BRANCHED, matched, _difference(tree, end, messages[matched]))


def _new_sequence(tree: Tree, pending: Pending) -> Fork:
    messages, keys = pending.request.messages, pending.keys.messages
    matched = len(pending.path) - 1
    if pending.path and matched == len(messages):
        return Fork(ForkKind.RESAMPLED, matched, "the same prompt was asked again")
    if pending.path and _has_user(messages[:matched]):
        return Fork(ForkKind.HISTORY_CHANGED, matched, _difference(tree, pending.path[-1], messages[matched]))
    for head in tree.heads:
        depth = _depth(tree, [head], keys)
        if (not pending.path or head != pending.path[0]) and _has_user(messages[:depth]):
            return Fork(ForkKind.TOOLS_CHANGED, 0, _tools_difference(tree, head, pending))
    if messages and messages[0].role == "system":
        for head in tree.heads:
            others = [n for n in tree.children(head) if (m := tree.nodes[n].message) and m.role == "system"]
            if _has_user(messages[1 : 1 + _depth(tree, others, keys[1:])]):
                return Fork(ForkKind.SYSTEM_CHANGED, 0, _difference(tree, head, messages[0]))
    return Fork(ForkKind.NEW_CONVERSATION, max(matched, 0), "nothing recorded begins with these messages")


def _depth(tree: Tree, start: Sequence[int], keys: Sequence[bytes]) -> int:
    frontier, depth = list(start), 0
    for key in keys:
        frontier = [c for node in frontier for c in tree.matching_children(node, key)]
        if not frontier:
            break
        depth += 1
    return depth


def _has_user(messages: Sequence[Message]) -> bool:
    return any(m.role == "user" for m in messages)


def _difference(tree: Tree, parent: int, message: Message) -> str:
    """The nearest recorded sibling of the same role and the first words that differ."""
    siblings = [m for n in tree.children(parent) if (m := tree.nodes[n].message) is not None]
    same_role = [m for m in siblings if m.role == message.role]
    if not same_role:
        roles = ", ".join(sorted({m.role for m in siblings})) or "nothing"
        return f"{message.role} message where {roles} was recorded"
    recorded, came = _shown(same_role[-1]), _shown(message)
    at = next((i for i, (a, b) in enumerate(zip(recorded, came, strict=False)) if a != b), min(len(recorded), len(came)))
    start = max(0, at - 20)
    return f"{message.role} text differs at character {at}: recorded {recorded[start : at + 40]!r}, came {came[start : at + 40]!r}"


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
