"""Which children of a node have a key, under one matcher. Owns no message and decides nothing."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from turnloom.core.match import Matcher

NEWEST = 32
"""How many of a node's equal children are looked at: the newest, and the newest of those that something follows."""


class Index:
    """Filled in the order in which nodes are added; reading changes nothing."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.keys: dict[int, tuple[bytes, ...]] = {}
        self._matching: dict[tuple[int, bytes], list[int]] = {}
        self._followed: dict[tuple[int, bytes], list[int]] = {}

    def add(self, node: int, parent: int, keys: tuple[bytes, ...]) -> None:
        self.keys[node] = keys
        for key in keys:
            self._matching.setdefault((parent, key), []).append(node)

    def rename(self, node: int, parent: int, keys: tuple[bytes, ...]) -> None:
        """Other keys for a node that nothing follows."""
        for key in self.keys[node]:
            self._matching[parent, key].remove(node)
        self.keys[node] = keys
        for key in keys:
            insort(self._matching.setdefault((parent, key), []), node)

    def follow(self, node: int, parent: int) -> None:
        """Something was added under `node` for the first time."""
        for key in self.keys[node]:
            self._followed.setdefault((parent, key), []).append(node)

    def matching(self, parent: int, key: bytes) -> Sequence[int]:
        """The children with this key, in the order they were added; of very many, those worth looking at."""
        found = self._matching.get((parent, key), ())
        if len(found) <= 2 * NEWEST:
            return found
        return sorted({*self._followed.get((parent, key), ())[-NEWEST:], *found[-NEWEST:]})
