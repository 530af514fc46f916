"""A session from open to dropped: finish, rewards, the clock, the janitor, a restart, and how many may be open."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.dialects import ALL, Spoken, error_of
from tests.support.gateways import bench, follow, user
from tests.support.lives import Clock, CountingStore, sessions, take
from turnloom.core.credit import RewardRule
from turnloom.errors import BadRequest, LimitReached, NotFound, SessionClosed, StoreError, Unauthorized
from turnloom.gateway.janitor import Janitor
from turnloom.gateway.respond import Choice
from turnloom.gateway.session import Session
from turnloom.gateway.sessions import Sessions
from turnloom.store.contract import Limits, SessionRow
from turnloom.store.memory import MemoryStore
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import Outcome

KINDS = pytest.mark.parametrize("kind", ["memory", "sqlite"])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def some(clock: Clock) -> AsyncIterator[Sessions]:
    async with sessions(clock=clock) as s:
        yield s


class Turning:
    """A turn that is in flight until `go`."""

    def __init__(self, session: Session) -> None:
        self.session, self.begun, self.go = session, asyncio.Event(), asyncio.Event()
        self.outcome: Outcome | None = None
        self.task = asyncio.create_task(self._turn())

    async def _turn(self) -> None:
        with self.session.turn_slot():
            self.begun.set()
            try:
                await self.go.wait()
                self.outcome = Outcome.DELIVERED
            except asyncio.CancelledError:
                self.outcome = Outcome.ABORTED if self.session.closing else Outcome.ORPHANED
                raise


async def turning(session: Session) -> Turning:
    made = Turning(session)
    await made.begun.wait()
    return made


# Finish


async def test_r13_a_finish_lets_turns_in_flight_end_and_then_cancels_them(some: Sessions) -> None:
    session, _ = await some.open()
    quick, slow = await turning(session), await turning(session)
    finishing = asyncio.create_task(session.finish(1.0, drain=0.2))
    while session.row.status == "open":
        await asyncio.sleep(0)
    with pytest.raises(SessionClosed, match="finished; open a new one"):
        await take(session, "late")
    quick.go.set()
    await finishing
    assert (quick.outcome, slow.outcome) == (Outcome.DELIVERED, Outcome.ABORTED)
    with pytest.raises(SessionClosed, match="closed while this reply was being made"):
        await slow.task
    assert session.in_flight == 0
    assert (session.row.ended, session.row.reward) == ("finished", 1.0)


async def test_r13_finishing_again_adds_its_reward_and_changes_nothing_else() -> None:
    async with bench(["Hello", "More"]) as b:
        body = user("hi")
        first = await b.post(body)
        assert (await b.post(follow(body, first.body, "and?"))).status == 200
        samples = await b.handle.finish()
        row = (await b.session()).row
        assert await b.handle.finish() == samples
        assert (await b.session()).row == row
        (again,) = await b.handle.finish(reward=0.5)
        assert again == replace(samples[0], reward=0.5)
        assert (await b.post(user("late"))).status == 503
        assert [s.token_ids.tolist() for s in await b.handle.samples()] == [s.token_ids.tolist() for s in samples]
        assert (await b.admin("DELETE", f"/sessions/{b.handle.id}"))[0] == 204
        with pytest.raises(NotFound):
            await b.session()
        assert (await b.post(user("late"))).status == 401


async def test_two_finishes_at_once_are_one(some: Sessions) -> None:
    session, _ = await some.open()
    slow = await turning(session)
    await asyncio.gather(session.finish(1.0, drain=60), session.finish(2.0, drain=0))
    assert slow.outcome is Outcome.ABORTED, "who has less patience decides"
    assert (session.row.ended, [r.value for r in session.row.rewards]) == ("finished", [1.0, 2.0])
    assert not session.closing


async def test_a_finish_goes_on_when_who_asked_for_it_has_left(some: Sessions) -> None:
    session, _ = await some.open()
    slow = await turning(session)
    asking = asyncio.create_task(session.finish(drain=0.05))
    while session.row.status == "open":
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await session.settled()
    assert slow.outcome is Outcome.ABORTED


async def test_a_row_that_cannot_be_written_leaves_the_session_open(caplog: pytest.LogCaptureFixture) -> None:
    class Full(MemoryStore):
        full = asyncio.Event()

        async def put_session(self, row: SessionRow) -> None:
            if row.status == "closed":
                await self.full.wait()
                raise StoreError("disk full")
            await super().put_session(row)

    store = Full()
    async with sessions(store) as s:
        session, _ = await s.open()
        asking = asyncio.create_task(session.finish())
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        store.full.set()
        await session.settled()
        assert "could not be changed, and who asked has left: disk full" in caplog.text
        with pytest.raises(StoreError, match="disk full"):
            await session.finish()
        assert session.row.status == "open"
        await take(session, "still there?")


async def test_a_turn_in_flight_ends_within_the_budget_over_the_wire() -> None:
    async with bench([Reply("a b c d e f g h i j", chunk=1, delay=0.03), "never"]) as b:
        asked = asyncio.create_task(b.post(user("hi")))
        await b.engine.wait_running(1)
        session = await b.session()
        finishing = asyncio.create_task(session.finish(drain=60))
        while session.row.status == "open":
            await asyncio.sleep(0)
        assert session.in_flight == 1
        refused = await b.post(user("another"))
        assert (refused.status, refused.headers["x-should-retry"]) == (503, "false")
        await finishing
        assert [turn.outcome for turn in session.tree.turns.values()] == [Outcome.DELIVERED]
        assert (await asked).body["content"][0]["text"] == "a b c d e f g h i j"
        assert len(b.engine.requests) == 1


# Rewards


@pytest.mark.parametrize(("rule", "expected"), [("last", 2.0), ("sum", 3.5), ("mean", 3.5 / 3), ("max", 2.0), ("min", 0.5)])
@KINDS
async def test_any_number_of_rewards_is_merged_by_the_sessions_rule(
    kind: str, rule: RewardRule, expected: float, tmp_path: Path, clock: Clock
) -> None:
    async with sessions(kind, tmp_path, clock=clock) as s:
        session, _ = await s.open(session_id="one", reward_rule=rule)
        assert session.row.reward is None
        await take(session, "hi")
        for value in (1.0, 0.5):
            clock.now += 1
            await session.reward(value)
        await session.finish()
        clock.now += 1
        await session.reward(2.0)
        assert session.row.reward == expected
        assert [(r.value, r.at) for r in session.row.rewards] == [(1.0, 1001.0), (0.5, 1002.0), (2.0, 1003.0)]
        assert [sample.reward for sample in session.unroll().samples] == [expected]
        assert await s._store.session("one") == session.row


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "high", None, 10**400])
async def test_what_is_no_finite_number_is_no_reward(value: Any, some: Sessions) -> None:
    session, _ = await some.open()
    with pytest.raises(BadRequest, match=r"value: Input should be a (finite|valid) number"):
        await session.reward(value)
    if value is not None:
        with pytest.raises(BadRequest):
            await session.finish(value)
    assert (session.row.rewards, session.row.status) == ((), "open")


@pytest.mark.parametrize(("rule", "fits"), [("last", True), ("sum", False), ("mean", False), ("max", True)])
async def test_rewards_that_no_float_holds_together_are_refused(rule: RewardRule, fits: bool, some: Sessions) -> None:
    session, _ = await some.open(reward_rule=rule)
    await session.reward(1.7e308)
    if fits:
        await session.reward(1.7e308)
    else:
        with pytest.raises(BadRequest, match="together beyond what a float holds"):
            await session.reward(1.7e308)
    assert session.row.reward == 1.7e308


async def test_a_lineage_has_the_reward_that_it_earned_and_the_others_have_the_sessions(some: Sessions) -> None:
    session, _ = await some.open(reward_rule="sum")
    one, two = await take(session, "one"), await take(session, "two")
    await session.reward(1.0)
    await session.reward(0.25, lineage=two.id)
    await session.reward(0.5, lineage=two.id)
    assert session.row.reward == 1.0
    assert {sample.lineage_id: sample.reward for sample in session.unroll().samples} == {one.id: 1.0, two.id: 0.75}
    with pytest.raises(BadRequest, match="no turn 'turn-x'"):
        await session.reward(1.0, lineage="turn-x")


async def test_a_dropped_session_takes_no_reward_and_does_not_come_back(clock: Clock) -> None:
    store = CountingStore()
    async with sessions(store, clock=clock) as s:
        session, key = await s.open(session_id="one")
        await take(session, "hi")
        await s.drop("one")
        for work in (session.reward(1.0), session.finish(1.0)):
            with pytest.raises(NotFound, match="dropped"):
                await work
        with pytest.raises(SessionClosed):
            await take(session, "late")
        with pytest.raises(NotFound):
            await s.drop("one")
        with pytest.raises(Unauthorized):
            await s.by_key(key)
        assert await store.session("one") is None
        again, _ = await s.open(session_id="one")
        assert again is not session
        assert not again.tree.turns


async def test_a_drop_ends_turns_in_flight_at_once_and_waits_for_their_records(some: Sessions) -> None:
    session, _ = await some.open(session_id="one")
    slow = await turning(session)
    dropping = asyncio.create_task(some.drop("one"))
    await asyncio.sleep(0)
    dropping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropping
    with pytest.raises(SessionClosed):
        await slow.task
    while some.loaded:
        await asyncio.sleep(0)
    with pytest.raises(NotFound):
        await some.by_id("one")


@pytest.mark.parametrize(("name", "word"), [("reward_rule", "median"), ("repeats", "always")])
async def test_a_word_that_is_none_of_those_known_is_refused(name: str, word: str, some: Sessions) -> None:
    with pytest.raises(BadRequest, match=f"{name}: Input should be"):
        await some.open(**{name: word})


# The clock


@pytest.mark.parametrize("limit", ["ttl", "idle_timeout"])
@KINDS
async def test_a_session_whose_time_is_up_refuses_before_anybody_has_looked(kind: str, limit: str, tmp_path: Path, clock: Clock) -> None:
    async with sessions(kind, tmp_path, clock=clock, limits=Limits(**{limit: 10.0})) as s:  # type: ignore[arg-type]
        session, _ = await s.open(session_id="one")
        clock.now += 9.5
        await take(session, "in time")
        clock.now += 10.0
        with pytest.raises(SessionClosed, match=limit):
            await take(session, "late")
        await session.settled()
        row = await s._store.session("one")
        assert row is not None
        assert (row.status, row.ended, row.reached) == ("closed", limit, (limit,))
        assert len(session.unroll().samples) == 1
        await session.finish(1.0)
        assert (session.row.ended, session.row.reward) == (limit, 1.0)


async def test_turns_in_flight_keep_a_session_from_being_idle_and_end_when_its_life_does(clock: Clock) -> None:
    async with sessions(clock=clock, limits=Limits(ttl=100.0, idle_timeout=10.0), drain=0.05) as s:
        janitor = Janitor(s, clock)
        session, _ = await s.open(session_id="one")
        slow = await turning(session)
        clock.now += 50.0
        assert await janitor.sweep(clock.now) == []
        clock.now += 50.0
        assert await janitor.sweep(clock.now) == [("one", "ttl")]
        assert session.row.status == "closed"
        await session.settled()
        assert slow.outcome is Outcome.ABORTED
        assert (janitor.failures, session.in_flight) == (0, 0)
        with pytest.raises(SessionClosed):
            await slow.task


async def test_idle_time_begins_when_the_last_turn_ended(clock: Clock) -> None:
    async with sessions(clock=clock, limits=Limits(idle_timeout=10.0)) as s:
        session, _ = await s.open(session_id="one")
        turn = await turning(session)
        clock.now += 50.0
        turn.go.set()
        await turn.task
        clock.now += 9.0
        assert await s.expire("one", clock.now) == ""
        clock.now += 1.0
        assert await s.expire("one", clock.now) == "idle_timeout"


# The janitor


@KINDS
async def test_a_sweep_closes_sessions_that_are_not_in_memory_without_bringing_them_in(kind: str, tmp_path: Path, clock: Clock) -> None:
    async with sessions(kind, tmp_path, clock=clock, limits=Limits(ttl=100.0), keep=10.0) as s:
        janitor = Janitor(s, clock)
        for name in ("a", "b", "c"):
            await take((await s.open(session_id=name))[0], "hi")
        clock.now += 50.0
        assert await janitor.sweep(clock.now) == []
        assert s.loaded == 0
        await s.by_id("b")
        clock.now += 50.0
        assert sorted(await janitor.sweep(clock.now)) == [("a", "ttl"), ("b", "ttl"), ("c", "ttl")]
        assert s.loaded == 1, "the one that was in memory already"
        assert await janitor.sweep(clock.now) == []
        for name in ("a", "b", "c"):
            session = await s.by_id(name)
            assert (session.row.status, session.row.ended, len(session.tree.turns)) == ("closed", "ttl", 1)


async def test_what_fails_in_a_sweep_is_counted_and_keeps_nothing_else_from_it(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(MemoryStore):
        down = False

        async def put_session(self, row: SessionRow) -> None:
            if row.status == "closed" and row.id == "bad":
                raise StoreError("disk full")
            await super().put_session(row)

        async def expired(self, now: float) -> Sequence[tuple[str, str]]:
            if self.down:
                raise ValueError("a defect")
            return await super().expired(now)

    store = Failing()
    async with sessions(store, clock=clock, limits=Limits(ttl=100.0), keep=10.0) as s:
        janitor = Janitor(s, clock)
        for name in ("a", "bad", "z"):
            await s.open(session_id=name)
        clock.now += 100.0
        assert [name for name, _ in await janitor.sweep(clock.now)] == ["a", "z"]
        assert janitor.failures == 1
        await (await s.by_id("a")).settled()
        store.down = True
        clock.now += 10.0
        assert await janitor.sweep(clock.now) == []
        assert (janitor.failures, s.loaded) == (2, 0), "memory is freed all the same"
        assert "disk full" in caplog.text
        assert "a defect" in caplog.text


async def test_the_janitor_sweeps_by_itself_until_it_is_stopped(clock: Clock) -> None:
    async with sessions(clock=clock, limits=Limits(ttl=100.0)) as s:
        janitor = Janitor(s, clock, every=0.001)
        session, _ = await s.open()
        await janitor.stop()
        janitor.start()
        clock.now += 100.0
        while session.row.status == "open":
            await asyncio.sleep(0)
        await janitor.stop()
        await janitor.stop()
        assert not [task for task in asyncio.all_tasks() if "Janitor" in repr(task)]


async def test_a_gateway_has_a_janitor_and_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("turnloom.gateway.api.time", clock)
    monkeypatch.setattr("turnloom.gateway.janitor.SWEEP_SECONDS", 0.01)
    async with bench(["Yes"], session_limits=Limits(ttl=10.0), loaded_seconds=20.0) as b:
        assert (await b.post(user("hi"))).status == 200
        clock.now += 10.0
        while (await b.session()).row.status == "open":
            await asyncio.sleep(0.01)
        clock.now += 20.0
        counted = ""
        while "turnloom_session_evictions_total 1.0" not in counted:
            async with b.http.get(b.gateway.url + "/metrics") as answer:
                counted = await answer.text()
        assert 'turnloom_session_expirations_total{limit="ttl"} 1.0' in counted
        assert "turnloom_sessions_loaded 0.0" in counted


# A restart


@KINDS
async def test_a_session_comes_back_as_it_was(kind: str, tmp_path: Path, clock: Clock) -> None:
    store: Any = MemoryStore() if kind == "memory" else None
    limits = Limits(max_turns=2, max_tokens=100, idle_timeout=60.0)
    async with sessions(store or kind, tmp_path, clock=clock, limits=limits) as s:
        session, key = await s.open(session_id="one", reward_rule="max", repeats="resample")
        await take(session, "one", tokens=7)
        clock.now += 5.0
        await take(session, "two", tokens=8)
        with pytest.raises(LimitReached):
            await take(session, "three")
        await session.reward(1.0)
        before, samples, usage = session.row, session.unroll(), session.usage
        await s.open(session_id="ended")
        clock.now += 60.0
        assert await s.expire("ended", clock.now) == "idle_timeout"
        clock.now -= 60.0
    async with sessions(store or kind, tmp_path, clock=clock) as s:
        assert s.loaded == 0, "lazily"
        again = await s.by_key(key)
        assert again is not session
        assert (again.row, again.unroll()) == (replace(before, reached=("max_turns",)), samples)
        assert replace(again.usage, bytes=0) == replace(usage, bytes=0)
        assert again.usage.bytes == (await s._store.usage("one")).bytes > 0
        assert again.touched == clock.now
        assert (await s.by_id("ended")).row.ended == "idle_timeout"
        with pytest.raises(LimitReached):
            await take(again, "three")
        clock.now += 59.0
        assert await s.expire("one", clock.now) == ""
        clock.now += 1.0
        assert await s.expire("one", clock.now) == "idle_timeout"


# How many may be open


@KINDS
async def test_no_more_sessions_are_open_than_may_be(kind: str, tmp_path: Path, clock: Clock) -> None:
    store: Any = MemoryStore() if kind == "memory" else None
    async with sessions(store or kind, tmp_path, clock=clock, max_sessions=3, limits=Limits(ttl=100.0)) as s:
        opened = await asyncio.gather(*(s.open(session_id=f"s{i}") for i in range(8)), return_exceptions=True)
        assert sum(isinstance(each, LimitReached) for each in opened) == 5
        names = [each[0].row.id for each in opened if not isinstance(each, BaseException)]
        with pytest.raises(LimitReached, match="3 open sessions, as many as it may; finish one, or raise max_sessions"):
            await s.open()
        with pytest.raises(BadRequest, match="is taken"):
            await s.open(session_id=names[0])
        await (await s.by_id(names[0])).finish()
        await s.open(session_id="fourth")
        await s.drop(names[0])
        with pytest.raises(LimitReached):
            await s.open()
        await s.drop(names[1])
        await s.open(session_id="fifth")
    async with sessions(store or kind, tmp_path, clock=clock, max_sessions=3) as s:
        with pytest.raises(LimitReached):
            await s.open()
        await s.drop("fifth")
        await s.open(session_id="sixth", limits=Limits())
        clock.now += 100.0
        assert len(await Janitor(s, clock).sweep(clock.now)) == 2
        await s.open(session_id="seventh")
        await s.open(session_id="eighth")
        with pytest.raises(LimitReached):
            await s.open()


async def test_a_session_that_could_not_be_stored_takes_no_place() -> None:
    class Full(MemoryStore):
        full = True

        async def put_session(self, row: SessionRow) -> None:
            if self.full:
                raise StoreError("disk full")
            await super().put_session(row)

    store = Full()
    async with sessions(store, max_sessions=1) as s:
        for _ in range(3):
            with pytest.raises(StoreError):
                await s.open()
        assert s.loaded == 0
        store.full = False
        await s.open()
        with pytest.raises(LimitReached):
            await s.open()


async def test_nothing_of_this_is_logged_as_an_error(some: Sessions, caplog: pytest.LogCaptureFixture) -> None:
    session, _ = await some.open(limits=Limits(max_turns=0))
    with pytest.raises(LimitReached):
        await take(session, "hi")
    await session.finish()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("spoken", ALL.values(), ids=ALL)
async def test_a_client_of_a_gateway_that_stops_is_not_told_to_give_up(spoken: Spoken) -> None:
    """Its session goes on when the gateway is back; only one that is over says that asking again cannot help."""
    async with bench([Reply("never", fault=Fault.HANG)]) as b:

        async def ask(text: str) -> tuple[int, bytes, Any]:
            path, body = spoken.ask(text)
            async with b.http.post(b.handle.base_url + path, data=body) as answer:
                return answer.status, await answer.read(), answer.headers

        during = asyncio.create_task(ask("during"))
        await b.engine.wait_running(1)
        draining = asyncio.create_task(b.gateway._running().drain(60))
        await asyncio.sleep(0)
        after = await ask("after")
        await b.gateway._running().close()
        await draining
        for status, raw, headers in (after, await during):
            assert status == 503
            assert "ask again when it is back" in error_of(spoken, status, raw)
            assert headers.get("x-should-retry", "true") == "true"
            assert "86400s" not in raw.decode()


async def test_a_turn_on_record_whose_reply_is_still_being_written_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    writing, go = asyncio.Event(), asyncio.Event()
    finish = Choice.finish

    async def slowly(self: Choice, reply: Any) -> None:
        writing.set()
        await go.wait()
        await finish(self, reply)

    monkeypatch.setattr(Choice, "finish", slowly)
    async with bench(["Yes"]) as b:
        asking = asyncio.create_task(b.post(user("hi")))
        await writing.wait()
        session = await b.session()
        assert (session.in_flight, session.being_made) == (1, 0)
        assert (await b.handle.stats())["turns"] == 1
        status = await b.handle.status()
        assert (status["turns"], status["in_flight"]) == (1, 0)
        go.set()
        assert (await asking).status == 200
