"""The admin API: sessions opened, read, rewarded, finished, dropped; nothing without the key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import ADMIN, bench, follow, user
from turnloom.export.canonical import read_jsonl
from turnloom.export.parquet import read_parquet
from turnloom.export.registry import FORMATS
from turnloom.gateway.samples import Snapshot
from turnloom.store.contract import Entry, Usage
from turnloom.store.memory import MemoryStore
from turnloom.testing.tokenizers import qwen_tokenizer


async def test_a_session_from_open_to_drop() -> None:
    async with bench(["One", "Two"]) as b:
        status, opened = await b.admin(
            "POST", "/sessions", {"id": "mine", "sampling": {"temperature": 0.5}, "group": "g", "metadata": {"k": 1}}
        )
        assert status == 201
        assert opened["id"] == "mine"
        base, key = f"{b.gateway.url}/s/{opened['key']}", opened["key"]
        assert opened["urls"] == {"anthropic": base, "openai": f"{base}/v1", "gemini": base}
        assert opened["env"] == {
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": key,
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": key,
            "GOOGLE_GEMINI_BASE_URL": base,
            "GEMINI_API_KEY": key,
        }

        async with b.http.post(opened["urls"]["anthropic"] + "/v1/messages", json=user("a")) as answer:
            first = await answer.json()
        async with b.http.post(opened["urls"]["anthropic"] + "/v1/messages", json=follow(user("a"), first, "b")) as answer:
            assert answer.status == 200
        assert b.engine.requests[0]["sampling_params"]["temperature"] == 0.5

        _, row = await b.admin("GET", "/sessions/mine")
        assert (row["status"], row["turns"], row["lineages"], row["in_flight"]) == ("open", 2, 1, 0)
        assert (row["outcomes"], row["forks"], row["group"], row["metadata"]) == ({"delivered": 2}, {}, "g", {"k": 1})
        assert row["turn_labels"] == {"main": 2}
        _, tree = await b.admin("GET", "/sessions/mine/tree")
        assert [n["role"] for n in tree["nodes"]] == [None, "user", "assistant", "user", "assistant"]
        assert [t["base"] for t in tree["turns"]] == [None, tree["turns"][0]["id"]]

        assert (await b.admin("POST", "/sessions/mine/reward", {"value": 0.25}))[1]["reward"] == 0.25
        _, done = await b.admin("POST", "/sessions/mine/finish", {"reward": 1.0})
        assert (done["status"], done["reward"]) == ("closed", 1.0)
        _, lines = await b.admin("GET", "/sessions/mine/samples?format=canonical")
        (sample,) = [json.loads(line) for line in lines.splitlines()]
        assert (sample["session_id"], sample["group_id"], sample["reward"], sample["temperature"]) == ("mine", "g", 1.0, 0.5)
        assert len(sample["token_ids"]) == len(sample["loss_mask"]) == len(sample["logprobs"]) == len(sample["turn_index"])

        assert (await b.admin("GET", "/sessions"))[1]["sessions"][0]["id"] == "mine"
        assert (await b.admin("DELETE", "/sessions/mine"))[0] == 204
        assert (await b.admin("GET", "/sessions/mine"))[0] == 404
        async with b.http.post(opened["urls"]["anthropic"] + "/v1/messages", json=user("a")) as answer:
            assert answer.status == 401


CALLS = [
    ("POST", "/sessions"),
    ("GET", "/sessions"),
    ("GET", "/sessions/ID"),
    ("GET", "/sessions/ID/tree"),
    ("GET", "/sessions/ID/samples"),
    ("POST", "/sessions/ID/reward"),
    ("POST", "/sessions/ID/finish"),
    ("DELETE", "/sessions/ID"),
    ("GET", "/store"),
    ("GET", "/metrics"),
    ("GET", "/engines"),
    ("POST", "/pause"),
    ("POST", "/resume"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_every_call_needs_the_admin_key(method: str, path: str) -> None:
    async with bench() as b:
        path = path.replace("ID", b.handle.id)
        for key in ("", "wrong", b.handle.key, ADMIN + "x", ADMIN[:-1]):
            status, body = await b.admin(method, path, {}, key=key)
            assert (status, body["error"]["type"]) == (401, "Unauthorized")
        assert (await b.session()).row.status == "open"


async def test_an_empty_admin_key_locks_the_api() -> None:
    from turnloom.engine.sglang import SGLangEngine
    from turnloom.gateway.api import Gateway

    async with bench() as b, Gateway(SGLangEngine(b.engine.url), b.tokenizer) as locked:
        async with b.http.get(locked.url + "/api/v1/sessions", headers={"Authorization": "Bearer "}) as answer:
            assert answer.status == 401


def nested(depth: int) -> dict[str, Any]:
    inner: Any = 1
    for _ in range(depth):
        inner = {"a": inner}
    return {"x": inner}


REFUSED = [
    ("POST", "/sessions", {"id": "../x"}, "id"),
    ("POST", "/sessions", {"sampling": {"temperature": -1}}, "sampling.temperature"),
    ("POST", "/sessions", {"sampling": {"temperature": "NaN"}}, "sampling.temperature"),
    *(
        ("POST", "/sessions", {"sampling": {name: value}}, f"sampling.{name}")
        for name, values in {
            "temperature": [101, 10**400],
            "top_k": [0, -2, 2**31, 2**70],
            "max_tokens": [0, 2**31],
            "seed": [-1, 2**63, 2**70],
            "stop": [[""], ["a", ""], ["a" * 1001], ["a"] * 65],
        }.items()
        for value in values
    ),
    ("POST", "/sessions", {"limits": {"max_turns": 2**70}}, "limits.max_turns"),
    ("POST", "/sessions", {"limits": {"max_context": 2**70}}, "limits.max_context"),
    ("POST", "/sessions", {"limits": {"turn_timeout": 1e300}}, "limits.turn_timeout"),
    ("POST", "/sessions", {"metadata": {"x": float("nan")}}, "metadata"),
    ("POST", "/sessions", {"metadata": {"x": [float("-inf")]}}, "metadata"),
    ("POST", "/sessions", {"metadata": {"x": {"y": 2**63}}}, "metadata"),
    ("POST", "/sessions", {"metadata": {"x": -(2**63) - 1}}, "metadata"),
    ("POST", "/sessions", {"metadata": nested(65)}, "metadata"),
    ("POST", "/sessions", {"surprise": 1}, "surprise"),
    ("POST", "/sessions/ID/reward", {}, "value"),
    ("POST", "/sessions/ID/finish", {"reward": "high"}, "reward"),
    ("GET", "/sessions?limit=x", None, "limit"),
    ("GET", "/sessions?limit=" + "9" * 5000, None, "limit"),
    ("GET", "/sessions?limit=-1", None, "limit"),
    ("GET", "/sessions?offset=" + "9" * 5000, None, "offset"),
    ("GET", "/sessions?offset=" + "9" * 12, None, "offset"),
    ("GET", "/sessions?status=dropped", None, "status"),
    ("GET", "/sessions/ID/samples?format=tar", None, "format"),
    ("GET", "/sessions/ID/samples?format=os:system", None, "format"),
    ("POST", "/sessions", {"key": "short"}, "key"),
    ("POST", "/sessions", {"limits": {"max_turns": "5"}}, "limits.max_turns"),
    ("POST", "/sessions", {"reward_rule": "best"}, "reward_rule"),
    ("POST", "/sessions", {"repeats": "never"}, "repeats"),
    ("POST", "/sessions/ID/reward", {"value": 1, "lineage": "nobody"}, "lineage"),
    ("POST", "/sessions/ID/finish", {"drain": -1}, "drain"),
    *(("GET", f"/sessions/ID/samples?max_tokens={n}", None, "max_tokens") for n in ("", "0", "1", "-5", "1.5", "x", "9" * 12, "9" * 5000)),
    *(("GET", f"/sessions/ID/samples?max_tokens=9&overlong={word}", None, "overlong") for word in ("", "cut", "TRUNCATE")),
]


@pytest.mark.parametrize(("method", "path", "body", "field"), REFUSED)
async def test_bad_admin_requests_name_the_field(method: str, path: str, body: object, field: str) -> None:
    async with bench() as b:
        status, answer = await b.admin(method, path.replace("ID", b.handle.id), body)
        assert status == 400
        assert answer["error"]["message"].startswith(field)


HELD = {"x": [2**63 - 1, -(2**63), 1.5, None, True, "é😀"], **nested(63)}
BODIES = {
    "five thousand digits": b'{"metadata": {"x": ' + b"9" * 5000 + b"}}",
    "a number beyond the doubles": b'{"metadata": {"x": 1e999}}',
    "half a pair": b'{"metadata": {"x": "\\ud800"}}',
    "half a pair in a label": b'{"labels": {"x": "\\ud800"}}',
    "very deep": b'{"metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    "no JSON": b"{",
    "a list": b"[]",
}


@pytest.mark.parametrize("raw", BODIES.values(), ids=BODIES)
async def test_a_body_that_cannot_be_kept_opens_nothing(raw: bytes) -> None:
    async with bench() as b:
        head = {"Authorization": f"Bearer {ADMIN}"}
        async with b.http.post(f"{b.gateway.url}/api/v1/sessions", data=raw, headers=head) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (400, "BadRequest")
        assert len((await b.admin("GET", "/sessions"))[1]["sessions"]) == 1


async def test_metadata_within_the_bounds_is_kept_and_exported() -> None:
    async with bench(["One"]) as b:
        _, opened = await b.admin("POST", "/sessions", {"id": "m", "metadata": HELD, "sampling": {"seed": 2**63 - 1, "top_k": 1}})
        async with b.http.post(opened["urls"]["anthropic"] + "/v1/messages", json=user("a")) as answer:
            assert answer.status == 200
        assert (await b.admin("GET", "/sessions/m"))[1]["metadata"] == HELD
        _, lines = await b.admin("GET", "/sessions/m/samples")
        assert json.loads(lines)["metadata"].items() >= HELD.items()


async def test_a_session_that_cannot_be_shown_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older store may hold metadata that is no JSON, and a stored session may be damaged."""
    store = MemoryStore()
    async with bench(store=store) as b:
        own = (await b.session()).row
        for name, value in (("long", 10**30), ("both", [10**30, float("nan")])):
            await store.put_session(replace(own, id=name, key_hash=name, metadata={"x": value}))
        plain = store.sessions

        async def sessions(**asked: Any) -> list[Entry]:
            return [*await plain(**asked), Entry("damaged", None, Usage(turns=3), "its row cannot be read")]

        monkeypatch.setattr(store, "sessions", sessions)
        status, listed = await b.admin("GET", "/sessions")
        found = {row["id"]: row for row in listed["sessions"]}
        assert status == 200
        assert set(found) == {"long", "both", "damaged", b.handle.id}
        assert found["long"]["metadata"] == {"x": 10**30}
        assert found[b.handle.id]["status"] == "open"
        assert (found["damaged"]["error"], found["damaged"]["usage"]["turns"]) == ("its row cannot be read", 3)
        assert found["both"]["error"]


async def test_a_body_too_large_or_badly_compressed_is_an_error_in_the_apis_shape() -> None:
    async with bench() as b:
        url, head = f"{b.gateway.url}/api/v1/sessions", {"Authorization": f"Bearer {ADMIN}"}
        async with b.http.post(url, data=b"x" * (33 * 2**20), headers=head) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (413, "BodyTooLarge")
        async with b.http.post(url, data=b"0123456789", headers={**head, "Content-Encoding": "gzip"}) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (400, "BadRequest")


async def test_a_taken_id_is_refused() -> None:
    async with bench() as b:
        status, answer = await b.admin("POST", "/sessions", {"id": b.handle.id})
        assert (status, answer["error"]["type"]) == (400, "BadRequest")


async def test_samples_are_cut_as_the_query_says() -> None:
    async with bench(["One two three.", "Four five six."]) as b:
        asked = user("Begin.")
        first = await b.post(asked)
        await b.post(follow(asked, first.body, "Go on."))

        async def lines(query: str) -> list[dict[str, Any]]:
            status, body = await b.admin("GET", f"/sessions/{b.handle.id}/samples{query}")
            assert status == 200
            return [json.loads(line) for line in body.splitlines()]

        (whole,) = await lines("?overlong=drop")
        ids, turns = whole["token_ids"], whole["turn_index"]
        assert await lines(f"?max_tokens={len(ids)}") == [whole] == await lines("")
        most = len(ids) - 2
        (cut,) = await lines(f"?max_tokens={most}")
        assert (cut["token_ids"], cut["statuses"]["cut"]) == (ids[:most], 1)
        assert await lines(f"?max_tokens={most}&overlong=truncate") == [cut]
        (of_whole_turns,) = await lines(f"?max_tokens={most}&overlong=turn")
        assert of_whole_turns["token_ids"] == ids[: turns.index(1) - turns[turns.index(0) : turns.index(1)].count(-1)]
        assert await lines(f"?max_tokens={most}&overlong=drop") == []


async def test_forks_explain_themselves_in_status_and_tree() -> None:
    async with bench(["One", "Two", "Three"]) as b:
        asked = user("Count.", system="Be brief.")
        first = await b.post(asked)
        await b.post(follow(asked, first.body, "Next."))
        await b.post({**asked, "system": "Be long."})
        _, row = await b.admin("GET", f"/sessions/{b.handle.id}")
        _, tree = await b.admin("GET", f"/sessions/{b.handle.id}/tree")
        turns = tree["turns"]
        held = len(turns[0]["appended"]) + len(turns[0]["output"])
        assert [t["kept"] for t in turns] == [0, held, 0]
        assert [t["kept"] + len(t["appended"]) for t in turns] == [t["prompt_len"] for t in turns]
        assert row["forks"] == {"system_changed": 1}
        assert row["reencoded_tokens"] == {"system_changed": turns[2]["prompt_len"]}
        assert [t["fork"] for t in turns[:2]] == [None, None]
        fork = turns[2]["fork"]
        at = fork["token_index"]
        assert (fork["kind"], fork["message_index"], fork["joined_by"]) == ("system_changed", 0, "")
        assert "differs at character 3" in fork["detail"]
        assert (fork["recorded"][:7], fork["came"][:6]) == (" brief.", " long.")
        assert turns[0]["appended"][:at] == turns[2]["appended"][:at]
        assert turns[0]["appended"][at] != turns[2]["appended"][at]


async def test_a_realigned_turn_shows_what_it_kept() -> None:
    """The template drops reasoning from history, so the reply gives way from its first token on."""
    tokenizer = qwen_tokenizer("qwen3")
    async with bench(["<think>\nHm.\n</think>\n\nOne", "Two"], tokenizer=tokenizer, history="template", realign=50) as b:
        asked = user("Count.")
        first = await b.post(asked)
        await b.post(follow(asked, first.body, "Next."))
        _, tree = await b.admin("GET", f"/sessions/{b.handle.id}/tree")
        before, after = tree["turns"]
        assert after["base"] == before["id"]
        assert after["kept"] == before["prompt_len"]
        assert (after["fork"]["kind"], after["fork"]["token_index"]) == ("realigned", after["kept"])
        assert after["fork"]["joined_by"] == "history=sampled"


async def test_healthz_and_metrics_are_open_and_true() -> None:
    async with bench(["One", "Two"]) as b:
        await b.post(user("a"))
        await b.post(user("a"))
        async with b.http.get(b.gateway.url + "/healthz") as answer:
            assert answer.status == 200
        async with b.http.get(b.gateway.url + "/metrics") as answer:
            text = await answer.text()
        assert 'turnloom_turns_total{dialect="anthropic",outcome="delivered"} 2.0' in text
        assert 'turnloom_forks_total{kind="resampled"} 1.0' in text
        assert "turnloom_engine_aborts_total" in text
        assert b.handle.key not in text
        await b.engine.stop()
        async with b.http.get(b.gateway.url + "/healthz") as answer:
            assert answer.status == 503


KEY = "tl-" + "k" * 43


async def test_the_same_id_with_the_same_key_is_the_same_session() -> None:
    """So that a caller whose answer was lost may ask again."""
    async with bench() as b:
        first = await b.admin("POST", "/sessions", {"id": "mine", "key": KEY})
        assert await b.admin("POST", "/sessions", {"id": "mine", "key": KEY}) == first
        assert (first[0], first[1]["key"]) == (201, KEY)
        for other in ({"id": "mine", "key": KEY[:-1] + "x"}, {"id": "mine"}, {"id": b.handle.id, "key": KEY}):
            status, refused = await b.admin("POST", "/sessions", other)
            assert (status, refused["error"]["type"]) == (400, "BadRequest")
            assert KEY not in str(refused)


async def test_samples_come_in_every_format_that_is_registered(tmp_path: Path) -> None:
    async with bench(["One", "Two"]) as b:
        await b.post(user("a"))
        await b.post(user("b"))
        samples = await b.handle.samples()
        for name in FORMATS:
            head = {"Authorization": f"Bearer {ADMIN}"}
            async with b.http.get(f"{b.gateway.url}/api/v1/sessions/{b.handle.id}/samples?format={name}", headers=head) as answer:
                assert answer.status == 200
                raw = await answer.read()
            path = tmp_path / name
            path.write_bytes(raw)
            assert list((read_parquet if name == "parquet" else read_jsonl)(path)) == samples, name


async def test_the_list_brings_no_session_into_memory() -> None:
    async with bench(["One"], loaded_sessions=1) as b:
        await b.post(user("a"))
        for number in range(3):
            await b.gateway.open_session(id=f"s{number}")
        before = b.gateway._running().loaded
        _, listed = await b.admin("GET", "/sessions?status=open")
        assert {each["id"]: each["usage"]["turns"] for each in listed["sessions"]} == {"s0": 0, "s1": 0, "s2": 0, b.handle.id: 1}
        assert b.gateway._running().loaded == before == 1


async def test_the_store_and_the_metrics_are_shown() -> None:
    async with bench(["One"]) as b:
        await b.post(user("a"))
        _, stats = await b.admin("GET", "/store")
        assert (stats["sessions"], stats["turns"]) == ({"open": 1}, 1)
        status, text = await b.admin("GET", "/metrics")
        assert (status, b"turnloom_sessions_opened_total 1.0" in text) == (200, True)


async def test_a_snapshot_is_read_while_turns_come() -> None:
    async with bench(["One", "Two"]) as b:
        await b.post(user("a"))
        session = await b.session()
        before = Snapshot.of(session)
        was = session.unroll().samples
        await b.post(user("b"))
        assert tuple(before.samples()) == was
        assert len(tuple(Snapshot.of(session).samples())) == 2
