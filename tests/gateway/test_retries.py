"""Exactly once: who asks again gets the same reply and makes no second turn; who wants another reply gets another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.gateways import Bench, bench, user
from tests.support.wires import WIRES, Wire
from turnloom.gateway.output import Output
from turnloom.gateway.session import Session
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import Outcome, Turn

LONG = "one two three four five six seven eight nine ten"
every_dialect = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
RETRY = {"x-stainless-retry-count": "1"}


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def turns_of(b: Bench) -> list[Turn]:
    return list((await b.session()).tree.turns.values())


async def ask(b: Bench, wire: Wire, text: str = "hi", *, stream: bool = False, **headers: str) -> tuple[int, str, bytes]:
    """Status, text of the reply, and all that came."""
    async with b.http.post(b.handle.base_url + wire.path(stream), json=wire.body(text, stream=stream), headers=headers) as answer:
        raw = await answer.read()
    if answer.status != 200:
        return answer.status, "", raw
    return 200, wire.shown(raw) if stream else wire.said(json.loads(raw)), raw


async def leave_in_the_middle(b: Bench, wire: Wire, text: str = "hi", **headers: str) -> Turn:
    """Ask, read something, and go: the turn as it is on record then."""
    session, known = await b.session(), set((await b.session()).tree.turns)
    answer = await b.http.post(b.handle.base_url + wire.path(True), json=wire.body(text, stream=True), headers=headers)
    seen = b""
    while not wire.shown(seen):
        seen += await answer.content.readany()
    answer.close()
    await until(lambda: session.in_flight == 0 and len(session.tree.turns) > len(known))
    return list(session.tree.turns.values())[-1]


def stalled(text: str = LONG) -> Reply:
    return Reply(text=text, chunk=1, fault=Fault.STALL)


def sent(b: Bench, request: int) -> list[int]:
    """The prompt ids that the engine got."""
    return list(b.engine.requests[request]["input_ids"])


async def check_one_exact_turn(b: Bench, said: str) -> Turn:
    session = await b.session()
    (turn,) = session.tree.turns.values()
    assert turn.outcome is Outcome.DELIVERED
    assert session.tree.reply(turn.id).text == said
    (sample,) = session.unroll().samples
    assert sample.token_ids.tolist() == [*sent(b, 0), *turn.output.tolist()]
    assert len(turn.output) == len(turn.logprobs) == int(sample.loss_mask.sum())
    return turn


@every_dialect
@pytest.mark.parametrize("streams", [(True, True), (False, False), (True, False)], ids=["streamed", "whole", "one of each"])
async def test_the_same_request_while_the_first_is_in_flight_joins_it(wire: Wire, streams: tuple[bool, bool]) -> None:
    async with bench([Reply(text=LONG, chunk=1, delay=0.02), "never"]) as b:
        answers = await asyncio.gather(*(ask(b, wire, stream=stream) for stream in streams))
        assert [(status, text) for status, text, _ in answers] == [(200, LONG)] * 2
        if streams[0] == streams[1]:
            assert answers[0][2] == answers[1][2]
        await check_one_exact_turn(b, LONG)
        assert len(b.engine.requests) == 1


async def test_who_joins_late_gets_all_of_it() -> None:
    wire = WIRES["anthropic"]
    async with bench([Reply(text=LONG, chunk=1, delay=0.03)]) as b:
        first = await b.http.post(b.handle.base_url + wire.path(True), json=wire.body("hi", stream=True))
        seen = b""
        while b"three" not in seen:
            seen += await first.content.readany()
        _, text, second = await ask(b, wire, stream=True)
        seen += await first.read()
        assert (text, second) == (LONG, seen)


async def test_a_turn_lives_as_long_as_anybody_waits_for_it() -> None:
    wire = WIRES["anthropic"]
    async with bench([Reply(text=LONG, chunk=1, delay=0.03)]) as b:
        session = await b.session()
        first = await b.http.post(b.handle.base_url + wire.path(True), json=wire.body("hi", stream=True))
        await first.content.readany()
        second = asyncio.create_task(ask(b, wire, stream=True))
        (live,) = session.live.values()
        await until(lambda: live.readers == 2)
        first.close()
        assert (await second)[1] == LONG
        assert (await check_one_exact_turn(b, LONG)).acknowledged
        assert b.engine.aborts == []


@every_dialect
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_what_a_client_left_in_the_middle_is_gone_on_with(wire: Wire, stream: bool) -> None:
    """The engine gets the prompt and what it sampled so far; the client gets one reply, under the id that it had."""
    rest = "six seven eight nine ten"
    async with bench([stalled(), Reply(text=rest, chunk=1)]) as b:
        begun = await leave_in_the_middle(b, wire)
        assert (begun.outcome, begun.finish.reason) == (Outcome.ORPHANED, "abort")
        held = begun.output.tolist()
        status, text, _ = await ask(b, wire, stream=stream)
        assert status == 200
        said = b.tokenizer.decode(held) + rest
        turn = await check_one_exact_turn(b, said)
        assert text == said
        assert sent(b, 1) == [*sent(b, 0), *held]
        assert turn.id == begun.id
        assert turn.output.tolist()[: len(held)] == held
        assert turn.logprobs[: len(held)].tolist() == begun.logprobs.tolist()
        assert [piece.start for piece in turn.pieces] == [0, len(held)]
        assert "came again" in turn.pieces[1].why
        assert b.engine.requests[1]["sampling_params"]["max_new_tokens"] == begun.sampling.max_tokens - len(held)  # type: ignore[operator]
        assert b.engine.requests[0]["rid"][:32] != b.engine.requests[1]["rid"][:32]


async def test_what_fails_before_it_has_its_beginning_leaves_that_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = WIRES["anthropic"]
    async with bench([stalled(), "the rest"]) as b:
        begun = await leave_in_the_middle(b, wire)
        with monkeypatch.context() as patch:
            patch.setattr(Output, "feed", lambda self, chunk: 1 / 0)
            assert (await ask(b, wire))[0] == 500
        assert await turns_of(b) == [begun]
        assert (await ask(b, wire))[1] == b.tokenizer.decode(begun.output.tolist()) + "the rest"
        assert len(await turns_of(b)) == 1


async def test_what_is_gone_on_with_may_be_left_again() -> None:
    wire = WIRES["openai_chat"]
    async with bench([stalled("a b c d e f"), stalled("d e f g h i"), "end"]) as b:
        first = await leave_in_the_middle(b, wire)
        session = await b.session()
        answer = await b.http.post(b.handle.base_url + wire.path(True), json=wire.body("hi", stream=True))
        await until(lambda: b.engine.running)
        seen = b""
        while not wire.shown(seen).startswith(b.tokenizer.decode(first.output.tolist()) + "d"):
            seen += await answer.content.readany()
        answer.close()
        await until(lambda: session.in_flight == 0 and not session.live)
        (second,) = await turns_of(b)
        assert len(second.output) > len(first.output)
        assert second.outcome is Outcome.ORPHANED
        said = b.tokenizer.decode(second.output.tolist()) + "end"
        assert (await ask(b, wire))[1] == said
        turn = await check_one_exact_turn(b, said)
        assert [piece.start for piece in turn.pieces] == [0, len(first.output), len(second.output)]


@every_dialect
async def test_what_the_engine_aborted_is_gone_on_with(wire: Wire) -> None:
    async with bench([Reply(text=LONG, chunk=1, fault=Fault.ABORT), "the rest"]) as b:
        await ask(b, wire, stream=True)
        (begun,) = await turns_of(b)
        held = begun.output.tolist()
        assert len(held) > 0
        assert begun.outcome is Outcome.ABORTED
        status, text, _ = await ask(b, wire, stream=True)
        assert (status, text) == (200, b.tokenizer.decode(held) + "the rest")
        await check_one_exact_turn(b, text)


@every_dialect
async def test_what_failed_is_not_trusted_with_a_rest(wire: Wire) -> None:
    async with bench([Reply(text=LONG, chunk=1, fault=Fault.GARBAGE), "anew"]) as b:
        await ask(b, wire, stream=True)
        assert (await ask(b, wire))[1] == "anew"
        assert [turn.outcome for turn in await turns_of(b)] == [Outcome.FAILED, Outcome.DELIVERED]


@every_dialect
async def test_a_reply_that_arrived_is_not_given_again_unless_it_is_said_to_be_a_retry(wire: Wire) -> None:
    async with bench(["first", "second"]) as b:
        one, two = await ask(b, wire), await ask(b, wire)
        assert (one[1], two[1]) == ("first", "second")
        again = await ask(b, wire, **RETRY)
        assert again == two
        assert [(turn.outcome, turn.acknowledged) for turn in await turns_of(b)] == [(Outcome.DELIVERED, True)] * 2


@every_dialect
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_an_idempotency_key_names_one_reply_for_ever(wire: Wire, stream: bool) -> None:
    async with bench(["first", "second"]) as b:
        first = await ask(b, wire, stream=stream, **{"Idempotency-Key": "k1"})
        assert await ask(b, wire, stream=stream, **{"Idempotency-Key": "k1"}) == first
        assert (await ask(b, wire, stream=stream, **{"Idempotency-Key": "k2"}))[1] == "second"
        status, _, raw = await ask(b, wire, "something else", **{"Idempotency-Key": "k1"})
        assert status == 400
        assert b"Idempotency-Key" in raw
        assert len(await turns_of(b)) == 2


async def test_an_idempotency_key_in_flight_is_held_to_its_request() -> None:
    wire = WIRES["anthropic"]
    async with bench([Reply(text=LONG, chunk=1, delay=0.03)]) as b:
        first = asyncio.create_task(ask(b, wire, **{"Idempotency-Key": "k"}))
        await until(lambda: b.engine.requests)
        assert (await ask(b, wire, "other", **{"Idempotency-Key": "k"}))[0] == 400
        assert (await first)[1] == LONG


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({}, [{"x-turnloom-resample": "1"}] * 3),
        ({}, [{"Idempotency-Key": f"sample {i}"} for i in range(3)]),
        ({"session_repeats": "resample"}, [{}] * 3),
    ],
    ids=["a header", "keys of their own", "agreed for the session"],
)
async def test_best_of_n_at_once(options: dict[str, Any], headers: list[dict[str, str]]) -> None:
    replies = [Reply(text=text, chunk=1, delay=0.02) for text in ("a a a", "b b b", "c c c")]
    async with bench(replies, **options) as b:
        answers = await asyncio.gather(*(ask(b, WIRES["openai_chat"], **each) for each in headers))
        assert {text for _, text, _ in answers} == {"a a a", "b b b", "c c c"}
        turns = await turns_of(b)
        assert len(turns) == 3
        assert [turn.fork.kind for turn in turns if turn.fork] == ["resampled", "resampled"]


async def test_each_choice_of_several_is_gone_on_with_by_itself() -> None:
    """Of two replies one is whole when the client goes; asked again, that one is as it was and the other is finished."""
    wire = WIRES["openai_chat"]
    body = {**wire.body("hi"), "n": 2}
    async with bench(["short", stalled(), "the end"]) as b:
        session = await b.session()
        asked = asyncio.create_task(b.post(body, wire.path(False)))
        await until(lambda: len(b.engine.requests) == 2 and b.engine.running == 1)
        asked.cancel()
        await until(lambda: session.in_flight == 0 and len(session.tree.turns) == 2)
        begun = {turn.choice: turn for turn in await turns_of(b)}
        answer = await b.post(body, wire.path(False))
        said = [choice["message"]["content"] for choice in answer.body["choices"]]
        turns = {turn.choice: turn for turn in await turns_of(b)}
        assert {turn.id for turn in turns.values()} == {turn.id for turn in begun.values()}
        assert [turn.outcome for turn in turns.values()] == [Outcome.DELIVERED] * 2
        assert sorted(said) == sorted(["short", b.tokenizer.decode(begun[said.index("short") ^ 1].output.tolist()) + "the end"])
        assert len(b.engine.requests) == 3


async def test_what_is_gone_on_from_is_a_reply_that_arrived() -> None:
    """A client that was cut off and goes on with what it has is not retrying when it asks the old question again."""
    wire = WIRES["anthropic"]
    async with bench([stalled(), "next", "anew"]) as b:
        begun = await leave_in_the_middle(b, wire)
        partial = {"role": "assistant", "content": b.tokenizer.decode(begun.output.tolist())}
        longer = wire.body("hi") | {"messages": [{"role": "user", "content": "hi"}, partial, {"role": "user", "content": "go on"}]}
        await b.post(longer, wire.path(False))
        assert (await ask(b, wire))[1] == "anew"
        assert len(await turns_of(b)) == 3


async def test_another_that_goes_on_from_the_beginning_meanwhile_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then what is gone on with is a turn of its own, and the beginning stays as the other one had it."""
    wire = WIRES["anthropic"]
    async with bench([stalled(), Reply(text="the rest", chunk=1, delay=0.05), "next"]) as b:
        begun = await leave_in_the_middle(b, wire)
        again = asyncio.create_task(ask(b, wire))
        await until(lambda: len(b.engine.requests) == 2)
        partial = {"role": "assistant", "content": b.tokenizer.decode(begun.output.tolist())}
        longer = wire.body("hi") | {"messages": [{"role": "user", "content": "hi"}, partial, {"role": "user", "content": "go on"}]}
        assert (await b.post(longer, wire.path(False))).status == 200
        assert (await again)[1].endswith("the rest")
        first, second, third = await turns_of(b)
        assert (first.id, first.outcome, first.output.tolist()) == (begun.id, Outcome.ORPHANED, begun.output.tolist())
        assert second.base == begun.id
        assert third.output.tolist()[: len(begun.output)] == begun.output.tolist()
        assert third.outcome is Outcome.DELIVERED
        trained = [sample for sample in (await b.session()).unroll().samples if sample.turn_index.max() == third.index]
        assert [sample.token_ids.tolist() for sample in trained] == [[*sent(b, 0), *third.output.tolist()]]


async def test_after_a_restart_what_nobody_is_known_to_have_is_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = WIRES["anthropic"]
    monkeypatch.setattr(Session, "acknowledge", lambda self, turn_id: None)
    async with bench(["first"], store=tmp_path / "s.db") as b:
        handle, first = b.handle, await ask(b, wire)
    monkeypatch.undo()
    async with bench(["second"], store=tmp_path / "s.db") as b:
        b.handle = _at(handle, b)
        again = await ask(b, wire)
        assert again == first
        assert b.engine.requests == []
        assert (await ask(b, wire))[1] == "second", "now it is known to have arrived"
        assert len(await turns_of(b)) == 2


async def test_after_a_restart_what_was_left_is_gone_on_with(tmp_path: Path) -> None:
    wire = WIRES["openai_responses"]
    async with bench([stalled()], store=tmp_path / "s.db") as b:
        handle, begun, prompt = b.handle, await leave_in_the_middle(b, wire), sent(b, 0)
    async with bench(["the rest"], store=tmp_path / "s.db") as b:
        b.handle = _at(handle, b)
        _, text, _ = await ask(b, wire)
        assert text == b.tokenizer.decode(begun.output.tolist()) + "the rest"
        assert sent(b, 0) == [*prompt, *begun.output.tolist()]
        (turn,) = await turns_of(b)
        assert (turn.id, turn.outcome) == (begun.id, Outcome.DELIVERED)


async def test_what_arrived_is_known_after_a_restart(tmp_path: Path) -> None:
    wire = WIRES["anthropic"]
    async with bench(["first"], store=tmp_path / "s.db") as b:
        handle, first = b.handle, await ask(b, wire)
    async with bench(["second"], store=tmp_path / "s.db") as b:
        b.handle = _at(handle, b)
        assert await ask(b, wire, **RETRY) == first
        assert (await ask(b, wire))[1] == "second"


def _at(handle: Any, b: Bench) -> Any:
    """The same session's handle at the new gateway."""

    class Moved:
        id, key, base_url = handle.id, handle.key, f"{b.gateway.url}/s/{handle.key}"

    return Moved()


async def test_a_body_spelled_otherwise_is_the_same_request() -> None:
    wire = WIRES["anthropic"]
    async with bench([Reply(text=LONG, chunk=1, delay=0.03), "never"]) as b:
        body = wire.body("hi", stream=False)
        spelled = json.dumps({name: body[name] for name in reversed(body)}, indent=1).encode()
        first = asyncio.create_task(b.post(body))
        await until(lambda: b.engine.requests)
        assert (await b.post(spelled)).body == (await first).body
        assert len(await turns_of(b)) == 1


@pytest.mark.parametrize("other", [{"temperature": 0.5}, {"metadata": {"user_id": "2"}}, {"max_tokens": 99}])
async def test_another_body_is_another_request(other: dict[str, Any]) -> None:
    async with bench([Reply(text=LONG, chunk=1, delay=0.03), "other"]) as b:
        first = asyncio.create_task(b.post(user("hi")))
        await until(lambda: b.engine.requests)
        assert (await b.post(user("hi", **other))).body["content"][0]["text"] == "other"
        assert (await first).body["content"][0]["text"] == LONG


async def test_a_session_knows_nothing_of_anothers_requests() -> None:
    async with bench([stalled(), "own"]) as b:
        await leave_in_the_middle(b, WIRES["anthropic"])
        b.handle = await b.gateway.open_session()
        assert (await ask(b, WIRES["anthropic"]))[1] == "own"


async def test_retries_take_no_turn_of_the_sessions() -> None:
    from turnloom.store.contract import Limits

    wire = WIRES["anthropic"]
    async with bench([stalled(), "rest"], session_limits=Limits(max_turns=1)) as b:
        await leave_in_the_middle(b, wire)
        assert (await ask(b, wire))[0] == 200
        assert (await ask(b, wire, **RETRY))[0] == 200
        assert (await ask(b, wire))[0] == 429
        assert len(await turns_of(b)) == 1


async def test_a_client_that_leaves_a_replay_leaves_the_record_as_it_was() -> None:
    wire = WIRES["anthropic"]
    async with bench(["first"]) as b:
        await ask(b, wire)
        with pytest.raises(asyncio.TimeoutError):
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1e-9)) as hasty:
                await hasty.post(b.handle.base_url + wire.path(True), json=wire.body("hi", stream=True), headers=RETRY)
        session = await b.session()
        await until(lambda: not session.live)
        assert [turn.outcome for turn in await turns_of(b)] == [Outcome.DELIVERED]
