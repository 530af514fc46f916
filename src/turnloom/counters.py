"""What this whole process counts, whichever gateway, engine or store it belongs to. A gateway serves it beside its own metrics."""

from __future__ import annotations

import logging
from typing import Any

from prometheus_client import CollectorRegistry, Counter, ProcessCollector

REGISTRY = CollectorRegistry()

ProcessCollector(registry=REGISTRY)

SWALLOWED = Counter("turnloom_swallowed", "Exceptions that were logged and went no further, by place.", ["where"], registry=REGISTRY)


def swallowed(log: logging.Logger, where: str, message: str, *args: Any, level: int = logging.WARNING, trace: bool = False) -> None:
    """Log an exception that goes no further, and count it.

    `where` is written into the code, never put together: it is a metric's label.
    `trace` adds the traceback of the exception that is being handled.
    """
    SWALLOWED.labels(where).inc()
    log.log(level, message, *args, exc_info=trace, stacklevel=2)
