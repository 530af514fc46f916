"""The opaque fields that clients carry back, as memory: each holds the id of the turn that it came with.

A reference is evidence and nothing more. Whoever reads one looks the turn up in
the session's own tree and compares what came with what is on record; a forged or
stale one names no turn there, and is ignored.
"""

from __future__ import annotations

import base64
import binascii
import re

_TURN = re.compile(r"[0-9a-f]{32}")


def turn_in(value: object) -> str:
    """The turn id that stands in an opaque field we wrote, wherever in it; "" where there is none."""
    found = _TURN.search(value) if isinstance(value, str) and len(value) <= 512 else None
    return found[0] if found else ""


def as_base64(turn_id: str) -> str:
    """The reference for a field that must be valid base64."""
    return base64.b64encode(turn_id.encode()).decode()


def turn_in_base64(value: object) -> str:
    """The turn id in a field that `as_base64` wrote; "" where there is none."""
    if not isinstance(value, str) or len(value) > 512:
        return ""
    try:
        return turn_in(base64.b64decode(value, altchars=b"-_" if "-" in value or "_" in value else None).decode("ascii"))
    except (binascii.Error, ValueError):
        return ""
