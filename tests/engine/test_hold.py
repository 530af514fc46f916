"""Holds: what runs is stopped, waited for or left; what comes waits; and a turn that someone stopped is not gone on with."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.support.members import STOP, Member, some
from turnloom.engine.contract import AbortOutcome, Chunk, PauseMode, Trace
from turnloom.engine.pool import Patience, Pool
from turnloom.errors import EngineRejected, EngineUnavailable
from turnloom.types import Finish, FinishReason, Piece, Sampling, ids

PROMPT = ids([1, 2, 3])
RID = "0" * 32
NOW = Patience(attempts=2, seconds=60, pause=0.0)
NEVER = 3600.0


def running(pool: Pool, trace: Trace | None = None, rid: str = RID) -> asyncio.Task[list[Chunk]]:
    async def sampled() -> list[Chunk]:
        return [c async for c in pool.sample(PROMPT, Sampling(max_tokens=50), rid=rid, routing_key="s", trace=trace)]

    return asyncio.create_task(sampled())


async def until(*facts: object) -> None:
    """Let others run until every fact (a function) holds."""
    async with asyncio.timeout(30):
        while not all(fact() for fact in facts):  # type: ignore[operator]
            await asyncio.sleep(0.001)


def tokens(task: asyncio.Task[list[Chunk]]) -> list[int]:
    return [t for c in task.result() for t in c.ids.tolist()]


async def test_abort_stops_what_runs_and_its_turn_goes_on_afterwards() -> None:
    never, trace = asyncio.Event(), Trace()
    one = Member("one", [[some(4), never], [some(5, finish=STOP)]])
    pool = Pool([one], NOW)
    task = running(pool, trace)
    await until(lambda: one.live)
    assert await pool.hold("abort", NEVER) == 0
    assert one.aborts == [RID + "0001"]
    await until(lambda: pool.gate.held == 1)
    assert len(one.asked) == 1
    pool.release()
    await task
    assert tokens(task) == [4, 5]
    assert trace.pieces == [Piece(0, "one"), Piece(1, "one", "Aborted")]


async def test_a_hold_costs_no_patience() -> None:
    never = asyncio.Event()
    one = Member("one", [*[[never]] * 5, [some(5, finish=STOP)]])
    pool = Pool([one], Patience(attempts=0))
    task = running(pool)
    for count in range(1, 6):
        await until(lambda: one.live, lambda count=count: len(one.asked) == count)
        await pool.hold("abort", NEVER)
        await until(lambda: pool.gate.held)
        pool.release()
    await task
    assert tokens(task) == [5]


async def test_abort_stops_a_request_that_is_still_on_its_way() -> None:
    """No abort reaches it until the engine has it: it is told again."""
    never, there = asyncio.Event(), asyncio.Event()
    one = Member("one", [[never], [some(5, finish=STOP)]], deaf=there)
    pool = Pool([one], NOW)
    task = running(pool)
    await until(lambda: one.asked)
    held = asyncio.create_task(pool.hold("abort", NEVER))
    await until(lambda: one.aborts)
    there.set()
    async with asyncio.timeout(60):
        assert await held == 0
    pool.release()
    await task
    assert tokens(task) == [5]


async def test_nothing_comes_between_the_gate_and_the_request() -> None:
    """The gate shuts while a turn asks its engine what it is: it is held, not sent."""
    asked, answer = asyncio.Event(), asyncio.Event()

    class Slow(Member):
        async def capabilities(self):  # type: ignore[no-untyped-def]
            if self.told:
                asked.set()
                await answer.wait()
            return await super().capabilities()

    one = Slow("one", [[some(5, finish=STOP)]])
    pool = Pool([one], NOW)
    await pool.capabilities()
    one.told.append("begun")
    task = running(pool)
    await asked.wait()
    assert await pool.hold("abort", NEVER) == 0
    answer.set()
    await until(lambda: pool.gate.held == 1)
    assert one.asked == []
    pool.release()
    await task
    assert tokens(task) == [5]


async def test_an_engine_that_was_never_up_is_not_asked_over_and_over_while_held() -> None:
    class Down(Member):
        times = 0

        async def capabilities(self):  # type: ignore[no-untyped-def]
            self.times += 1
            raise EngineUnavailable("down")

    pool = Pool([Down("down"), Member("up", [[some(5, finish=STOP)]])], NOW)
    await pool.capabilities()
    down = pool.members[0]
    await pool.hold("keep")
    tasks = [running(pool, rid=f"{i:032x}") for i in range(4)]
    await until(lambda: pool.gate.held == 4)
    assert down.times == 1  # type: ignore[attr-defined]
    pool.release()
    await asyncio.wait(tasks)
    assert [tokens(t) for t in tasks] == [[5]] * 4


async def test_abort_waits_no_longer_than_it_is_told() -> None:
    class Deaf(Member):
        async def abort(self, rid: str) -> AbortOutcome:
            await asyncio.Event().wait()
            raise AssertionError

    never = asyncio.Event()
    one = Deaf("one", [[some(4), never, some(5, finish=STOP)]])
    pool = Pool([one], NOW)
    task = running(pool)
    await until(lambda: one.live)
    async with asyncio.timeout(30):
        assert await pool.hold("abort", 0) == 1
    never.set()
    await task
    assert tokens(task) == [4, 5]


async def test_wait_waits_for_what_runs_and_holds_what_comes() -> None:
    go = asyncio.Event()
    one = Member("one", [[some(4), go, some(5, finish=STOP)], [some(6, finish=STOP)]])
    pool = Pool([one], NOW)
    first = running(pool)
    await until(lambda: one.live)
    held = asyncio.create_task(pool.hold("wait"))
    await until(lambda: pool.gate.shut)
    second = running(pool, rid="1" * 32)
    await until(lambda: pool.gate.held == 1)
    assert not held.done()
    go.set()
    assert await held == 0
    await first
    assert tokens(first) == [4, 5]
    assert one.aborts == []
    assert not second.done()
    pool.release()
    await second


async def test_wait_for_a_while_says_what_still_runs() -> None:
    never = asyncio.Event()
    one = Member("one", [[never]])
    pool = Pool([one], NOW)
    task = running(pool)
    await until(lambda: one.live)
    assert await pool.hold("wait", 0.01) == 1
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_hold_returns_when_it_is_released(mode: PauseMode) -> None:
    """Else it would wait for what comes after it, too."""

    class Deaf(Member):
        async def abort(self, rid: str) -> AbortOutcome:
            self.aborts.append(rid)
            return AbortOutcome.FAILED

    never = asyncio.Event()
    one = Deaf("one", [[never]])
    pool = Pool([one], NOW)
    task = running(pool)
    await until(lambda: one.live)
    held = asyncio.create_task(pool.hold(mode, NEVER))
    await until(lambda: pool.gate.shut)
    pool.release()
    async with asyncio.timeout(30):
        assert await held == 1
    task.cancel()
    await asyncio.wait([task])


async def test_keep_leaves_what_runs_and_stops_its_time() -> None:
    go = asyncio.Event()
    one = Member("one", [[some(4), go, some(5, finish=STOP)]])
    pool = Pool([one], NOW)
    async with asyncio.timeout(60) as timer:
        task = running(pool, Trace(timer=timer))
        await until(lambda: one.live)
        assert await pool.hold("keep") == 1
        assert timer.when() is None
        pool.release()
        assert timer.when() is not None
        go.set()
        await task
    assert tokens(task) == [4, 5]


async def test_pausing_the_servers_stops_the_time_of_what_they_have() -> None:
    go = asyncio.Event()
    one = Member("one", [[go, some(5, finish=STOP)]])
    pool = Pool([one], NOW)
    async with asyncio.timeout(60) as timer:
        task = running(pool, Trace(timer=timer))
        await until(lambda: one.live)
        await pool.pause("keep")
        assert timer.when() is None
        await pool.resume()
        assert timer.when() is not None
        go.set()
        await task


async def test_every_server_is_told_though_one_cannot_be() -> None:
    one, two = Member("one", refuses=EngineRejected("cannot")), Member("two")
    pool = Pool([one, two])
    with pytest.raises(EngineRejected):
        await pool.pause("wait")
    with pytest.raises(EngineRejected):
        await pool.resume()
    assert one.told == two.told == ["wait", "resume"]


async def test_a_server_that_cannot_be_paused_stops_no_time() -> None:
    pool = Pool([Member("one", refuses=EngineRejected("cannot"))])
    with pytest.raises(EngineRejected):
        await pool.pause("keep")
    async with asyncio.timeout(60) as timer:
        await asyncio.sleep(0)
        with pool.gate.watch(timer):
            assert timer.when() is not None


async def test_a_turn_that_is_stopped_by_its_id_is_not_gone_on_with() -> None:
    never = asyncio.Event()
    one = Member("one", [[some(4), never]])
    pool = Pool([one], NOW)
    task = running(pool)
    await until(lambda: one.live)
    assert await pool.abort(RID) is AbortOutcome.VERIFIED
    chunks = await task
    assert chunks[-1].finish == Finish(FinishReason.ABORT, message="Aborted")
    assert tokens(task) == [4]
    assert len(one.asked) == 1


async def test_a_held_turn_that_is_stopped_asks_no_engine() -> None:
    one = Member("one", [[some(4, finish=STOP)]])
    pool = Pool([one], NOW)
    await pool.hold("keep")
    task = running(pool)
    await until(lambda: pool.gate.held == 1)
    assert await pool.abort(RID) is AbortOutcome.VERIFIED
    pool.release()
    chunks = await task
    assert [c.finish for c in chunks] == [Finish(FinishReason.ABORT, message="stopped")]
    assert one.asked == []


async def test_one_request_is_stopped_by_its_own_id_and_its_turn_goes_on() -> None:
    never = asyncio.Event()
    one = Member("one", [[some(4), never], [some(5, finish=STOP)]])
    pool = Pool([one], NOW)
    task = running(pool)
    await until(lambda: one.live)
    assert await pool.abort(RID + "0001") is AbortOutcome.VERIFIED
    await task
    assert tokens(task) == [4, 5]


@pytest.mark.parametrize("rid", ["", "f" * 32])
async def test_an_id_that_nobody_has_stops_nothing(rid: str) -> None:
    never = asyncio.Event()
    one = Member("one", [[never]])
    pool = Pool([one], NOW)
    task = running(pool)
    await until(lambda: one.live)
    assert await pool.abort(rid) is AbortOutcome.FAILED
    assert one.aborts == []
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_closing_closes_every_member() -> None:
    """And waits for those that take their time, though one fails at once."""

    class Broken(Member):
        async def close(self) -> None:
            raise EngineUnavailable("no")

    class Slow(Member):
        async def close(self) -> None:
            for _ in range(9):
                await asyncio.sleep(0)
            await super().close()

    slow = Slow("two")
    with pytest.raises(EngineUnavailable):
        await Pool([Broken("one"), slow]).close()
    assert slow.told == ["close"]
