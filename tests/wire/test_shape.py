"""The depth and the number of values of JSON, counted from its bytes: against a plain reading of them, wherever a block ends."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnloom.errors import BadRequest
from turnloom.wire import shape
from turnloom.wire.shape import check_shape


def plainly(body: bytes) -> tuple[int, int]:
    """(depth, values), byte by byte."""
    level, deepest, values, in_string, i = 0, 0, 1, False, 0
    while i < len(body):
        byte = body[i : i + 1]
        if byte == b"\\":
            i += 1
        elif byte == b'"':
            in_string = not in_string
        elif not in_string:
            level += (byte in b"[{") - (byte in b"]}")
            deepest = max(deepest, level)
            values += byte in b"[{,"
        i += 1
    return deepest, values


def fits(body: bytes, depth: int, values: int) -> bool:
    try:
        check_shape(body, depth=depth, values=values)
    except BadRequest:
        return False
    return True


@settings(max_examples=400, deadline=None)
@given(body=st.text('[]{}",\\\\\\|an', max_size=60), block=st.integers(1, 17))
def test_it_counts_as_a_plain_reading_does(body: str, block: int) -> None:
    raw = body.encode()
    deepest, values = plainly(raw)
    before, shape._BLOCK = shape._BLOCK, block
    try:
        assert fits(raw, deepest, values)
        assert not raw or not fits(raw, deepest, values - 1)
        assert not deepest or not fits(raw, deepest - 1, values)
    finally:
        shape._BLOCK = before


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.sampled_from(['"', "\\", '\\"[{', "]}"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def count_of(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count_of, inner))


@settings(max_examples=200, deadline=None)
@given(VALUES, st.booleans())
def test_it_is_exact_in_depth_and_counts_no_value_less(value: object, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert fits(raw, depth_of(value), 2 * count_of(value))
    assert not depth_of(value) or not fits(raw, depth_of(value) - 1, 10**6)
    assert count_of(value) == 1 or not fits(raw, 10**6, count_of(value) - 1)


@pytest.mark.parametrize("piece", [b"[", b'{"a":', b"\\", b'\\"', b'"', b",", b'""', b"[],"])
def test_megabytes_of_anything_are_told_in_one_pass(piece: bytes) -> None:
    body = piece * (2**21 // len(piece))
    assert fits(body, *plainly(body[: 2**12 // len(piece) * len(piece)])) is (piece in (b"\\", b'\\"', b'"', b'""'))


def test_a_limit_is_named() -> None:
    with pytest.raises(BadRequest, match="deeper than 3 levels"):
        check_shape(b"[[[[1]]]]", depth=3, values=100)
    with pytest.raises(BadRequest, match="more than 4 JSON values"):
        check_shape(b"[1,2,3,4,5]", depth=3, values=4)
