"""Each reader of a field takes what is right, and names the field where it is not."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnloom.errors import BadRequest
from turnloom.wire import fields
from turnloom.wire.contract import MAX_STOP_CHARS, MAX_STOPS, Reading

SHOW = Reading(images="placeholder")

TAKEN: dict[str, tuple[Callable[[], Any], Any]] = {
    "a string": (lambda: fields.string({"a": "x"}, "a", "b"), "x"),
    "an empty string": (lambda: fields.string({"a": ""}, "a", "b"), ""),
    "no string": (lambda: fields.optional_string({}, "a", "b"), ""),
    "null for a string": (lambda: fields.optional_string({"a": None}, "a", "b"), ""),
    "true": (lambda: fields.boolean({"a": True}, "a", False), True),
    "false": (lambda: fields.boolean({"a": False}, "a", True), False),
    "null for a boolean": (lambda: fields.boolean({"a": None}, "a", True), True),
    "one": (lambda: fields.positive({"a": 1}, "a"), 1),
    "no number": (lambda: fields.positive({}, "a"), None),
    "a list": (lambda: fields.items([1], "a", 1), [1]),
    "no list": (lambda: fields.items(None, "a", 1), []),
    "objects": (lambda: fields.objects([{}], "a", 1), [{}]),
    "a stop": (lambda: fields.stops("x", "a"), ("x",)),
    "stops": (lambda: fields.stops(["x", "y" * MAX_STOP_CHARS], "a"), ("x", "y" * MAX_STOP_CHARS)),
    "no stops": (lambda: fields.stops(None, "a"), ()),
}


@pytest.mark.parametrize(("read", "value"), TAKEN.values(), ids=TAKEN)
def test_what_is_right_is_taken(read: Callable[[], Any], value: Any) -> None:
    assert read() == value
    assert type(read()) is type(value)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no string": (lambda: fields.string({}, "a", "b.0"), "b.0.a: must be a string"),
    "a number for a string": (lambda: fields.string({"a": 1}, "a", ""), "a: must be a string"),
    "a list for a string": (lambda: fields.optional_string({"a": []}, "a", "b"), "b.a: must be a string"),
    "one for true": (lambda: fields.boolean({"a": 1}, "a", True), "a: must be true or false"),
    "zero": (lambda: fields.positive({"a": 0}, "a", "b"), "b.a: must be an integer of at least 1"),
    "true for one": (lambda: fields.positive({"a": True}, "a"), "a: must be an integer of at least 1"),
    "a fraction": (lambda: fields.positive({"a": 1.5}, "a"), "a: must be an integer of at least 1"),
    "an object for a list": (lambda: fields.items({}, "a", 1), "a: must be a list"),
    "a string for a list": (lambda: fields.items("x", "a", 1), "a: must be a list"),
    "too many": (lambda: fields.items([1, 2], "a", 1), "a: has 2 items; at most 1"),
    "a string among objects": (lambda: fields.objects([{}, "x"], "a", 2), "a.1: must be an object"),
    "an empty stop": (lambda: fields.stops("", "a"), "a.0: must be a string that is not empty"),
    "a number among stops": (lambda: fields.stops(["x", 1], "a"), "a.1: must be a string that is not empty"),
    "many stops": (lambda: fields.stops(["x"] * (MAX_STOPS + 1), "a"), f"a: has {MAX_STOPS + 1} items"),
    "a long stop": (lambda: fields.stops(["x" * (MAX_STOP_CHARS + 1)], "a"), f"a.0: has {MAX_STOP_CHARS + 1} characters"),
    "an image": (lambda: fields.image(Reading(), "image/png", "", "a.0"), "a.0: images and files are not supported"),
}


@pytest.mark.parametrize(("read", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(read: Callable[[], Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read()
    assert str(caught.value).startswith(says)


ONE = {
    "none": ([], ""),
    "blank": (["", ""], ""),
    "one": (["", "a"], "a"),
    "the same twice": (["a", "a"], "a"),
    "two": (["a", "b", "a"], ""),
}


@pytest.mark.parametrize(("refs", "ref"), ONE.values(), ids=ONE)
def test_references_that_contradict_each_other_are_none(refs: list[str], ref: str) -> None:
    assert fields.only(iter(refs)) == ref


@given(st.text(max_size=80), st.binary(max_size=40))
def test_a_placeholder_says_what_it_stands_for_and_nothing_that_a_client_could_smuggle(media_type: str, raw: bytes) -> None:
    shown = fields.image(SHOW, media_type, base64.b64encode(raw).decode(), "a")
    assert shown.startswith("[")
    assert shown.endswith("not shown]")
    assert len(shown) < 80
    assert all(c.isalnum() or c in "/+.-, []" for c in shown)
    assert not set("<|>") & set(shown)
    assert (f"{len(raw)} bytes" in shown) == bool(raw)


@pytest.mark.parametrize("data", ["", "é", "a", "====", "a b c d", "\n"])
def test_a_size_that_is_not_known_is_not_told(data: str) -> None:
    assert fields.image(SHOW, "", data, "a") == "[image, not shown]"
