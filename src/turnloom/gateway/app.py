"""The HTTP application: routes, bodies, errors. It decides nothing about tokens."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from aiohttp import web

from turnloom.core.retry import Intent
from turnloom.core.unroll import DEFAULT_TRAINING, UNLIMITED, Longest, Training
from turnloom.engine.pool import Pool
from turnloom.errors import BadRequest, NotFound, TurnloomError
from turnloom.gateway import admin, auth
from turnloom.gateway import routes as dialect_routes
from turnloom.gateway.admin_sessions import SessionCalls
from turnloom.gateway.answer import answer, identified, intent_of, new_turns
from turnloom.gateway.body import MAX_BODY, read_body
from turnloom.gateway.labels import Labeler, labelled
from turnloom.gateway.logs import OF_SESSION
from turnloom.gateway.metrics import ADMIN
from turnloom.gateway.observe import in_session
from turnloom.gateway.openapi import document
from turnloom.gateway.pools import Route, routed
from turnloom.gateway.respond import KEEPALIVE_SECONDS, OtherChoiceFailed, Responder, http_error
from turnloom.gateway.session import Session
from turnloom.gateway.sessions import Sessions
from turnloom.gateway.turn import Parts, count_tokens
from turnloom.types import Request
from turnloom.wire.contract import COUNT, DEFAULT_READING, Dialect, Envelope, Reading
from turnloom.wire.fields import MAX_MODEL, shown
from turnloom.wire.labels import recognise

log = logging.getLogger("turnloom.gateway")

_INLINE_BODY = 16 * 1024
"""A body this large takes about a millisecond to read, whatever it holds; larger ones are read in a thread."""

SPOKEN = web.RequestKey("dialect", Dialect)
"""The dialect of the route that took the request."""

_KEY_IN_PATH = re.compile(r"/s/[^/]+")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayApp:
    """The handlers and what they share."""

    def __init__(
        self,
        parts: Parts,
        sessions: Sessions,
        pools: Mapping[str, Pool],
        *,
        admin_key: str = "",
        keepalive: float = KEEPALIVE_SECONDS,
        reading: Reading = DEFAULT_READING,
        labeler: Labeler = recognise,
        routes: Sequence[Route] = (),
        longest: Longest = UNLIMITED,
        training: Training = DEFAULT_TRAINING,
    ) -> None:
        self.parts = parts
        self.sessions = sessions
        self.admin_key = admin_key
        self._keepalive = keepalive
        self._pools = pools
        self._labeler = labeler
        self._routes = routes
        self._calls = SessionCalls(sessions, longest, training)
        self._dialects = dialect_routes.make_dialects(reading)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._errors])
        router = app.router
        for prefix in ("", "/s/{key}"):
            for path, name in dialect_routes.TURNS.items():
                router.add_post(prefix + path, partial(self._turn, getattr(self._dialects, name)))
            for path, name in dialect_routes.COUNTS.items():
                router.add_post(prefix + path, partial(self._count, getattr(self._dialects, name)))
            router.add_get(f"{prefix}/v1/responses", self._websocket)
            for version in dialect_routes.VERSIONS:
                router.add_post(f"{prefix}{version}/models/{{model:.+}}:{{verb:[A-Za-z]+}}", self._gemini)
                router.add_get(f"{prefix}{version}/models", self._models)
                router.add_get(f"{prefix}{version}/models/{{model:.+}}", self._model)
            router.add_get(f"{prefix}/api/hello", self._hello)
            router.add_get(prefix or "/", self._hello)
        router.add_get("/s/{key}/", self._hello)
        router.add_get("/healthz", self._healthz)
        router.add_get("/metrics", self._metrics)
        router.add_get("/openapi.json", self._openapi)
        admin.add_routes(app, self._calls, self._pools, lambda http: auth.require_admin(http, self.admin_key))
        return app

    async def _turn(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        http[SPOKEN] = dialect
        with (await self.sessions.by_key(auth.session_key(http))).held() as session:
            in_session(session.row.id)
            http[OF_SESSION] = session.row.id
            return await self._answered(session, dialect, http)

    async def _answered(self, session: Session, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        request = await self._read(http, dialect)
        self._count_read(request)
        intent = intent_of(session, http.headers)
        out = Responder(http, dialect, stream=request.stream, choices=request.choices, keepalive=self._keepalive)
        try:
            await self._choices(session, dialect, request, intent, out)
            assert out.response is not None, "a turn that ended well was answered"
            return out.response
        except ConnectionError:
            raise
        except TurnloomError as error:
            failure = error
        except Exception as error:
            log.exception("unexpected error on %s %s", http.method, _shown(http))
            failure = _internal(error)
        finally:
            await out.close()
        self.parts.metrics.error(failure, dialect.name)
        return await out.error(failure)

    async def _choices(self, session: Session, dialect: Dialect, request: Request, intent: Intent, out: Responder) -> None:
        """One reply for each choice, at once. Each comes to its own end; of several failures the first cause is raised."""

        async def take(number: int) -> None:
            try:
                await answer(self.parts, session, dialect, request, intent, out.choices[number])
            finally:
                out.lose(number)

        if request.choices == 1:
            return await take(0)
        with session.admit(new_turns(self.parts, session, request, intent)):
            ended = await asyncio.gather(*map(take, range(request.choices)), return_exceptions=True)
        failures = [error for error in ended if isinstance(error, BaseException)]
        if failures:
            raise min(failures, key=lambda error: isinstance(error, OtherChoiceFailed))

    async def _count(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        http[SPOKEN] = dialect
        with (await self.sessions.by_key(auth.session_key(http))).held() as session:
            in_session(session.row.id)
            tokens = await count_tokens(self.parts, session, await self._read(http, dialect))
        return web.Response(body=dialect.count(tokens), content_type="application/json")

    async def _gemini(self, http: web.Request) -> web.StreamResponse:
        verb = http.match_info["verb"]
        if verb == COUNT:
            return await self._count(self._dialects.gemini, http)
        if verb in dialect_routes.GENERATE:
            return await self._turn(self._dialects.gemini, http)
        http[SPOKEN] = self._dialects.gemini
        raise NotFound(f"models have no method {verb!r} here; there are {', '.join((*dialect_routes.GENERATE, COUNT))}")

    async def _read(self, http: web.Request, dialect: Dialect) -> Request:
        body, envelope = await read_body(http), dialect_routes.envelope_of(http)
        self.parts.observe.received(http.headers)
        read = partial(self._understood, dialect, envelope, body)
        return read() if len(body) <= _INLINE_BODY else await asyncio.to_thread(read)

    def _understood(self, dialect: Dialect, envelope: Envelope, body: bytes) -> Request:
        """The request, what it is for, whose model answers it, and what it is known by."""
        request = dialect.read(body, envelope)
        if len(request.model) > MAX_MODEL:
            raise BadRequest(f"model: the name has {len(request.model)} characters; at most {MAX_MODEL} are supported")
        request = labelled(self._labeler, dialect.name, envelope, request)
        request = replace(request, pool=routed(self._routes, request, envelope))
        return identified(request, dialect.name, envelope, body)

    async def _websocket(self, http: web.Request) -> web.StreamResponse:
        """Codex first asks for a WebSocket; 426 sends it to POST at once."""
        http[SPOKEN] = self._dialects.openai_responses
        if http.headers.get("Upgrade", "").lower() != "websocket":
            raise NotFound("responses are made with POST; none can be fetched again")
        response = http_error(self._dialects.openai_responses.error(NotFound("no WebSocket here; POST to /v1/responses")))
        response.set_status(426)
        return response

    async def _models(self, http: web.Request) -> web.Response:
        dialect = dialect_routes.dialect_of(http, self._dialects)
        await self.sessions.by_key(auth.session_key(http))
        names = dict.fromkeys(served.name for served in (self.parts.policy, *self.parts.others.values()))
        return web.Response(body=dialect.models(list(names)), content_type="application/json")

    async def _model(self, http: web.Request) -> web.Response:
        """Every name is a model, as in requests."""
        dialect = dialect_routes.dialect_of(http, self._dialects)
        await self.sessions.by_key(auth.session_key(http))
        return web.Response(body=dialect.model(http.match_info["model"]), content_type="application/json")

    async def _hello(self, http: web.Request) -> web.Response:
        """Agents probe the root before they start; there is nothing to tell them."""
        return web.Response(text="turnloom\n")

    async def _healthz(self, http: web.Request) -> web.Response:
        models = self.parts.policy, *self.parts.others.values()
        # One that stops says so at once: load balancers leave before the last replies are out.
        ready = not self.sessions.stopping and all(await asyncio.gather(*(served.engine.health() for served in models)))
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _metrics(self, http: web.Request) -> web.Response:
        self.parts.metrics.state(self.sessions.loaded, await self.sessions.stats())
        return web.Response(body=self.parts.metrics.render(), content_type="text/plain", charset="utf-8")

    async def _openapi(self, http: web.Request) -> web.Response:
        return web.Response(body=document(), content_type="application/json")

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error leaves in the caller's own shape."""
        try:
            return await handler(request)
        except TurnloomError as error:
            failure: TurnloomError = error
        except web.HTTPNotFound:
            failure = NotFound(f"no route {request.method} {_shown(request)}")
        except web.HTTPMethodNotAllowed as error:
            failure = NotFound(f"{_shown(request)} answers {', '.join(sorted(error.allowed_methods))}, not {request.method}")
        except web.HTTPException:
            raise
        except ConnectionError:
            log.info("client left: %s %s", request.method, _shown(request))
            raise
        except Exception as error:
            log.exception("unexpected error on %s %s", request.method, _shown(request))
            failure = _internal(error)
        if request.path.startswith("/api/v1/"):
            self.parts.metrics.error(failure, ADMIN)
            response = admin.error_response(failure)
        else:
            dialect = request.get(SPOKEN) or dialect_routes.dialect_of(request, self._dialects)
            self.parts.metrics.error(failure, dialect.name)
            response = http_error(dialect.error(failure))
        if request.content.exception() is not None:
            response.force_close()  # where a broken body ends, and the next request begins, is not known
        return response

    def _count_read(self, request: Request) -> None:
        self.parts.metrics.declined.inc(len(request.declined))
        self.parts.metrics.images.inc(request.images)
        if request.declined:
            log.info("not offered to the model, since they run on a provider's servers: %s", ", ".join(map(shown, request.declined[:20])))


def _internal(error: Exception) -> TurnloomError:
    return TurnloomError(f"internal error ({type(error).__name__}); the gateway's log has the details")


def _shown(http: web.Request) -> str:
    """The path without a session's key, in one line."""
    return repr(_KEY_IN_PATH.sub("/s/…", http.path))[1:-1][:300]
