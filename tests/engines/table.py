"""docs/engines.md's table of what a run showed: engine × version × check figure × abort time × streaming × versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """What each engine showed in this run, by engine; a column is filled in by the test that measures it."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def note(self, engine: str, **columns: Any) -> None:
        self.rows.setdefault(engine, {}).update(columns)
