"""Whatever an engine does to a request: the turn's outcome, the client's answer, and what trains."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.gateways import Answer, Bench, user
from tests.support.pools import Story, pooled, until
from turnloom.testing.scripted_engine import Fault, ScriptedEngine, logprob_at
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Outcome, Turn

QWEN = qwen_tokenizer("qwen2.5")
REPLY = "One two three, four five six. Seven!"
HALF = 5
"""Tokens that are out when something goes wrong in the middle."""


@dataclass(frozen=True)
class Ends:
    """How a turn ends whose engine does this once. `goes_on`: a delivered one needed another request."""

    outcome: Outcome = Outcome.DELIVERED
    status: int = 200
    error: str = ""
    goes_on: bool = True
    silent: bool = False
    """Nothing but its time ends the turn."""


SURVIVED = Ends()
HARMLESS = Ends(goes_on=False)
REFUSED = Ends(Outcome.FAILED, 400, "invalid_request_error")
BROKEN = Ends(Outcome.FAILED, 502, "api_error")
SILENT = Ends(Outcome.ABORTED, 529, "overloaded_error", silent=True)

MATRIX = {
    Fault.HTTP_400: REFUSED,
    Fault.HTTP_429: SURVIVED,
    Fault.HTTP_500: SURVIVED,
    Fault.HTTP_503: SURVIVED,
    Fault.HANG: SILENT,
    Fault.RESET: SURVIVED,
    Fault.STALL: SILENT,
    Fault.CUT: SURVIVED,
    Fault.ERROR_EVENT: REFUSED,
    Fault.NO_FINISH: HARMLESS,  # the end token came: the reply was whole
    Fault.GARBAGE: BROKEN,
    Fault.MISSING_LOGPROB: BROKEN,
    Fault.NULL_LOGPROB: BROKEN,
    Fault.WRONG_ID: BROKEN,
    Fault.REWRITTEN: BROKEN,
    Fault.ID_OUTSIDE: BROKEN,
    Fault.ABORT: SURVIVED,
    Fault.ABORT_COLLAPSED: SURVIVED,
    Fault.ABORT_400: REFUSED,
    Fault.ABORT_503: SURVIVED,
    Fault.DUPLICATE_FINAL: HARMLESS,
    Fault.MORE_AFTER_FINAL: BROKEN,
    Fault.ABORT_QUEUED: SURVIVED,
    Fault.SHORT_EXPERTS: HARMLESS,  # nobody asked for experts
}

TAKES_TOKENS = {Fault.STALL, Fault.CUT, Fault.ERROR_EVENT, Fault.NO_FINISH, Fault.GARBAGE}
TAKES_TOKENS |= {Fault.ABORT, Fault.ABORT_COLLAPSED, Fault.ABORT_400, Fault.ABORT_503}
"""Faults that come after tokens of their own request; before the others another request is cut."""


def test_every_fault_has_its_row() -> None:
    assert set(MATRIX) == set(Fault)


@pytest.mark.parametrize("count", [1, 2], ids=["one engine", "two engines"])
@pytest.mark.parametrize("begun", [False, True], ids=["no token out", "mid-reply"])
@pytest.mark.parametrize("fault", Fault)
async def test_fault(fault: Fault, begun: bool, count: int) -> None:
    ends = MATRIX[fault]
    breaks = [(HALF if begun else 0, fault)] if not begun or fault in TAKES_TOKENS else [(HALF, Fault.CUT), (0, fault)]
    story = Story(QWEN, REPLY, *breaks)
    async with pooled(engines(story, count)) as b:
        asking = asyncio.create_task(b.post(user("hi", stream=count == 1)))
        if ends.silent:
            await time_is_up(b, story, len(breaks), HALF if begun else 0)
        answer = await asking
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.outcome is ends.outcome, turn.error
        if turn.outcome is Outcome.DELIVERED:
            assert said(answer) == REPLY
            assert turn.output.tolist() == story.whole
            survived = ends.goes_on or (fault is Fault.NO_FINISH and begun)
            assert len(story.asked) == (len(breaks) + 1 if survived else len(breaks))
        else:
            assert told(answer) == (ends.status if not answer.events else 200, ends.error)
            assert turn.output.tolist() == story.whole[: len(turn.output)], "what was sampled is on record"
            assert bool(len(turn.output)) == (begun or fault in (Fault.REWRITTEN, Fault.MORE_AFTER_FINAL))
            assert len(story.asked) == len(breaks)
        pieces_are_true(story, turn, b)
        await trains(b, turn)


async def time_is_up(b: Bench, story: Story, asked: int, sampled: int) -> None:
    """Once so many requests have been made and so many tokens come."""
    pool = b.gateway.engine
    await until(lambda: len(story.asked) == asked, lambda: [t.seam.count for t in pool._turns.values()] == [sampled])
    (turn,) = pool._turns.values()
    assert turn.trace.timer is not None
    turn.trace.timer.reschedule(asyncio.get_running_loop().time())


def engines(story: Story, count: int = 1, **options: Any) -> list[ScriptedEngine]:
    return [ScriptedEngine(story.of(f"{i}"), tokenizer=QWEN, **options) for i in range(count)]


def said(answer: Answer) -> str:
    """The text of a reply that came to its end."""
    assert answer.status == 200, answer.body
    if not answer.events:
        return "".join(block["text"] for block in answer.body["content"])
    assert answer.events[-1][0] == "message_stop", answer.events[-1]
    return "".join(data["delta"].get("text", "") for name, data in answer.events if name == "content_block_delta")


def told(answer: Answer) -> tuple[int, str]:
    """The status and the kind of error, of a stream the one it ends with."""
    if not answer.events:
        return answer.status, answer.body["error"]["type"]
    name, data = answer.events[-1]
    assert name == "error"
    return answer.status, data["error"]["type"]


def pieces_are_true(story: Story, turn: Turn, b: Bench) -> None:
    """Each piece is what one request gave, asked for with the prompt and all the pieces before it; each logprob is the one sent."""
    prompt = story.prompt or []
    urls = b.gateway.engine.name.split(",")
    sent = [(urls[int(name)], asked) for name, asked in story.asked]
    assert all(asked == [*prompt, *story.whole[: len(asked) - len(prompt)]] for _, asked in sent)
    assert turn.pieces
    for piece in turn.pieces:
        assert (piece.engine, [*prompt, *turn.output[: piece.start].tolist()]) in sent
    assert [p.start for p in turn.pieces] == sorted({p.start for p in turn.pieces})
    assert all(piece.why for piece in turn.pieces[1:])
    expected = [logprob_at(len(prompt) + i, token) for i, token in enumerate(turn.output.tolist())]
    assert turn.logprobs.tolist() == expected


async def trains(b: Bench, turn: Turn) -> None:
    """All of a delivered turn, once, and nothing of another, with the reason."""
    found = (await b.session()).unroll()
    if turn.outcome is not Outcome.DELIVERED:
        assert list(found.samples) == []
        assert [u.tokens for u in found.untrained] == [len(turn.output)]
        return
    (sample,) = found.samples
    mask = sample.loss_mask.astype(bool)
    assert sample.token_ids[mask].tolist() == turn.output.tolist()
    assert np.array_equal(sample.logprobs[mask], turn.logprobs)


@pytest.mark.parametrize("fault", [f for f, ends in MATRIX.items() if ends is SURVIVED])
async def test_patience_is_over_and_the_client_is_told(fault: Fault) -> None:
    """Where every request ends so, what the last one died of is the answer."""
    story = Story(QWEN, REPLY, *[(0, fault)] * 9)
    async with pooled(engines(story)) as b:
        answer = await b.post(user("hi"))
        assert len(story.asked) == 4
        expected = 529 if fault in (Fault.HTTP_429, Fault.HTTP_503) or fault.value.startswith("abort") else 503
        assert answer.status == expected
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.outcome is (Outcome.ABORTED if fault in (Fault.ABORT, Fault.ABORT_COLLAPSED, Fault.ABORT_QUEUED) else Outcome.FAILED)
        await trains(b, turn)


async def test_a_killed_engine_is_outlived_by_another() -> None:
    story, half_way = Story(QWEN, REPLY, (HALF, Fault.STALL)), asyncio.Event()

    async def seen(_: dict[str, Any], sent: int) -> None:
        if sent == 2:
            half_way.set()

    pair = engines(story, 2, gate=seen)
    async with pooled(pair) as b:
        asking = asyncio.create_task(b.post(user("hi", stream=True)))
        await half_way.wait()
        first = pair[int(story.asked[0][0])]
        await first.kill()
        assert said(await asking) == REPLY
        (turn,) = (await b.session()).tree.turns.values()
        assert [p.engine for p in turn.pieces] == [first.url, next(e.url for e in pair if e is not first)]
        assert await b.gateway.engine.health(), "one of two is enough"
        pieces_are_true(story, turn, b)
