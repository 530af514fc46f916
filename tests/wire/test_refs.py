"""The turn that an opaque field names: found in whatever a client kept of it, and nothing else is taken for one."""

from __future__ import annotations

import base64
import binascii
import contextlib
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnloom.wire.refs import as_base64, turn_in, turn_in_base64

TURN = "0123456789abcdef" * 2
turns = st.uuids().map(lambda each: each.hex)


@pytest.mark.parametrize("prefix", ["", "toolu_", "call_", "fc_", "rs_", "msg_", "chatcmpl-", "call-"])
@pytest.mark.parametrize("suffix", ["", "00", "|fc_1", ":z"])
def test_a_turn_is_found_in_every_id_that_we_mint(prefix: str, suffix: str) -> None:
    assert turn_in(prefix + TURN + suffix) == TURN


NO_TURN = {
    "nothing": "",
    "a word": "toolu_01A09q90qw90lq917835lq9",
    "upper case": TURN.upper(),
    "one digit short": TURN[:31],
    "a UUID with its dashes": str(UUID(TURN)),
    "cut in two": f"{TURN[:16]}-{TURN[16:]}",
    "very long": "x" * 512 + TURN,
}


@pytest.mark.parametrize("value", [*NO_TURN.values(), None, 5, [TURN], {"id": TURN}, TURN.encode()], ids=repr)
def test_what_names_no_turn(value: object) -> None:
    assert turn_in(value) == ""
    assert turn_in_base64(value) == ""


@given(turns)
def test_base64_is_valid_and_read_again(turn: str) -> None:
    field = as_base64(turn)
    base64.b64decode(field, validate=True)
    assert turn_in_base64(field) == turn
    assert turn_in_base64(field.rstrip("=") if len(field) % 4 == 0 else field) in (turn, "")
    assert turn_in_base64(field.replace("+", "-").replace("/", "_")) == turn


def test_a_turn_as_it_is_does_not_pass_for_base64() -> None:
    assert turn_in_base64(TURN) == ""


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: base64.b64encode(raw).decode()))
def test_any_text_is_read_without_harm(value: str) -> None:
    found = turn_in(value)
    assert found == "" or found in value
    decoded = b""
    with contextlib.suppress(binascii.Error, ValueError):
        decoded = base64.b64decode(value)
    found = turn_in_base64(value)
    assert found == "" or found.encode() in decoded or "-" in value or "_" in value
