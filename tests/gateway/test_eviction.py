"""Sessions leave memory and come back: which ones, when, and that nothing is lost, doubled or written through a stale object."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tempfile
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.gateways import bench, follow, user
from tests.support.lives import Clock, sessions, take
from turnloom.core.tree import Tree
from turnloom.errors import NotFound, SessionClosed, Unauthorized
from turnloom.gateway.janitor import Janitor
from turnloom.gateway.session import Session
from turnloom.gateway.sessions import Sessions
from turnloom.store.contract import Limits
from turnloom.store.memory import MemoryStore
from turnloom.store.sqlite import SQLiteStore
from turnloom.types import AbortOutcome

KINDS = pytest.mark.parametrize("kind", ["memory", "sqlite"])


def loaded(s: Sessions) -> list[str]:
    return sorted(session.row.id for session in s.memory)


# Which ones


async def test_those_longest_unused_leave_where_more_are_idle_than_may_stay() -> None:
    async with sessions(loaded=3) as s:
        for name in "abc":
            await s.open(session_id=name)
        await s.by_id("a")
        await s.open(session_id="d")
        assert loaded(s) == ["a", "c", "d"]
        await take(await s.by_id("c"), "hi")
        await s.by_id("b")
        assert loaded(s) == ["b", "c", "d"]


async def test_none_stays_that_was_unused_for_long_enough() -> None:
    clock = Clock()
    async with sessions(clock=clock, keep=60.0) as s:
        for name in "ab":
            await s.open(session_id=name)
        clock.now += 59.0
        await s.by_id("b")
        assert s.evict() == 0
        clock.now += 1.0
        assert (s.evict(), loaded(s)) == (1, ["b"])
        assert (s.evict(), loaded(s)) == (0, ["b"])


Use = Callable[[Session, asyncio.Event], Awaitable[None]]


async def _hold(session: Session, go: asyncio.Event) -> None:
    with session.held():
        await go.wait()


async def _turn(session: Session, go: asyncio.Event) -> None:
    with session.turn_slot():
        await go.wait()


async def _settle(session: Session, go: asyncio.Event) -> None:
    async def abort() -> AbortOutcome:
        await go.wait()
        return AbortOutcome.UNVERIFIED

    session.settle("turn", [abort()])


@pytest.mark.parametrize("use", [_hold, _turn, _settle])
async def test_one_that_is_in_use_stays_until_it_is_not(use: Use) -> None:
    clock, go = Clock(), asyncio.Event()
    async with sessions(clock=clock, loaded=1, keep=60.0) as s:
        session, _ = await s.open(session_id="used")
        using = asyncio.ensure_future(use(session, go))
        await asyncio.sleep(0)
        with (await s.by_id("used")).held():
            pass
        clock.now += 1000.0
        for name in "abc":
            await s.open(session_id=name)
        assert s.evict() == 0
        assert await s.by_id("used") is session
        go.set()
        await using
        await session.settled()
        await asyncio.sleep(0)
        assert s.memory.idle == s.loaded == 1
        await s.open(session_id="d")
        assert loaded(s) == ["d"]


async def test_one_that_was_dropped_says_nothing_of_the_next_of_its_id() -> None:
    async with sessions(loaded=1) as s:
        old, _ = await s.open(session_id="one")
        with old.held():
            await s.drop("one")
            new, _ = await s.open(session_id="one")
            go = asyncio.Event()
            turn = asyncio.create_task(_turn(new, go))
            await asyncio.sleep(0)
        await s.open(session_id="two")
        await s.open(session_id="three")
        assert await s.by_id("one") is new
        go.set()
        await turn


async def test_a_turn_that_nobody_waits_for_any_more_keeps_its_session_until_it_is_on_record() -> None:
    async with bench(["Hello"], loaded_sessions=1) as b:
        store_append = b.gateway._store.append
        go, storing = asyncio.Event(), asyncio.Event()

        async def slow(session_id: str, delta: Any) -> None:
            storing.set()
            await go.wait()
            await store_append(session_id, delta)

        b.gateway._store.append = slow  # type: ignore[method-assign]
        session = await b.session()
        asking = asyncio.create_task(b.post(user("hi")))
        await storing.wait()
        asking.cancel()
        for _ in range(3):
            await b.gateway.open_session()
        assert await b.session() is session
        go.set()
        while session.busy:
            await asyncio.sleep(0.01)
        await b.gateway.open_session()
        assert session.evicted
        assert len((await b.session()).tree.turns) == 1


# Stale objects


async def test_a_session_that_has_left_memory_takes_nothing() -> None:
    async with sessions(loaded=1) as s:
        stale, _ = await s.open(session_id="one")
        await take(stale, "hi")
        await s.open(session_id="two")
        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: take(stale, "late"),
            lambda: stale.reward(1.0),
            lambda: stale.finish(),
            lambda: stale.expire(1e12),
            lambda: stale.drop(),
        ]
        for use in uses:
            with pytest.raises(RuntimeError, match="session one has left memory since it was looked up"):
                await use()
        live = await s.by_id("one")
        assert live is not stale
        assert (len(live.tree.turns), live.row.status, live.row.rewards) == (1, "open", ())


# The same again


@KINDS
async def test_what_comes_back_equals_what_left_and_goes_on_in_its_lineage(kind: str, tmp_path: Path) -> None:
    store: Any = MemoryStore() if kind == "memory" else tmp_path / "t.db"
    async with bench(lambda body, index: f"reply {index}", store=store, loaded_sessions=1) as b:
        body = user("hi")
        for turn in range(4):
            session = await b.session()
            before = session.row, session.unroll(), session.usage.turns, dict(session.tree.turns)
            await b.gateway.open_session()
            assert session.evicted
            again = await b.session()
            assert (again.row, again.unroll(), again.usage.turns, again.tree.turns) == before
            answer = await b.post(body)
            body = follow(body, answer.body, f"and {turn}?")
            await again.reward(1.0)
        session = await b.session()
        assert [(turn.index, turn.fork) for turn in session.tree.turns.values()] == [(i, None) for i in range(4)]
        (sample,) = session.unroll().samples
        assert (sample.reward, len(session.row.rewards)) == (1.0, 4)
        for one, two in zip(b.engine.requests, b.engine.requests[1:], strict=False):
            assert two["input_ids"][: len(one["input_ids"])] == one["input_ids"]


@KINDS
async def test_a_reply_that_arrived_is_known_to_have_arrived_when_its_session_comes_back(kind: str, tmp_path: Path) -> None:
    """Else a deliberate repeat would be taken for a retry."""
    store: Any = MemoryStore() if kind == "memory" else tmp_path / "t.db"
    async with bench(lambda body, index: f"reply {index}", store=store, loaded_seconds=0.0) as b:
        assert (await b.post(user("hi"))).status == 200
        session = await b.session()
        while session.busy:
            await asyncio.sleep(0)
        assert b.gateway._running().evict() == 1
        (turn,) = (await b.session()).tree.turns.values()
        assert turn.acknowledged
        assert (await b.post(user("hi"))).body["content"][0]["text"] == "reply 1"


@KINDS
async def test_loads_at_once_give_one_session(kind: str, tmp_path: Path) -> None:
    async with sessions(kind, tmp_path, loaded=1) as s:
        first, key = await s.open(session_id="one")
        for i in range(20):
            await take(first, f"question {i}")
        await s.open(session_id="two")
        assert first.evicted
        found = await asyncio.gather(*(s.by_key(key) if i % 2 else s.by_id("one") for i in range(20)))
        assert len(set(map(id, found))) == 1
        assert len(found[0].tree.turns) == 20


@KINDS
async def test_whoever_loads_gets_what_they_asked_for_though_only_one_has_room(kind: str, tmp_path: Path) -> None:
    async with sessions(kind, tmp_path, loaded=1) as s:
        keys = [(await s.open(session_id=f"s{i}"))[1] for i in range(10)]

        async def ask(i: int) -> None:
            for turn in range(5):
                with (await s.by_key(keys[i])).held() as session:
                    assert session.row.id == f"s{i}"
                    await asyncio.sleep(0)
                    await take(session, f"{i} {turn}")

        await asyncio.gather(*map(ask, range(10)), *map(ask, range(10)))
        assert s.loaded == 1
        for i in range(10):
            assert len((await s.by_id(f"s{i}")).tree.turns) == 10


async def test_a_load_that_is_cancelled_leaves_the_next_its_turn() -> None:
    class Slow(MemoryStore):
        go = asyncio.Event()

        async def usage(self, session_id: str) -> Any:
            await self.go.wait()
            return await super().usage(session_id)

    store = Slow()
    async with sessions(store, loaded=1) as s:
        await s.open(session_id="one")
        await s.open(session_id="two")
        first, second = (asyncio.create_task(s.by_id("one")) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        store.go.set()
        assert (await second).row.id == "one"
        assert not dict(s._alone)


# Races


@KINDS
async def test_many_tasks_over_few_places_lose_and_double_nothing(kind: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    clock = Clock()
    async with sessions(kind, tmp_path, clock=clock, loaded=3, keep=5.0) as s:
        keys = {f"s{i}": (await s.open(session_id=f"s{i}", reward_rule="sum"))[1] for i in range(12)}
        made: Counter[str] = Counter()
        rewarded: Counter[str] = Counter()
        alive: dict[str, int] = {}

        async def work(number: int) -> None:
            for step in range(25):
                name = rng.choice(list(keys))
                with (await s.by_key(keys[name])).held() as session:
                    assert alive.setdefault(name, id(session)) == id(session) or session.evicted is False
                    for _ in range(rng.randrange(3)):
                        await asyncio.sleep(0)
                    await take(session, f"{number} {step}")
                    made[name] += 1
                if not rng.randrange(4):
                    await (await s.by_id(name)).reward(1.0)
                    rewarded[name] += 1
                if not rng.randrange(3):
                    clock.now += 1.0
                    s.evict()

        await asyncio.gather(*map(work, range(16)))
        assert s.loaded <= 3
        assert s._metrics.evictions._value.get() > 50
        for name in keys:
            session = await s.by_id(name)
            assert (len(session.tree.turns), session.row.reward) == (made[name], float(rewarded[name]) or None)
            assert [turn.index for turn in session.tree.turns.values()] == list(range(made[name]))
            assert len(session.unroll().samples) == made[name]


async def test_a_session_is_kept_while_its_request_is_still_arriving() -> None:
    clock = Clock()
    async with bench(["Hello"], loaded_sessions=1) as b:
        session = await b.session()
        body = json.dumps(user("hi")).encode()
        began, go = asyncio.Event(), asyncio.Event()

        async def parts() -> Any:
            yield body[:10]
            began.set()
            await go.wait()
            yield body[10:]

        asking = asyncio.create_task(b.http.post(b.handle.base_url + "/v1/messages", data=parts()))
        await began.wait()
        while not session.busy:
            await asyncio.sleep(0.01)
        for _ in range(3):
            await b.gateway.open_session()
        clock.now += 1e6
        assert await b.session() is session
        go.set()
        async with await asking as answer:
            assert answer.status == 200
        assert len((await b.session()).tree.turns) == 1


async def test_a_drop_races_with_loads_and_leaves_nothing() -> None:
    async with sessions(loaded=1) as s:
        for i in range(20):
            session, key = await s.open(session_id="one")
            await take(session, "hi")
            if i % 2:
                await s.open(session_id=f"other{i}")

            async def load(key: str = key) -> None:
                try:
                    with (await s.by_key(key)).held() as found:
                        await take(found, "again")
                except (SessionClosed, Unauthorized, NotFound):
                    pass

            await asyncio.gather(load(), s.drop("one"), load())
            with pytest.raises(NotFound):
                await s.by_id("one")
            assert await s._store.session("one") is None


# Memory


async def test_nothing_grows_with_the_sessions_that_were() -> None:
    """200 sessions of 5 turns: only those that may stay are alive, with their trees."""
    trees: weakref.WeakSet[Tree] = weakref.WeakSet()
    alive: weakref.WeakSet[Session] = weakref.WeakSet()
    async with sessions(loaded=8) as s:
        for turn in range(5):
            for i in range(200):
                session = (await s.open(session_id=f"s{i}"))[0] if not turn else await s.by_id(f"s{i}")
                await take(session, f"turn {turn}")
                trees.add(session.tree)
                alive.add(session)
                del session
        gc.collect()
        assert s.loaded == s.memory.idle == 8
        assert (len(alive), len(trees)) == (8, 8)
        assert (len(s.memory._by_id), len(s.memory._by_key), len(s._alone)) == (8, 8, 0)
        assert s._metrics.evictions._value.get() == 1000 - 8
        for i in range(200):
            assert len((await s.by_id(f"s{i}")).tree.turns) == 5


async def test_nothing_grows_over_the_wire_either() -> None:
    trees: weakref.WeakSet[Tree] = weakref.WeakSet()
    async with bench(lambda body, index: "Yes", loaded_sessions=2) as b:
        handles = [await b.gateway.open_session() for _ in range(10)]
        for handle in handles:
            async with b.http.post(handle.base_url + "/v1/messages", json=user("hi")) as answer:
                assert answer.status == 200
                await answer.read()
            trees.add((await b.gateway.session(handle.id)).tree)
        gc.collect()
        assert len(trees) == 2


# A model


class Lives(RuleBasedStateMachine):
    """Random lives of a few sessions on either store; a plain model says what each must be, whenever it is looked at."""

    NAMES = st.sampled_from(["a", "b", "c", "d"])

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = ExitStack()
        self.clock = Clock()
        self.model: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)  # type: ignore[arg-type]

    @initialize(disk=st.booleans(), most=st.integers(1, 3))
    def begin(self, disk: bool, most: int) -> None:
        self.most = most
        self.store = self.disk() if disk else MemoryStore()
        self.start()

    def disk(self) -> SQLiteStore:
        return SQLiteStore(Path(self.stack.enter_context(tempfile.TemporaryDirectory())) / "t.db")

    def start(self) -> None:
        self.context = sessions(self.store, clock=self.clock, loaded=self.most, keep=50.0, limits=Limits(max_turns=4, idle_timeout=100.0))
        self.sessions = self.run(self.context.__aenter__())
        self.janitor = Janitor(self.sessions, self.clock)

    def state(self, name: str) -> str:
        known = self.model.get(name)
        if known is None:
            return "none"
        return "closed" if known["ended"] or self.clock.now >= known["touched"] + 100.0 else "open"

    @rule(name=NAMES)
    def open(self, name: str) -> None:
        if self.state(name) == "none":
            _, self.keys[name] = self.run(self.sessions.open(session_id=name))
            self.model[name] = {"turns": [], "rewards": [], "ended": "", "touched": self.clock.now}

    @rule(name=NAMES, text=st.sampled_from(["x", "y"]), by_key=st.booleans())
    def turn(self, name: str, text: str, by_key: bool) -> None:
        async def go() -> Any:
            with (await (s.by_key(self.keys[name]) if by_key else s.by_id(name))).held() as session:
                turn = await take(session, text)
            return turn.id

        s = self.sessions
        match self.state(name):
            case "none":
                if by_key and name not in self.keys:
                    return
                with pytest.raises((NotFound, Unauthorized)):
                    self.run(go())
            case "closed":
                with pytest.raises(SessionClosed):
                    self.run(go())
                self.run(self.settled(name))
                self.model[name]["ended"] = self.model[name]["ended"] or "idle_timeout"
            case "open" if len(self.model[name]["turns"]) == 4:
                with pytest.raises(Exception, match="has used its 4 turns"):
                    self.run(go())
            case "open":
                self.model[name]["turns"].append(self.run(go()))
                self.model[name]["touched"] = self.clock.now

    async def settled(self, name: str) -> None:
        with (await self.sessions.by_id(name)).held() as session:
            await session.settled()

    @rule(name=NAMES, value=st.integers(-3, 3))
    def reward(self, name: str, value: int) -> None:
        if name in self.model:
            self.run(self._with(name, lambda session: session.reward(value)))
            self.model[name]["rewards"].append(float(value))

    @rule(name=NAMES)
    def finish(self, name: str) -> None:
        if name in self.model:
            self.run(self._with(name, lambda session: session.finish()))
            self.model[name]["ended"] = self.model[name]["ended"] or "finished"

    async def _with(self, name: str, work: Callable[[Session], Awaitable[Any]]) -> None:
        await work(await self.sessions.by_id(name))

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        if self.model.pop(name, None) is None:
            with pytest.raises(NotFound):
                self.run(self.sessions.drop(name))
        else:
            self.run(self.sessions.drop(name))

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0, 101.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def sweep(self) -> None:
        due = sorted(name for name in self.model if self.state(name) == "closed" and not self.model[name]["ended"])
        assert sorted(name for name, _ in self.run(self.janitor.sweep(self.clock.now))) == due
        for name in due:
            self.model[name]["ended"] = "idle_timeout"

    @rule()
    def restart(self) -> None:
        self.run(self.context.__aexit__(None, None, None))
        self.start()

    @rule(name=NAMES)
    @precondition(lambda self: self.model)
    def look(self, name: str) -> None:
        if name in self.model:
            known = self.model[name]
            session: Session = self.run(self.sessions.by_id(name))
            assert (list(session.tree.turns), session.row.ended) == (known["turns"], known["ended"])
            assert [reward.value for reward in session.row.rewards] == known["rewards"]
            assert session.touched == known["touched"]

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "sessions"):
            assert self.sessions.memory.idle <= self.most
            assert not self.sessions._alone

    def teardown(self) -> None:
        if hasattr(self, "sessions"):
            self.run(self.context.__aexit__(None, None, None))
        self.stack.close()
        self.loop.close()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
