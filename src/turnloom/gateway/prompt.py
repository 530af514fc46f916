"""The ids that one turn sends: a bridge over the tokens held, or a whole rendering with the reason for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from turnloom.core.match import request_keys
from turnloom.core.tree import Pending, Tree
from turnloom.errors import RenderError
from turnloom.render.contract import Rendered, Renderer, Unbridgeable
from turnloom.types import Fork, ForkKind, IntArray, Message, Request, ids

_INLINE_CHARS = 4_000
"""Encoding this much text takes about a millisecond; more goes to a thread, so that the event loop is not held up."""

_INLINE_HASH = 500_000
"""Hashing this much text takes about a millisecond."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` is what the engine gets: the held ids, then `appended`. `base` None means nothing was held.

    `fork` is set where the template stood in the way; what the histories have to
    do with each other is known only when the turn is committed.
    """

    ids: IntArray
    appended: IntArray
    base: str | None
    fork: Fork | None
    reasoning_open: bool
    escaped: int


async def prepare(tree: Tree, request: Request) -> Pending:
    """Resolve the request; the pass over a long history's text is made in a thread."""
    size = sum(map(_size, request.messages))
    keys = request_keys(request) if size < _INLINE_HASH else await asyncio.to_thread(request_keys, request)
    return tree.prepare(request, keys)


async def build_prompt(renderer: Renderer, tree: Tree, pending: Pending) -> Prompt:
    """Bridge where the history is held and the template allows it. Raises RenderError when the template refuses the messages."""
    base = pending.base
    held = tree.held(base)
    last = (tree.reply(base), tree.turns[base].output) if base is not None else None
    size = sum(map(_size, pending.tail)) + sum(len(t.description) + len(t.parameters) for t in pending.request.tools)
    if size < _INLINE_CHARS:
        return _build(renderer, pending, held, last)
    return await asyncio.to_thread(_build, renderer, pending, held, last)


def _build(renderer: Renderer, pending: Pending, held: IntArray, last: tuple[Message, IntArray] | None) -> Prompt:
    request, fork = pending.request, None
    if last is not None:
        bridged = _bridge(renderer, pending, *last)
        if isinstance(bridged, Rendered):
            whole = ids(np.concatenate([held, bridged.ids]))
            return Prompt(whole, bridged.ids, pending.base, None, bridged.reasoning_open, bridged.escaped)
        fork = Fork(ForkKind.TEMPLATE, len(request.messages) - len(pending.tail), bridged.detail)
    rendered = renderer.render(request.messages, request.tools)
    return Prompt(rendered.ids, rendered.ids, None, fork, rendered.reasoning_open, rendered.escaped)


def _bridge(renderer: Renderer, pending: Pending, reply: Message, output: IntArray) -> Rendered | Unbridgeable:
    try:
        return renderer.bridge(reply, output.tolist(), pending.tail, pending.request.tools)
    except RenderError as error:
        return Unbridgeable(f"the template refuses the stand-in history: {error}")


def _size(message: Message) -> int:
    return sum(len(p.text) if hasattr(p, "text") else len(p.arguments) for p in message.parts)
