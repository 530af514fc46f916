"""How a reply is come by: a turn that is being made is joined, one on record is written again or gone on with, or one is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

from turnloom.core.retry import Answer, Identity, Intent, check_same, identity
from turnloom.errors import BadRequest
from turnloom.gateway.respond import Choice
from turnloom.gateway.session import Session
from turnloom.gateway.turn import Parts, take_turn
from turnloom.types import Request
from turnloom.wire.contract import Dialect, Envelope
from turnloom.wire.fingerprint import fingerprint

RESAMPLE = "x-turnloom-resample"
IDEMPOTENCY_KEY = "idempotency-key"
RETRY_COUNT = "x-stainless-retry-count"
"""What the official SDKs of Anthropic and OpenAI count their attempts in."""

MAX_KEY = 255
"""Characters of an idempotency key."""


def identified(request: Request, dialect: str, envelope: Envelope, body: bytes) -> Request:
    """The request with what it is known by. Raises BadRequest for an idempotency key that is none."""
    key = envelope.headers.get(IDEMPOTENCY_KEY, "")
    if len(key) > MAX_KEY:
        raise BadRequest(f"Idempotency-Key: has {len(key)} characters; at most {MAX_KEY} are supported")
    hashed = sha256(key.encode("utf-8", "surrogateescape")).hexdigest() if key else ""
    return replace(request, fingerprint=fingerprint(dialect, envelope, body, request.label, request.pool), idempotency=hashed)


def intent_of(session: Session, headers: Mapping[str, str]) -> Intent:
    """What the caller says: the headers first, then what was agreed for the session."""
    count = headers.get(RETRY_COUNT, "")
    again = count.isdecimal() and len(count) < 10 and int(count) > 0
    another = bool(headers.get(RESAMPLE)) or (session.row.repeats == "resample" and not again)
    return Intent(again, another)


def _asked(request: Request, intent: Intent, number: int) -> Identity | None:
    """What reply on record, or being made, may be the one that is asked for; None where another one is wanted in any case."""
    return None if intent.another and not request.idempotency else identity(request, number)


def new_turns(parts: Parts, session: Session, request: Request, intent: Intent) -> int:
    """How many of the request's choices are turns that nothing stands for yet. Raises BadRequest as `answer` does."""
    model, pool = parts.served(request.pool).name, request.pool

    def new(number: int) -> bool:
        asked = _asked(request, intent, number)
        if asked is None:
            return True
        return asked.place not in session.live and session.answers.find(session.tree, asked, intent, model, pool)[0] is Answer.NEW

    return sum(map(new, range(request.choices)))


async def answer(parts: Parts, session: Session, dialect: Dialect, request: Request, intent: Intent, out: Choice) -> None:
    """Raises what ended the turn, BadRequest for an idempotency key of another request, ConnectionError when the client is gone."""
    asked = _asked(request, intent, out.number)
    while asked is not None and (live := session.live.get(asked.place)) is not None:
        assert live.asked is not None
        check_same(asked, live.asked.fingerprint)
        if not live.leaving:
            parts.metrics.repeats.labels("joined").inc()
            return await live.read(out)
        await live.ended.wait()
    found, before = Answer.NEW, None
    if asked is not None:
        found, before = session.answers.find(session.tree, asked, intent, parts.served(request.pool).name, request.pool)
        if found is Answer.NEW:
            session.answers.begun(asked)
    live = session.make(asked, out.number, lambda live: take_turn(parts, session, dialect, request, live, before))
    await live.read(out)
