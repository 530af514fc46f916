"""What a request is for: as its client says, as a plug-in says, as it is recognised; and what that does to the samples."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gateways import Bench, bench, follow, user
from tests.support.wires import WIRES, Wire
from turnloom.errors import ConfigError
from turnloom.gateway.labels import load_labeler
from turnloom.types import COMPACTION, MAIN, SIDE, SUBAGENT, Request
from turnloom.wire.contract import Envelope

HEADER = "x-turnloom-label"


async def labels(b: Bench) -> list[str]:
    return [t.label for t in (await b.session()).tree.turns.values()]


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_a_label_is_declared_by_header_in_every_dialect(wire: Wire) -> None:
    async with bench(["One", "Two"]) as b:
        await b.post(wire.body("a"), wire.whole)
        await b.post(wire.body("b"), wire.whole, **{HEADER: "grader.v2_x-1"})
        assert await labels(b) == [MAIN, "grader.v2_x-1"]


@pytest.mark.parametrize("label", ["two words", "a/b", "é", "<b>", "x" * 65])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_a_header_that_is_no_label_is_a_clear_400(wire: Wire, label: str) -> None:
    async with bench(["One"]) as b:
        answer = await b.post(wire.body("a"), wire.whole, **{HEADER: label})
        assert answer.status == 400
        assert answer.body["error"]["message"].startswith(f"{HEADER}: must be")
        assert not b.engine.requests


def by_words(dialect: str, envelope: Envelope, request: Request) -> str:
    """A plug-in: what the request says, and what stands beside it."""
    return f"{dialect}-{envelope.headers.get('x-kind', 'none')}" if "label me" in request.messages[-1].text else ""


async def test_a_plug_in_labels_what_no_header_does() -> None:
    async with bench(lambda _, i: f"reply {i}", labeler="tests.gateway.test_labels:by_words") as b:
        await b.post(user("plain"))
        await b.post(user("label me"))
        await b.post(WIRES["gemini"].body("label me"), WIRES["gemini"].whole, **{"X-Kind": "b"})
        await b.post(user("label me"), **{HEADER: "mine"})
        assert await labels(b) == [MAIN, "anthropic-none", "gemini-b", "mine"]


@pytest.mark.parametrize(
    "named", ["", "magic", "tests.gateway.test_labels:missing", "no.such.module:x", "tests.gateway.test_labels:HEADER"]
)
def test_a_labeler_that_is_none_is_one_clear_line(named: str) -> None:
    with pytest.raises(ConfigError, match=r"label"):
        load_labeler(named)


def test_a_function_is_its_own_labeler() -> None:
    assert load_labeler(by_words) is by_words


CODEX = {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}


async def session_with_labels(b: Bench) -> list[dict[str, Any]]:
    """main, side, main again, subagent, compaction: three lineages beside the task's."""
    asked = user("Task.")
    first = await b.post(asked)
    await b.post(user("Title?"), **{HEADER: SIDE})
    await b.post(follow(asked, first.body, "On."))
    await b.post(user("Part."), **{"x-claude-code-agent-id": "1"})
    await b.post(WIRES["openai_responses"].body("Sum up."), "/v1/responses", **CODEX)
    assert await labels(b) == [MAIN, SIDE, MAIN, SUBAGENT, COMPACTION]
    return [{"label": MAIN, "turns": 2}, {"label": SIDE, "turns": 1}, {"label": SUBAGENT, "turns": 1}, {"label": COMPACTION, "turns": 1}]


def spoken(_: dict[str, Any], index: int) -> str:
    return f"Reply number {index}."


SKIPS = [
    (None, {MAIN, SUBAGENT, COMPACTION}),
    ([], {MAIN, SIDE, SUBAGENT, COMPACTION}),
    ([SIDE, SUBAGENT], {MAIN, COMPACTION}),
    ([MAIN], {SIDE, SUBAGENT, COMPACTION}),
]


@pytest.mark.parametrize(("skip", "trained"), SKIPS)
async def test_samples_are_those_of_labels_that_train(skip: list[str] | None, trained: set[str]) -> None:
    """By the handle and over HTTP; by the command line in tests/cli."""
    options = {} if skip is None else {"skip_labels": skip}
    async with bench(spoken, **options) as b:
        shapes = [shape for shape in await session_with_labels(b) if shape["label"] in trained]
        samples = await b.handle.finish()
        assert [(s.label, s.statuses["turns"]) for s in sorted(samples, key=lambda s: s.turn_index.max())] == [
            (shape["label"], shape["turns"]) for shape in sorted(shapes, key=lambda s: [SIDE, MAIN, SUBAGENT, COMPACTION].index(s["label"]))
        ]
        assert sum(s.weight for s in samples) == pytest.approx(1)
        query = "" if skip is None else "?" + "&".join(f"skip_label={label}" for label in skip or [""])
        _, lines = await b.admin("GET", f"/sessions/{b.handle.id}/samples{query}")
        assert {json.loads(line)["label"] for line in lines.splitlines()} == trained


async def test_what_does_not_train_has_its_label_for_a_reason() -> None:
    async with bench(spoken) as b:
        await session_with_labels(b)
        session = await b.session()
        (left_out,) = session.unroll().untrained
        side = next(t for t in session.tree.turns.values() if t.label == SIDE)
        assert (left_out.turn_id, left_out.tokens, left_out.reason) == (side.id, len(side.output), "label side")
        _, row = await b.admin("GET", f"/sessions/{b.handle.id}")
        assert row["turn_labels"] == {MAIN: 2, SIDE: 1, SUBAGENT: 1, COMPACTION: 1}
