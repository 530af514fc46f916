"""What the engine clients of this process count."""

from __future__ import annotations

from prometheus_client import Counter

from turnloom.counters import REGISTRY

__all__ = ["ABORTS", "ABORT_FAILURES", "CONTINUED", "PROTOCOL_ERRORS", "REGISTRY"]

ABORTS = Counter("turnloom_engine_aborts", "Requests whose decoding was stopped, by outcome.", ["outcome"], registry=REGISTRY)
ABORT_FAILURES = Counter("turnloom_engine_abort_failures", "Workers that could not be told to stop a request.", registry=REGISTRY)
PROTOCOL_ERRORS = Counter("turnloom_engine_protocol_errors", "Streams rejected because the engine contradicted itself.", registry=REGISTRY)
CONTINUED = Counter("turnloom_engine_continued", "Requests that went on with a turn after its engine gave out.", registry=REGISTRY)
