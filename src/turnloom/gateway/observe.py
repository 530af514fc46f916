"""What is seen of a turn while it is made: how long each stage took, how it ended. It decides nothing.

It feeds the metrics, one line of the log, and the spans where someone collects
them. What a client or a model wrote never comes here: ids, counts and names do.

    parts.observe.received(http.headers)                    # the body is in; optional, the turn's time then counts from here
    with parts.observe.turn(dialect=dialect.name, session=row.id, turn_id=turn_id, before=before) as watch:
        watch.mark(Stage.PREPARED)                          # its place in the tree is found
        watch.mark(Stage.PROMPTED)                          # prompt and sampling stand; the engine is asked next
        watch.chunk(len(chunk.ids))                         # for each chunk that an engine gave just now
        watch.mark(Stage.SAMPLED)                           # the last token is in, or none will come: before it is recorded
        watch.mark(Stage.RECORDED)                          # durable
        watch.mark(Stage.ANSWERED)                          # the client has all of it
        watch.ended(record.turn, trace)                     # at the end, whatever it was; None: it could not be recorded

The block's exception is what ended the turn. A turn that never comes to `ended`
was refused before it began: no turn is counted. A mark that is made again counts
the first time, `ended` the last time. Within the block, and in tasks begun there,
log lines carry the session and the turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from turnloom.core.retry import Answer, whole
from turnloom.counters import swallowed
from turnloom.engine.contract import Trace
from turnloom.gateway.logs import FIELDS, SESSION, TURN
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.pools import POLICY
from turnloom.types import Turn

log = logging.getLogger("turnloom.turn")


class Stage(StrEnum):
    """What has been reached, in order."""

    PREPARED = "prepared"
    PROMPTED = "prompted"
    FIRST_TOKEN = "first_token"
    SAMPLED = "sampled"
    RECORDED = "recorded"
    ANSWERED = "answered"


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request's body was in, and the trace that its headers name (W3C Trace Context)."""

    at: float
    traceparent: str = ""
    tracestate: str = ""


_ARRIVAL: ContextVar[Arrival | None] = ContextVar("turnloom_arrival", default=None)


class Spans(Protocol):
    """Who collects turns as spans. `turn` does not wait."""

    def turn(self, watch: TurnWatch) -> None:
        """A turn that is over."""
        ...

    def close(self) -> None: ...


class Observer:
    """One gateway's. `clock` counts seconds from anywhere."""

    def __init__(self, metrics: Metrics, spans: Spans | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.metrics = metrics
        self.spans = spans
        self.clock = clock

    def received(self, headers: Mapping[str, str]) -> None:
        """The body of the current task's request is in: the turns made for it count their time from here."""
        if self.spans is None:
            _ARRIVAL.set(Arrival(self.clock()))
        else:
            _ARRIVAL.set(Arrival(self.clock(), headers.get("traceparent", ""), headers.get("tracestate", "")))

    def turn(self, *, dialect: str, session: str, turn_id: str, before: Turn | None = None) -> TurnWatch:
        """`before` is what is on record of the reply, where it was asked for before."""
        return TurnWatch(self, dialect, session, turn_id, before)


def in_session(session_id: str) -> None:
    """Log lines of the current task, and of those it begins, carry this session from here on."""
    SESSION.set(session_id)


def in_turn(turn_id: str) -> None:
    """The same for the turn: for those who wait for its reply."""
    TURN.set(turn_id)


class TurnWatch:
    """One turn, from its request to its end. A context manager; see the module for how it is told."""

    __slots__ = (
        "_begun",
        "_clock",
        "_observer",
        "_tokens",
        "arrival",
        "before",
        "dialect",
        "error",
        "finished",
        "recorded",
        "session",
        "times",
        "turn",
        "turn_id",
        "waited",
    )

    def __init__(self, observer: Observer, dialect: str, session: str, turn_id: str, before: Turn | None) -> None:
        self._observer = observer
        self._clock = observer.clock
        self._tokens: tuple[Token[str], Token[str]] | None = None
        self._begun = False
        self.dialect, self.session, self.turn_id, self.before = dialect, session, turn_id, before
        self.arrival = _ARRIVAL.get() or Arrival(self._clock())
        self.times: dict[Stage, float] = {}
        """When each stage was reached, as the observer's clock has it."""
        self.turn: Turn | None = None
        self.recorded: bool | None = None
        """None until `ended`: the turn never began."""
        self.waited = 0.0
        self.error: BaseException | None = None
        self.finished = 0.0

    def mark(self, stage: Stage) -> None:
        if stage not in self.times:
            self.times[stage] = self._clock()

    def chunk(self, tokens: int) -> None:
        """So many new tokens came from an engine."""
        if tokens and not self._begun:
            self._begun = True
            self.mark(Stage.FIRST_TOKEN)

    def ended(self, turn: Turn | None, trace: Trace | None = None) -> None:
        """What is on record, None where it could not be recorded."""
        self.turn, self.recorded = turn, turn is not None
        self.waited = 0.0 if trace is None else trace.waited

    @property
    def answer(self) -> Answer:
        """Whether it was made, gone on with, or written again."""
        if self.before is None:
            return Answer.NEW
        return Answer.REPLAY if whole(self.before) else Answer.RESUME

    @property
    def sampled(self) -> int:
        """Tokens that came to the record this time."""
        turn, before = self.turn, self.before
        return 0 if turn is None else max(len(turn.output) - (0 if before is None else len(before.output)), 0)

    @property
    def seconds(self) -> float:
        return self.finished - self.arrival.at

    def between(self, start: Stage | None, end: Stage) -> float | None:
        """Seconds from one stage (None: the request) to another; None where it did not come so far."""
        begun = self.arrival.at if start is None else self.times.get(start)
        done = self.times.get(end)
        return None if begun is None or done is None else max(done - begun, 0.0)

    def __enter__(self) -> Self:
        self._tokens = SESSION.set(self.session), TURN.set(self.turn_id)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.error, self.finished = error, self._clock()
        try:
            self._count()
            self._say()
            if self._observer.spans is not None:
                self._observer.spans.turn(self)
        except Exception:  # noqa: BLE001 (a turn is not lost for being watched)
            swallowed(log, "gateway.observe", "the end of a turn could not be told", trace=True)
        if self._tokens is not None:
            session, turn = self._tokens
            SESSION.reset(session)
            TURN.reset(turn)

    def _count(self) -> None:
        metrics = self._observer.metrics
        if self.answer is not Answer.NEW:
            metrics.repeats.labels(self.answer).inc()
        if self.recorded is None or self.answer is Answer.REPLAY:
            return
        metrics.turn(self.turn, self.dialect, self.before)
        metrics.seconds.observe(self.seconds)
        metrics.queue.observe(self.waited)
        if (first := self.between(None, Stage.FIRST_TOKEN)) is not None:
            metrics.first_token.observe(first)
        if (asked := self.between(None, Stage.PROMPTED)) is not None:
            metrics.overhead.observe(asked + (self.between(Stage.SAMPLED, Stage.RECORDED) or 0.0))

    def _say(self) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        fields = self.fields()
        words = " ".join(f"{name}={value}" for name, value in fields.items() if value != "")
        log.info("turn %s", words, extra={FIELDS: fields})

    def fields(self) -> dict[str, str | int | float]:
        """What the log's line and the span say of it."""
        turn = self.turn
        fields: dict[str, str | int | float] = {
            "outcome": turn.outcome if turn is not None else "refused" if self.recorded is None else "unrecorded",
            "dialect": self.dialect,
            "answer": self.answer,
            "seconds": round(self.seconds, 4),
            "error": "" if self.error is None else type(self.error).__name__,
        }
        if turn is not None:
            fields |= {
                "model": turn.model,
                "pool": turn.pool or POLICY,
                "label": turn.label,
                "prompt_tokens": turn.prompt_len,
                "bridged_tokens": turn.kept,
                "sampled_tokens": self.sampled,
                "fork": "" if turn.fork is None else turn.fork.kind,
                "finish": turn.finish.reason,
                "pieces": len(turn.pieces),
            }
        return fields
