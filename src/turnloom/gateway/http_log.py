"""The HTTP server's own log: what a client sent never stands in it.

A request that is no HTTP is logged by the server with the line that offends,
which may hold a session's key or a prompt. Here the error's class is all that is
said of it. A client that is gone when it is written to is no error, and the
gateway says so in a line of its own. Errors of any other kind keep their traceback.
"""

from __future__ import annotations

import logging

from aiohttp.http import HttpProcessingError


class _Unquoted(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            return False
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "a request that is no HTTP: %s", (type(error).__name__,)
            record.exc_info, record.exc_text = None, None
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
        return True


def server_log() -> logging.Logger:
    log = logging.getLogger("turnloom.gateway.http")
    if not any(isinstance(each, _Unquoted) for each in log.filters):
        log.addFilter(_Unquoted())
    return log
