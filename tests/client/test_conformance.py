"""One suite for every client: async and not, in the gateway's process and elsewhere."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import turnloom
from tests.client.conftest import KINDS, Side, side
from turnloom.errors import BadRequest, NotFound
from turnloom.export.check import check_samples
from turnloom.store.contract import Limits
from turnloom.types import Sampling

Session = Any


async def test_a_session_from_open_to_drop(one: Side) -> None:
    session = await one.client.open_session(
        id="mine",
        sampling=turnloom.Sampling(temperature=0.5, stop=("END",)),
        limits=turnloom.Limits(max_turns=7, idle_timeout=60.0),
        group="g",
        rollout="r",
        labels={"a": "b"},
        metadata={"k": [1, None]},
        reward_rule="sum",
        repeats="resample",
    )
    assert session.base_url == f"{one.url}/s/{session.key}" == session.urls["anthropic"] == session.env["ANTHROPIC_BASE_URL"]
    await one.talk(session, "a", "b")
    assert one.engine.requests[0]["sampling_params"]["temperature"] == 0.5
    status = await session.status()
    assert (status["id"], status["status"], status["ended"], status["group"], status["rollout"]) == ("mine", "open", "", "g", "r")
    assert (status["labels"], status["metadata"], status["reward"]) == ({"a": "b"}, {"k": [1, None]}, None)
    assert (status["reward_rule"], status["repeats"]) == ("sum", "resample")
    assert (status["limits"]["max_turns"], status["limits"]["idle_timeout"], status["sampling"]["stop"]) == (7, 60.0, ["END"])
    assert (status["turns"], status["usage"]["turns"], status["outcomes"]) == (2, 2, {"delivered": 2})
    assert status["usage"]["tokens"] == status["sampled_tokens"] > 0
    assert await session.stats() == {"turns": 2, "tokens": status["sampled_tokens"], "lineages": 1, "forks": 0}
    assert [n["role"] for n in (await session.tree())["nodes"]] == [None, "user", "assistant", "user", "assistant"]

    await session.reward(0.25)
    await session.reward(0.5)
    (sample,) = await session.finish(0.25, drain=0.0)
    assert sample.reward == 1.0
    assert await session.finish() == [sample] == await session.samples()
    status = await session.status()
    assert (status["status"], status["ended"], [r["value"] for r in status["rewards"]]) == ("closed", "finished", [0.25, 0.5, 0.25])
    await session.drop()
    for call in (session.status, session.tree, session.samples, session.finish, session.drop, session.stats):
        with pytest.raises(NotFound, match="mine"):
            await call()


async def test_samples_are_exact_in_their_types_and_where_nothing_was_sampled(one: Side) -> None:
    session = await one.client.open_session()
    await one.talk(session, "a", "b", "c")
    (sample,) = await session.samples()
    columns = (sample.token_ids, sample.loss_mask, sample.logprobs, sample.turn_index)
    assert [column.dtype for column in columns] == [np.int32, np.uint8, np.float32, np.int32]
    assert not any(column.flags.writeable for column in columns)
    turns = (await session.tree())["turns"]
    sent = [id for turn in turns for id in (*turn["appended"], *turn["output"])]
    assert sample.token_ids.tolist() == sent
    sampled = [p for turn in turns for p in (*[math.nan] * len(turn["appended"]), *turn["logprobs"])]
    assert np.array_equal(sample.logprobs, np.array(sampled, np.float32), equal_nan=True)
    assert np.isnan(sample.logprobs).any()
    assert check_samples([sample]).ok


async def test_a_lineage_earns_a_reward_of_its_own(one: Side) -> None:
    session = await one.client.open_session()
    await one.talk(session, "a")
    await one.talk(session, "other")
    first, second = [turn["id"] for turn in (await session.tree())["turns"]]
    await session.reward(1.0)
    await session.reward(-1.0, lineage=first)
    assert {s.lineage_id: s.reward for s in await session.samples()} == {first: -1.0, second: 1.0}


async def test_the_list_is_paged_and_chosen_by_status(one: Side) -> None:
    for name in ("a", "b", "c"):
        await one.client.open_session(id=name)
    await (await one.client.handle("b")).finish()
    listed = await one.client.sessions()
    assert {each["id"]: each["status"] for each in listed} == {"a": "open", "b": "closed", "c": "open"}
    assert [each["id"] for each in await one.client.sessions(status="closed")] == ["b"]
    pages = [(await one.client.sessions(limit=1, offset=number))[0]["id"] for number in range(3)]
    assert pages == [each["id"] for each in listed]
    assert listed[0]["usage"]["turns"] == 0


async def test_a_handle_of_another_session_knows_no_key(one: Side) -> None:
    await one.client.open_session(id="a.b", metadata={"x": 1})
    session = await one.client.handle("a.b")
    assert (session.id, session.key, session.base_url, dict(session.urls), dict(session.env)) == ("a.b", "", "", {}, {})
    assert (await session.status())["metadata"] == {"x": 1}
    for name in ("nobody", "../store", "a/../b", "%2e%2e", "?x=1", "#", "é", "\ud800", "a\nb"):
        with pytest.raises(NotFound):
            await one.client.handle(name)


async def test_what_is_refused_raises_the_gateways_own_error(one: Side) -> None:
    session = await one.client.open_session(id="taken")
    with pytest.raises(BadRequest, match="taken"):
        await one.client.open_session(id="taken")
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(BadRequest, match="a finite number"):
            await session.reward(value)
        with pytest.raises(BadRequest, match="a finite number"):
            await session.finish(value)
    with pytest.raises(BadRequest, match="lineage"):
        await session.reward(1.0, lineage="nobody")
    with pytest.raises(BadRequest, match="metadata"):
        await one.client.open_session(metadata={"x": 2**64})
    with pytest.raises(BadRequest, match="reward_rule"):
        await one.client.open_session(reward_rule="best")
    with pytest.raises(NotFound, match="no pool"):
        await one.client.pause(pool="nobody")
    assert (await session.status())["status"] == "open"


async def test_the_store_and_the_engines(one: Side) -> None:
    session = await one.client.open_session()
    await one.talk(session, "a")
    stats = await one.client.store_stats()
    assert (stats["sessions"]["open"], stats["turns"]) == (1, 1)
    held = await one.client.pause("wait")
    assert (held["paused"], held["running"]) == (True, 0)
    assert (await one.client.engines())["pools"]["policy"]["paused"] is True
    assert (await one.client.resume())["paused"] is False


WRONG_CALLS = {
    "ttl": lambda c: c.open_session(limits=Limits(ttl=math.nan)),
    "endless turn": lambda c: c.open_session(limits=Limits(turn_timeout=math.inf)),
    "id": lambda c: c.open_session(id="a/b"),
    "dots": lambda c: c.open_session(id=".."),
    "temperature": lambda c: c.open_session(sampling=Sampling(temperature=-1)),
    "schema": lambda c: c.open_session(sampling={"json_schema": "{}"}),
    "labels": lambda c: c.open_session(labels={"a": 1}),
    "group": lambda c: c.open_session(group=None),
    "metadata": lambda c: c.open_session(metadata={"a": {1}}),
    "limit": lambda c: c.sessions(limit=5000),
    "negative": lambda c: c.sessions(limit=-1),
    "offset": lambda c: c.sessions(offset=-3),
    "status": lambda c: c.sessions(status="bogus"),
    "mode": lambda c: c.pause("bogus"),
    "seconds": lambda c: c.pause("wait", seconds=math.nan),
}


@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
async def test_the_same_is_refused_by_all(call: Callable[[Any], Awaitable[object]], one: Side) -> None:
    with pytest.raises(BadRequest):
        await call(one.client)


async def test_what_differs_from_the_gateways_own_is_said_as_a_mapping() -> None:
    for kind in KINDS:
        async with side(kind, sampling=Sampling(temperature=0.5), limits=Limits(max_turns=9, ttl=100.0)) as one:
            some = await one.client.open_session(sampling={"top_k": 3, "stop": ("END",)}, limits={"max_turns": 2})
            status = await some.status()
            assert (status["sampling"]["temperature"], status["sampling"]["top_k"]) == (0.5, 3)
            assert (status["limits"]["ttl"], status["limits"]["max_turns"]) == (100.0, 2)
            whole = await (await one.client.open_session(sampling=Sampling(top_k=3), limits=Limits(max_turns=2))).status()
            assert (whole["sampling"]["temperature"], whole["limits"]["ttl"]) == (1.0, None)


async def test_metadata_comes_back_as_it_will_be_read_ever_after(one: Side) -> None:
    session = await one.client.open_session(metadata={"pair": (1, 2), "figure": np.float64(0.5)})
    assert (await session.status())["metadata"] == {"pair": [1, 2], "figure": 0.5}


async def test_a_session_is_dropped_by_its_name(one: Side) -> None:
    session = await one.client.open_session()
    await one.client.drop(session.id)
    for gone in (one.client.drop(session.id), one.client.handle(session.id)):
        with pytest.raises(NotFound):
            await gone
