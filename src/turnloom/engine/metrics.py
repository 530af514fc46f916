"""What the engine clients count, on the default Prometheus registry."""

from __future__ import annotations

from prometheus_client import Counter

ABORTS = Counter("turnloom_engine_aborts", "Requests whose decoding was stopped, by outcome.", ["outcome"])
ABORT_FAILURES = Counter("turnloom_engine_abort_failures", "Workers that could not be told to stop a request.")
PROTOCOL_ERRORS = Counter("turnloom_engine_protocol_errors", "Streams rejected because the engine contradicted itself.")
