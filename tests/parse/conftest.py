"""One way to run a parser in tests: `parse(text, …)` gives everything that came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest

from turnloom.parse.contract import CallEvent, ParseEvent, ReasoningDelta, TextDelta
from turnloom.parse.formats import parser_factory
from turnloom.types import CallRecord, CallStatus, Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "force": {"type": "boolean"},
        "options": {"type": "object"},
        "items": {"type": "array"},
        "nothing": {"type": "null"},
        "either": {"type": ["string", "integer"]},
    },
}
TOOLS = tuple(Tool(name, "", json.dumps(SCHEMA)) for name in ("read_file", "write_file", "bash"))


@dataclass(frozen=True)
class Parsed:
    events: list[ParseEvent]
    records: list[CallRecord]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def reasoning(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, ReasoningDelta))

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(event.name, event.arguments) for event in self.events if isinstance(event, CallEvent)]

    @property
    def statuses(self) -> list[CallStatus]:
        return [record.status for record in self.records]


def merged(events: Iterable[ParseEvent]) -> list[ParseEvent]:
    """Neighbouring deltas of one kind as one."""
    result: list[ParseEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            result[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + event.text)
        else:
            result.append(event)
    return result


@pytest.fixture(scope="session")
def parse() -> Callable[..., Parsed]:
    def run(
        *pieces: str, form: str = "hermes", tools: Sequence[Tool] = TOOLS, reasoning_open: bool = False, reasoning: bool | None = None
    ) -> Parsed:
        parser = parser_factory(form, "<think>", reasoning=reasoning)(tools, reasoning_open)
        events = [event for piece in pieces for event in parser.feed(piece)]
        events += parser.finish()
        assert parser.finish() == []
        return Parsed(merged(events), parser.records)

    return run


@pytest.fixture(scope="session")
def account() -> Callable[..., tuple[str, str]]:
    """(reasoning, text) as the contract defines them, from the whole output at once and the spans of the calls that parsed.

    Every character is in exactly one of: reasoning, text, a call's span, framing;
    the pieces joined again are the output.
    """

    def split(output: str, parsed: Parsed, *, reasoning_open: bool = False) -> tuple[str, str]:
        pieces: list[tuple[str, str]] = []

        def take(kind: str, text: str) -> None:
            pieces.append((kind, text))

        rest = output
        blanks = output[: len(output) - len(output.lstrip())]
        opened = reasoning_open
        if output[len(blanks) :].startswith("<think>"):
            lead = blanks.removesuffix("\n")
            take("reasoning" if reasoning_open else "text", lead)
            rest = output[len(blanks) + len("<think>") :].removeprefix("\n")
            take("framing", output[len(lead) : len(output) - len(rest)])
            opened = True
        if opened:
            inside, tag, after = rest.partition("</think>")
            thought = inside.removesuffix("\n") if tag else inside
            rest = after.removeprefix("\n").removeprefix("\n")
            take("reasoning", thought)
            take("framing", output[len("".join(text for _, text in pieces)) : len(output) - len(rest)])
        at = len(output) - len(rest)
        good = [record for record in parsed.records if record.status is CallStatus.OK]
        for index, stop in enumerate([record.start for record in good] + [len(output)]):
            segment = output[at:stop]
            text = segment.removeprefix("\n") if index else segment
            take("framing", segment[: len(segment) - len(text)])
            kept = text.removesuffix("\n") if index < len(good) else text
            take("text", kept)
            take("framing", text[len(kept) :])
            if index < len(good):
                take("call", good[index].raw)
                at = good[index].end
        assert "".join(text for _, text in pieces) == output
        reasoning = "".join(text for kind, text in pieces if kind == "reasoning")
        return reasoning, "".join(text for kind, text in pieces if kind == "text")

    return split
