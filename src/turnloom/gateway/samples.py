"""A session's samples while it goes on: read from a copy of its tree's outline, with the rewards of its lineages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from turnloom.core.tree import Tree
from turnloom.core.unroll import DEFAULT_TRAINING, UNLIMITED, Longest, Origin, Policy, iter_samples
from turnloom.gateway.lifecycle import Lifecycle, merged
from turnloom.store.contract import SessionRow
from turnloom.types import Sample


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A session as it is now, for another thread to read: turns that come meanwhile are not in it. Its tree has paths and turns only."""

    row: SessionRow
    tree: Tree
    in_flight: int

    @classmethod
    def of(cls, session: Lifecycle) -> Self:
        tree = copy.copy(session.tree)
        tree.nodes, tree.turns, tree.node_of = list(tree.nodes), dict(tree.turns), dict(tree.node_of)
        return cls(session.row, tree, session.being_made)

    def samples(self, longest: Longest = UNLIMITED, policy: Policy = DEFAULT_TRAINING) -> Iterator[Sample]:
        """One at a time. One whose lineage earned a reward of its own has that, the others have the session's."""
        row = self.row
        earned = {reward.lineage: merged(row.rewards, reward.lineage, row.reward_rule) for reward in row.rewards if reward.lineage}
        for sample in iter_samples(self.tree, origin(row), policy, longest):
            yield credited(self.tree, sample, earned)


def origin(row: SessionRow) -> Origin:
    return Origin(row.id, row.rollout, row.group, row.reward, row.metadata)


def credited(tree: Tree, sample: Sample, earned: dict[str, float | None]) -> Sample:
    """Of several rewards on its lineage, the one of the latest turn is its own."""
    if not earned:
        return sample
    turns = [tree.nodes[node].turn for node in reversed(tree.path(tree.node_of[sample.lineage_id]))]
    return next((replace(sample, reward=earned[turn]) for turn in turns if turn in earned), sample)
