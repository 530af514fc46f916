"""How long a turn goes on with engines that fail, and how long an engine that failed is left alone. Asks no engine, reads no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnloom.engine.contract import Capabilities, Engine

_REST = 0.5
_LONGEST_REST = 30.0
"""Seconds that an engine which failed is left alone while there are others; doubled with each failure."""

_SHORT = 1.0
"""Seconds: one that asks for a longer wait is left for another at once, which costs the session its cache."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a turn goes on with engines that fail: `attempts` more requests in a row without a token, and `seconds` since
    the first of these failed. As long as another engine is free no attempt counts, and there is no wait before going on with
    that one. The wait before any other request grows from `pause` seconds to `longest`.
    """

    attempts: int = 8
    seconds: float = 120.0
    pause: float = 0.25
    longest: float = 5.0


PATIENCE = Patience()


class Budget:
    """What is left of a turn's patience."""

    def __init__(self, patience: Patience, clock: Callable[[], float]) -> None:
        self._patience = patience
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        """A token came, or a hold is over."""
        self._failed = 0
        self._since: float | None = None

    def wait(self, asked: float, *, at_once: bool, counts: bool) -> float | None:
        """A request failed. Seconds until the next; None when there is to be none. `asked` is what the next engine asks for."""
        own, now = self._patience, self._clock()
        if self._since is None:
            self._since = now
        self._failed += counts
        pause = 0.0 if at_once else max(asked, min(own.pause * 2 ** min(max(self._failed - 1, 0), 64), own.longest))
        return None if self._failed > own.attempts or now - self._since + pause > own.seconds else pause


@dataclass(slots=True)
class Member:
    """An engine of a pool, and what it did last."""

    engine: Engine
    fits: Capabilities | None = None
    """What it said of itself when it was last found to fit its pool."""
    failures: int = 0
    refusals: int = 0
    rests_until: float = 0.0
    asked_until: float = 0.0
    """When it said that it can be asked again, however far that is."""

    @property
    def wakes(self) -> float:
        return max(self.rests_until, self.asked_until)

    def failed(self, now: float) -> None:
        """All that break at once are one failure."""
        if self.rests_until <= now:
            self.failures += 1
            self.rests_until = now + _rest(self.failures)

    def refused(self, now: float, asked: float | None = None) -> None:
        """Busy once, it is asked again, if it can be soon; then others are."""
        if self.rests_until > now:
            return
        self.refusals += 1
        asked = asked or 0.0
        self.asked_until = now + asked
        if self.refusals > 1 or asked > _SHORT:
            self.rests_until = now + min(max(asked, _rest(self.refusals - 1)), _LONGEST_REST)

    def answered(self) -> None:
        self.failures, self.refusals, self.rests_until, self.asked_until = 0, 0, 0.0, 0.0


def _rest(times: int) -> float:
    return float(min(_REST * 2 ** min(times - 1, 16), _LONGEST_REST)) if times > 0 else 0.0
