"""The tree for a person: one line per message, turns with their tokens, masks and forks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnloom.core.tree import Tree
from turnloom.core.unroll import Unrolled
from turnloom.types import MAIN, Message, Outcome, Turn

Decode = Callable[[Sequence[int]], str]


def dump_tree(tree: Tree, *, width: int = 72) -> list[str]:
    """Lines of the whole tree. Every character a model or an agent wrote is shown escaped."""
    lines: list[str] = []
    for head in tree.heads:
        names = escaped(", ".join(t.name for t in tree.nodes[head].tools)) or "none"
        lines.append(f"tools: {clip(names, width)}")
        stack = [(child, 0) for child in reversed(tree.children(head))]
        while stack:
            node_id, depth = stack.pop()
            node = tree.nodes[node_id]
            assert node.message is not None
            branches = tree.children(node_id)
            mark = "*" if node.turn else " "
            indent = "  " * depth
            lines.append(f" {mark} {indent}{node.message.role:<9} {clip(shown(node.message), width)}")
            if node.turn is not None:
                lines.append(f"   {indent}          {turn_line(tree.turns[node.turn])}")
            deeper = depth + 1 if len(branches) > 1 else depth
            stack += [(child, deeper) for child in reversed(branches)]
    return lines


def turn_line(turn: Turn) -> str:
    """One turn's figures, with its fork's reason if it has one."""
    fork = f"fork: {turn.fork.kind} at message {turn.fork.message_index}" if turn.fork else ""
    how = f"bridge +{len(turn.appended)}" if turn.base is not None else f"{len(turn.appended)} encoded"
    how = f"{fork}, {how}" if fork else how
    parts = [f"turn {turn.index}", f"{turn.prompt_len} prompt ({how})", f"{len(turn.output)} sampled", str(turn.finish.reason)]
    if turn.label not in ("", MAIN):
        parts.append(escaped(turn.label))
    if turn.pool:
        parts.append(f"pool {escaped(turn.pool)}")
    parts += [f"went on at {p.start} on {escaped(p.engine)} ({escaped(p.why)})" for p in turn.pieces if p.why]
    if turn.outcome is not Outcome.DELIVERED:
        parts.append(str(turn.outcome) + (f": {escaped(turn.error)}" if turn.error else ""))
    if turn.abort:
        parts.append(f"abort {turn.abort}")
    parts += [f"call {c.status}" for c in turn.calls if c.status != "ok"]
    return " · ".join(parts)


def dump_samples(unrolled: Unrolled, decode: Decode | None = None, *, width: int = 72) -> list[str]:
    """One line per sample, then its runs of equal mask; then the sampled tokens that do not train, with reasons."""
    lines: list[str] = []
    for sample in unrolled.samples:
        trained = int(sample.loss_mask.sum())
        lines.append(f"sample {sample.sample_index}: {len(sample.token_ids)} tokens, {trained} trained, weight {sample.weight:.3g}")
        for start, end in runs(sample.loss_mask.tolist()):
            mark = "train  " if sample.loss_mask[start] else "context"
            text = clip(escaped(decode(sample.token_ids[start:end].tolist())), width) if decode else ""
            lines.append(f"   {mark} [{start}, {end}) {text}")
    lines += [f"untrained: {u.tokens} tokens of turn {u.turn_id}: {u.reason}" for u in unrolled.untrained]
    return lines


def runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges of equal values."""
    found: list[tuple[int, int]] = []
    for i, value in enumerate(values):
        if found and values[found[-1][0]] == value:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return found


def summary(tree: Tree) -> dict[str, Any]:
    """Counts for status pages: turns by outcome and by label, tokens, lineages, forks by reason, and the tokens that those had encoded."""
    outcomes: dict[str, int] = {}
    labels: dict[str, int] = {}
    forks: dict[str, int] = {}
    reencoded: dict[str, int] = {}
    for turn in tree.turns.values():
        outcomes[turn.outcome.value] = outcomes.get(turn.outcome.value, 0) + 1
        labels[turn.label or MAIN] = labels.get(turn.label or MAIN, 0) + 1
        if turn.fork:
            kind = turn.fork.kind.value
            forks[kind] = forks.get(kind, 0) + 1
            reencoded[kind] = reencoded.get(kind, 0) + len(turn.appended)
    return {
        "turns": len(tree.turns),
        "outcomes": outcomes,
        "turn_labels": labels,
        "prompt_tokens": sum(t.prompt_len for t in tree.turns.values()),
        "sampled_tokens": sum(len(t.output) for t in tree.turns.values()),
        "lineages": lineage_count(tree),
        "forks": forks,
        "reencoded_tokens": reencoded,
    }


def lineage_count(tree: Tree) -> int:
    """Paths from a head to a generated message that no other generated message follows."""
    followed: set[int] = set()
    for node in tree.node_of.values():
        parent = tree.nodes[node].parent
        while parent is not None and parent not in followed:
            followed.add(parent)
            parent = tree.nodes[parent].parent
    return sum(node not in followed for node in tree.node_of.values())


def shown(message: Message) -> str:
    """The message on one line."""
    calls = " ".join(f"→ {c.name}({c.arguments})" for c in message.calls)
    thought = f"[thinks {len(message.reasoning)} chars] " if message.reasoning else ""
    return escaped(f"{thought}{message.text}{' ' if calls and message.text else ''}{calls}")


def escaped(text: str) -> str:
    """Control characters as escapes, so that nothing written by a model moves the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
