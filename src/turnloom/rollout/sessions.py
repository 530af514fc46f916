"""A rollout's session: opened under the rollout's own name, looked at, closed. It decides no reward and runs no agent."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from contextlib import suppress
from dataclasses import dataclass

from turnloom.counters import swallowed
from turnloom.errors import NotFound
from turnloom.rollout.contract import Gateway, SessionHandle
from turnloom.types import Outcome

log = logging.getLogger("turnloom.rollout")

CLOSING_SECONDS = 120.0
"""How long a gateway may take to close one session before that counts as its failure."""

_NAME_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Seen:
    """What a session says of itself. `turns` counts those in flight; `gave_out` is why its last turn failed, "" if it did not."""

    turns: int = 0
    tokens: int = 0
    lineages: int = 0
    forks: int = 0
    reached: tuple[str, ...] = ()
    gave_out: str = ""


def safe_name(rollout_id: str) -> str:
    """The rollout's id where it can name a session and a folder; else what is left of it, and a hash of it.

    Letters, digits, `.`, `_` and `-`, not beginning with a dot, at most 128 characters.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", rollout_id)
    plain = re.sub(r"^(\.|$)", "_", plain)
    if plain == rollout_id and 0 < len(plain) <= _NAME_LENGTH:
        return plain
    return f"{plain[:_NAME_LENGTH]}.{hashlib.sha256(rollout_id.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


async def open_anew(gateway: Gateway, *, rollout: str, group: str, metadata: dict[str, object], again: bool) -> SessionHandle:
    """A session of the rollout's own. With `again` one that an earlier run left half done is dropped first."""
    name = safe_name(rollout)
    if again:
        with suppress(NotFound):
            await (await gateway.handle(name)).drop()
    return await gateway.open_session(id=name, group=group, rollout=rollout, metadata=metadata)


async def look(session: SessionHandle) -> Seen:
    """What the session says now."""
    status = await session.status()
    outcomes = status["outcomes"]
    spoilt = outcomes.get(Outcome.ABORTED, 0) + outcomes.get(Outcome.FAILED, 0)
    return Seen(
        turns=status["turns"] + status["in_flight"],
        tokens=status["sampled_tokens"],
        lineages=status["lineages"],
        forks=sum(status["forks"].values()),
        reached=tuple(status["reached"]),
        gave_out=await _gave_out(session) if spoilt else "",
    )


async def _gave_out(session: SessionHandle) -> str:
    """Why the last turn on record failed; "" where one after it went well, since then the agent got over it."""
    turns = (await session.tree())["turns"]
    last = max(turns, key=lambda turn: turn["index"])
    return (last["error"] or last["outcome"]) if last["outcome"] in (Outcome.ABORTED, Outcome.FAILED) else ""


async def abandon(session: SessionHandle | None) -> None:
    """Close the session of a cancelled rollout; it keeps its turns, and has no reward."""
    if session is None:
        return
    try:
        async with asyncio.timeout(CLOSING_SECONDS):
            await session.finish(None)
    except Exception:  # noqa: BLE001 (nothing may take the place of the cancellation)
        swallowed(log, "rollout.finish", "session %s could not be finished", session.id, trace=True)
