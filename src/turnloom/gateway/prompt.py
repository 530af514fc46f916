"""The ids that one turn sends: what is held and what is new, by the history policy, with the reason where the two part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from turnloom.core.align import agreement, sequence, shared_turns
from turnloom.core.match import request_keys
from turnloom.core.records import Pending
from turnloom.core.restore import calls_before, restored, restored_tail
from turnloom.core.tree import Tree
from turnloom.errors import RenderError, UnknownResponse
from turnloom.gateway.policy import SAMPLED, History
from turnloom.render.contract import Rendered, Renderer, Unbridgeable
from turnloom.types import Fork, ForkKind, IntArray, Message, Request, Turn, ids

_INLINE_CHARS = 4_000
"""Encoding this much text takes about a millisecond; more goes to a thread, so that the event loop is not held up."""

_INLINE_HASH = 500_000
"""Hashing this much text takes about a millisecond."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` is what the engine gets: the first ids of the base turn's sequence, then `appended`. `base` None means nothing was held.

    `fork` is set where the template stood in the way; what the histories have to
    do with each other is known only when the turn is committed.
    """

    ids: IntArray
    appended: IntArray
    base: str | None
    fork: Fork | None
    reasoning_open: bool
    escaped: int


@dataclass(frozen=True, slots=True)
class _Held:
    """The sequence that the request may go on from: its turns, its ids, its last reply, and the request's index of each turn's reply.

    `tail` is what comes after that reply, and `calls_before` how many calls before it.
    """

    chain: Sequence[Turn]
    ids: IntArray
    reply: Message
    places: Sequence[int]
    tail: Sequence[Message]
    calls_before: int


def continued(tree: Tree, request: Request) -> Request:
    """The request with the history that it names by its last reply standing before its messages. Raises UnknownResponse.

    Instructions are not inherited (OpenAI's rule for `previous_response_id`). Each
    reply of that history names its turn, so that of equal ones it is found again.
    """
    if not request.previous:
        return request
    node = tree.node_of.get(request.previous)
    if node is None:
        raise UnknownResponse(str(request.wire.get("previous_response_id", request.previous)))
    path = [tree.nodes[each] for each in tree.path(node)[1:]]
    history = [replace(each.message, ref=each.turn or "") for each in path if each.message is not None]
    if request.wire.get("previous_instructed") and history[0].role == "system":
        del history[0]
    own = 1 if request.instructed else 0
    return replace(request, messages=(*request.messages[:own], *history, *request.messages[own:]))


async def prepare(tree: Tree, request: Request) -> Pending:
    """Resolve the request; the pass over a long history's text is made in a thread."""
    size = sum(map(_size, request.messages))
    matcher = tree.matcher
    keys = request_keys(request, matcher) if size < _INLINE_HASH else await asyncio.to_thread(request_keys, request, matcher)
    return tree.prepare(request, keys)


async def build_prompt(renderer: Renderer, tree: Tree, pending: Pending, history: History = SAMPLED) -> Prompt:
    """Go on from what is held where the policy and the template allow it. Raises RenderError when the template refuses the messages."""
    held = None
    if pending.base is not None:
        chain = tree.chain(pending.base)
        at = {node: i for i, node in enumerate(pending.path, -1)}
        places = [at[tree.node_of[turn.id]] for turn in chain]
        reply = tree.reply(pending.base)
        held = _Held(chain, sequence(chain), reply, places, restored_tail(pending, reply), calls_before(tree, pending, places[-1]))
    encoded = pending.tail if history.policy == "sampled" else pending.request.messages
    size = sum(map(_size, encoded)) + sum(len(t.description) + len(t.parameters) for t in pending.request.tools)
    if size < _INLINE_CHARS:
        return _build(renderer, tree, pending, held, history)
    return await asyncio.to_thread(_build, renderer, tree, pending, held, history)


def _build(renderer: Renderer, tree: Tree, pending: Pending, held: _Held | None, history: History) -> Prompt:
    if held is None:
        return _whole(renderer, tree, pending)
    if history.policy == "template":
        return _rendered(renderer, tree, pending, held, history.realign)
    bridged = _bridge(renderer, pending, held)
    if isinstance(bridged, Rendered):
        whole = ids(np.concatenate([held.ids, bridged.ids]))
        return Prompt(whole, bridged.ids, pending.base, None, bridged.reasoning_open, bridged.escaped)
    prompt = _whole(renderer, tree, pending)
    agreed = agreement(held.ids, prompt.ids)
    if agreed == len(held.ids):
        return replace(prompt, appended=prompt.ids[agreed:], base=pending.base)
    fork = Fork(ForkKind.TEMPLATE, len(pending.request.messages) - len(pending.tail), bridged.detail)
    return replace(_from_shared(prompt, held, agreed), fork=fork)


def _rendered(renderer: Renderer, tree: Tree, pending: Pending, held: _Held, realign: int) -> Prompt:
    """The `template` policy: the template's own ids, from the deepest turn that they still go on from."""
    prompt = _whole(renderer, tree, pending)
    agreed = agreement(held.ids, prompt.ids)
    replaced = len(held.ids) - agreed
    if not replaced:
        return replace(prompt, appended=prompt.ids[agreed:], base=pending.base)
    joined = "history=sampled" if isinstance(_bridge(renderer, pending, held), Rendered) else ""
    place = _message_at(held, agreed)
    if replaced <= realign and agreed >= held.chain[-1].prompt_len:
        fork = Fork(ForkKind.REALIGNED, place, f"{replaced} sampled ids gave way to what the template writes", joined_by=joined)
        return replace(prompt, appended=prompt.ids[agreed:], base=pending.base, fork=fork)
    detail = f"the template writes the history with other ids from {agreed} of the {len(held.ids)} held on"
    return replace(_from_shared(prompt, held, agreed), fork=Fork(ForkKind.RERENDERED, place, detail, joined_by=joined))


def _whole(renderer: Renderer, tree: Tree, pending: Pending) -> Prompt:
    rendered = renderer.render(restored(tree, pending), pending.request.tools)
    return Prompt(rendered.ids, rendered.ids, None, None, rendered.reasoning_open, rendered.escaped)


def _from_shared(prompt: Prompt, held: _Held, agreed: int) -> Prompt:
    """On the deepest turn whose whole sequence the prompt begins with; on none where there is none."""
    count = shared_turns(held.chain, agreed, prompt.ids)
    if not count:
        return prompt
    turn = held.chain[count - 1]
    return replace(prompt, appended=prompt.ids[turn.prompt_len + len(turn.output) :], base=turn.id)


def _message_at(held: _Held, token: int) -> int:
    """The request's index of the message in which this id of the held sequence stands; of several that came together, the first."""
    previous = -1
    for turn, place in zip(held.chain, held.places, strict=True):
        if token < turn.prompt_len:
            return previous + 1
        if token < turn.prompt_len + len(turn.output):
            return place
        previous = place
    return previous


def _bridge(renderer: Renderer, pending: Pending, held: _Held) -> Rendered | Unbridgeable:
    try:
        output = held.chain[-1].output.tolist()
        return renderer.bridge(held.reply, output, held.tail, pending.request.tools, calls_before=held.calls_before)
    except RenderError as error:
        return Unbridgeable(f"the template refuses the stand-in history: {error}")


def _size(message: Message) -> int:
    return sum(len(p.text) if hasattr(p, "text") else len(p.arguments) for p in message.parts)
