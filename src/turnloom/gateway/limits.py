"""Whether a session may take another turn, and what a client is told where not. It decides from what it is given; it reads no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from turnloom.errors import LimitReached, RequestError, SessionClosed
from turnloom.store.contract import Limits, SessionRow, Usage

FINISHED = "finished"
TTL = "ttl"
IDLE = "idle_timeout"
"""What a closed session's row names as its end."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is turned away: the limit's name in `Limits`, "" where no limit did it, and what the client is told."""

    limit: str
    error: RequestError


def expiry(row: SessionRow, touched: float, in_flight: int, now: float) -> str:
    """Which limit an open session's time is up by at `now`, "" for none.

    Times are Unix seconds. `touched` is when its last turn ended, or it was opened; a
    session with turns in flight is not idle.
    """
    limits = row.limits
    if row.status != "open":
        return ""
    if limits.ttl is not None and now >= row.created + limits.ttl:
        return TTL
    if limits.idle_timeout is not None and not in_flight and now >= touched + limits.idle_timeout:
        return IDLE
    return ""


def closed(row: SessionRow, why: str) -> SessionRow:
    """The row once it is closed, by a finish or by a limit. One that is closed already stays as it is."""
    if row.status != "open":
        return row
    row = replace(row, status="closed", ended=why)
    return row if why == FINISHED else reached(row, why)


def reached(row: SessionRow, limit: str) -> SessionRow:
    """The row with the name of a limit at which a request was refused; each is there once, in the order they came."""
    return row if limit in row.reached else replace(row, reached=(*row.reached, limit))


def over(row: SessionRow, touched: float, in_flight: int, now: float) -> Refusal | None:
    """What refuses every request: that the session is closed, or would be if somebody had looked at the clock."""
    if row.status == "open":
        limit = expiry(row, touched, in_flight, now)
        return Refusal(limit, SessionClosed(_ended(row.limits, limit))) if limit else None
    return Refusal("", SessionClosed(_ended(row.limits, row.ended)))


def _ended(limits: Limits, why: str) -> str:
    if why == TTL and limits.ttl is not None:
        return f"this session is closed: its time was up {limits.ttl:g} s after it was opened (ttl); open a new one"
    if why == IDLE and limits.idle_timeout is not None:
        return f"this session is closed: it had no turn for {limits.idle_timeout:g} s (idle_timeout); open a new one"
    return "this session is finished; open a new one"


def counted(limits: Limits) -> bool:
    """Whether what was used of it has to be known."""
    return (limits.max_turns, limits.max_tokens, limits.max_bytes) != (None, None, None)


def spent(limits: Limits, usage: Usage, in_flight: int, choices: int = 1) -> Refusal | None:
    """What refuses `choices` further turns at once. `usage.turns` leaves out failed ones, `in_flight` are turns not on record yet."""
    if limits.max_turns is not None and (left := limits.max_turns - usage.turns - in_flight) < choices:
        return Refusal("max_turns", LimitReached(too_many("turns", limits.max_turns, left, choices)))
    if limits.max_tokens is not None and (left := limits.max_tokens - usage.tokens) < choices:
        return Refusal("max_tokens", LimitReached(too_many("sampled tokens", limits.max_tokens, left, choices)))
    if limits.max_bytes is not None and usage.bytes >= limits.max_bytes:
        told = f"this session's turns take up {usage.bytes} bytes of the store, and it may use {limits.max_bytes}; open a new one"
        return Refusal("max_bytes", LimitReached(told))
    return None


def too_many(what: str, limit: int, left: int, choices: int = 1) -> str:
    """What a client is told that asks for more turns or tokens than are left."""
    if left < 1:
        return f"this session has used its {limit} {what}; open a new one, or one with a higher limit"
    return f"this request asks for {choices} replies at once, and the session has {left} of its {limit} {what} left; ask for fewer"


def share(limit: int, used: int, choices: int, choice: int) -> int:
    """How many of the tokens that are left one of a request's replies may have, 0 where there are none."""
    each, more = divmod(max(limit - used, 0), choices)
    return each + (choice < more)
