"""The gate before an engine: who is held, whose time stands still, and what a hold waits for. Time is the loop's, set by hand."""

from __future__ import annotations

import asyncio

import pytest

from turnloom.engine.gate import Clock, Gate


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the loop's clock is ahead by."""
    ahead, plain = [0.0], asyncio.BaseEventLoop.time
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda self: plain(self) + ahead[0])
    return ahead


async def test_what_comes_while_it_is_open_goes_through() -> None:
    gate = Gate()
    assert not await gate.wait(Clock(None))
    with gate.through("r", "one"):
        assert gate.running == {"r": "one"}
    assert gate.running == {}


async def test_it_is_open_when_a_wait_returns() -> None:
    """Shut again before a waiter ran: it goes on waiting."""
    gate = Gate()
    gate.close()
    waiting = asyncio.create_task(gate.wait(Clock(None)))
    await asyncio.sleep(0)
    assert gate.held == 1
    gate.open()
    gate.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    gate.open()
    assert await waiting
    assert gate.held == 0


async def test_opening_and_closing_twice_is_once() -> None:
    gate = Gate()
    gate.close()
    gate.close()
    gate.open()
    gate.open()
    assert not gate.shut
    assert not await gate.wait(Clock(None))


async def test_one_who_leaves_is_not_held_any_more() -> None:
    gate = Gate()
    gate.close()
    waiting = asyncio.create_task(gate.wait(Clock(None)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert gate.held == 0


async def test_waiting_for_what_runs_ends_with_it_or_with_the_hold() -> None:
    gate = Gate()
    assert await gate.empty(None)
    with gate.through("a", "one"):
        gate.close()
        assert not await gate.empty(0)
        waiting = asyncio.create_task(gate.empty(None))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.open()
        assert not await waiting, "it was let go, and something runs"
        gate.close()
        waiting = asyncio.create_task(gate.empty(None))
        await asyncio.sleep(0)
        assert not waiting.done()
    assert await waiting


async def test_a_held_turns_time_stands_still(hours: list[float]) -> None:
    gate = Gate()
    gate.close()
    async with asyncio.timeout(60) as timer:
        with gate.watch(timer) as clock:
            waiting = asyncio.create_task(gate.wait(clock))
            await asyncio.sleep(0)
            assert timer.when() is None
            hours[0] = 3600
            gate.open()
            await waiting
            left = (timer.when() or 0) - asyncio.get_running_loop().time()
            assert 0 < left <= 60, "what was left before is left now"
            assert left > 60 - 3600


async def test_time_goes_on_after_a_hold(hours: list[float]) -> None:
    gate = Gate()

    async def turn() -> None:
        async with asyncio.timeout(60) as timer:
            with gate.watch(timer) as clock:
                gate.close()
                asyncio.get_running_loop().call_soon(gate.open)
                await gate.wait(clock)
                hours[0] = 61
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await turn()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_frozen_time_stands_still_for_what_runs_too(when: str, hours: list[float]) -> None:
    gate = Gate()
    if when == "before":
        gate.freeze()
    async with asyncio.timeout(60) as timer:
        with gate.watch(timer) as clock:
            gate.freeze()
            gate.freeze()
            assert timer.when() is None
            hours[0] = 3600
            gate.close()
            waiting = asyncio.create_task(gate.wait(clock))
            await asyncio.sleep(0)
            gate.thaw()
            assert timer.when() is None, "it is held, and that alone stops it"
            gate.open()
            await waiting
            assert timer.when() is not None
            assert timer.when() > hours[0]


async def test_who_ends_while_time_is_frozen_has_his_limit_back() -> None:
    gate = Gate()
    async with asyncio.timeout(60) as timer:
        await asyncio.sleep(0)
        with gate.watch(timer):
            gate.freeze()
            assert timer.when() is None
        assert timer.when() is not None
        gate.open()
        gate.open()


async def test_a_turn_without_a_limit_has_none_afterwards() -> None:
    gate = Gate()
    async with asyncio.timeout(None) as timer:
        await asyncio.sleep(0)
        with gate.watch(timer):
            gate.freeze()
            gate.thaw()
        assert timer.when() is None
