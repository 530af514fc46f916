"""What a session may use: which limit refuses a request, what the client is told in its own dialect, what the session says of itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from tests.support.dialects import ALL, Spoken, error_of
from tests.support.gateways import Bench, bench
from tests.support.lives import Clock, CountingStore, commit, sessions, take
from turnloom.errors import LimitReached, SessionClosed, StoreError
from turnloom.gateway import limits as rules
from turnloom.gateway.sessions import hash_key
from turnloom.store.contract import Limits, SessionRow, Usage
from turnloom.types import FinishReason, Outcome, Sampling

ROW = SessionRow("s", "h", 100.0, Sampling(), Limits())


def row(**limits: float) -> SessionRow:
    return replace(ROW, limits=Limits(**limits))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "touched", "in_flight", "now", "expected"),
    [
        ({}, 100.0, 0, 1e12, ""),
        ({"ttl": 10.0}, 109.0, 0, 109.9, ""),
        ({"ttl": 10.0}, 109.0, 0, 110.0, "ttl"),
        ({"ttl": 10.0}, 109.0, 1, 110.0, "ttl"),
        ({"idle_timeout": 10.0}, 105.0, 0, 114.9, ""),
        ({"idle_timeout": 10.0}, 105.0, 0, 115.0, "idle_timeout"),
        ({"idle_timeout": 10.0}, 105.0, 1, 115.0, ""),
        ({"ttl": 20.0, "idle_timeout": 5.0}, 100.0, 0, 121.0, "ttl"),
    ],
)
def test_when_a_sessions_time_is_up(limits: dict[str, float], touched: float, in_flight: int, now: float, expected: str) -> None:
    assert rules.expiry(row(**limits), touched, in_flight, now) == expected
    assert rules.expiry(replace(row(**limits), status="closed"), touched, in_flight, now) == ""
    refused = rules.over(row(**limits), touched, in_flight, now)
    assert (refused.limit if refused else "") == expected
    assert refused is None or isinstance(refused.error, SessionClosed)


@pytest.mark.parametrize(
    ("limits", "usage", "in_flight", "choices", "expected"),
    [
        ({}, Usage(10**6, 10**9, 10**12), 100, 100, ""),
        ({"max_turns": 3}, Usage(turns=2), 0, 1, ""),
        ({"max_turns": 3}, Usage(turns=2), 1, 1, "max_turns"),
        ({"max_turns": 3}, Usage(turns=2), 0, 2, "max_turns"),
        ({"max_turns": 3}, Usage(turns=3), 0, 1, "max_turns"),
        ({"max_turns": 0}, Usage(), 0, 1, "max_turns"),
        ({"max_tokens": 10}, Usage(tokens=9), 7, 1, ""),
        ({"max_tokens": 10}, Usage(tokens=9), 0, 2, "max_tokens"),
        ({"max_tokens": 10}, Usage(tokens=12), 0, 1, "max_tokens"),
        ({"max_bytes": 10}, Usage(bytes=9), 5, 3, ""),
        ({"max_bytes": 10}, Usage(bytes=10), 0, 1, "max_bytes"),
        ({"max_turns": 1, "max_tokens": 1, "max_bytes": 1}, Usage(1, 1, 1), 0, 1, "max_turns"),
    ],
)
def test_which_limit_refuses_further_turns(limits: dict[str, int], usage: Usage, in_flight: int, choices: int, expected: str) -> None:
    refused = rules.spent(Limits(**limits), usage, in_flight, choices)  # type: ignore[arg-type]
    assert (refused.limit if refused else "") == expected
    assert refused is None or isinstance(refused.error, LimitReached)
    assert rules.counted(Limits(**limits)) is bool(limits)  # type: ignore[arg-type]


def test_what_is_left_is_shared_among_the_choices_and_never_more_than_it() -> None:
    for left in range(30):
        for choices in range(1, 9):
            shares = [rules.share(100, 100 - left, choices, choice) for choice in range(choices)]
            assert sum(shares) == left
            assert max(shares) - min(shares) <= 1
    assert rules.share(100, 130, 1, 0) == 0


def test_a_row_is_closed_once_and_names_each_limit_once() -> None:
    once = rules.reached(rules.reached(rules.reached(ROW, "max_turns"), "max_tokens"), "max_turns")
    assert once.reached == ("max_turns", "max_tokens")
    expired = rules.closed(once, rules.IDLE)
    assert (expired.status, expired.ended, expired.reached) == ("closed", "idle_timeout", ("max_turns", "max_tokens", "idle_timeout"))
    assert rules.closed(expired, rules.FINISHED) is expired
    finished = rules.closed(ROW, rules.FINISHED)
    assert (finished.ended, finished.reached) == ("finished", ())


@dataclass(frozen=True)
class Case:
    """A limit that one turn uses up, or that `then` brings about; what a client is told that asks again."""

    limits: Limits
    status: int
    words: str
    reached: tuple[str, ...]
    before: bool = True
    then: Callable[[Bench, Clock], Awaitable[object]] | None = None
    ended: str = ""


async def _later(b: Bench, clock: Clock) -> None:
    clock.now += 60.0


CASES = {
    "max_turns": Case(Limits(max_turns=1), 429, "has used its 1 turns", ("max_turns",)),
    "max_tokens": Case(Limits(max_tokens=2), 429, "has used its 2 sampled tokens", ("max_tokens",)),
    "max_bytes": Case(Limits(max_bytes=1), 429, "bytes of the store, and it may use 1", ("max_bytes",)),
    "max_context": Case(Limits(max_context=8), 400, "", ("max_context",), before=False),
    "ttl": Case(Limits(ttl=60.0), 503, "its time was up 60 s after it was opened", ("ttl",), then=_later, ended="ttl"),
    "idle_timeout": Case(Limits(idle_timeout=60.0), 503, "had no turn for 60 s", ("idle_timeout",), then=_later, ended="idle_timeout"),
    "finished": Case(Limits(), 503, "is finished; open a new one", (), then=lambda b, _: b.handle.finish(), ended="finished"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("spoken", ALL.values(), ids=ALL)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_each_limit_answers_in_each_dialect_and_is_said_of_the_session(
    case: Case, spoken: Spoken, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, store = Clock(), CountingStore()
    monkeypatch.setattr("turnloom.gateway.api.time", clock)
    async with bench(["Yes"] * 9, store=store, session_limits=case.limits) as b:

        async def ask(text: str) -> tuple[int, bytes, str]:
            path, body = spoken.ask(text, stream=stream)
            async with b.http.post(b.handle.base_url + path, data=body) as answer:
                return answer.status, await answer.read(), answer.headers.get("x-should-retry", "")

        if case.before:
            assert (await ask("first"))[0] == 200
        asked = len(b.engine.requests)
        if case.then is not None:
            await case.then(b, clock)
        for text in ("second", "third"):
            status, raw, again = await ask(text)
            assert status == case.status
            assert case.words in error_of(spoken, status, raw)
            assert again == ("" if spoken.name == "gemini" or status == 400 else "false")
        assert len(b.engine.requests) == asked, "no engine was asked"
        session = await b.session()
        await session.settled()
        assert len(session.tree.turns) == asked
        assert (session.row.reached, session.row.ended) == (case.reached, case.ended)
        assert session.row.status == ("closed" if case.ended else "open")
        assert await store.session(session.row.id) == session.row
        assert len(store.rows) == 2, "opened, and told once of the limit"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("spoken", ALL.values(), ids=ALL)
async def test_a_key_that_nobody_knows_opens_no_session_more_than_may_be_open(spoken: Spoken, stream: bool) -> None:
    async with bench(["Yes"] * 9, open_sessions=True, max_sessions=2) as b:
        path, body = spoken.ask("hi", stream=stream)
        answers = {}
        for key in ("one", "two", "one"):
            async with b.http.post(f"{b.gateway.url}/s/{key}{path}", data=body) as answer:
                answers[key] = answer.status, await answer.read()
        assert answers["one"][0] == 200
        status, raw = answers["two"]
        assert (status, "2 open sessions, as many as it may" in error_of(spoken, status, raw)) == (429, True)
        await (await b.gateway.session(hash_key("one")[:32])).finish()
        async with b.http.post(f"{b.gateway.url}/s/two{path}", data=body) as answer:
            assert answer.status == 200, "one that is finished counts no more"


@pytest.mark.parametrize("spoken", ALL.values(), ids=ALL)
async def test_a_reply_that_takes_the_last_tokens_ends_for_its_length(spoken: Spoken) -> None:
    async with bench(["one two three four five six seven"], session_limits=Limits(max_tokens=3)) as b:
        path, body = spoken.ask("hi")
        async with b.http.post(b.handle.base_url + path, data=body) as answer:
            said = await answer.json()
        cut = {
            "anthropic": lambda: said["stop_reason"] == "max_tokens",
            "openai_chat": lambda: said["choices"][0]["finish_reason"] == "length",
            "openai_responses": lambda: said["incomplete_details"]["reason"] == "max_output_tokens",
            "gemini": lambda: said["candidates"][0]["finishReason"] == "MAX_TOKENS",
        }
        assert cut[spoken.name]()
        (turn,) = (await b.session()).tree.turns.values()
        assert (turn.finish.reason, len(turn.output), turn.sampling.max_tokens) == (FinishReason.LENGTH, 3, 3)


CHAT = "/v1/chat/completions"


def many(n: int, text: str = "hi") -> dict[str, object]:
    return {"model": "m", "n": n, "messages": [{"role": "user", "content": text}]}


async def test_choices_that_do_not_all_fit_are_refused_before_any_begins() -> None:
    async with bench(lambda body, index: "Yes", session_limits=Limits(max_turns=3)) as b:
        refused = await b.post(many(4), CHAT)
        assert (refused.status, refused.body["error"]["code"]) == (429, "insufficient_quota")
        assert "asks for 4 replies at once, and the session has 3 of its 3 turns left; ask for fewer" in refused.body["error"]["message"]
        assert not b.engine.requests
        assert (await b.post(many(2), CHAT)).status == 200
        assert (await b.post(many(2, "more"), CHAT)).status == 429
        assert (await b.post(many(1, "more"), CHAT)).status == 200
        assert len((await b.session()).tree.turns) == 3


async def test_of_requests_at_once_each_has_all_its_choices_or_none() -> None:
    async with bench(lambda body, index: "Yes", session_limits=Limits(max_turns=5)) as b:
        answers = await asyncio.gather(*(b.post(many(2, f"question {i}"), CHAT) for i in range(4)))
        assert sorted(answer.status for answer in answers) == [200, 200, 429, 429]
        assert len(b.engine.requests) == 4
        assert len((await b.session()).tree.turns) == 4


async def test_choices_share_the_tokens_that_are_left() -> None:
    async with bench(lambda body, index: "one two three four five six seven", session_limits=Limits(max_tokens=10)) as b:
        answer = await b.post(many(4), CHAT)
        assert [choice["finish_reason"] for choice in answer.body["choices"]] == ["length"] * 4
        session = await b.session()
        assert sorted(len(turn.output) for turn in session.tree.turns.values()) == [2, 2, 3, 3]
        assert session.usage.tokens == 10
        assert (await b.post(many(1, "more"), CHAT)).status == 429


async def test_choices_that_come_again_are_no_new_turns() -> None:
    async with bench(lambda body, index: "Yes", session_limits=Limits(max_turns=2)) as b:
        first = await b.post(many(2), CHAT)
        again = await b.post(many(2), CHAT, **{"x-stainless-retry-count": "1"})
        assert (first.status, again.status) == (200, 200)
        assert len(b.engine.requests) == 2
        assert (await b.post(many(2, "another"), CHAT)).status == 429


async def test_failed_turns_do_not_count() -> None:
    async with sessions(limits=Limits(max_turns=1)) as s:
        session, _ = await s.open()
        await take(session, "one", outcome=Outcome.FAILED)
        await take(session, "two")
        with pytest.raises(LimitReached):
            await take(session, "three")
        assert len(session.tree.turns) == 2


async def test_a_turn_counts_once_while_its_reply_is_still_on_its_way() -> None:
    """A client asks for its next turn as soon as it has the last byte; the turn before may not have left its place yet."""
    async with sessions(limits=Limits(max_turns=2)) as s:
        session, _ = await s.open()
        with session.turn_slot():
            await commit(session, "one")
            await asyncio.create_task(take(session, "two"))
            with pytest.raises(LimitReached):
                await asyncio.create_task(take(session, "three"))


async def test_what_is_on_record_is_gone_on_with_beyond_every_limit_but_the_end_of_the_session() -> None:
    clock = Clock()
    async with sessions(clock=clock, limits=Limits(max_turns=1, max_tokens=1, max_bytes=1, ttl=50.0)) as s:
        session, _ = await s.open()
        await take(session, "one")
        with session.turn_slot(new=False):
            pass
        assert session.row.reached == ()
        clock.now += 50.0
        with pytest.raises(SessionClosed), session.turn_slot(new=False):
            pass


async def test_places_that_no_turn_took_are_free_again() -> None:
    async with sessions(limits=Limits(max_turns=2)) as s:
        session, _ = await s.open()
        with session.admit(2):
            with pytest.raises(LimitReached), session.admit(1):
                pass
            await asyncio.create_task(take(session, "one"))
        with session.admit(1):
            await asyncio.create_task(take(session, "two"))
        assert session.usage.turns == 2


async def test_a_turn_that_begins_after_its_request_is_over_needs_a_place_of_its_own() -> None:
    async with sessions(limits=Limits(max_turns=1)) as s:
        session, _ = await s.open()
        go = asyncio.Event()

        async def late() -> None:
            await go.wait()
            await take(session, "late")

        with session.admit(1):
            waiting = asyncio.create_task(late())
        await take(session, "first")
        go.set()
        with pytest.raises(LimitReached):
            await waiting


async def test_a_limit_that_could_not_be_written_is_tried_again_and_refuses_all_the_same() -> None:
    class Full(CountingStore):
        full = False

        async def put_session(self, row: SessionRow) -> None:
            if self.full:
                raise StoreError("disk full")
            await super().put_session(row)

    store = Full()
    async with sessions(store, limits=Limits(max_turns=0)) as s:
        session, _ = await s.open()
        for full in (True, False, False):
            store.full = full
            with pytest.raises(LimitReached):
                await take(session, "hi")
            await session.settled()
            assert session.row.reached == (() if full else ("max_turns",))
        assert len(store.rows) == 2


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_bytes_are_those_that_the_store_counts(kind: str, tmp_path: object) -> None:
    async with sessions(kind, tmp_path, limits=Limits(max_bytes=10**6)) as s:  # type: ignore[arg-type]
        session, _ = await s.open(session_id="one")
        assert session.usage.bytes == 0
        await take(session, "hello", tokens=500)
        counted = (await s._store.usage("one")).bytes
        assert session.usage.bytes == counted > 0
        limited, _ = await s.open(session_id="two", limits=Limits(max_bytes=counted))
        await take(limited, "hello", tokens=500)
        with pytest.raises(LimitReached, match=f"{counted} bytes of the store, and it may use {counted}"):
            await take(limited, "again")


def test_what_a_refusal_says_can_be_acted_on() -> None:
    told = rules.spent(Limits(max_turns=5), Usage(turns=4), 0, 3)
    assert told is not None
    assert (
        json.dumps(str(told.error)) == '"this request asks for 3 replies at once, and the session has 1 of its 5 turns left; ask for fewer"'
    )


async def test_a_session_is_opened_with_its_limits_and_says_which_it_reached() -> None:
    limits = {
        "max_turns": 5,
        "max_context": 900,
        "max_tokens": 2,
        "max_bytes": 10**6,
        "ttl": 50.5,
        "idle_timeout": 5.5,
        "turn_timeout": 7.0,
    }
    async with bench(["Yes"], max_sessions=2) as b:
        status, opened = await b.admin("POST", "/sessions", {"id": "mine", "limits": limits})
        assert status == 201
        assert (await b.gateway.session("mine")).row.limits == Limits(**limits)  # type: ignore[arg-type]
        for expected in (200, 429):
            async with b.http.post(
                f"{opened['urls']['anthropic']}/v1/messages", json={**many(1, str(expected)), "max_tokens": 9}
            ) as answer:
                assert answer.status == expected
        _, row = await b.admin("GET", "/sessions/mine")
        assert (row["status"], row["ended"], row["reached"]) == ("open", "", ["max_tokens"])
        status, refused = await b.admin("POST", "/sessions", {"id": "more"})
        assert (status, refused["error"]["type"]) == (429, "LimitReached")
        for name, value in (("max_tokens", -1), ("max_bytes", 1.5), ("ttl", 0), ("idle_timeout", -1), ("ttl", "long")):
            status, refused = await b.admin("POST", "/sessions", {"limits": {name: value}})
            assert (status, refused["error"]["message"].partition(":")[0]) == (400, f"limits.{name}")
