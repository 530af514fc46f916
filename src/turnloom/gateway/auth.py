"""Who is asking: a session by its key, or the operator by the admin key."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

from aiohttp import web

from turnloom.errors import BadRequest, Unauthorized

MAX_KEY = 512
"""Characters. Ours have 46; clients that name sessions of their own may have longer ones."""

_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


def session_key(http: web.Request) -> str:
    """The path's key before the bearer token before those of x-api-key, x-goog-api-key and the query; "" where there is none.

    Agents send a key of their own beside the address that holds the session's, so
    several places may disagree, and the first counts. One place that brings two
    different keys is refused: what stands before us may have read the other.

    Raises BadRequest, and Unauthorized for what is too long to be a key.
    """
    headers = http.headers
    key = (
        http.match_info.get("key", "")
        or bearer(http)
        or _only(headers.getall("x-api-key", ()), "x-api-key")
        or _only(headers.getall("x-goog-api-key", ()), "x-goog-api-key")
        or _only(http.query.getall("key", ()), "key")
    )
    if len(key) > MAX_KEY:
        raise Unauthorized(f"no key has more than {MAX_KEY} characters")
    return key


def bearer(http: web.Request) -> str:
    """Raises BadRequest."""
    scheme, _, token = _only(http.headers.getall("Authorization", ()), "Authorization").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _only(values: Iterable[str], where: str) -> str:
    found = set(values)
    if len(found) > 1:
        raise BadRequest(f"{where} is sent {len(found)} times, each with another value; send it once")
    return found.pop() if found else ""


def require_admin(http: web.Request, admin_key: str) -> None:
    """Raises Unauthorized. An empty admin key locks the admin API."""
    given = bearer(http)
    if not admin_key or not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), admin_key.encode()):
        raise Unauthorized("the admin API needs `Authorization: Bearer ADMIN_KEY`")


def origin(http: web.Request) -> str:
    """Where the caller reached us, to put before the addresses that it is told: its Host header, where that is a host and no more.

    Raises BadRequest.
    """
    if not _HOST.fullmatch(http.host):
        raise BadRequest("Host: must be a name or an address, and a port")
    return f"{http.scheme}://{http.host}"
