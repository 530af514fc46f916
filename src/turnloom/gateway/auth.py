"""Who is asking: a session by its key, or the operator by the admin key."""

from __future__ import annotations

import hmac

from aiohttp import web

from turnloom.errors import Unauthorized


def session_key(http: web.Request) -> str:
    """The path's key before the bearer token before those of x-api-key, x-goog-api-key and the query; "" where there is none."""
    headers = http.headers
    return (
        http.match_info.get("key", "")
        or bearer(http)
        or headers.get("x-api-key", "")
        or headers.get("x-goog-api-key", "")
        or http.query.get("key", "")
    )


def bearer(http: web.Request) -> str:
    scheme, _, token = http.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def require_admin(http: web.Request, admin_key: str) -> None:
    """Raises Unauthorized. An empty admin key locks the admin API."""
    given = bearer(http)
    if not admin_key or not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), admin_key.encode()):
        raise Unauthorized("the admin API needs `Authorization: Bearer ADMIN_KEY`")
