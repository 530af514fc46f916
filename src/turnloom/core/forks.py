"""Why a history did not continue a held one, in words and tokens a person can act on.

A fork is compared with the nearest recorded sequence: that of a turn under the
place where the request departs from what is recorded. Nearest is the history
with most messages in common, under whatever tools and system messages.
Whatever a client sent, a fork's texts are short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from turnloom.core.align import agreement
from turnloom.core.records import Pending
from turnloom.core.tree import Tree
from turnloom.types import Fork, ForkKind, IntArray, Message, Tool

Decode = Callable[[Sequence[int]], str]

SHOWN_TOKENS = 12
"""How many ids a fork decodes on each side."""

SHOWN_NAMES = 5
NAME_CHARS = 40
DETAIL_CHARS = 600
SIDE_CHARS = 300

NEAREST = 8
"""How many siblings, or histories that open with the same message, a request is compared with: the newest."""

Found = tuple[Fork, str | None]
"""A fork and the turn whose sequence is nearest."""


def explain(tree: Tree, pending: Pending, prompt: IntArray | None = None, decode: Decode | None = None) -> Fork | None:
    """Why a request does not simply go on from what is held, by the nearest history.

    None for a session's first turn, and where the request continues tokens that
    no other turn has continued yet. The tokens are compared where both `prompt`
    and `decode` are given.
    """
    found: Found | None
    if pending.elsewhere is not None:
        found = _other_pool(tree, pending, pending.elsewhere)
    elif pending.base is None:
        found = _new_sequence(tree, pending) if tree.turns else None
    else:
        found = _shared_sequence(tree, pending) if tree.continued(pending.base) else None
    if found is None:
        return None
    fork, nearest = found
    fork = replace(fork, joined_by=_joined_by(tree, pending))
    # Another pool's ids are of another vocabulary.
    alike = nearest is None or tree.turns[nearest].pool == pending.request.pool
    return _short(fork) if prompt is None or decode is None or not alike else compare(fork, tree.held(nearest), prompt, decode)


def compare(fork: Fork, recorded: IntArray, prompt: IntArray, decode: Decode) -> Fork:
    """The fork with the first id that differs and the text from there on, recorded and as it came.

    Where both sides begin with the same text, the detail shows how each splits it.
    """
    at = agreement(recorded, prompt)
    sides = [part[at : at + SHOWN_TOKENS].tolist() for part in (recorded, prompt)]
    before, now = map(decode, sides)
    detail = fork.detail
    if before and now and (before.startswith(now) or now.startswith(before)):
        split = [_clipped("|".join(decode([token]) for token in side[:4]), NAME_CHARS) for side in sides]
        detail = f"{_clipped(detail, DETAIL_CHARS // 2)}; the same text in other tokens: recorded {split[0]!r}, came {split[1]!r}"
    return _short(replace(fork, detail=detail, token_index=at, recorded=before, came=now))


def _short(fork: Fork) -> Fork:
    recorded, came = _clipped(fork.recorded, SIDE_CHARS), _clipped(fork.came, SIDE_CHARS)
    return replace(fork, detail=_clipped(fork.detail, DETAIL_CHARS), recorded=recorded, came=came)


def _clipped(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


def _other_pool(tree: Tree, pending: Pending, turn: str) -> Found:
    here, there = pending.request.pool or "policy", tree.turns[turn].pool or "policy"
    at = pending.path.index(tree.node_of[turn])
    return Fork(ForkKind.OTHER_POOL, at, f"the reply before it is from the engines of {there!r}, this one is asked of {here!r}"), turn


def _shared_sequence(tree: Tree, pending: Pending) -> Found:
    matched, end = len(pending.path) - 1, pending.path[-1]
    if matched == len(pending.slots):
        return Fork(ForkKind.RESAMPLED, matched, "the same prompt was asked again"), _turn_under(tree, end)
    return _departure(tree, pending, ForkKind.BRANCHED)


def _new_sequence(tree: Tree, pending: Pending) -> Found:
    messages, matched = pending.request.messages, len(pending.path) - 1
    if pending.path and matched == len(messages):
        return Fork(ForkKind.RESAMPLED, matched, "the same prompt was asked again"), _turn_under(tree, pending.path[-1])
    same = matched if any(m.role == "user" for m in messages[: max(matched, 0)]) else 0
    if (other := _nearest(tree, pending)) is not None and other.depth > same:
        return Fork(other.kind, 0, other.detail), _turn_under(tree, other.node)
    if same:
        return _departure(tree, pending, ForkKind.HISTORY_CHANGED)
    nearest = _turn_under(tree, pending.path[-1]) if pending.path else next(reversed(tree.turns))
    return Fork(ForkKind.NEW_CONVERSATION, max(matched, 0), "nothing recorded begins with these messages"), nearest


def _departure(tree: Tree, pending: Pending, kind: ForkKind) -> Found:
    """The first message that is not on record, against the nearest recorded sibling of the same role."""
    parent, at = pending.path[-1], pending.slots[len(pending.path) - 1][0]
    message = pending.request.messages[at]
    siblings = [(n, m) for n in tree.children(parent)[-NEAREST:] if (m := tree.nodes[n].message) is not None]
    same_role = [(n, m) for n, m in siblings if m.role == message.role]
    if not same_role:
        roles = ", ".join(sorted({m.role for _, m in siblings})) or "nothing"
        return Fork(kind, at, f"{message.role} message where {roles} was recorded"), _turn_under(tree, parent)
    node, sibling = same_role[-1]
    return Fork(kind, at, _difference(sibling, message)), tree.nodes[node].turn or _turn_under(tree, node)


@dataclass(frozen=True, slots=True)
class _Near:
    """A history under other tools or another system message: how many of the request's messages it has, and the last of them."""

    depth: int
    node: int
    kind: ForkKind
    detail: str = ""


def _nearest(tree: Tree, pending: Pending) -> _Near | None:
    """The longest history that opens as the request does after its system messages; of several the newest."""
    messages, keys = pending.request.messages, pending.keys
    opening = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
    if opening == len(messages):
        return None
    best: _Near | None = None
    for node in tree.openings(keys.messages[opening])[-NEAREST:]:
        head, *leading = tree.path(node)[:-1]
        kind = _what_changed(tree, leading, keys.messages[:opening], same_tools=pending.path[:1] == (head,))
        if kind is None:
            continue
        depth, end = opening, node
        for frontier in _levels(tree, pending, (leading or [head])[-1], opening):
            depth, end = depth + 1, frontier[-1]
        if not any(m.role == "user" for m in messages[opening:depth]):
            continue
        if best is None or depth >= best.depth:
            best = _Near(depth, end, kind)
    if best is None:
        return None
    head, *leading = tree.path(best.node)
    if best.kind is ForkKind.TOOLS_CHANGED:
        return replace(best, detail=_tools_difference(tree.nodes[head].tools, pending.request.tools))
    recorded = [m for n in leading[: len(messages)] if (m := tree.nodes[n].message) is not None]
    at = next(i for i, key in enumerate(keys.messages) if key not in tree.index.keys[leading[i]])
    return replace(best, detail=_difference(recorded[at], messages[at]))


def _levels(tree: Tree, pending: Pending, start: int, opening: int) -> Iterator[list[int]]:
    messages, keys = pending.request.messages[opening:], pending.keys.messages[opening:]
    return tree.levels(tree.index, start, messages, keys, pending.request.pool)


def _what_changed(tree: Tree, leading: Sequence[int], keys: Sequence[bytes], *, same_tools: bool) -> ForkKind | None:
    """None where the request's own tools and system messages stand before a history, or where only one of them has a system message."""
    if len(leading) == len(keys) and all(key in tree.index.keys[n] for n, key in zip(leading, keys, strict=True)):
        return None if same_tools else ForkKind.TOOLS_CHANGED
    return ForkKind.SYSTEM_CHANGED if leading and keys else None


def _turn_under(tree: Tree, node: int) -> str | None:
    """The first turn on the newest way down, or the node's own where nothing follows."""
    while children := tree.children(node):
        node = children[-1]
        if tree.nodes[node].turn is not None:
            break
    return tree.nodes[node].turn


def _joined_by(tree: Tree, pending: Pending) -> str:
    """The canonical matcher, where it would have gone on from a turn further on in this history."""
    if not pending.keys.canonical:
        return ""
    found = tree.prepare_canonical(pending)
    return "matching=canonical" if found.base is not None and len(found.tail) < len(pending.tail) else ""


def _difference(recorded: Message, came: Message) -> str:
    """The first characters that differ."""
    before, now = _shown(recorded), _shown(came)
    at = first_difference(before, now)
    start = max(0, at - 20)
    return f"{came.role} text differs at character {at}: recorded {before[start : at + 40]!r}, came {now[start : at + 40]!r}"


def first_difference(left: str, right: str) -> int:
    """The length of the longest common prefix, by halves: slices compare at the speed of memory."""
    same, end = 0, min(len(left), len(right))
    while same < end:
        middle = (same + end + 1) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same


def _shown(message: Message) -> str:
    return message.text + "".join(f"\n{c.name}({c.arguments})" for c in message.calls)


def _tools_difference(before: Sequence[Tool], now: Sequence[Tool]) -> str:
    recorded, came = {t.name: t for t in before}, {t.name: t for t in now}
    changed = (n for n in came.keys() & recorded.keys() if came[n] != recorded[n])
    kinds = (("added", came.keys() - recorded.keys()), ("removed", recorded.keys() - came.keys()), ("changed", changed))
    parts = [f"{word} {_names(found)}" for word, names in kinds if (found := sorted(names))]
    return "tools " + ("; ".join(parts) or "reordered")


def _names(names: Iterable[str]) -> str:
    every = list(names)
    shown = ", ".join(_clipped(name, NAME_CHARS) for name in every[:SHOWN_NAMES])
    return f"{shown} and {len(every) - SHOWN_NAMES} more" if len(every) > SHOWN_NAMES else shown
