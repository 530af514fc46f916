"""The HTTP application: routes, bodies, errors. It decides nothing about tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from turnloom.errors import NotFound, TurnloomError
from turnloom.gateway import admin, auth
from turnloom.gateway.body import MAX_BODY, read_body
from turnloom.gateway.respond import KEEPALIVE_SECONDS, Responder, http_error
from turnloom.gateway.session import Session
from turnloom.gateway.sessions import Sessions
from turnloom.gateway.turn import Parts, count_tokens, take_turn
from turnloom.types import Request
from turnloom.wire.anthropic import AnthropicDialect
from turnloom.wire.contract import Dialect

log = logging.getLogger("turnloom.gateway")

_INLINE_BODY = 256 * 1024
"""A body this large takes about a millisecond to read; larger ones are read in a thread."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayApp:
    """The handlers and what they share."""

    def __init__(self, parts: Parts, sessions: Sessions, *, admin_key: str = "", keepalive: float = KEEPALIVE_SECONDS) -> None:
        self.parts = parts
        self.sessions = sessions
        self.admin_key = admin_key
        self._keepalive = keepalive
        self._anthropic: Dialect = AnthropicDialect()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._errors])
        for prefix in ("", "/s/{key}"):
            app.router.add_post(f"{prefix}/v1/messages", self._messages)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/api/hello", self._hello)
            app.router.add_get(prefix or "/", self._hello)
        app.router.add_get("/s/{key}/", self._hello)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        admin.add_routes(app, self.sessions, self.parts, lambda http: auth.require_admin(http, self.admin_key))
        return app

    async def _messages(self, http: web.Request) -> web.StreamResponse:
        session = await self.sessions.by_key(auth.session_key(http))
        request = await self._read(http, self._anthropic)
        out = Responder(http, self._anthropic, stream=request.stream, keepalive=self._keepalive)
        return await self._answer(session, self._anthropic, request, out)

    async def _answer(self, session: Session, dialect: Dialect, request: Request, out: Responder) -> web.StreamResponse:
        try:
            await take_turn(self.parts, session, dialect, request, out)
        except TurnloomError as error:
            self._count_error(error)
            return await out.error(error)
        assert out.response is not None, "a turn that ended well was answered"
        return out.response

    async def _count(self, http: web.Request) -> web.StreamResponse:
        session = await self.sessions.by_key(auth.session_key(http))
        request = await self._read(http, self._anthropic)
        tokens = await count_tokens(self.parts, session, request)
        return web.Response(body=self._anthropic.count(tokens), content_type="application/json")

    async def _read(self, http: web.Request, dialect: Dialect) -> Request:
        body = await read_body(http)
        read = partial(dialect.read, body, stream=_accepts_stream(http))
        return read() if len(body) <= _INLINE_BODY else await asyncio.to_thread(read)

    async def _models(self, http: web.Request) -> web.Response:
        await self.sessions.by_key(auth.session_key(http))
        model = self.parts.default_model
        entry = {"type": "model", "id": model, "display_name": model, "created_at": "2025-01-01T00:00:00Z"}
        return web.json_response({"data": [entry], "has_more": False, "first_id": model, "last_id": model})

    async def _hello(self, http: web.Request) -> web.Response:
        """Agents probe the root before they start; there is nothing to tell them."""
        return web.Response(text="turnloom\n")

    async def _healthz(self, http: web.Request) -> web.Response:
        ready = await self.parts.engine.health()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _metrics(self, http: web.Request) -> web.Response:
        self.parts.metrics.sessions.set(self.sessions.loaded)
        return web.Response(body=self.parts.metrics.render(), content_type="text/plain", charset="utf-8")

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error leaves in the caller's own shape."""
        try:
            return await handler(request)
        except TurnloomError as error:
            failure: TurnloomError = error
        except web.HTTPNotFound:
            failure = NotFound(f"no route {request.method} {request.path}")
        except web.HTTPMethodNotAllowed as error:
            failure = NotFound(f"{request.path} answers {', '.join(sorted(error.allowed_methods))}, not {request.method}")
        except web.HTTPException:
            raise
        except ConnectionError:
            log.info("client left: %s %s", request.method, request.path)
            raise
        except Exception as error:
            log.exception("unexpected error on %s %s", request.method, request.path)
            failure = TurnloomError(f"internal error ({type(error).__name__}); the gateway's log has the details")
        self._count_error(failure)
        of_admin = request.path.startswith("/api/v1/")
        response = admin.error_response(failure) if of_admin else http_error(self._anthropic.error(failure))
        if request.content.exception() is not None:
            response.force_close()  # where a broken body ends, and the next request begins, is not known
        return response

    def _count_error(self, error: TurnloomError) -> None:
        self.parts.metrics.errors.labels(type(error).__name__).inc()


def _accepts_stream(http: web.Request) -> bool:
    """What a request whose body does not say wants."""
    return "text/event-stream" in http.headers.get("Accept", "")
