"""The admin API's calls about sessions. What is long to make is made in a thread, from a copy of the session's outline."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from aiohttp import web

from turnloom.core.unroll import DEFAULT_TRAINING, UNLIMITED, Longest, Overlong, Training
from turnloom.counters import swallowed
from turnloom.errors import BadRequest, NotFound, TurnloomError
from turnloom.export.canonical import to_line
from turnloom.export.registry import FORMATS, load_format
from turnloom.gateway import auth
from turnloom.gateway.admin_answers import Damaged, Listed, listed, opened, status_answer, store_answer, tree_answer
from turnloom.gateway.admin_bodies import FinishBody, LimitsBody, OpenBody, RewardBody, SamplingBody
from turnloom.gateway.admin_body import read_model
from turnloom.gateway.samples import Snapshot
from turnloom.gateway.session import Session
from turnloom.gateway.sessions import MAX_LISTED, Sessions, hash_key
from turnloom.store.contract import Entry
from turnloom.types import Sample

log = logging.getLogger("turnloom.gateway")

T = TypeVar("T")

PIECE = 256 * 1024
"""Bytes of an answer that are made before some are sent."""

_LINES = "application/x-ndjson"
_TYPES = {"canonical": _LINES, "jsonl": _LINES, "parquet": "application/vnd.apache.parquet"}


class SessionCalls:
    def __init__(self, sessions: Sessions, longest: Longest = UNLIMITED, training: Training = DEFAULT_TRAINING) -> None:
        """`longest` and `training` are what samples are where a call does not say."""
        self._sessions = sessions
        self._longest, self._training = longest, training

    async def open(self, http: web.Request) -> web.Response:
        origin, body = auth.origin(http), await read_model(http, OpenBody)
        try:
            session, key = await self._sessions.open(
                session_id=body.id,
                key=body.key,
                sampling=_given(body.sampling),
                limits=_given(body.limits),
                group=body.group,
                rollout=body.rollout,
                labels=body.labels,
                metadata=body.metadata,
                reward_rule=body.reward_rule,
                repeats=body.repeats,
            )
        except BadRequest as error:
            session, key = await self._again(body, error)
        return json_response(opened(session.row.id, key, origin), status=201)

    async def _again(self, body: OpenBody, refused: BadRequest) -> tuple[Session, str]:
        """The session that this very call has opened before. Raises `refused` where it has not."""
        if body.id is None or body.key is None:
            raise refused
        try:
            session = await self._sessions.by_id(body.id)
        except NotFound:
            raise refused from None
        if not hmac.compare_digest(session.row.key_hash, hash_key(body.key)):
            raise refused
        return session, body.key

    async def list(self, http: web.Request) -> web.Response:
        limit, offset = _number(http, "limit", 100, MAX_LISTED), _number(http, "offset", 0, 2**31 - 1)
        status = http.query.get("status")
        entries = await self._sessions.entries(limit, offset, status)
        return await in_thread(lambda: {"sessions": [_entry(each) for each in entries], "limit": limit, "offset": offset})

    async def get(self, http: web.Request) -> web.Response:
        return await self._status(await self._session(http))

    async def tree(self, http: web.Request) -> web.Response:
        snapshot = Snapshot.of(await self._session(http))
        return await in_thread(lambda: tree_answer(snapshot))

    async def samples(self, http: web.Request) -> web.StreamResponse:
        chosen = http.query.get("format", "canonical")
        if chosen not in FORMATS:
            raise BadRequest(f"format: there is no {chosen[:80]!r} here; use one of {', '.join(FORMATS)}")
        longest = _longest(http, self._longest)
        skip = http.query.getall("skip_label", None)
        policy = self._training if skip is None else replace(self._training, skip=frozenset(filter(None, skip)))
        samples = Snapshot.of(await self._session(http)).samples(longest, policy)
        if _TYPES.get(chosen) == _LINES:
            return await _streamed(http, _pieces(samples), _LINES)
        with tempfile.TemporaryDirectory(prefix="turnloom-") as place:
            path = Path(place, f"samples.{chosen}")
            await asyncio.to_thread(load_format(chosen), samples, path)
            head = {"Content-Disposition": f'attachment; filename="{path.name}"'}
            return await _streamed(http, _read(path), _TYPES.get(chosen, "application/octet-stream"), head)

    async def reward(self, http: web.Request) -> web.Response:
        body = await read_model(http, RewardBody)
        session = await self._session(http)
        await session.reward(body.value, body.lineage)
        return await self._status(session)

    async def finish(self, http: web.Request) -> web.Response:
        body = await read_model(http, FinishBody)
        session = await self._session(http)
        await session.finish(body.reward, drain=body.drain)
        return await self._status(session)

    async def drop(self, http: web.Request) -> web.Response:
        await self._sessions.drop(http.match_info["id"])
        return web.Response(status=204)

    async def store(self, http: web.Request) -> web.Response:
        return json_response(store_answer(await self._sessions.store_stats()))

    async def metrics(self, http: web.Request) -> web.Response:
        self._sessions.metrics.state(self._sessions.loaded, await self._sessions.stats())
        return web.Response(body=self._sessions.metrics.render(), content_type="text/plain", charset="utf-8")

    async def _session(self, http: web.Request) -> Session:
        return await self._sessions.by_id(http.match_info["id"])

    async def _status(self, session: Session) -> web.Response:
        snapshot = Snapshot.of(session)
        usage = await self._sessions.usage(session.row.id)
        return await in_thread(lambda: status_answer(snapshot, usage))


def _given(body: SamplingBody | LimitsBody | None) -> dict[str, Any] | None:
    """What was said of it; the rest is the gateway's."""
    return None if body is None else body.model_dump(exclude_unset=True)


def _entry(entry: Entry) -> orjson.Fragment:
    """One session of the list. One that cannot be read, or written as JSON, hides no other."""
    found: Listed | Damaged = listed(entry)
    try:
        return orjson.Fragment(dump(found))
    except (TypeError, ValueError, RecursionError) as error:
        swallowed(log, "gateway.list", "session %s cannot be listed: %s", entry.id, error)
        return orjson.Fragment(dump({"id": entry.id, "error": str(error), "usage": found["usage"]}))


def _pieces(samples: Iterator[Sample]) -> Iterator[bytes]:
    """Whole lines, at least PIECE bytes of them at a time but the last."""
    held = bytearray()
    for sample in samples:
        held += to_line(sample) + b"\n"
        if len(held) >= PIECE:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


async def _streamed(
    http: web.Request, pieces: Iterator[bytes], content_type: str, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """Send the pieces, each made in a thread when the one before is on its way.

    What fails before the first is an error as any other; later the connection is cut, so that nobody takes the
    beginning for the whole.
    """
    piece = await asyncio.to_thread(next, pieces, b"")
    response = web.StreamResponse(headers=headers)
    response.content_type = content_type
    await response.prepare(http)
    try:
        while piece:
            await response.write(piece)
            piece = await asyncio.to_thread(next, pieces, b"")
    except ConnectionError:
        raise
    except Exception as error:
        swallowed(log, "gateway.samples", "samples could not be read to their end: %s", error, level=logging.ERROR, trace=True)
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError("the samples could not be read to their end") from error
    await response.write_eof()
    return response


def _longest(http: web.Request, default: Longest) -> Longest:
    """`max_tokens` and `overlong`, as `turnloom export` takes them; else the gateway's own."""
    most = _number(http, "max_tokens", 0, 2**31 - 1, least=2) if "max_tokens" in http.query else default.max_tokens
    chosen = http.query.get("overlong", default.overlong)
    if chosen not in list(Overlong):
        raise BadRequest(f"overlong: must be one of {', '.join(Overlong)}")
    return Longest(most, Overlong(chosen))


def _number(http: web.Request, name: str, default: int, most: int, least: int = 0) -> int:
    raw = http.query.get(name, str(default))
    if not raw.isdecimal() or len(raw) > 10 or not least <= int(raw) <= most:
        raise BadRequest(f"{name}: must be a whole number from {least} to {most}")
    return int(raw)


async def in_thread(make: Callable[[], Any]) -> web.Response:
    """JSON that is long to make, made where it holds up nobody."""
    return web.Response(body=await asyncio.to_thread(lambda: dump(make())), content_type="application/json")


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=dump(value), status=status, content_type="application/json")


def dump(value: Any) -> bytes:
    """JSON bytes, of values as well that only Python's own callers can bring: metadata that is no JSON is spelled as text."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, default=str, allow_nan=False).encode()


def error_response(error: TurnloomError) -> web.Response:
    return json_response({"error": {"type": type(error).__name__, "message": str(error)}}, status=error.status)
