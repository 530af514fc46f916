"""What every store promises, asked of each."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from turnloom.core.credit import Reward
from turnloom.core.records import Delta
from turnloom.errors import StoreError
from turnloom.store.contract import Limits, Usage
from turnloom.store.schema import VERSION
from turnloom.types import Message, Outcome, Sampling, Text


async def test_a_session_comes_back_equal(store, row):
    full = row(
        "s1",
        sampling=Sampling(temperature=0.7, top_k=20, stop=("\n\n",), seed=7),
        limits=Limits(max_turns=3, turn_timeout=None, max_tokens=5, max_bytes=6, ttl=7.0, idle_timeout=8.5),
        group="g",
        rollout="r",
        labels={"kind": "train"},
        metadata={"task": {"id": 4, "tags": ["a", None, 0.1]}},
        rewards=(Reward(0.25, 2.0), Reward(1.0, 3.0, "t9")),
        reward_rule="max",
        repeats="resample",
        ended="ttl",
        reached=("max_turns",),
    )
    await store.put_session(full)
    assert await store.session("s1") == full
    assert await store.session_by_key("hash-of-s1") == full


async def test_putting_a_session_again_replaces_its_row_and_keeps_its_turns(store, row, delta):
    await store.put_session(row("s1"))
    await store.append("s1", delta("t1"))
    changed = row("s1", key_hash="another", status="closed", rewards=(Reward(1.0),))
    await store.put_session(changed)
    assert await store.session("s1") == changed
    assert await store.session_by_key("hash-of-s1") is None
    assert await store.session_by_key("another") == changed
    assert await store.deltas("s1") == [delta("t1")]


async def test_the_row_is_a_copy_of_what_was_put(store, row):
    metadata = {"n": 1}
    await store.put_session(row("s1", metadata=metadata))
    metadata["n"] = 2
    stored = await store.session("s1")
    assert stored is not None
    assert stored.metadata == {"n": 1}


async def test_metadata_that_is_not_json_is_refused(store, row):
    with pytest.raises(StoreError, match="JSON"):
        await store.put_session(row("s1", metadata={"a": object()}))
    assert await store.session("s1") is None


async def test_a_key_opens_one_session_only(store, row):
    await store.put_session(row("s1", key_hash="k"))
    with pytest.raises(StoreError, match="key"):
        await store.put_session(row("s2", key_hash="k"))
    assert (await store.session_by_key("k")) == row("s1", key_hash="k")
    assert await store.session("s2") is None


async def test_an_empty_key_opens_nothing(store, row):
    await store.put_session(row("s1", key_hash=""))
    await store.put_session(row("s2", key_hash=""))
    assert await store.session_by_key("") is None


async def test_unknown_things_are_absent(store):
    assert await store.session("nobody") is None
    assert await store.session_by_key("nobody") is None
    assert list(await store.deltas("nobody")) == []
    assert list(await store.sessions()) == []


async def test_sessions_are_newest_first_and_paged(store, row):
    for name, created in [("old", 1.0), ("new", 3.0), ("middle", 2.0), ("middle2", 2.0)]:
        await store.put_session(row(name, created=created))
    assert [r.id for r in await store.sessions()] == ["new", "middle2", "middle", "old"]
    assert [r.id for r in await store.sessions(limit=2, offset=1)] == ["middle2", "middle"]
    assert list(await store.sessions(offset=9)) == []


async def test_a_row_marked_dropped_is_not_listed(store, row):
    await store.put_session(row("s1", status="dropped"))
    await store.put_session(row("s2"))
    assert [r.id for r in await store.sessions()] == ["s2"]


async def test_deltas_come_back_equal_and_in_order(store, row, delta):
    await store.put_session(row("s1"))
    appended = [delta(f"t{n}", tokens=n) for n in (3, 1, 2, 0)]
    for each in appended:
        await store.append("s1", each)
    assert list(await store.deltas("s1")) == appended


async def test_token_columns_come_back_read_only_with_their_types(store, row, delta):
    await store.put_session(row("s1"))
    await store.append("s1", delta("t1"))
    turn = (await store.deltas("s1"))[0].turn
    for column, dtype in [(turn.appended, np.int32), (turn.output, np.int32), (turn.logprobs, np.float32)]:
        assert column.dtype == dtype
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


async def test_two_sessions_do_not_share_turns(store, row, delta):
    await store.put_session(row("s1"))
    await store.put_session(row("s2"))
    await store.append("s1", delta("t1", tokens=1))
    await store.append("s2", delta("t1", tokens=2))
    assert list(await store.deltas("s1")) == [delta("t1", tokens=1)]
    assert list(await store.deltas("s2")) == [delta("t1", tokens=2)]


async def test_an_append_to_an_unknown_session_is_refused(store, delta):
    with pytest.raises(StoreError, match="no session nobody"):
        await store.append("nobody", delta())


async def test_a_turn_is_stored_once(store, row, delta):
    await store.put_session(row("s1"))
    await store.append("s1", delta("t1", tokens=1))
    with pytest.raises(StoreError, match="already holds turn t1"):
        await store.append("s1", delta("t1", tokens=5))
    assert list(await store.deltas("s1")) == [delta("t1", tokens=1)]


async def test_a_delta_with_a_column_of_another_type_is_refused(store, row, delta):
    from dataclasses import replace

    await store.put_session(row("s1"))
    bad = delta("t1")
    bad = replace(bad, turn=replace(bad.turn, output=np.arange(3, dtype=np.int64)))
    with pytest.raises(StoreError, match="int32"):
        await store.append("s1", bad)
    bad = replace(bad, turn=replace(delta("t1").turn, output=np.array([1, -1, 2], dtype=np.int32)))
    with pytest.raises(StoreError, match="never below 0"):
        await store.append("s1", bad)
    bad = replace(bad, turn=replace(delta("t1").turn, output=delta("t1", tokens=2).turn.output))
    with pytest.raises(StoreError, match="2 sampled ids but 3 logprobs"):
        await store.append("s1", bad)
    assert list(await store.deltas("s1")) == []


async def test_a_bad_append_among_many_fails_alone(store, row, delta):
    await store.put_session(row("s1"))
    await store.append("s1", delta("seen"))
    names = [f"t{n}" for n in range(20)]
    work = [store.append("s1", delta(name)) for name in names]
    work.insert(5, store.append("s1", delta("seen")))
    work.insert(9, store.append("nobody", delta("lost")))
    results = await asyncio.gather(*work, return_exceptions=True)
    assert [type(r) for r in results if r is not None] == [StoreError, StoreError]
    assert results[5] is not None
    assert results[9] is not None
    assert [d.turn.id for d in await store.deltas("s1")] == ["seen", *names]


async def test_an_amended_outcome_is_what_is_read(store, row, delta):
    await store.put_session(row("s1"))
    await store.append("s1", delta("t1"))
    await store.append("s1", delta("t2"))
    await store.amend("s1", "t1", outcome=Outcome.ORPHANED)
    assert list(await store.deltas("s1")) == [delta("t1", outcome=Outcome.ORPHANED), delta("t2")]
    await store.amend("s1", "t1", abort="verified")
    assert list(await store.deltas("s1")) == [delta("t1", outcome=Outcome.ORPHANED, abort="verified"), delta("t2")]
    await store.amend("s1", "t1", outcome=Outcome.DELIVERED, abort="")
    assert list(await store.deltas("s1")) == [delta("t1"), delta("t2")]


async def test_amending_what_is_not_there_is_refused(store, row):
    await store.put_session(row("s1"))
    with pytest.raises(StoreError, match="no turn t9"):
        await store.amend("s1", "t9", outcome=Outcome.ORPHANED)
    with pytest.raises(StoreError, match="no session nobody"):
        await store.amend("nobody", "t9", outcome=Outcome.ORPHANED)


async def test_a_dropped_session_is_forgotten_with_its_turns(store, row, delta):
    await store.put_session(row("s1"))
    await store.put_session(row("s2"))
    await store.append("s1", delta("t1"))
    await store.append("s2", delta("t1"))
    await store.drop("s1")
    await store.drop("s1")
    assert await store.session("s1") is None
    assert await store.session_by_key("hash-of-s1") is None
    assert list(await store.deltas("s1")) == []
    assert list(await store.deltas("s2")) == [delta("t1")]
    await store.put_session(row("s1"))
    assert list(await store.deltas("s1")) == []


async def test_reading_twice_gives_equal_things(store, row, delta):
    await store.put_session(row("s1"))
    await store.append("s1", delta("t1"))
    assert await store.deltas("s1") == await store.deltas("s1")
    assert await store.session("s1") == await store.session("s1")


async def test_a_closed_store_says_so(store, row, delta):
    await store.put_session(row("s1"))
    await store.close()
    await store.close()
    for use in (
        store.append("s1", delta()),
        store.put_session(row("s2")),
        store.amend("s1", "t1", outcome=Outcome.FAILED),
        store.drop("s1"),
        store.session("s1"),
        store.session_by_key("k"),
        store.sessions(),
        store.deltas("s1"),
    ):
        with pytest.raises(StoreError, match="not open"):
            await use


async def test_opening_twice_is_refused_and_a_closed_store_opens_again(store, row):
    await store.put_session(row("s1"))
    with pytest.raises(StoreError, match="already open"):
        await store.open()
    await store.close()
    await store.open()
    assert await store.session("s1") == row("s1")


def usage_of(deltas, touched, interrupted=0):
    turns = [delta.turn for delta in deltas]
    return (len(turns), sum(len(turn.output) for turn in turns), touched, interrupted)


async def used(store, session_id="s1"):
    usage = await store.usage(session_id)
    return (usage.turns, usage.tokens, usage.touched, usage.interrupted)


async def test_usage_adds_up_what_is_on_record(store, row, delta):
    await store.put_session(row("s1"))
    assert await store.usage("s1") == Usage(touched=1.0)
    ended = replace(delta("t1", tokens=3), turn=replace(delta("t1", tokens=3).turn, ended=9.0))
    await store.append("s1", ended)
    after_one = await store.usage("s1")
    await store.append("s1", delta("t2", tokens=5))
    assert await used(store) == usage_of([ended, delta("t2", tokens=5)], 9.0)
    assert 0 < after_one.bytes < (await store.usage("s1")).bytes
    assert await store.usage("nobody") == Usage()
    await store.drop("s1")
    assert await store.usage("s1") == Usage()


async def test_a_turn_takes_the_place_of_its_beginning(store, row, delta):
    await store.put_session(row("s1"))
    begun = delta("t1", tokens=2, outcome=Outcome.ORPHANED)
    await store.append("s1", begun)
    await store.append("s1", delta("t2"))
    small = await store.usage("s1")
    whole = replace(delta("t1", tokens=50).turn, ended=7.0, reasoning_open=True)
    reply = Message("assistant", (Text("a.txt and " + "more " * 90),))
    await store.replace("s1", whole, reply)
    first, second = await store.deltas("s1")
    assert first == Delta((*begun.nodes[:-1], replace(begun.nodes[-1], message=reply)), whole)
    assert second == delta("t2")
    assert await used(store) == usage_of([first, second], 7.0)
    assert (await store.usage("s1")).bytes > small.bytes


@pytest.mark.parametrize(("session", "turn"), [("s1", "t9"), ("s9", "t1")])
async def test_what_is_not_there_is_not_replaced(store, row, delta, session, turn):
    await store.put_session(row("s1"))
    await store.append("s1", delta("t1"))
    with pytest.raises(StoreError):
        await store.replace(session, delta(turn).turn, Message("assistant", (Text("x"),)))
    assert await store.deltas("s1") == [delta("t1")]


async def test_what_a_client_is_known_to_have_is_noted(store, row, delta):
    await store.put_session(row("s1"))
    await store.append("s1", delta("t1"))
    store.acknowledge("s1", "t1")
    store.acknowledge("s1", "nobody"), store.acknowledge("nobody", "t1")
    await store.append("s1", delta("t2"))
    assert [d.turn.acknowledged for d in await store.deltas("s1")] == [True, False]


async def test_the_list_has_what_each_session_used_and_may_be_of_one_status(store, row, delta):
    await store.put_session(row("s1", created=1.0))
    await store.put_session(row("s2", created=2.0, status="closed"))
    await store.put_session(row("s3", created=3.0, status="dropped"))
    await store.append("s1", delta("t1"))
    entries = await store.sessions()
    assert [(entry.id, entry.row and entry.row.id, entry.error) for entry in entries] == [("s2", "s2", ""), ("s1", "s1", "")]
    assert [entry.usage.turns for entry in entries] == [0, 1]
    assert [entry.id for entry in await store.sessions(status="open")] == ["s1"]
    assert [entry.id for entry in await store.sessions(status="closed", limit=1)] == ["s2"]
    assert await store.sessions(status="closed", offset=1) == []


async def test_open_sessions_whose_time_is_up(store, row, delta):
    await store.put_session(row("ttl", created=10.0, limits=Limits(ttl=5.0)))
    await store.put_session(row("idle", created=10.0, limits=Limits(idle_timeout=3.0)))
    await store.put_session(row("both", created=10.0, limits=Limits(ttl=1.0, idle_timeout=1.0)))
    await store.put_session(row("closed", created=10.0, limits=Limits(ttl=1.0), status="closed"))
    await store.put_session(row("free", created=10.0))
    assert sorted(await store.expired(10.9)) == []
    assert sorted(await store.expired(13.0)) == [("both", "ttl"), ("idle", "idle_timeout")]
    await store.append("idle", replace(delta("t1"), turn=replace(delta("t1").turn, ended=12.5)))
    assert sorted(await store.expired(15.4)) == [("both", "ttl"), ("ttl", "ttl")]
    assert sorted(await store.expired(15.5)) == [("both", "ttl"), ("idle", "idle_timeout"), ("ttl", "ttl")]


async def test_stats_are_of_all_sessions(store, row, delta):
    await store.put_session(row("s1"))
    await store.put_session(row("s2", status="closed"))
    await store.append("s1", delta("t1"))
    await store.append("s2", delta("t1"))
    stats = await store.stats()
    assert (dict(stats.sessions), stats.turns, stats.schema) == ({"open": 1, "closed": 1}, 2, VERSION)


async def test_a_turn_that_was_begun_and_stored_is_not_interrupted(store, row, delta):
    await store.put_session(row("s1"))
    store.begin("s1", "t1", 1.0)
    store.begin("s1", "t2", 1.0)
    store.begin("s1", "t3", 1.0)
    await store.append("s1", delta("t1"))
    store.cancel("s1", "t2")
    await store.append("s1", delta("t3"))
    store.begin("s1", "t3", 2.0)
    await store.replace("s1", delta("t3").turn, Message("assistant", (Text("x"),)))
    await store.close()
    await store.open()
    assert (await store.usage("s1")).interrupted == 0
