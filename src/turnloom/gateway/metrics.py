"""Prometheus counters of one gateway, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from turnloom.engine.metrics import REGISTRY as ENGINE_REGISTRY
from turnloom.types import Turn


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter("turnloom_turns", "Turns recorded, by outcome.", ["outcome"], registry=self.registry)
        self.forks = Counter("turnloom_forks", "Token sequences that started anew, by reason.", ["kind"], registry=self.registry)
        self.calls = Counter("turnloom_tool_calls", "Tool calls that the model wrote, by parse status.", ["status"], registry=self.registry)
        self.tokens = Counter("turnloom_tokens", "Tokens: held ones bridged, new ones encoded, sampled.", ["kind"], registry=self.registry)
        self.escaped = Counter("turnloom_escaped_control_tokens", "Control-token spellings encoded as text.", registry=self.registry)
        self.declined = Counter("turnloom_declined_tools", "Server-side tools of requests, shown to no model.", registry=self.registry)
        self.images = Counter("turnloom_image_placeholders", "Images that a placeholder stood for.", registry=self.registry)
        self.errors = Counter("turnloom_errors", "Errors answered to clients, by class.", ["error"], registry=self.registry)
        self.repeats = Counter("turnloom_repeats", "Requests that came again, by what they were given.", ["answer"], registry=self.registry)
        self.seconds = Histogram("turnloom_turn_seconds", "Duration of a turn.", registry=self.registry)
        self.sessions = Gauge("turnloom_sessions_loaded", "Sessions in memory.", registry=self.registry)

    def turn(self, turn: Turn | None) -> None:
        """Count a recorded turn; None is a turn that could not be recorded."""
        if turn is None:
            self.turns.labels("unrecorded").inc()
            return
        self.turns.labels(turn.outcome).inc()
        if turn.fork is not None:
            self.forks.labels(turn.fork.kind).inc()
        for call in turn.calls:
            self.calls.labels(call.status).inc()
        self.tokens.labels("bridged").inc(turn.prompt_len - len(turn.appended))
        self.tokens.labels("encoded").inc(len(turn.appended))
        self.tokens.labels("sampled").inc(len(turn.output))
        self.escaped.inc(turn.escaped)
        self.seconds.observe(max(turn.ended - turn.started, 0.0))

    def render(self) -> bytes:
        return generate_latest(self.registry) + generate_latest(ENGINE_REGISTRY)
