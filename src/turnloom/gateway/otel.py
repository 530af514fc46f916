"""Turns as OpenTelemetry spans: one for the turn, under it one for each stage it came to. Imported only where spans are wanted.

Spans are made when a turn is over, from the times that were noted. They carry
ids, counts and names, and never what a client or a model wrote.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from turnloom import __version__
from turnloom.errors import ConfigError
from turnloom.gateway.observe import Spans, Stage, TurnWatch

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PARTS = {
    "prepare": Stage.PREPARED,
    "render": Stage.PROMPTED,
    "engine": Stage.SAMPLED,
    "commit": Stage.RECORDED,
    "write": Stage.ANSWERED,
}
"""The parts of a turn, in order, and the stage that ends each."""

_USUAL = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "sampled_tokens": "gen_ai.usage.output_tokens",
    "error": "error.type",
}
"""Attributes that OpenTelemetry's semantic conventions have a name for."""

_FLUSH_SECONDS = 5.0


def spans_wanted(environment: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's own variables name somewhere to send spans to, and do not switch them off."""
    named = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    return bool(named) and not off


def open_spans(endpoint: str = "") -> Spans:
    """Spans that go to an OTLP collector over HTTP: that at `endpoint` (`http://HOST:4318`), else the one in the environment.

    Raises ConfigError where OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError('OpenTelemetry is not installed; run `pip install "turnloom[otel]"`') from error
    named = {"service.version": __version__} | ({} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "turnloom"})
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces") if endpoint else OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OpenTelemetrySpans(provider)


class OpenTelemetrySpans:
    """`Spans` of a provider, which it shuts down when it is closed."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._closed = False
        self._tracer = provider.get_tracer("turnloom", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._within = set_span_in_context

    def turn(self, watch: TurnWatch) -> None:
        # What the observer's clock says, as nanoseconds of the wall's.
        offset = time.time() - watch.finished
        times = [(name, watch.times.get(stage)) for name, stage in PARTS.items()]

        def nanos(at: float) -> int:
            return int((at + offset) * 1e9)

        parent = self._extract({"traceparent": watch.arrival.traceparent, "tracestate": watch.arrival.tracestate})
        span = self._tracer.start_span("turn", parent, attributes=_attributes(watch), start_time=nanos(watch.arrival.at))
        within, begun = self._within(span, parent), watch.arrival.at
        for name, done in times:
            end = watch.finished if done is None else done
            child = self._tracer.start_span(name, within, start_time=nanos(begun))
            if name == "engine" and (first := watch.times.get(Stage.FIRST_TOKEN)) is not None:
                child.add_event("first_token", timestamp=nanos(first))
            if done is None:
                _failed(child, watch)
            child.end(nanos(end))
            begun = end
            if done is None:
                break
        if watch.error is not None:
            _failed(span, watch)
        span.end(nanos(watch.finished))

    def close(self) -> None:
        """Send what is left, for a few seconds at most: a collector that does not answer holds nobody up. Twice is no error."""
        if self._closed:
            return
        self._closed = True
        ending = threading.Thread(target=self._provider.shutdown, name="turnloom-spans", daemon=True)
        ending.start()
        ending.join(_FLUSH_SECONDS)


def _failed(span: Any, watch: TurnWatch) -> None:
    from opentelemetry.trace import StatusCode

    span.set_status(StatusCode.ERROR, "" if watch.error is None else type(watch.error).__name__)


def _attributes(watch: TurnWatch) -> dict[str, str | int | float]:
    fields = {name: value for name, value in watch.fields().items() if value != ""}
    own = {_USUAL.get(name, f"turnloom.{name}"): value for name, value in fields.items()}
    return {**own, "gen_ai.operation.name": "chat", "turnloom.session": watch.session, "turnloom.turn": watch.turn_id}
