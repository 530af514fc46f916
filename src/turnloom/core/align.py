"""How far a prompt agrees with the sequences that are held, and what of them it can go on from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from turnloom.types import NO_IDS, IntArray, Turn, ids


def sequence(chain: Sequence[Turn]) -> IntArray:
    """Every id of the last turn's sequence, prompt and output [n]. `chain` are the turns it is made of, first to last."""
    if not chain:
        return NO_IDS
    return ids(np.concatenate([part for turn, end in zip(chain, used(chain), strict=True) for part in (turn.appended, turn.output[:end])]))


def used(chain: Sequence[Turn]) -> list[int]:
    """How many of each turn's sampled ids the last turn's sequence holds: all, but where the next turn was realigned."""
    if not chain:
        return []
    kept = [max(0, min(after.kept - turn.prompt_len, len(turn.output))) for turn, after in pairwise(chain)]
    return [*kept, len(chain[-1].output)]


def agreement(left: IntArray, right: IntArray) -> int:
    """The length of the longest common prefix."""
    common = min(len(left), len(right))
    differs = np.flatnonzero(left[:common] != right[:common])
    return int(differs[0]) if len(differs) else common


def shared_turns(chain: Sequence[Turn], agreed: int, prompt: IntArray) -> int:
    """How many turns of the chain, from its first, the prompt goes on from: the last of them is a whole prefix of it.

    `agreed` is the agreement of the prompt with the chain's sequence.
    """
    intact: float = float("inf")
    for count in range(len(chain), 0, -1):
        turn = chain[count - 1]
        end = turn.prompt_len + len(turn.output)
        if end <= min(agreed, intact):
            return count
        # Where a later turn was realigned, the end of this one's sequence is not in the chain's. The prompt can go on
        # from it only where it leaves the chain's at that very id.
        if intact == agreed < end <= len(prompt) and agreement(sequence(chain[:count]), prompt) == end:
            return count
        intact = min(intact, turn.kept)
    return 0
