"""What `/metrics` says after something has happened, and that no label is ever what a client or a model wrote."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import turnloom
from tests.support.gateways import Bench, bench, follow, user
from tests.support.logs import written
from tests.support.wires import WIRES
from turnloom import errors
from turnloom.core.retry import Answer
from turnloom.counters import SWALLOWED, swallowed
from turnloom.errors import BadRequest, StoreError, TurnloomError
from turnloom.gateway import lag
from turnloom.gateway.lag import watch_loop
from turnloom.gateway.metrics import ADMIN, BRIDGED, OTHER, Metrics
from turnloom.gateway.routes import Dialects
from turnloom.store.contract import Limits, StoreStats
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import AbortOutcome, CallStatus, ForkKind, Outcome

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

WHOLE = {name: wire for name, wire in WIRES.items() if name != "gemini array"}


def read(text: str) -> Samples:
    return {(s.name, frozenset(s.labels.items())): s.value for family in text_string_to_metric_families(text) for s in family.samples}


async def scrape(b: Bench) -> Samples:
    async with b.http.get(b.gateway.url + "/metrics") as answer:
        assert answer.status == 200
        return read(await answer.text())


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((f"turnloom_{name}", frozenset(labels.items())), 0.0)


async def test_turns_are_counted_by_outcome_and_dialect() -> None:
    script = [*["Yes"] * len(WHOLE), Reply("one two three four", fault=Fault.ABORT), Reply("one two", fault=Fault.NULL_LOGPROB)]
    async with bench(script) as b:
        for wire in WHOLE.values():
            assert (await b.post(wire.body("hi"), wire.whole)).status == 200
        assert (await b.post(user("two"))).status == 529
        assert (await b.post(user("three"))).status == 502
        seen = await scrape(b)
    for dialect in WHOLE:
        assert of(seen, "turns_total", outcome="delivered", dialect=dialect) == 1, dialect
    assert of(seen, "turns_total", outcome="aborted", dialect="anthropic") == 1
    assert of(seen, "turns_total", outcome="failed", dialect="anthropic") == 1
    ended = len(script)
    for name in ("turn", "queue", "overhead"):
        assert of(seen, f"{name}_seconds_count") == ended, name
    assert 0 < of(seen, "overhead_seconds_sum") < of(seen, "turn_seconds_sum")
    assert of(seen, "first_token_seconds_count") >= ended - 1


async def test_bridges_forks_and_their_tokens_are_counted() -> None:
    async with bench(["First.", "Second.", "Third.", "Fourth."]) as b:
        asked = user("hi")
        first = await b.post(asked)
        again = follow(asked, first.body, "more")
        second = await b.post(again)
        await b.post(follow(again, second.body, "and more"))
        await b.post(user("something else"))
        turns = list((await b.session()).tree.turns.values())
        seen = await scrape(b)
    assert of(seen, "bridges_total", kind=BRIDGED) == 2
    assert of(seen, "forks_total", kind="new_conversation") == 1
    assert of(seen, "tokens_total", kind="bridged") == sum(turn.kept for turn in turns) > 0
    assert of(seen, "tokens_total", kind="encoded") == sum(len(turn.appended) for turn in turns)
    assert of(seen, "tokens_total", kind="sampled") == sum(len(turn.output) for turn in turns)


async def test_a_fork_that_shares_held_tokens_is_a_bridge_of_its_own_kind() -> None:
    async with bench(["First.", "Second.", "Third."]) as b:
        asked = user("hi")
        first = await b.post(asked)
        await b.post(follow(asked, first.body, "this way"))
        await b.post(follow(asked, first.body, "that way"))
        seen = await scrape(b)
    assert of(seen, "bridges_total", kind=BRIDGED) == 1
    assert of(seen, "bridges_total", kind="branched") == 1
    assert of(seen, "forks_total", kind="branched") == 1


async def test_errors_are_counted_by_class_and_dialect() -> None:
    async with bench([Reply(fault=Fault.HTTP_400)]) as b:
        assert (await b.post({"messages": 5})).status == 400
        assert (await b.post({"contents": 5}, WHOLE["gemini"].whole)).status == 400
        assert (await b.post(user("hi"))).status == 400
        assert (await b.post(user("hi"), "/v1/nothing")).status == 404
        assert (await b.admin("POST", "/sessions", {"nothing": 1}))[0] == 400
        assert (await b.admin("GET", "/sessions", key="guess"))[0] == 401
        seen = await scrape(b)
    assert of(seen, "errors_total", error="BadRequest", dialect="anthropic") == 1
    assert of(seen, "errors_total", error="BadRequest", dialect="gemini") == 1
    assert of(seen, "errors_total", error="EngineRejected", dialect="anthropic") == 1
    assert of(seen, "errors_total", error="NotFound", dialect="openai_chat") == 1
    assert of(seen, "errors_total", error="BadRequest", dialect=ADMIN) == 1
    assert of(seen, "errors_total", error="Unauthorized", dialect=ADMIN) == 1


async def test_a_request_that_comes_again_is_counted_by_what_it_is_given() -> None:
    async with bench(["Once", "Other"]) as b:
        await b.gateway.hold()
        asked = json.dumps(user("hi"))
        both = [asyncio.create_task(b.post(asked.encode())) for _ in range(2)]
        async with asyncio.timeout(10):
            while not of(seen := await scrape(b), "repeats_total", answer="joined"):
                await asyncio.sleep(0.01)
        assert of(seen, "turns_total", outcome="delivered", dialect="anthropic") == 0
        await b.gateway.release()
        replies = await asyncio.gather(*both)
        assert replies[0].body == replies[1].body
        again = await b.post(asked.encode(), **{"x-stainless-retry-count": "1"})
        assert again.body == replies[0].body
        seen = await scrape(b)
    assert of(seen, "repeats_total", answer="joined") == 1
    assert of(seen, "repeats_total", answer="replayed") == 1
    assert of(seen, "turns_total", outcome="delivered", dialect="anthropic") == 1


async def test_the_wait_for_a_pool_that_is_held_is_time_in_the_queue() -> None:
    async with bench(["Yes", "Yes"]) as b:
        await b.post(user("hi"))
        assert of(await scrape(b), "queue_seconds_sum") == 0
        await b.gateway.hold()
        waiting = asyncio.create_task(b.post(user("ho")))
        async with asyncio.timeout(10):
            while not b.gateway.engine.gate.held:
                await asyncio.sleep(0.01)
        await b.gateway.release()
        assert (await waiting).status == 200
        seen = await scrape(b)
    assert of(seen, "queue_seconds_sum") > 0
    assert of(seen, "queue_seconds_count") == 2


async def test_a_loop_that_stands_still_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "STUCK", 0.1)
    metrics = Metrics()
    watch = asyncio.create_task(watch_loop(metrics.lag))
    with written() as lines:
        try:
            await asyncio.sleep(0)
            time.sleep(0.6)  # noqa: ASYNC251 (it is to stand still)
            async with asyncio.timeout(10):
                while not (metrics.registry.get_sample_value("turnloom_loop_lag_seconds_count") or 0):
                    await asyncio.sleep(0.01)
        finally:
            watch.cancel()
    assert (metrics.registry.get_sample_value("turnloom_loop_lag_seconds_sum") or 0) >= 0.3
    assert "stood still" in lines.text


async def test_a_gateway_looks_at_its_loop_as_long_as_it_runs() -> None:
    async with bench() as b, asyncio.timeout(10):
        while not of(await scrape(b), "loop_lag_seconds_count"):
            await asyncio.sleep(0.05)
        task = b.gateway._lag
        assert task is not None
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()


async def test_commits_take_time(tmp_path: Any) -> None:
    async with bench(["Yes"], store=tmp_path / "t.db") as b:
        before = of(await scrape(b), "store_commit_seconds_count")
        await b.post(user("hi"))
        assert of(await scrape(b), "store_commit_seconds_count") > before


def test_what_is_swallowed_is_logged_and_counted_by_its_place() -> None:
    def count() -> float:
        return SWALLOWED.labels("gateway.tests")._value.get()

    before = count()
    with written() as lines:
        try:
            raise ValueError("why")
        except ValueError:
            swallowed(logging.getLogger("turnloom.tests"), "gateway.tests", "it failed at %d", 3, trace=True)
    (line,) = lines.of("turnloom.tests")
    assert (line["level"], line["message"], line["exception"]) == ("warning", "it failed at 3", "ValueError")
    assert lines.records[0].funcName == inspect.currentframe().f_code.co_name  # type: ignore[union-attr]
    assert count() == before + 1


class Theirs(BadRequest):
    """A plug-in's own error."""


def test_a_name_that_is_none_of_ours_is_no_label() -> None:
    metrics = Metrics()
    metrics.error(Theirs("no"), "their dialect")
    metrics.error(TurnloomError("no"), "anthropic")
    metrics.limit("their limit")
    metrics.limit("max_turns")
    metrics.expired("ttl")
    metrics.turn(None, "their dialect")
    metrics.state(3, StoreStats({"open": 2, "their status": 1}, 0, 0, 0))
    seen = read(metrics.render().decode())
    assert of(seen, "errors_total", error="BadRequest", dialect=OTHER) == 1
    assert of(seen, "errors_total", error="TurnloomError", dialect="anthropic") == 1
    assert of(seen, "limits_reached_total", limit=OTHER) == 1
    assert of(seen, "limits_reached_total", limit="max_turns") == 1
    assert of(seen, "session_expirations_total", limit="ttl") == 1
    assert of(seen, "turns_total", outcome="unrecorded", dialect=OTHER) == 1
    assert (of(seen, "sessions_loaded"), of(seen, "sessions", status="open"), of(seen, "sessions", status="closed")) == (3, 2, 0)
    assert b"their" not in metrics.render()


_DIALECTS = {*Dialects._fields, ADMIN, OTHER}
ALLOWED: dict[str, set[str]] = {
    "outcome": {*Outcome, *AbortOutcome, "unrecorded"},
    "dialect": _DIALECTS,
    "kind": {*ForkKind, BRIDGED, "encoded", "sampled"},
    "status": {*CallStatus, "open", "closed"},
    "answer": {*Answer, "joined"},
    "error": {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, TurnloomError)},
    "limit": {*Limits.__dataclass_fields__, "max_sessions", OTHER},
}


async def test_no_label_is_what_a_client_or_a_model_wrote() -> None:
    """However a word comes in: in a header, a path, a body, a reply, by the operator, as an address of an engine."""
    mark = "zqzq"
    tools = [{"name": f"{mark}_tool", "input_schema": {"type": "object"}}]
    call = f'<tool_call>\n{{"name": "{mark}_other", "arguments": {{}}}}\n</tool_call>'
    script = ["Yes", call, "<tool_call>zqzq", Reply(f"{mark} two three", fault=Fault.ABORT), Reply("x", fault=Fault.HTTP_400)]
    headers = {name: f"{mark}-{name}" for name in ("x-turnloom-label", "x-app", "user-agent", "idempotency-key", "anthropic-version")}
    async with bench(script, session_id=mark, session_labels={mark: mark}, session_group=mark, session_metadata={mark: mark}) as b:
        body: dict[str, Any] = {**user(mark), "model": mark, "tools": tools, "metadata": {"user_id": mark}}
        await b.post(body, **headers)
        for number in range(len(script)):
            await b.post({**body, "messages": [{"role": "user", "content": f"{mark} {number}"}]})
        await b.post({**body, "messages": mark})
        await b.post(body, f"/{mark}")
        await b.post(WHOLE["gemini"].body(mark), f"/v1beta/models/{mark}:{mark}")
        await b.admin("POST", "/sessions", {mark: mark})
        await b.admin("POST", f"/sessions/{mark}/reward", {"value": 1.0})
        async with b.http.get(b.gateway.url + "/metrics") as answer:
            text = await answer.text()
    assert mark not in text
    samples = read(text)
    assert of(samples, "tool_calls_total", status="unknown_tool") == 1
    for name, labels in samples:
        for label, value in labels:
            if label == "le":
                continue
            if label == "where":
                assert value.replace(".", "").replace("_", "").isalpha(), name
            else:
                assert value in ALLOWED[label], (name, label, value)


def test_places_of_swallowed_exceptions_are_written_into_the_code() -> None:
    """`where` is a label: a word that is put together could be anything."""
    files = [path for path in Path(turnloom.__file__).parent.rglob("*.py") if path.name != "counters.py"]
    calls = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    places = [call.args[1] for call in calls if ast.unparse(call.func) == "swallowed"]
    places += [call.args[0] for call in calls if ast.unparse(call.func) == "SWALLOWED.labels"]
    assert len(places) > 20
    assert not [ast.unparse(place) for place in places if not (isinstance(place, ast.Constant) and isinstance(place.value, str))]


@pytest.mark.parametrize("name", ["turn_seconds", "first_token_seconds", "queue_seconds", "overhead_seconds", "loop_lag_seconds"])
def test_buckets_reach_from_the_usual_to_the_worst(name: str) -> None:
    seen = read(Metrics().render().decode())
    edges = sorted(float(dict(labels)["le"]) for found, labels in seen if found == f"turnloom_{name}_bucket")
    assert edges[0] <= 0.05
    assert edges[-2] >= 5


async def test_sessions_are_counted_as_they_live() -> None:
    async with bench(["Yes"], max_sessions=2, session_limits=Limits(max_turns=1)) as b:
        other = await b.gateway.open_session()
        assert (await b.admin("POST", "/sessions", {}))[0] == 429
        assert (await b.post(user("hi"))).status == 200
        assert (await b.post(user("ho"))).status == 429
        assert (await b.admin("POST", f"/sessions/{b.handle.id}/reward", {"value": 1.0}))[0] == 200
        await other.finish(0.5)
        seen = await scrape(b)
    assert (of(seen, "sessions", status="open"), of(seen, "sessions", status="closed"), of(seen, "sessions_loaded")) == (1, 1, 2)
    assert of(seen, "sessions_opened_total") == 2
    assert of(seen, "rewards_total") == 2
    assert of(seen, "limits_reached_total", limit="max_turns") == 1
    assert of(seen, "limits_reached_total", limit="max_sessions") == 1


async def test_a_store_that_fails_leaves_the_other_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> Any:
        raise StoreError("gone")

    async with bench() as b:
        monkeypatch.setattr(b.gateway._store, "stats", broken)
        before = SWALLOWED.labels("gateway.stats")._value.get()
        seen = await scrape(b)
    assert of(seen, "sessions_loaded") == 1
    assert of(seen, "swallowed_total", where="gateway.stats") == before + 1


async def test_sessions_that_expire_or_leave_memory_are_counted() -> None:
    async with bench(["Yes"], loaded_sessions=1, session_limits=Limits(ttl=60.0)) as b:
        other = await b.gateway.open_session()
        assert (await b.post(user("hi"))).status == 200
        janitor = b.gateway._janitor
        assert janitor is not None
        assert await janitor.sweep(time.time() + 61) == [(b.handle.id, "ttl")]
        assert (await b.admin("POST", f"/sessions/{other.id}/finish", {}))[0] == 200
        await janitor.sweep(time.time())
        seen = await scrape(b)
    assert of(seen, "session_expirations_total", limit="ttl") == 1
    assert of(seen, "session_evictions_total") >= 1
    assert of(seen, "sessions_loaded") == 1
    assert of(seen, "sessions", status="closed") == 2
