"""What one request may bring, told before any of it is parsed. What a session may use is its own (`store.contract.Limits`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from turnloom.errors import BadRequest, ConfigError, LimitReached
from turnloom.gateway import auth


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Raises ConfigError where one of them leaves nothing."""

    body_bytes: int = 32 * 2**20
    """Of a body as it comes, and of its text when it is decompressed. It is the limit of Anthropic's own Messages API."""
    admin_bytes: int = 2**20
    """The same for the bodies of the admin API. Metadata and labels are copied into every sample."""
    depth: int = 128
    """Lists and objects inside each other."""
    values: int = 1_000_000
    """JSON values of a body: strings, numbers, words, lists and objects, wherever they stand."""
    body_seconds: float = 120.0
    """From the end of the headers until all of the body is there."""
    idle_seconds: float = 600.0
    """How long a connection may take for the headers of a request, the next one's too."""
    line_bytes: int = 64 * 1024
    """Of the request line, and of one header. Agents describe their turns in headers."""
    header_bytes: int = 256 * 1024
    """Of all headers of a request, names and values."""
    headers: int = 128
    """Header lines of a request."""
    at_once: int = 256
    """Requests with one key that are being answered."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"the request limit {name} must be more than 0")


DEFAULT_LIMITS = RequestLimits()

LIMITS = web.AppKey("request_limits", RequestLimits)
"""Of the application that serves a request."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def limits_of(http: web.Request) -> RequestLimits:
    return http.config_dict.get(LIMITS, DEFAULT_LIMITS)


def install(app: web.Application, limits: RequestLimits) -> None:
    """Hold the application's requests to `limits`. An outer middleware of its own spells the errors."""
    app[LIMITS] = limits
    app.middlewares.append(gate())


def guard(server: web.Server) -> None:
    """What the server itself answers, before any middleware, repeats nothing of what was sent: that may hold a key."""
    server.__class__ = _Server
    handle = server.request_handler

    async def guarded(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "100-continue").lower() != "100-continue":
            return web.Response(status=417, text="Expect: only 100-continue is known here\n")
        return await handle(request)

    server.request_handler = guarded


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        handler = super().__call__()
        handler.__class__ = _Handler
        return handler


class _Handler(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)
        said = (
            "internal error; the log has the details"
            if status >= 500
            else f"this is no HTTP that is understood here ({type(exc).__name__})"
        )
        response = web.Response(status=status, text=said + "\n")
        response.force_close()
        return response


def gate() -> Middleware:
    """Raises BadRequest for too many or too long headers, LimitReached for too many requests with one key at once."""
    busy: Counter[str] = Counter()

    @web.middleware
    async def gated(request: web.Request, handler: Handler) -> web.StreamResponse:
        limits = limits_of(request)
        check_headers(request, limits)
        key = auth.session_key(request)
        if not key:
            return await handler(request)
        if busy[key] >= limits.at_once:
            raise LimitReached(f"{limits.at_once} requests with this key are being answered; at most {limits.at_once} are at once")
        busy[key] += 1
        try:
            return await handler(request)
        finally:
            busy[key] -= 1
            if not busy[key]:
                del busy[key]

    return gated


def check_headers(http: web.Request, limits: RequestLimits) -> None:
    """Raises BadRequest, also for a body in another coding than plain chunks, after which no request is read."""
    if http.headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        http.protocol.close()
        raise BadRequest("Transfer-Encoding: only chunked is supported")
    if len(http.raw_headers) > limits.headers:
        raise BadRequest(f"the request has {len(http.raw_headers)} headers; at most {limits.headers} are supported")
    size = sum(len(name) + len(value) for name, value in http.raw_headers)
    if size > limits.header_bytes:
        raise BadRequest(f"the headers of the request have {size} bytes; at most {limits.header_bytes} are supported")


def server_options(limits: RequestLimits) -> dict[str, Any]:
    """For `web.AppRunner`. The HTTP parser's own count of headers is looser than ours, whose answer has the dialect's shape."""
    return {
        "max_line_size": limits.line_bytes,
        "max_field_size": limits.line_bytes,
        "max_headers": 2 * limits.headers,
        "keepalive_timeout": limits.idle_seconds,
        "auto_decompress": False,
    }
