"""What is seen of a turn: its stages as times, and as spans where someone collects them."""

from __future__ import annotations

import asyncio
import builtins
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.gateways import bench, follow, user
from tests.support.logs import written
from turnloom.engine.contract import Trace
from turnloom.errors import ConfigError
from turnloom.gateway import otel
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.observe import Observer, Stage, TurnWatch
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import NO_FLOATS, NO_IDS, Finish, FinishReason, Outcome, Sampling, Turn, floats, ids

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def turn(outcome: Outcome = Outcome.DELIVERED, reason: FinishReason = FinishReason.STOP, sampled: int = 3, **more: Any) -> Turn:
    some = floats([-0.5] * sampled) if sampled else NO_FLOATS
    made = ids(range(sampled)) if sampled else NO_IDS
    return Turn("t", 0, None, None, ids([1, 2]), 2, 0, made, some, Finish(reason), outcome, Sampling(), **more)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"turnloom_{name}", labels)
    return 0.0 if found is None else found


def reach(watch: TurnWatch, clock: Clock, *stages: tuple[Stage, float]) -> None:
    for stage, at in stages:
        clock.now = at
        watch.mark(stage)


def test_each_time_is_between_the_stages_it_is_named_for() -> None:
    clock, metrics = Clock(), Metrics()
    observer = Observer(metrics, clock=clock)
    observer.received({})
    clock.now = 101.0
    with observer.turn(dialect="gemini", session="s", turn_id="t") as watch:
        reach(watch, clock, (Stage.PREPARED, 102), (Stage.PROMPTED, 104))
        clock.now = 108
        watch.chunk(0)
        clock.now = 116
        watch.chunk(4)
        clock.now = 132
        watch.chunk(4)
        reach(watch, clock, (Stage.SAMPLED, 140), (Stage.RECORDED, 140.5), (Stage.RECORDED, 150), (Stage.ANSWERED, 160))
        watch.ended(turn(), Trace(waited=7.0))
        clock.now = 164
    assert value(metrics, "turn_seconds_sum") == 64, "from the request, not from when its turn began"
    assert value(metrics, "first_token_seconds_sum") == 16
    assert value(metrics, "queue_seconds_sum") == 7
    assert value(metrics, "overhead_seconds_sum") == 4.5, "before the engine was asked, and until it was durable"
    assert value(metrics, "turns_total", outcome="delivered", dialect="gemini") == 1


def test_a_turn_that_never_began_is_not_counted() -> None:
    metrics = Metrics()
    with pytest.raises(ZeroDivisionError), written() as lines, Observer(metrics).turn(dialect="gemini", session="s", turn_id="t"):
        raise ZeroDivisionError
    (line,) = lines.of("turnloom.turn")
    assert (line["outcome"], line["error"]) == ("refused", "ZeroDivisionError")
    assert value(metrics, "turn_seconds_count") == 0
    assert b"turnloom_turns_total{" not in metrics.render()


def test_a_turn_that_could_not_be_stored_is_counted_as_that() -> None:
    metrics = Metrics()
    with Observer(metrics).turn(dialect="openai_chat", session="s", turn_id="t") as watch:
        watch.ended(None)
    assert value(metrics, "turns_total", outcome="unrecorded", dialect="openai_chat") == 1


def test_a_reply_written_again_samples_nothing_and_one_gone_on_with_counts_what_is_new() -> None:
    metrics = Metrics()
    whole, cut = turn(), turn(Outcome.ORPHANED, FinishReason.ABORT, 2)
    for before in (whole, cut):
        with Observer(metrics).turn(dialect="anthropic", session="s", turn_id="t", before=before) as watch:
            watch.ended(turn())
    assert value(metrics, "repeats_total", answer="replayed") == 1
    assert value(metrics, "repeats_total", answer="resumed") == 1
    assert value(metrics, "turns_total", outcome="delivered", dialect="anthropic") == 1, "the one that was gone on with"
    assert value(metrics, "tokens_total", kind="sampled") == 1
    assert value(metrics, "tokens_total", kind="encoded") == 0, "its prompt was counted when it began"


class Collected:
    """Spans in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = otel.OpenTelemetrySpans(provider)

    def turns(self) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == "turn"]

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        assert parent.context is not None
        return [s for s in self.exporter.get_finished_spans() if s.parent is not None and s.parent.span_id == parent.context.span_id]


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


async def test_a_turn_is_a_span_with_a_child_for_each_stage_below_the_callers_own() -> None:
    seen = Collected()
    async with bench(["FIRST WORDS", "SECOND WORDS"], spans=seen.spans, session_id="one") as b:
        asked = user("A SECRET QUESTION", system="SYSTEM WORDS", tools=[{"name": "secret_tool", "input_schema": {"type": "object"}}])
        first = await b.post(asked, traceparent=PARENT, tracestate="vendor=1")
        await b.post(follow(asked, first.body, "more"))
    one, two = seen.turns()
    assert one.context is not None
    assert two.context is not None
    assert one.parent is not None
    assert (f"{one.context.trace_id:032x}", f"{one.parent.span_id:016x}") == (TRACE_ID, "00f067aa0ba902b7")
    assert one.context.trace_state.get("vendor") == "1"
    assert two.parent is None, "whose trace it was is not remembered for the next request"
    for span in (one, two):
        children = seen.children(span)
        assert [child.name for child in children] == ["prepare", "render", "engine", "commit", "write"]
        ends = [span.start_time, *(time for child in children for time in (child.start_time, child.end_time)), span.end_time]
        assert ends == sorted(ends, key=lambda time: time or 0)
        assert [event.name for event in children[2].events] == ["first_token"]
        assert all(child.status.is_ok or child.status.is_unset for child in children)
    told = attributes(two)
    assert told["turnloom.session"] == "one"
    assert told["turnloom.turn"] != attributes(one)["turnloom.turn"] == first.headers["x-request-id"].removeprefix("req_")
    assert (told["turnloom.outcome"], told["turnloom.dialect"], told["gen_ai.request.model"]) == ("delivered", "anthropic", "scripted")
    assert told["gen_ai.usage.input_tokens"] > told["turnloom.bridged_tokens"] > 0 < told["gen_ai.usage.output_tokens"]
    everything = "".join(span.to_json() for span in seen.exporter.get_finished_spans())
    assert not [words for words in ("SECRET", "WORDS", "secret_tool", "more", b.handle.key) if words in everything]


async def test_a_turn_that_fails_is_a_span_to_the_stage_where_it_did() -> None:
    seen = Collected()
    cut = Reply("one two three four", fault=Fault.ABORT)
    async with bench([cut], spans=seen.spans) as b:
        assert (await b.post(user("hi"))).status == 529
        assert (await b.post(user("hi " * 40_000))).status == 400
    aborted, refused = seen.turns()
    assert attributes(aborted)["turnloom.outcome"] == "aborted"
    assert attributes(aborted)["error.type"] == "EngineAborted"
    assert not aborted.status.is_ok
    assert aborted.status.description == "EngineAborted", "never its message"
    assert not aborted.events, "nor its traceback"
    assert "ended this reply" not in "".join(span.to_json() for span in seen.exporter.get_finished_spans())
    assert seen.children(aborted)[2].name == "engine"
    assert attributes(refused)["turnloom.outcome"] == "refused"
    assert attributes(refused)["error.type"] == "PromptTooLong"
    assert [(child.name, child.status.is_ok) for child in seen.children(refused)][-1] == ("render", False)


@pytest.mark.parametrize("sent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x7f" * 300])
async def test_a_traceparent_that_is_none_is_no_parent(sent: str) -> None:
    seen = Collected()
    with Observer(Metrics(), seen.spans).turn(dialect="anthropic", session="s", turn_id="t"):
        pass
    observer = Observer(Metrics(), seen.spans)
    observer.received({"traceparent": sent})
    with observer.turn(dialect="anthropic", session="s", turn_id="t") as watch:
        watch.ended(turn(model="m"))
    assert [span.parent for span in seen.turns()] == [None, None]


def test_a_turn_that_came_out_shorter_than_it_was_is_counted_all_the_same() -> None:
    metrics = Metrics()
    with Observer(metrics).turn(dialect="anthropic", session="s", turn_id="t", before=turn(Outcome.ORPHANED, FinishReason.ABORT)) as watch:
        watch.ended(turn(Outcome.FAILED, FinishReason.ABORT, 1))
    assert value(metrics, "turns_total", outcome="failed", dialect="anthropic") == 1
    assert value(metrics, "tokens_total", kind="sampled") == 0


def test_spans_that_cannot_be_made_end_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    seen = Collected()
    monkeypatch.setattr(seen.spans, "turn", broken)
    with written() as lines, Observer(Metrics(), seen.spans).turn(dialect="anthropic", session="s", turn_id="t") as watch:
        watch.ended(turn())
    assert [line["exception"] for line in lines.parsed if "exception" in line] == ["ZeroDivisionError"]


async def test_spans_arrive_at_a_collector() -> None:
    came: asyncio.Queue[bytes] = asyncio.Queue()

    async def collect(request: web.Request) -> web.Response:
        assert request.path == "/v1/traces"
        await came.put(await request.read())
        return web.Response()

    app = web.Application()
    app.router.add_post("/{path:.*}", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        spans = otel.open_spans(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        async with bench(["Yes"], spans=spans) as b:
            assert (await b.post(user("hi"))).status == 200
        got = ExportTraceServiceRequest.FromString(await asyncio.wait_for(came.get(), 10))
    finally:
        await runner.cleanup()
    (resource,) = got.resource_spans
    assert any(each.key == "service.name" and each.value.string_value == "turnloom" for each in resource.resource.attributes)
    names = sorted(span.name for scope in resource.scope_spans for span in scope.spans)
    assert names == ["commit", "engine", "prepare", "render", "turn", "write"]


def test_a_collector_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take longer goes on in a thread that ends with the process."""
    stuck = Collected().spans
    monkeypatch.setattr(otel, "_FLUSH_SECONDS", 0.01)
    gate = threading.Event()
    monkeypatch.setattr(stuck._provider, "shutdown", gate.wait)
    stuck.close()
    assert not gate.is_set()
    gate.set()


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_environment_says_whether_spans_are_wanted(environment: dict[str, str], wanted: bool) -> None:
    assert otel.spans_wanted(environment) is wanted


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"turnloom\[otel\]"):
        otel.open_spans()


def test_nothing_of_opentelemetry_is_imported_when_it_is_off() -> None:
    code = "import sys, json, turnloom.cli.serve, turnloom.gateway.api\nprint(json.dumps([m for m in sys.modules if 'opentelemetry' in m]))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == []


async def test_nobody_reads_the_trace_of_a_request_that_no_one_collects() -> None:
    observer = Observer(Metrics())
    observer.received({"traceparent": PARENT})
    with observer.turn(dialect="anthropic", session="s", turn_id="t") as watch:
        assert watch.arrival.traceparent == ""
