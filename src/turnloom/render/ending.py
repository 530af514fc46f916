"""Where a reply that was sampled and the template's own way to end it meet.

A template shows the last reply closed (the history ends there) and continued
(more messages follow). What both write after the reply's last word is the
reply's own ending; in the continued form the next messages come after it. The
sampled ids may hold all of that ending, a part of it, or another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_LOOK_BACK = 16
"""How many sampled ids may stand after the reply's last word."""


@dataclass(frozen=True, slots=True)
class Control:
    """A control token in a text: characters [start, end) spell the token `id`."""

    start: int
    end: int
    id: int


Controls = Callable[[str], Sequence[Control]]
"""Every control token of a text, in order."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The control tokens that end a reply, in the continued text.

    `at` is the character where the first of them starts, or where the reply's
    words end if none is its own; `count` how many there are; `end` which of them, from 0, ends the turn: None where none does and the
    next message's opening ends it, and then the last of them may be that opening
    (`opens`). `closed_as` is the id that stands in the place of the first when
    nothing follows.
    """

    at: int
    count: int
    end: int | None
    opens: bool = False
    closed_as: int | None = None


def find_ending(
    continued: str,
    closed: str,
    controls: Controls,
    turn_ends: frozenset[int],
    openings: frozenset[int],
    said: Callable[[], str] = str,
    has_calls: bool = False,
) -> Ending | None:
    """Both texts begin after the reply's last word. None: the template ends a reply differently once more follows.

    `turn_ends` are the ids known to end turns, `openings` those that open the model's own. `said` is the end of the
    sampled text without end tokens: where the template ends a reply in plain text, that says how much of it was sampled.
    """
    following, closing = controls(continued), controls(closed)
    shared = common_length(continued, closed)
    own = [token for token in following if token.end <= shared]
    if own:
        ends = [i for i, token in enumerate(own) if token.id in turn_ends]
        if ends:
            # Both may go on alike past the end: some templates always write a generation prompt.
            return Ending(own[0].start, ends[-1] + 1, ends[-1])
        opens = len(following) > len(own)
        return Ending(own[0].start, len(own) + opens, None, opens)
    if not closing:
        if not continued.startswith(closed.rstrip()):
            return None
        words = _held_text(continued, closed, said()) if closed.strip() or not following else 0
        if has_calls and not words:
            # The call was read, so what closes it was sampled, if in another spelling.
            words = len(closed.rstrip())
        opens = bool(following) and not continued[words : following[0].start].strip()
        return Ending(words, int(opens), None, opens)
    if not following or closed[: closing[0].start].rstrip() != continued[: following[0].start].rstrip():
        return None
    first = following[0]
    if first.id == closing[0].id:
        return Ending(first.start, 1, 0)
    # Another token stands where the reply's end was: an end as well only if the next message opens right after it.
    if first.id in openings or len(following) < 2 or continued[first.end : following[1].start].strip():
        return None
    return Ending(first.start, 1, 0, closed_as=closing[0].id)


def missing(ending: Ending, sampled: Sequence[int], rest: Sequence[int], is_control: Callable[[int], bool], end_ids: frozenset[int]) -> int:
    """How many ids of `rest`, the continued text from `ending.at` on, the sampled ids hold already.

    What is left of `rest` is to be appended. The longest end of `sampled` that is
    also part of the ending counts; end tokens that were sampled past it do not
    undo it. Else the reply never ended, and its turn's end is appended with what follows.
    """
    starts = [i for i, token in enumerate(rest) if is_control(token)][: ending.count]
    held = list(sampled[-_LOOK_BACK:])
    while held:
        found = [i + n for i in starts for n in range(len(held), 0, -1) if _same(held[-n:], rest[i : i + n], i == 0, ending.closed_as)]
        if found:
            return max(found)
        if held[-1] not in end_ids:
            break
        held.pop()
    if not starts:
        return 0
    if ending.end is not None:
        return starts[ending.end]
    # Nothing ends the turn but the next message's opening; the control tokens before it are part of the reply's last call.
    own = len(starts) - ending.opens
    return starts[own - 1] + 1 if own else 0


def _held_text(continued: str, closed: str, said: str) -> int:
    """How many characters of the continued text the sampled text ends in: of the reply's ending, or past it."""
    longest = min(len(closed) + _LOOK_BACK, len(continued), len(said))
    return next((n for n in range(longest, 0, -1) if said.endswith(continued[:n])), 0)


def common_length(left: str, right: str) -> int:
    """How many characters both begin with."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _same(held: Sequence[int], rest: Sequence[int], first: bool, closed_as: int | None) -> bool:
    if list(held) == list(rest):
        return True
    return first and closed_as is not None and len(rest) > 0 and held[0] == closed_as and list(held[1:]) == list(rest[1:])
