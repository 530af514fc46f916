"""Turnloom: exact tokens for reinforcement learning of agents.

Words: a *session* is one run of one agent; a *turn* is one model call; the
session's messages form a *tree*; a *bridge* continues the exact tokens held; a
*fork* starts a new token sequence and says why; a *sample* is one training row.

    async with turnloom.Gateway(engine="http://127.0.0.1:30000", tokenizer="Qwen/Qwen3-8B") as gateway:
        session = await gateway.open_session()
        ...  # point an Anthropic client at session.base_url with session.key
        samples = await session.finish(reward=1.0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turnloom.types import Outcome, Sample, Sampling

if TYPE_CHECKING:
    from turnloom.client.remote import BlockingClient, Client
    from turnloom.gateway.api import BackgroundGateway, Gateway, SessionHandle
    from turnloom.store.contract import Limits

__version__ = "0.1.0"

__all__ = ["BackgroundGateway", "BlockingClient", "Client", "Gateway", "Limits", "Outcome", "Sample", "Sampling", "SessionHandle"]

_LAZY = {
    "BackgroundGateway": "turnloom.gateway.api",
    "BlockingClient": "turnloom.client.remote",
    "Client": "turnloom.client.remote",
    "Gateway": "turnloom.gateway.api",
    "Limits": "turnloom.store.contract",
    "SessionHandle": "turnloom.gateway.api",
}


def __getattr__(name: str) -> Any:
    """The gateway is imported when it is asked for: reading samples needs no server."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'turnloom' has no attribute {name!r}")
