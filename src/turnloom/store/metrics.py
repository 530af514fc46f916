"""What the stores of this process count."""

from __future__ import annotations

from prometheus_client import Histogram

from turnloom.counters import REGISTRY

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

COMMIT_SECONDS = Histogram(
    "turnloom_store_commit_seconds", "From the first write of a batch until all of it was durable.", buckets=_BUCKETS, registry=REGISTRY
)
