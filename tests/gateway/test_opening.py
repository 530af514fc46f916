"""What a session is opened with: the same is refused whoever asks, what is not said is the gateway's, what is taken comes back."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.gateways import ADMIN, bench, user
from turnloom import Gateway
from turnloom.errors import BadRequest, ConfigError, LimitReached, NotFound, Unauthorized
from turnloom.gateway.sessions import hash_key
from turnloom.store.contract import Limits
from turnloom.store.fsck import check
from turnloom.types import Sampling

NAN, INF = float("nan"), float("inf")

WRONG: dict[str, dict[str, Any]] = {
    "id of another type": {"id": 5},
    "id in two lines": {"id": "a\nb"},
    "id with a slash": {"id": "a/b"},
    "id that paths swallow": {"id": ".."},
    "id too long": {"id": "x" * 129},
    "group": {"group": 5},
    "no group": {"group": None},
    "rollout": {"rollout": 7},
    "labels": {"labels": {"a": 1}},
    "labels that are a list": {"labels": ["a"]},
    "metadata that is no JSON": {"metadata": {"a": {1, 2}}},
    "metadata without an end": {"metadata": {"a": INF}},
    "metadata that is no object": {"metadata": [1]},
    "reward rule": {"reward_rule": "median"},
    "repeats": {"repeats": "always"},
    "part of a turn": {"limits": Limits(max_turns=2.5)},  # type: ignore[arg-type]
    "ttl that is no number": {"limits": Limits(ttl=NAN)},
    "ttl without an end": {"limits": Limits(ttl=INF)},
    "ttl in the past": {"limits": Limits(ttl=-1)},
    "no limits": {"limits": 5},
    "unknown limit": {"limits": {"turns": 5}},
    "cold": {"sampling": Sampling(temperature=-1)},
    "no temperature": {"sampling": Sampling(temperature=NAN)},
    "no token to sample": {"sampling": Sampling(top_k=0)},
    "no mass to sample": {"sampling": Sampling(top_p=0)},
    "top_k of bits": {"sampling": Sampling(top_k=2**40)},
    "empty stop": {"sampling": Sampling(stop=("",))},
    "stop of another type": {"sampling": {"stop": "END"}},
    "schema of another type": {"sampling": Sampling(json_schema={})},  # type: ignore[arg-type]
    "schema over HTTP's head": {"sampling": {"json_schema": "{}"}},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_what_is_wrong_is_refused_here_and_over_http(wrong: dict[str, Any]) -> None:
    async with bench(["Yes"]) as b:
        with pytest.raises(BadRequest) as refused:
            await b.gateway.open_session(**wrong)
        assert next(iter(wrong)) in str(refused.value)
        spoken = {name: asdict(value) if isinstance(value, Limits | Sampling) else value for name, value in wrong.items()}
        if "json_schema" in spoken.get("sampling", {}) and not isinstance(wrong["sampling"], dict):
            spoken["sampling"].pop("json_schema")
            if isinstance(wrong["sampling"].json_schema, dict):
                return
        try:
            status, _ = await b.admin("POST", "/sessions", spoken)
        except TypeError:  # What JSON cannot spell cannot be sent.
            return
        assert status == 400
        assert len(await b.gateway.sessions()) == 1


async def test_what_is_not_said_is_the_gateways() -> None:
    own = {"sampling": Sampling(temperature=0.5, top_k=7, stop=("END",)), "limits": Limits(max_turns=9, ttl=100.0)}
    async with bench(["Yes"] * 9, **own) as b:
        for given in ({"sampling": {"max_tokens": 50}, "limits": {"max_bytes": 10_000}}, {"sampling": {}, "limits": {}}):
            status, opened = await b.admin("POST", "/sessions", given)
            assert status == 201
            over_http = (await b.gateway.session(opened["id"])).row
            here = (await b.gateway.session((await b.gateway.open_session(**given)).id)).row  # type: ignore[arg-type]
            for row in (over_http, here):
                assert row.sampling == Sampling(temperature=0.5, top_k=7, stop=("END",), max_tokens=given["sampling"].get("max_tokens"))
                assert row.limits == Limits(max_turns=9, ttl=100.0, max_bytes=given["limits"].get("max_bytes"))
        nothing = {"limits": {"max_turns": None}, "sampling": {"top_k": -1}}
        _, opened = await b.admin("POST", "/sessions", nothing)
        row = (await b.gateway.session(opened["id"])).row
        assert (row.limits, row.sampling) == (Limits(ttl=100.0), Sampling(temperature=0.5, stop=("END",)))
        whole = await b.gateway.session((await b.gateway.open_session(sampling=Sampling(top_k=3), limits=Limits(max_turns=1))).id)
        assert (whole.row.sampling, whole.row.limits) == (Sampling(top_k=3), Limits(max_turns=1))


@pytest.mark.parametrize(
    "own", [{"sampling": Sampling(top_k=0)}, {"sampling": Sampling(temperature=INF)}, {"limits": Limits(ttl=NAN)}], ids=["k", "t", "ttl"]
)
def test_a_gateway_has_nothing_that_it_refuses(own: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"sampling|limits"):
        Gateway("http://127.0.0.1:1", **own)


async def test_metadata_is_the_same_before_and_after_a_restart_and_the_callers_no_more(tmp_path: Path) -> None:
    given = {"pair": (1, 2), "figure": np.float64(0.1), "nested": [{"a": []}]}
    async with bench(["Yes"], store=tmp_path / "t.db") as b:
        handle = await b.gateway.open_session(id="one", metadata=given)
        given["nested"].append("later")  # type: ignore[attr-defined]
        async with b.http.post(handle.base_url + "/v1/messages", json=user("hi")) as answer:
            assert answer.status == 200
        (before,) = await handle.finish(1)
    async with bench(store=tmp_path / "t.db") as b:
        (after,) = await (await b.gateway.handle("one")).samples()
    assert before.metadata == after.metadata
    assert before.metadata["pair"] == [1, 2]
    assert before.metadata["nested"] == [{"a": []}]
    assert type(before.metadata["figure"]) is float
    assert before.reward == after.reward == 1.0


async def test_a_key_that_another_session_has_is_the_callers_fault() -> None:
    key = "tl-" + "k" * 43
    async with bench(["Yes"]) as b:
        answers = await asyncio.gather(*(b.admin("POST", "/sessions", {"id": f"s{i}", "key": key}) for i in range(4)))
        assert sorted(status for status, _ in answers) == [201, 400, 400, 400]
        assert all("key: another session has it" in body["error"]["message"] for status, body in answers if status == 400)


async def test_the_key_of_a_dropped_session_opens_none_that_took_its_id(tmp_path: Path) -> None:
    """The old one is out of memory; it is dropped and its id taken while its key is being looked up."""
    async with bench(["Yes"], store=tmp_path / "t.db", loaded_sessions=1) as b:
        sessions = b.gateway._running()
        _, old = await sessions.open(session_id="one")
        await b.gateway.open_session(id="other")
        assert sessions.memory.get("one") is None
        read, go = asyncio.Event(), asyncio.Event()
        found = sessions._store.session_by_key

        async def slow(key_hash: str) -> Any:
            row = await found(key_hash)
            read.set()
            await go.wait()
            return row

        sessions._store.session_by_key = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(sessions.by_key(old))
        await read.wait()
        await sessions.drop("one")
        _, new = await sessions.open(session_id="one")
        go.set()
        with pytest.raises(Unauthorized):
            await asking
        assert (await sessions.by_key(new)).row.key_hash == hash_key(new)


async def test_what_is_damaged_can_be_dropped_and_its_id_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    async with bench(["Yes"], store=path) as b:
        await b.gateway.open_session(id="row")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE sessions SET body = x'01ff' WHERE id = 'row'")
    connection.commit()
    connection.close()
    async with bench(["Yes"], store=path, max_sessions=4) as b:
        assert (await b.admin("GET", "/sessions/row"))[0] == 500
        assert (await b.admin("DELETE", "/sessions/row"))[0] == 204
        assert (await b.admin("DELETE", "/sessions/row"))[0] == 404
        assert (await b.admin("POST", "/sessions", {"id": "row"}))[0] == 201
        await b.gateway.open_session()  # The damaged one is not counted any more.
        with pytest.raises(LimitReached, match="as many as it may"):
            await b.gateway.open_session()
    report = check(path)
    assert report.problems == []


async def test_a_second_start_is_refused_and_harms_nothing() -> None:
    async with bench(["Yes"]) as b:
        with pytest.raises(ConfigError, match="started already"):
            await b.gateway.start()
        assert (await b.post(user("hi"))).status == 200


async def test_a_line_end_after_the_admin_key_is_no_part_of_it() -> None:
    async with bench() as b:
        gateway = Gateway(b.engine.url, b.tokenizer, admin_key=f"{ADMIN}\n")
        async with gateway:
            headers = {"Authorization": f"Bearer {ADMIN}"}
            async with b.http.get(f"{gateway.url}/api/v1/sessions", headers=headers) as answer:
                assert answer.status == 200


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"])
def test_an_admin_key_that_no_client_can_send_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        Gateway("http://127.0.0.1:1", admin_key=key)


def test_blanks_are_no_admin_key() -> None:
    with pytest.raises(ConfigError, match="needs an admin key"):
        Gateway("http://127.0.0.1:1", host="0.0.0.0", admin_key="  ")


async def test_no_error_is_longer_than_it_may_be() -> None:
    async with bench() as b:
        with pytest.raises(NotFound) as unknown:
            await b.gateway.handle("x" * 10_000)
        with pytest.raises(BadRequest) as lineage:
            await b.handle.reward(1.0, "y" * 500_000)
        assert max(len(str(unknown.value)), len(str(lineage.value))) <= 1500
        status, body = await b.admin("POST", f"/sessions/{b.handle.id}/reward", {"value": 1, "lineage": "z" * 500_000})
        assert (status, len(body["error"]["message"]) <= 1500) == (400, True)
