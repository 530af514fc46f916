"""The Prometheus metrics of one gateway, in a registry of its own.

A label's values are names of ours, and so few: what a client, a model or a plug-in
wrote is never one.
"""

from __future__ import annotations

import inspect
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from turnloom import counters, errors
from turnloom.gateway.routes import Dialects
from turnloom.store.contract import Limits, StoreStats
from turnloom.types import Turn

BRIDGED = "bridged"
ADMIN = "admin"
"""What stands for a dialect where the operator was answered."""
OTHER = "other"
"""What stands for a name that is none of ours."""

_DIALECTS = frozenset({*Dialects._fields, ADMIN})
_ERRORS = frozenset(kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.TurnloomError))
_LIMITS = frozenset({*(field.name for field in fields(Limits)), "max_sessions"})

_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_OWN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Metrics:
    """What is counted by others is counted through a method; `render` is what `/metrics` says."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_turns()
        self._of_time()
        self._of_sessions()

    def _of_turns(self) -> None:
        count = self._counter
        self.turns = count("turns", "Turns that ended, by outcome and dialect.", "outcome", "dialect")
        self.bridges = count("bridges", "Turns whose prompt goes on from tokens that are held, by kind.", "kind")
        self.forks = count("forks", "Token sequences that started anew or left a recorded one, by reason.", "kind")
        self.calls = count("tool_calls", "Tool calls that the model wrote, by parse status.", "status")
        self.tokens = count("tokens", "Tokens: held ones bridged, new ones encoded, sampled.", "kind")
        self.escaped = count("escaped_control_tokens", "Control-token spellings encoded as text.")
        self.declined = count("declined_tools", "Server-side tools of requests, shown to no model.")
        self.images = count("image_placeholders", "Images that a placeholder stood for.")
        self.errors = count("errors", "Errors answered, by class and dialect.", "error", "dialect")
        self.repeats = count("repeats", "Requests that came again, by what they were given.", "answer")

    def _of_time(self) -> None:
        time = self._histogram
        self.seconds = time("turn_seconds", "From a turn's request to its end.", _WHOLE)
        self.first_token = time("first_token_seconds", "From a turn's request to its first token.", _WAITS)
        self.queue = time("queue_seconds", "What a turn waited for a held pool, and for engines to have room.", _WAITS)
        self.overhead = time("overhead_seconds", "What the gateway took before it asked an engine, and to record what was sampled.", _OWN)
        self.lag = time("loop_lag_seconds", "How late the event loop was.", _OWN)

    def _of_sessions(self) -> None:
        count = self._counter
        self.sessions = Gauge("turnloom_sessions_loaded", "Sessions in memory.", registry=self.registry)
        self.stored = Gauge("turnloom_sessions", "Sessions on record, by status.", ["status"], registry=self.registry)
        self.opened = count("sessions_opened", "Sessions that were opened.")
        self.evictions = count("session_evictions", "Sessions that left memory, to come back from the store.")
        self.expirations = count("session_expirations", "Sessions that a limit closed, by its name.", "limit")
        self.rewards = count("rewards", "Rewards that were given.")
        self.limits = count("limits_reached", "Requests that a limit refused, by its name.", "limit")

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(f"turnloom_{name}", says, labels, registry=self.registry)

    def _histogram(self, name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"turnloom_{name}", says, buckets=buckets, registry=self.registry)

    def turn(self, turn: Turn | None, dialect: str = "", before: Turn | None = None) -> None:
        """Count a turn that ended; None is one that could not be recorded. `before` is its beginning, where it was gone on with."""
        if turn is None:
            self.turns.labels("unrecorded", _one_of(dialect, _DIALECTS)).inc()
            return
        self.turns.labels(turn.outcome, _one_of(dialect, _DIALECTS)).inc()
        self.tokens.labels("sampled").inc(max(len(turn.output) - (0 if before is None else len(before.output)), 0))
        for call in turn.calls:
            self.calls.labels(call.status).inc()
        if before is not None:
            return
        if turn.kept:
            self.bridges.labels(BRIDGED if turn.fork is None else turn.fork.kind).inc()
        if turn.fork is not None:
            self.forks.labels(turn.fork.kind).inc()
        self.tokens.labels("bridged").inc(turn.kept)
        self.tokens.labels("encoded").inc(len(turn.appended))
        self.escaped.inc(turn.escaped)

    def error(self, error: errors.TurnloomError, dialect: str) -> None:
        """Count an error that was answered, as the class of ours that it is; `dialect` is ADMIN for the operator."""
        name = next(kind.__name__ for kind in type(error).__mro__ if kind in _ERRORS)
        self.errors.labels(name, _one_of(dialect, _DIALECTS)).inc()

    def limit(self, name: str) -> None:
        """A limit refused a request: a field of `Limits`, or `max_sessions`."""
        self.limits.labels(_one_of(name, _LIMITS)).inc()

    def expired(self, limit: str) -> None:
        self.expirations.labels(_one_of(limit, _LIMITS)).inc()

    def state(self, loaded: int, stats: StoreStats | None = None) -> None:
        """How many sessions there are, in memory and on record."""
        self.sessions.set(loaded)
        if stats is not None:
            for status in ("open", "closed"):
                self.stored.labels(status).set(stats.sessions.get(status, 0))

    def render(self) -> bytes:
        return generate_latest(self.registry) + generate_latest(counters.REGISTRY)


def _one_of(name: str, known: frozenset[str]) -> str:
    return name if name in known else OTHER
