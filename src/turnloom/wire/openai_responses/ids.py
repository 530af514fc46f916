"""The ids of this dialect. Each holds the turn, so that what a client carries back names the reply it was.

A response is `resp_` and the turn's id, with an `i` at the end where its request
brought instructions: a request that goes on from it inherits the rest of the
history, but not those. An item is its kind, the turn and its number in the
output. Calls have ids of their own, which `ReplyBuilder` mints.
"""

from __future__ import annotations

import re

from turnloom.wire.contract import Head

_RESPONSE = re.compile(r"resp_([0-9a-f]{32})(i?)")
_ITEM = re.compile(r"(?:msg|rs|fc|ctc)_([0-9a-f]{32})([0-9]{2,6})")
_PART_OF_TURN = re.compile(r"(?:msg|rs|fc|ctc|call)_([0-9a-f]{32})[0-9]{2,6}")


def response_id(head: Head) -> str:
    return f"resp_{head.turn_id}{'i' if head.request.instructed else ''}"


def turn_of_response(value: str) -> tuple[str, bool]:
    """(turn id, whether its request brought instructions); ("", False) where no gateway wrote this id."""
    found = _RESPONSE.fullmatch(value)
    return (found[1], bool(found[2])) if found else ("", False)


def item_id(kind: str, turn_id: str, number: int) -> str:
    """`kind` is `msg`, `rs`, `fc` or `ctc`."""
    return f"{kind}_{turn_id}{number:02d}"


def turn_of(value: object) -> str:
    """The turn that an item's or a call's id names; "" where it is not one of ours."""
    found = _PART_OF_TURN.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else ""


def place_of(value: object, turn_id: str) -> int | None:
    """The number of an item in the output of this turn; None where its id is not one of that turn's."""
    found = _ITEM.fullmatch(value) if isinstance(value, str) else None
    return int(found[2]) if found and found[1] == turn_id else None
