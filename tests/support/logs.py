"""What a process writes to its log, as people and machines are shown it, and as it was before anything was masked."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from turnloom.gateway.logs import InTurn, JSONFormatter, TextFormatter


@dataclass
class Lines:
    records: list[logging.LogRecord] = field(default_factory=list)
    text: str = ""
    raw: str = ""
    """As an ordinary formatter writes it."""
    parsed: list[dict[str, Any]] = field(default_factory=list)

    def of(self, logger: str) -> list[dict[str, Any]]:
        return [line for line in self.parsed if line["logger"] == logger]


@contextmanager
def written(level: int = logging.DEBUG) -> Iterator[Lines]:
    """Every line from here to the end of the block, whoever writes it."""
    lines = Lines()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            machine = JSONFormatter().format(record)
            assert "\n" not in machine
            lines.parsed.append(json.loads(machine))
            lines.text += TextFormatter().format(record) + "\n"
            record.exc_text = None
            lines.raw += logging.Formatter("%(message)s %(session)s %(turn)s").format(record) + "\n"
            record.exc_text = None
            lines.records.append(record)

    root, handler = logging.getLogger(), Handler()
    handler.addFilter(InTurn())
    before = root.level
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
