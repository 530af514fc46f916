"""Client stop strings: the text ends before the first one to be complete, whatever the engine sampled after it."""

from __future__ import annotations

from collections.abc import Sequence

from turnloom.parse.reader import ready


class StopTrimmer:
    """Passes text through until a stop string. Holds back what may be the start of one; linear in the text.

    `matched` is the stop string found, and `end` where it ends: so many characters of all that were fed.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.matched: str | None = None
        self.end = 0
        self._passed = 0

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        window = self._held + text
        found = [(at, stop) for stop in self._stops if (at := window.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            self.end = self._passed + at + len(self.matched)
            self._held = ""
            return window[:at]
        stop = ready(window, 0, self._stops)
        self._held = window[stop:]
        self._passed += stop
        return window[:stop]

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held
