"""The admin API under `/api/v1`: sessions opened, read, rewarded, finished and dropped. Every call needs the admin key."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from aiohttp import web
from pydantic import Field, field_validator

from turnloom.core.dump import summary
from turnloom.core.unroll import DEFAULT_TRAINING, Longest, Overlong, Training
from turnloom.counters import swallowed
from turnloom.engine.pool import Pool
from turnloom.errors import BadRequest, TurnloomError
from turnloom.export.canonical import to_line
from turnloom.gateway import auth
from turnloom.gateway.admin_body import AdminModel, read_model
from turnloom.gateway.admin_engines import Engines, PauseBody, ResumeBody
from turnloom.gateway.body import check_json
from turnloom.gateway.pools import POLICY
from turnloom.gateway.session import Session
from turnloom.gateway.sessions import Sessions
from turnloom.store.contract import Limits
from turnloom.types import Sampling
from turnloom.wire.contract import MAX_STOP_CHARS, MAX_STOPS

log = logging.getLogger("turnloom.gateway")

Call = Callable[[web.Request], Awaitable[web.Response]]


class SamplingBody(AdminModel):
    """A policy that any engine can run: its integers fit 32 bits, and the seed's 64."""

    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field([], max_length=MAX_STOPS)
    seed: int | None = Field(None, ge=0, lt=2**63)

    @field_validator("top_k")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 leaves no token to sample; -1 turns it off")
        return value

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.max_tokens, tuple(self.stop), self.seed)


class LimitsBody(AdminModel):
    max_turns: int | None = Field(None, ge=0, lt=2**31)
    max_context: int | None = Field(None, ge=2, lt=2**31)
    turn_timeout: float | None = Field(600.0, gt=0, lt=2**31)
    max_tokens: int | None = Field(None, ge=0, lt=2**53)
    max_bytes: int | None = Field(None, ge=0, lt=2**53)
    ttl: float | None = Field(None, gt=0, lt=2**31)
    idle_timeout: float | None = Field(None, gt=0, lt=2**31)

    def limits(self) -> Limits:
        return Limits(**self.model_dump())


class OpenBody(AdminModel):
    id: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,128}$")
    sampling: SamplingBody | None = None
    limits: LimitsBody | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    group: str = ""
    rollout: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("metadata")
    @classmethod
    def _writable(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Samples carry it: what no export could write is refused when it comes."""
        check_json(value)
        return value


class RewardBody(AdminModel):
    value: float


class FinishBody(AdminModel):
    reward: float | None = None


def add_routes(app: web.Application, sessions: Sessions, pools: Mapping[str, Pool], authorize: Callable[[web.Request], None]) -> None:
    api = _Admin(sessions, Engines(pools))
    for method, path, call in (
        ("POST", "/sessions", api.open),
        ("GET", "/sessions", api.list),
        ("GET", "/sessions/{id}", api.get),
        ("DELETE", "/sessions/{id}", api.drop),
        ("GET", "/sessions/{id}/tree", api.tree),
        ("GET", "/sessions/{id}/samples", api.samples),
        ("POST", "/sessions/{id}/reward", api.reward),
        ("POST", "/sessions/{id}/finish", api.finish),
        ("GET", "/engines", api.engines),
        ("POST", "/pause", api.pause),
        ("POST", "/resume", api.resume),
    ):
        app.router.add_route(method, f"/api/v1{path}", _guarded(call, authorize))


def _guarded(call: Call, authorize: Callable[[web.Request], None]) -> Call:
    async def handler(http: web.Request) -> web.Response:
        authorize(http)
        return await call(http)

    return handler


def session_urls(origin: str, key: str) -> Mapping[str, Mapping[str, str]]:
    """Where an agent finds its session, and the environment that points it there."""
    base = f"{origin}/s/{key}"
    return {
        "urls": {"anthropic": base, "openai": f"{base}/v1", "gemini": base},
        "env": {
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": key,
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": key,
            "GOOGLE_GEMINI_BASE_URL": base,
            "GEMINI_API_KEY": key,
        },
    }


class _Admin:
    def __init__(self, sessions: Sessions, engines: Engines) -> None:
        self._sessions = sessions
        self._engines = engines

    async def open(self, http: web.Request) -> web.Response:
        origin, body = auth.origin(http), await read_model(http, OpenBody)
        session, key = await self._sessions.open(
            session_id=body.id,
            sampling=body.sampling.sampling() if body.sampling else None,
            limits=body.limits.limits() if body.limits else None,
            group=body.group,
            rollout=body.rollout,
            labels=body.labels,
            metadata=body.metadata,
        )
        return _json({"id": session.row.id, "key": key, **session_urls(origin, key)}, status=201)

    async def list(self, http: web.Request) -> web.Response:
        limit, offset = _number(http, "limit", 100, 1000), _number(http, "offset", 0, 2**31)
        rows = await self._sessions.entries(limit, offset)
        return _json({"sessions": [await self._entry(r.id) for r in rows], "limit": limit, "offset": offset})

    async def _entry(self, session_id: str) -> orjson.Fragment:
        """One session of the list. One that cannot be read hides no other."""
        try:
            return orjson.Fragment(_dump(_row(await self._sessions.by_id(session_id))))
        except (TurnloomError, TypeError, ValueError, RecursionError) as error:
            swallowed(log, "gateway.list", "session %s cannot be listed: %s", session_id, error)
            return orjson.Fragment(_dump({"id": session_id, "error": str(error)}))

    async def get(self, http: web.Request) -> web.Response:
        return _json(_row(await self._session(http)))

    async def tree(self, http: web.Request) -> web.Response:
        return _json(tree_json(await self._session(http)))

    async def samples(self, http: web.Request) -> web.Response:
        chosen = http.query.get("format", "canonical")
        if chosen != "canonical":
            raise BadRequest(f"format {chosen!r} is not served here; use canonical, and `turnloom export` for other formats")
        longest = _longest(http)
        skip = http.query.getall("skip_label", None)
        policy = DEFAULT_TRAINING if skip is None else Training(frozenset(filter(None, skip)))
        lines = map(to_line, (await self._session(http)).unroll(longest, policy).samples)
        return web.Response(body=b"".join(line + b"\n" for line in lines), content_type="application/x-ndjson")

    async def reward(self, http: web.Request) -> web.Response:
        body = await read_model(http, RewardBody)
        session = await self._session(http)
        await session.reward(body.value)
        return _json(_row(session))

    async def finish(self, http: web.Request) -> web.Response:
        body = await read_model(http, FinishBody)
        session = await self._session(http)
        await session.finish(body.reward)
        return _json(_row(session))

    async def drop(self, http: web.Request) -> web.Response:
        await self._sessions.drop(http.match_info["id"])
        return web.Response(status=204)

    async def engines(self, http: web.Request) -> web.Response:
        return _json(await self._engines.list())

    async def pause(self, http: web.Request) -> web.Response:
        return _json(await self._engines.pause(await read_model(http, PauseBody)))

    async def resume(self, http: web.Request) -> web.Response:
        return _json(await self._engines.resume(await read_model(http, ResumeBody)))

    async def _session(self, http: web.Request) -> Session:
        return await self._sessions.by_id(http.match_info["id"])


def _row(session: Session) -> dict[str, Any]:
    row = session.row
    return {
        "id": row.id,
        "status": row.status,
        "ended": row.ended,
        "reached": list(row.reached),
        "created": row.created,
        "group": row.group,
        "rollout": row.rollout,
        "labels": dict(row.labels),
        "metadata": dict(row.metadata),
        "reward": row.reward,
        "in_flight": session.in_flight,
        **summary(session.tree),
    }


def tree_json(session: Session) -> dict[str, Any]:
    """Nodes and turns as they are; token columns as lists."""
    nodes = [
        {
            "id": n.id,
            "parent": n.parent,
            "role": n.message.role if n.message else None,
            "text": n.message.text if n.message else None,
            "reasoning": n.message.reasoning if n.message else None,
            "calls": [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in n.message.calls] if n.message else [],
            "tools": [t.name for t in n.tools],
            "turn": n.turn,
        }
        for n in session.tree.nodes
    ]
    turns = [
        {
            "id": t.id,
            "index": t.index,
            "base": t.base,
            "fork": asdict(t.fork) if t.fork else None,
            "prompt_len": t.prompt_len,
            "kept": t.kept,
            "appended": t.appended.tolist(),
            "output": t.output.tolist(),
            "logprobs": t.logprobs.tolist(),
            "finish_reason": t.finish.reason,
            "outcome": t.outcome,
            "label": t.label,
            "pool": t.pool or POLICY,
            "model": t.model,
            "versions": [asdict(span) for span in t.versions],
            "pieces": [asdict(piece) for piece in t.pieces],
            "abort": t.abort,
            "surplus": t.surplus,
            "cached_tokens": t.cached_tokens,
            "calls": [{name: getattr(c, name) for name in ("status", "name", "start", "end", "first_token", "end_token")} for c in t.calls],
            "error": t.error,
        }
        for t in session.tree.turns.values()
    ]
    return {"id": session.row.id, "nodes": nodes, "turns": turns}


def _longest(http: web.Request) -> Longest:
    """`max_tokens` and `overlong`, as `turnloom export` takes them."""
    most = _number(http, "max_tokens", 0, 2**31 - 1, least=2) if "max_tokens" in http.query else None
    chosen = http.query.get("overlong", Overlong.TRUNCATE)
    if chosen not in list(Overlong):
        raise BadRequest(f"overlong: must be one of {', '.join(Overlong)}")
    return Longest(most, Overlong(chosen))


def _number(http: web.Request, name: str, default: int, most: int, least: int = 0) -> int:
    raw = http.query.get(name, str(default))
    if not raw.isdecimal() or len(raw) > 10 or not least <= int(raw) <= most:
        raise BadRequest(f"{name}: must be a whole number from {least} to {most}")
    return int(raw)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_dump(value), status=status, content_type="application/json")


def _dump(value: Any) -> bytes:
    """JSON bytes, of values as well that only Python's own callers can bring: metadata that is no JSON is spelled as text."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, default=str, allow_nan=False).encode()


def error_response(error: TurnloomError) -> web.Response:
    return _json({"error": {"type": type(error).__name__, "message": str(error)}}, status=error.status)
