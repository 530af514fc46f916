"""Parsers that follow `reader`: one way to run them, and the two laws that each of their formats keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.parse.conftest import Parsed, merged
from turnloom.parse.contract import CallEvent, TextDelta
from turnloom.parse.formats import parser_factory
from turnloom.types import CallStatus, Tool

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "count": {"type": "integer"}, "force": {"type": "boolean"}, "options": {"type": "object"}},
}
TOOLS = tuple(Tool(name, "does it", json.dumps(SCHEMA)) for name in ("bash", "read_file", "mcp__files__list-all"))


@dataclass(frozen=True)
class Result(Parsed):
    """With the arguments of calls read."""

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(event.name, json.loads(event.arguments)) for event in self.events if isinstance(event, CallEvent)]

    @property
    def spelled(self) -> list[str]:
        return [event.arguments for event in self.events if isinstance(event, CallEvent)]

    @property
    def written(self) -> list[str]:
        return [event.written for event in self.events if isinstance(event, CallEvent)]


def read(form: str, pieces: Sequence[str], template: str, tools: Sequence[Tool], opened: bool) -> Result:
    parser = parser_factory(form, template)(tools, opened)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert parser.finish() == []
    return Result(merged(events), parser.records)


def run(form: str, output: str, *, template: str = "", tools: Sequence[Tool] = TOOLS, opened: bool = False) -> Result:
    """What comes out, whole and by the character; the same."""
    whole = read(form, [output], template, tools, opened)
    assert read(form, list(output), template, tools, opened) == whole
    return whole


def outputs(*fragments: str) -> st.SearchStrategy[str]:
    """Outputs made of a format's own pieces, with others between them."""
    common = (
        "\n",
        "\n\n",
        " ",
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        "\\ud83d",
        "\\ude00",
        "<",
        "|",
        "bash",
        "nope",
        ",",
        ":",
        "文",
        "\ud800",
        "1",
    )
    piece = st.sampled_from([*fragments, *fragments, *common]) | st.text(max_size=3)
    return st.lists(piece, max_size=25).map("".join)


def check_chunking(form: str, output: str, data: Any, *, template: str = "", opened: bool = False) -> None:
    """Any cut of the output gives the same events and records."""
    at = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    pieces = [output[a:b] for a, b in zip([0, *at], [*at, len(output)], strict=True)]
    assert read(form, pieces, template, TOOLS, opened) == run(form, output, template=template, opened=opened)


def check_nothing_lost(form: str, output: str, framing: str, *, template: str = "", opened: bool = False) -> None:
    """Each character is text, reasoning, part of a call that parsed, or framing that matches `framing`; in order, and once."""
    parser: Any = parser_factory(form, template)(TOOLS, opened)
    pieces: list[str] = []
    emit, frame = parser._emit, parser._frame

    def emitted(text: str, *, reasoning: bool = False) -> None:
        pieces.append(text)
        emit(text, reasoning=reasoning)

    def framed(text: str) -> None:
        assert re.fullmatch(framing, text), text
        pieces.append(text)
        frame(text)

    parser._emit, parser._frame = emitted, framed
    events = parser.feed(output) + parser.finish()
    calls = [event.record for event in events if isinstance(event, CallEvent)]
    good = [record for record in parser.records if record.status is CallStatus.OK]
    assert calls == good
    found = ""
    for piece in [*pieces, ""]:
        while good and good[0].start == len(found):
            found += good.pop(0).raw
        found += piece
    assert found == output
    assert not good
    visible = "".join(event.text for event in events if isinstance(event, TextDelta))
    for record in parser.records:
        assert output[record.start : record.end] == record.raw
        assert record.raw
        assert record.status is CallStatus.OK or record.raw in visible
        assert not re.search(r"<\||\|>|\[/?[A-Z_]+\]", record.name)
    assert all(a.end <= b.start for a, b in zip(parser.records, parser.records[1:], strict=False))
    for event in events:
        if isinstance(event, CallEvent):
            assert event.name in {tool.name for tool in TOOLS}
            assert isinstance(json.loads(event.arguments), dict)
            event.arguments.encode("utf-8")
