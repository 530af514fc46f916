"""What log lines look like and what each one carries: the session and the turn it was written in. No key stands in one.

Nothing here writes a log line of its own, but for the access log, which is off unless asked for.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO
from urllib.parse import urlencode

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from turnloom.core.dump import escaped

Format = Literal["text", "json"]

SESSION: ContextVar[str] = ContextVar("turnloom_session", default="")
"""The id of the session that the current task works for."""

TURN: ContextVar[str] = ContextVar("turnloom_turn", default="")

FIELDS = "fields"
"""The attribute of a record that holds a mapping of what its message says, for those who read JSON: `extra={FIELDS: {…}}`."""

OF_SESSION = web.RequestKey("session", str)
"""What a request holds the id of its session under: the access log's line is written when its task's context is gone."""

ACCESS = logging.getLogger("turnloom.access")

_KEYS = re.compile(r"(/s/)[^/?#\s\"']+|([?&]key=)[^&#\s\"']+|tl-[A-Za-z0-9_-]{43}")


def masked(text: str) -> str:
    """The text without the keys of sessions: in a path, in a query, and wherever one of our own making stands."""
    return _KEYS.sub(lambda found: f"{found[1] or found[2] or 'tl-'}…", text)


def shown_path(request: web.BaseRequest) -> str:
    """Path and query as they were meant, percent escapes read, without what stands where a session's key does."""
    parts = request.path.split("/")
    if len(parts) > 2 and parts[1] == "s":
        parts[2] = "…"
    query = urlencode([(name, "…" if name == "key" else value) for name, value in request.query.items()], safe="…")
    return masked("/".join(parts) + (f"?{query}" if query else ""))


class InTurn(logging.Filter):
    """Gives every record `session` and `turn`, "" where it was written outside of one. It holds nothing back."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.session = getattr(record, "session", "") or SESSION.get()
        record.turn = getattr(record, "turn", "") or TURN.get()
        return True


class TextFormatter(logging.Formatter):
    """For people. Control characters, which an agent may have written, are shown escaped; a traceback keeps its lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = [f"{name}={value}" for name in ("session", "turn") if (value := getattr(record, name, ""))]
        return escaped(" ".join([super().formatMessage(record), *ids]))

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(escaped(line) for line in masked(super().format(record)).split("\n"))


class JSONFormatter(logging.Formatter):
    """One object a line: `ts` (UTC), `level`, `logger`, `message`, `session`, `turn`, the record's own fields, and what was raised."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            **getattr(record, FIELDS, {}),
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": masked(record.getMessage()),
            "session": getattr(record, "session", ""),
            "turn": getattr(record, "turn", ""),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
            line["traceback"] = masked("".join(traceback.format_exception(*record.exc_info)))
        return json.dumps(line, default=str)


class _Lines(logging.StreamHandler[TextIO]):
    """The handler that `configure` sets up."""


def configure(style: Format = "text", level: int = logging.WARNING) -> None:
    """Make the root logger write such lines to standard error. What somebody else has set up stays as it is; a second call counts."""
    root = logging.getLogger()
    if any(not isinstance(handler, _Lines) for handler in root.handlers):
        return
    lines: _Lines = _Lines()
    lines.setFormatter(JSONFormatter() if style == "json" else TextFormatter())
    lines.addFilter(InTurn())
    root.handlers[:] = [lines]
    root.setLevel(level)
    logging.captureWarnings(True)


def adopt(library: str) -> None:
    """Where `configure` set up the log, let a library that writes to standard error by itself write lines like all others."""
    if any(isinstance(handler, _Lines) for handler in logging.getLogger().handlers):
        own = logging.getLogger(library)
        own.handlers.clear()
        own.propagate = True


class AccessLog(AbstractAccessLogger):
    """One line a request, for aiohttp's `access_log_class`: who, what, the status, its bytes and seconds."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        path = shown_path(request)
        fields = {
            "method": request.method,
            "path": path,
            "status": response.status,
            "bytes": response.body_length,
            "seconds": round(time, 4),
        }
        self.logger.info(
            '%s "%s %s" %d %d %.3f s',
            request.remote or "-",
            request.method,
            path,
            response.status,
            response.body_length,
            time,
            extra={
                FIELDS: fields,
                "session": request.get(OF_SESSION, ""),
                "turn": response.headers.get("x-request-id", "").removeprefix("req_"),
            },
        )
