"""What of laws 1 to 5 and 9 a session broke, against what the engine really got and gave."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tests.properties.driver import Driver, Written, unpromised
from tests.properties.engine import Call
from turnloom.core.dump import dump_samples, dump_tree, summary
from turnloom.core.unroll import REPLACED, Unrolled
from turnloom.export.check import check_samples
from turnloom.render.contract import Rendered
from turnloom.types import ForkKind, Message, Outcome, Reasoning, Text, ToolCall, ToolResult, Turn

LAWS = ("law 1", "law 2", "law 3", "law 4", "law 5", "law 9", "forks")
"""How every violation begins. `forks`: a turn that starts anew or leaves recorded tokens, and does not say why, or says so wrongly."""


def violations(driver: Driver) -> list[str]:
    """Each one line that begins with one of LAWS; empty where every law holds."""
    calls = {call.rid: call for call in driver.engine.calls}
    turns = driver.session.tree.turns
    if turns.keys() != calls.keys():
        return ["law 4: the turns on record are not the calls that the engine got"]
    found = [line for turn in turns.values() for line in _turn(driver, turn, calls)]
    unrolled = driver.unroll()
    found += _samples(driver, unrolled, calls)
    found += _reading(driver, unrolled)
    found += _control_tokens(driver)
    found += [
        f"forks: refused {held}: {words}"
        for held, words in driver.refused
        if all(s.profile.whole.get(shape) == "yes" for s in driver.subjects.values() for shape in held.split("; "))
    ]
    return found


def _turn(driver: Driver, turn: Turn, calls: Mapping[str, Call]) -> Iterator[str]:
    call, at = calls[turn.id], f"turn {turn.index}"
    if not (np.array_equal(turn.output, call.output) and np.array_equal(turn.logprobs, call.logprobs)):
        yield f"law 4: {at} does not hold what was sampled, with its logprobs"
    fork = turn.fork
    if turn.base is None:
        if turn.kept:
            yield f"law 1: {at} has no base and keeps {turn.kept} ids"
        if (fork is None) != (turn.index == 0):
            yield f"forks: {at} starts anew and gives the reason {fork}"
    else:
        yield from _bridged(driver, turn, calls)
    if not np.array_equal(_prompt(driver, turn), call.prompt):
        yield f"law 2: the prompt on record of {at} is not what the engine got"
    if fork is not None and fork.kind is ForkKind.TEMPLATE and not unpromised(driver, turn):
        yield f"forks: {at} was not bridged where the profile promises it: {fork.detail}"
    allowed = {"sampled": (), "template": (ForkKind.RERENDERED, ForkKind.REALIGNED)}[driver.history.policy]
    if fork is not None and fork.kind in (ForkKind.RERENDERED, ForkKind.REALIGNED) and fork.kind not in allowed:
        yield f"forks: {at} is {fork.kind} under the policy {driver.history.policy}"


def _bridged(driver: Driver, turn: Turn, calls: Mapping[str, Call]) -> Iterator[str]:
    call, base, at = calls[turn.id], calls[turn.base or ""], f"turn {turn.index}"
    held = np.concatenate([base.prompt, base.output])
    realigned = turn.fork is not None and turn.fork.kind is ForkKind.REALIGNED
    kept = held[: turn.kept] if realigned else held
    if realigned and not len(base.prompt) <= turn.kept < len(held):
        yield f"law 1: {at} is realigned and keeps {turn.kept} of {len(base.prompt)} + {len(base.output)} ids"
    if realigned and len(held) - turn.kept > driver.history.realign:
        yield f"forks: {at} gave up {len(held) - turn.kept} ids where {driver.history.realign} may be"
    if turn.kept != len(kept) or not np.array_equal(call.prompt[: len(kept)], kept):
        yield f"law 1: the prompt of {at} does not start with the ids held"
    if len(call.prompt) <= len(kept):
        yield f"law 1: the prompt of {at} adds nothing to the ids held"
    shared = any(t.base == turn.base for t in driver.session.tree.turns.values() if t.index < turn.index)
    if (turn.fork is not None) != (shared or realigned):
        yield f"forks: {at} goes on from {'shared' if shared else 'its own'} tokens and gives the reason {turn.fork}"


def _prompt(driver: Driver, turn: Turn) -> np.ndarray:
    held = driver.session.tree.held(turn.id)
    return held[: len(held) - len(turn.output)]


def _samples(driver: Driver, unrolled: Unrolled, calls: Mapping[str, Call]) -> Iterator[str]:
    turns = driver.session.tree.turns
    trained = {turn_id: np.zeros(len(call.output), np.int64) for turn_id, call in calls.items()}
    by_index = {turn.index: turn for turn in turns.values()}
    for sample in unrolled.samples:
        at = f"sample {sample.sample_index}"
        where = np.flatnonzero(sample.loss_mask)
        for index in np.unique(sample.turn_index[where]).tolist():
            if index not in by_index:
                yield f"law 4: {at} trains tokens of turn {index}, which there is not"
                continue
            call = calls[by_index[index].id]
            places = where[sample.turn_index[where] == index]
            offsets = places - len(call.prompt)
            if offsets[0] < 0 or offsets[-1] >= len(call.output):
                yield f"law 4: {at} trains tokens that turn {index} did not sample"
                continue
            if not np.array_equal(sample.token_ids[places], call.output[offsets]):
                yield f"law 4: {at} trains other ids than turn {index} sampled"
            if not np.array_equal(sample.logprobs[places], call.logprobs[offsets]):
                yield f"law 4: {at} has other logprobs than turn {index} sampled"
            end = int(places[-1]) + 1
            if not np.array_equal(sample.token_ids[:end], np.concatenate([call.prompt, call.output])[:end]):
                yield f"law 2: what {at} has before turn {index}'s tokens is not what the engine had"
            trained[by_index[index].id][offsets] += 1
    yield from _once(turns, unrolled, trained)
    if unrolled.samples and not (report := check_samples(unrolled.samples)).ok:
        yield f"law 4: the samples do not pass their check: {report.findings}"


def _once(turns: Mapping[str, Turn], unrolled: Unrolled, trained: Mapping[str, np.ndarray]) -> Iterator[str]:
    reasons = {u.turn_id: u for u in unrolled.untrained}
    if len(reasons) != len(unrolled.untrained):
        yield "law 3: a turn gives two reasons not to train"
    for turn in turns.values():
        why = reasons.get(turn.id)
        trains = len(turn.output) - (why.tokens if why else 0)
        expected = np.arange(len(turn.output)) < trains
        if not np.array_equal(trained[turn.id], expected):
            yield f"law 3: of the {len(turn.output)} ids of turn {turn.index}, {int(trained[turn.id].sum())} train, and the reason is {why}"
        kept_back = turn.outcome is not Outcome.DELIVERED or bool(turn.pool) or not len(turn.output)
        if kept_back != (why is not None and why.reason != REPLACED):
            yield f"law 3: turn {turn.index} is {turn.outcome} and its reason not to train is {why}"


def _reading(driver: Driver, first: Unrolled) -> Iterator[str]:
    tree = driver.session.tree
    nodes, turns = list(tree.nodes), copy.copy(tree.turns)
    dump_tree(tree), dump_samples(first), summary(tree)
    if driver.unroll() != first:
        yield "law 5: unrolling twice gives other samples"
    if tree.nodes != nodes or tree.turns != turns:
        yield "law 5: reading changed the tree"


CHECKED = 2
"""Renderings a session that are held against the same with harmless words."""


def _control_tokens(driver: Driver) -> Iterator[str]:
    """Text that spells control tokens adds none: the same messages with a harmless word in each spelling's place have the same."""
    spelled = driver.replies.any_control
    control = frozenset(driver.subject.tokenizer.control_tokens.values())
    checked = 0
    for written in driver.renderer.written:
        if checked == CHECKED or not any(spelled.search(text) for m in written.messages for text in _texts(m)):
            continue
        checked += 1
        driver.checked[9] += 1
        harmless = [_replaced(m, spelled) for m in written.messages]
        again = _again(driver, written, harmless)
        if not isinstance(again, Rendered):
            yield f"law 9: without its spellings of control tokens it does not bridge: {again}"
        elif _only(again, control) != _only(written.rendered, control):
            yield f"law 9: text became a control token in {'a whole prompt' if written.reply is None else 'a bridge'} of {written.messages}"


def _again(driver: Driver, written: Written, messages: Sequence[Message]) -> object:
    renderer = driver.subject.renderer
    if written.reply is None:
        return renderer.render(messages, written.tools)
    return renderer.bridge(written.reply, written.output, messages, written.tools, calls_before=written.calls_before)


def _only(rendered: Rendered, control: frozenset[int]) -> list[int]:
    return [token for token in rendered.ids.tolist() if token in control]


def _texts(message: Message) -> list[str]:
    return [part.arguments if isinstance(part, ToolCall) else part.text for part in message.parts]


def _replaced(message: Message, spelled: re.Pattern[str]) -> Message:
    def clean(text: str) -> str:
        return spelled.sub("w", text)

    parts: list[Text | Reasoning | ToolCall | ToolResult] = []
    for part in message.parts:
        match part:
            case Text(text):
                parts.append(Text(clean(text)))
            case Reasoning(text):
                parts.append(Reasoning(clean(text)))
            case ToolCall(call_id, name, arguments, written):
                parts.append(ToolCall(call_id, name, clean(arguments), written))
            case ToolResult(call_id, text, is_error):
                parts.append(ToolResult(call_id, clean(text), is_error))
    return Message(message.role, tuple(parts))


def by_law(found: Sequence[str]) -> Counter[str]:
    return Counter(line.partition(":")[0] for line in found)
