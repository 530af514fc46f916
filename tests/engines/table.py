"""docs/engines.md's table of what a run showed: engine × version × check figure × abort time × streaming × versions."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.engines.setup import SGLANG, VLLM

DOCUMENT = Path(__file__).parents[2] / "docs" / "engines.md"
_BEGIN, _END = "<!-- table -->\n", "<!-- /table -->"

COLUMNS = {
    "check": "logprobs recomputed, largest difference in nats",
    "streaming": "streams",
    "abort": "told to stop, until it is known to be gone",
    "versions": "weight versions",
}

SGLANG_ROW, ROUTER_ROW, VLLM_ROW, LLAMA_ROW, EMBEDDED_ROW = (
    f"SGLang {SGLANG.version}",
    f"SGLang {SGLANG.version}, two workers behind sglang-router 0.3.2",
    f"vLLM {VLLM.version}",
    f"llama.cpp server, xllamacpp {version('xllamacpp')}",
    f"embedded, xllamacpp {version('xllamacpp')}",
)
ROWS = (SGLANG_ROW, ROUTER_ROW, VLLM_ROW, LLAMA_ROW, EMBEDDED_ROW)

FACTS = {
    "killed": "One of two workers killed with SIGKILL while 16 agents streamed",
    "updated": "New weights loaded into both workers while 16 agents streamed, the gateway holding",
    "paused": "The same, the workers paused by the trainer",
    "cancelled": "200 turns cancelled at random moments",
}
"""What is said below the table, of the router."""


@dataclass
class Table:
    """What each engine showed in this run. A column is filled in by the test that measures it."""

    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

    def note(self, engine: str, **columns: str) -> None:
        self.rows.setdefault(engine, {}).update(columns)

    def tell(self, fact: str, words: str) -> None:
        self.facts[fact] = words

    def missing(self) -> list[str]:
        """What this run did not show: a table of some engines would be a wrong one."""
        rows = [row for row in ROWS if not self.rows.get(row, {}).keys() >= COLUMNS.keys()]
        return rows + [fact for fact in FACTS if fact not in self.facts]

    def write(self) -> None:
        """Put it into the document, in the place of the last run's."""
        before, _, rest = DOCUMENT.read_text("utf-8").partition(_BEGIN)
        _, _, after = rest.partition(_END)
        DOCUMENT.write_text(before + _BEGIN + self.text() + _END + after, "utf-8")

    def text(self) -> str:
        lines = ["| engine | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += ["| " + " | ".join([row, *(self.rows[row][column] for column in COLUMNS)]) + " |" for row in ROWS]
        return "\n".join([*lines, "", *(f"- {said}: {self.facts[fact]}." for fact, said in FACTS.items())]) + "\n"
