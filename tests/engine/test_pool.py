"""Several engines as one: who is asked, what is gone on with and for how long, and holds. Engines are in memory, time is set by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.support.members import ABLE, STOP, Member, aborted, some
from tests.support.pool_turns import PROMPT, RID, SOON, by_hand, first_of, sampled, tokens, two
from turnloom.engine.contract import Capabilities, Chunk, Trace
from turnloom.engine.metrics import CONTINUED
from turnloom.engine.pool import Patience, Pool
from turnloom.errors import ConfigError, EngineError, EngineOverloaded, EngineProtocol, EngineRejected, EngineUnavailable
from turnloom.types import Finish, FinishReason, Piece, Sampling, VersionSpan, ids

DEAD = EngineUnavailable("it broke off")
BUSY = EngineOverloaded("busy")


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return by_hand(monkeypatch)


async def test_it_goes_on_elsewhere_from_the_prompt_and_the_ids_so_far(slept: list[float]) -> None:
    pool, own, other = two()
    own.plan = [[some(4, 5, version="v1"), some(6, version="v1"), DEAD]]
    other.plan = [[some(7, version="v2"), some(8, finish=STOP, versions=[VersionSpan("v2", 0, 2)])]]
    trace = Trace()
    chunks = await sampled(pool, trace=trace)
    assert tokens(chunks) == [4, 5, 6, 7, 8]
    assert chunks[-1].versions == (VersionSpan("v1", 0, 3), VersionSpan("v2", 3, 5))
    assert trace.pieces == [Piece(0, own.name), Piece(3, other.name, "it broke off")]
    (first,), (second,) = own.asked, other.asked
    assert (first.prompt, second.prompt) == ([1, 2, 3], [1, 2, 3, 4, 5, 6])
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (50, 47)
    assert (first.rid, second.rid) == (RID + "0001", RID + "0002")
    assert first.routing_key == second.routing_key == "s"
    assert slept == [0.0], "another engine takes over at once"
    assert pool.gate.running == {}


@pytest.mark.parametrize("broken", [[some(4), aborted(5)], [some(4), some(5), DEAD], [some(4, 5), BUSY], [some(4, 5)]])
async def test_a_single_engine_is_asked_again(broken: list[Any]) -> None:
    one = Member("one", [broken, [some(6, finish=STOP)]])
    before = CONTINUED._value.get()
    assert tokens(await sampled(Pool([one], SOON))) == [4, 5, 6]
    assert one.asked[1].prompt == [1, 2, 3, 4, 5]
    assert CONTINUED._value.get() == before + 1


async def test_what_an_abort_brings_with_it_is_kept() -> None:
    one = Member("one", [[aborted(4, 5)], [some(6, finish=STOP)]])
    trace = Trace()
    assert tokens(await sampled(Pool([one], SOON), trace=trace)) == [4, 5, 6]
    assert trace.pieces == [Piece(0, "one"), Piece(2, "one", "Aborted")]


async def test_a_request_that_gave_nothing_leaves_its_reason_with_the_next() -> None:
    one = Member("one", [[BUSY], [DEAD], [some(6, finish=STOP)]])
    trace = Trace()
    await sampled(Pool([one], SOON), trace=trace)
    assert trace.pieces == [Piece(0, "one", "it broke off")]


@pytest.mark.parametrize(
    ("last", "max_tokens", "finish"),
    [
        (some(9), 50, Finish(FinishReason.STOP, matched=9)),
        (some(5), 2, Finish(FinishReason.LENGTH)),
        (some(9), 2, Finish(FinishReason.STOP, matched=9)),
    ],
    ids=["end token", "max_tokens", "both"],
)
@pytest.mark.parametrize("way", ["cut", "abort"])
async def test_nothing_is_sampled_after_a_reply_that_was_whole(way: str, last: Chunk, max_tokens: int, finish: Finish) -> None:
    one = Member("one", [[some(4), last, DEAD if way == "cut" else aborted()]])
    chunks = await sampled(Pool([one], SOON), max_tokens=max_tokens, trace=Trace(end_ids=frozenset({9})))
    assert chunks[-1].finish == finish
    assert len(one.asked) == 1


async def test_nothing_is_sampled_for_a_reader_who_has_it_all() -> None:
    one, trace = Member("one", [[some(4), DEAD]]), Trace()
    got = []
    async for chunk in Pool([one], SOON).sample(PROMPT, Sampling(max_tokens=9), rid=RID, trace=trace):
        got.append(chunk)
        trace.complete = True
    assert got[-1].finish == Finish(FinishReason.STOP)
    assert len(one.asked) == 1


@pytest.mark.parametrize("error", [EngineProtocol("it contradicts itself"), EngineRejected("no")])
async def test_what_contradicts_itself_or_refuses_is_not_asked_again(error: EngineError) -> None:
    pool, own, other = two()
    own.plan = [[some(4), error]]
    with pytest.raises(type(error)):
        await sampled(pool)
    assert other.asked == []
    assert pool.gate.running == {}


async def test_a_schema_that_has_begun_is_not_gone_on_with() -> None:
    one = Member("one", [[some(4), aborted(5)], [some(6, finish=STOP)]])
    chunks = await sampled(Pool([one], SOON), json_schema="{}")
    assert tokens(chunks) == [4, 5]
    assert chunks[-1].finish == Finish(FinishReason.ABORT, message="Aborted")
    one = Member("one", [[some(4), DEAD]])
    with pytest.raises(EngineUnavailable):
        await sampled(Pool([one], SOON), json_schema="{}")
    one = Member("one", [[BUSY], [some(6, finish=STOP)]])
    assert tokens(await sampled(Pool([one], SOON), json_schema="{}")) == [6], "before it has begun it is asked again"


async def test_patience_is_over_after_so_many_failures_in_a_row(slept: list[float]) -> None:
    one = Member("one", [[DEAD]])
    with pytest.raises(EngineUnavailable, match="broke off"):
        await sampled(Pool([one], Patience(attempts=4, seconds=1000, pause=1, longest=3)))
    assert len(one.asked) == 5
    assert slept == [1, 2, 3, 3]
    one = Member("one", [[aborted()]])
    chunks = await sampled(Pool([one], Patience(attempts=2, seconds=1000)))
    assert chunks[-1].finish == Finish(FinishReason.ABORT, message="Aborted")
    assert len(one.asked) == 3


async def test_patience_is_over_after_so_long(slept: list[float]) -> None:
    """Seconds of failing: what an engine takes before its first failure counts for nothing."""
    one = Member("one", [[DEAD]])
    with pytest.raises(EngineUnavailable):
        await sampled(Pool([one], Patience(attempts=1000, seconds=10, pause=4, longest=4)))
    assert slept == [4, 4]


async def test_a_long_silence_before_the_first_failure_is_not_impatience(slept: list[float]) -> None:
    class Slow(Member):
        async def capabilities(self) -> Capabilities:
            slept.append(500.0)
            return ABLE

    one = Slow("one", [[aborted()], [some(4, finish=STOP)]])
    assert tokens(await sampled(Pool([one], Patience(seconds=10, pause=0)))) == [4]


async def test_a_token_renews_patience() -> None:
    one = Member("one", [[some(t), DEAD] for t in range(4, 12)] + [[some(12, finish=STOP)]])
    assert tokens(await sampled(Pool([one], replace(SOON, attempts=1)))) == [*range(4, 13)]


async def test_a_busy_engine_says_how_long_to_wait(slept: list[float]) -> None:
    one = Member("one", [[EngineOverloaded("busy", 7.0)], [some(4, finish=STOP)]])
    assert tokens(await sampled(Pool([one], Patience(seconds=60)))) == [4]
    assert slept == [7.0]
    one = Member("one", [[EngineOverloaded("busy", 61.0)], [some(4, finish=STOP)]])
    with pytest.raises(EngineOverloaded):
        await sampled(Pool([one], Patience(seconds=60)))
    assert slept == [7.0], "longer than patience: the client is told at once"


async def test_one_that_stays_busy_is_left_for_another() -> None:
    pool, own, other = two()
    own.plan, other.plan = [[BUSY]], [[some(4, finish=STOP)]]
    assert tokens(await sampled(pool)) == [4]
    assert len(own.asked) == 2, "once busy, it is asked again: it has the session's cache"


async def test_a_session_keeps_its_engine() -> None:
    names = [f"engine {i}" for i in range(5)]
    keys = [f"session {i}" for i in range(300)]
    pool = Pool([Member(n) for n in names])
    own = {key: first_of(pool, key).name for key in keys}
    assert own == {key: first_of(Pool([Member(n) for n in reversed(names)]), key).name for key in keys}
    shares = Counter(own.values())
    assert set(shares) == set(names)
    assert max(shares.values()) < 2 * min(shares.values())
    more = {key: first_of(Pool([Member(n) for n in [*names, "new"]]), key).name for key in keys}
    assert {more[key] for key in keys if more[key] != own[key]} == {"new"}, "what moves, moves to the new one"
    fewer = {key: first_of(Pool([Member(n) for n in names[1:]]), key).name for key in keys}
    assert all(fewer[key] == own[key] for key in keys if own[key] != names[0]), "who was elsewhere stays there"


async def test_a_dead_engine_rests_and_its_sessions_come_back(slept: list[float]) -> None:
    pool, own, other = two()
    own.plan = [[DEAD], [some(4, finish=STOP)]]
    other.plan = [[some(5, finish=STOP)]]
    assert [tokens(await sampled(pool)) for _ in range(2)] == [[5], [5]], "it rests: the second turn does not ask it"
    slept.append(0.6)
    assert [tokens(await sampled(pool)) for _ in range(2)] == [[4], [4]]


async def test_each_failure_doubles_the_rest_and_an_answer_ends_it(slept: list[float]) -> None:
    pool, own, other = two()
    own.plan = [[DEAD], [DEAD], [some(4, finish=STOP)], [DEAD], [some(4, finish=STOP)]]
    other.plan = [[some(5, finish=STOP)]]
    for wait, expected in [(0, 5), (0.6, 5), (0.6, 5), (0.6, 4), (0, 5), (0.6, 4)]:
        slept.append(wait)
        assert tokens(await sampled(pool)) == [expected]
    assert len(own.asked) == 5


async def test_many_turns_that_break_at_once_are_one_failure(slept: list[float]) -> None:
    pool, own, other = two()
    falls = asyncio.Event()
    own.plan = [[some(4), falls, DEAD]] * 16 + [[some(6, finish=STOP)]]
    other.plan = [[some(5, finish=STOP)]]
    running = [asyncio.create_task(sampled(pool, rid=f"{i:032x}")) for i in range(16)]
    while len(own.live) < 16:
        await asyncio.sleep(0)
    falls.set()
    assert [tokens(await each) for each in running] == [[4, 5]] * 16
    slept.append(0.6)
    assert tokens(await sampled(pool)) == [6], "back after the first rest"


async def test_where_all_rest_the_first_to_wake_is_asked() -> None:
    pool, own, other = two()
    own.plan, other.plan = [[DEAD], [some(4, finish=STOP)]], [[DEAD], [some(5, finish=STOP)]]
    assert tokens(await sampled(pool)) == [4]


async def test_capabilities_are_what_all_have() -> None:
    big = Member("one", able=Capabilities("m", 1000, None, "raw", structured=True))
    small = Member("two", able=Capabilities("m", 500, 100, "raw"))
    able = await Pool([big, small]).capabilities()
    assert (able.context_length, able.vocab_size, able.structured) == (500, 100, False)
    with pytest.raises(EngineRejected, match="context"):
        [c async for c in Pool([big, small]).sample(ids([1] * 500), Sampling(), rid=RID)]
    with pytest.raises(EngineRejected, match="vocabulary"):
        [c async for c in Pool([big, small]).sample(ids([100]), Sampling(), rid=RID)]


@pytest.mark.parametrize("changes", [{"vocab_size": 101}, {"logprob_convention": "temperature"}], ids=str)
async def test_engines_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"differ in {next(iter(changes))}"):
        await Pool([Member("one"), Member("two", able=replace(ABLE, **changes))]).capabilities()


@pytest.mark.parametrize("changes", [{"vocab_size": 101}, {"logprob_convention": "temperature"}, {"context_length": 900}], ids=str)
async def test_one_that_was_silent_at_first_and_does_not_fit_is_never_asked(changes: dict[str, Any]) -> None:
    pool, own, other = two()
    own.able = DEAD
    other.plan = own.plan = [[some(5, finish=STOP)]]
    await pool.capabilities()
    own.able = replace(ABLE, **changes)
    trace = Trace()
    assert tokens(await sampled(pool, trace=trace)) == [5]
    assert own.asked == []
    assert trace.pieces[0].engine == other.name
    assert own.name in trace.pieces[0].why


async def test_one_that_was_silent_at_first_and_fits_is_asked() -> None:
    pool, own, _ = two()
    own.able = DEAD
    own.plan = [[some(5, finish=STOP)]]
    await pool.capabilities()
    own.able = replace(ABLE, context_length=2000)
    assert tokens(await sampled(pool)) == [5]
    assert own.asked


async def test_where_all_are_silent_it_says_so() -> None:
    pool, own, other = two()
    own.able = other.able = DEAD
    with pytest.raises(EngineUnavailable):
        await pool.capabilities()
    own.able = ABLE
    assert await pool.capabilities() == ABLE, "a failure is not remembered"


def test_a_pool_has_members_of_different_names() -> None:
    with pytest.raises(ConfigError, match="needs an engine"):
        Pool([])
    with pytest.raises(ConfigError, match="named twice"):
        Pool([Member("one"), Member("one")])


async def test_logprobs_are_recomputed_by_whoever_is_there() -> None:
    for down in (0, 1):
        members = [Member("one"), Member("two")]
        members[down].able = DEAD
        assert (await Pool(members).prompt_logprobs(PROMPT, 1)).tolist() == [-2 / 128, -3 / 128]
    with pytest.raises(EngineUnavailable):
        await Pool([Member("one", able=DEAD), Member("two", able=DEAD)]).prompt_logprobs(PROMPT, 1)


async def test_one_healthy_engine_is_a_healthy_pool() -> None:
    never = asyncio.Event()
    assert await Pool([Member("one", healthy=False), Member("two")]).health()
    assert not await Pool([Member("one", healthy=False), Member("two", healthy=False)]).health()
    async with asyncio.timeout(30):
        assert await Pool([Member("one", healthy=never), Member("two")]).health(), "one that hangs is not waited for"


async def test_a_held_pool_is_healthy() -> None:
    """A server that is paused may leave its health without an answer; the requests wait here."""
    pool = Pool([Member("one", healthy=False)])
    await pool.hold("keep")
    assert await pool.health()
    pool.release()
    assert not await pool.health()


async def test_leaving_closes_the_request() -> None:
    one = Member("one", [[some(4), some(5), some(6, finish=STOP)]])
    pool = Pool([one], SOON)
    stream = pool.sample(PROMPT, Sampling(max_tokens=9), rid=RID)
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert one.closed == 1
    assert pool.gate.running == {}


@pytest.mark.parametrize("where", ["sampling", "held", "backoff", "capabilities"])
async def test_a_turn_that_is_cancelled_anywhere_leaves_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never, reached = asyncio.Event(), asyncio.Event()

    class Silent(Member):
        async def capabilities(self) -> Capabilities:
            if where == "capabilities" and self.told:
                reached.set()
                await never.wait()
            return ABLE

    async def asleep(_: float) -> None:
        reached.set()
        await never.wait()

    one = Silent("one", [[some(4), never, some(5, finish=STOP)]] if where == "sampling" else [[DEAD]])
    pool = Pool([one], SOON)
    await pool.capabilities()
    one.told.append("begun")
    if where == "backoff":
        monkeypatch.setattr("turnloom.engine.pool.asyncio.sleep", asleep)
    if where == "held":
        await pool.hold("keep")
    async with asyncio.timeout(None) as timer:
        task = asyncio.create_task(sampled(pool, trace=Trace(timer=timer)))
        while not (reached.is_set() or pool.gate.held or one.live):
            await asyncio.wait([task], timeout=0.001)
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert (pool.gate.running, pool.gate.held, pool._turns, one.live, pool.gate._clocks) == ({}, 0, {}, {}, set())
