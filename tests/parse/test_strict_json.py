"""JSON without Python's extensions, with the writer's spelling kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnloom.parse.strict_json import MAX_DEPTH, Member, escape_surrogates, is_object, kind, members, quote


def test_members_keep_order_duplicates_and_spelling() -> None:
    text = ' { "a" : 1.0 , "b":[ ] ,"a":"\\u0041"}\n'
    assert members(text) == [Member("a", 1.0, "1.0"), Member("b", [], "[ ]"), Member("a", "A", '"\\u0041"')]
    assert members("{}") == members(" { } ") == []


@pytest.mark.parametrize(
    "text", ["", "[]", "1", "{", "{}x", '{"a"}', '{"a":}', '{"a":1,}', "{1:2}", '{"a":NaN}', '{"a":1 "b":2}', '{"a":"\n"}', "\ufeff{}"]
)
def test_what_is_not_one_object_is_refused(text: str) -> None:
    assert not is_object(text)


@pytest.mark.parametrize("quoted", ['"[[[["', '"\\"[["', '"\\\\"'])
def test_brackets_in_strings_are_not_nesting(quoted: str) -> None:
    inner = ", ".join([quoted] * MAX_DEPTH)
    assert is_object(f'{{"a": [{inner}]}}')


@pytest.mark.parametrize("text", ['"' + '\\"' * 50 + "[" * 300, '"' + "[" * 300 + "\\", '{"a": "' + "[" * 300])
def test_unfinished_string_with_many_brackets_is_refused(text: str) -> None:
    assert kind(text) is None
    assert not is_object(text)


def test_depth_is_counted_by_nesting_not_by_brackets() -> None:
    assert kind("[" + "[]," * 1000 + "[]]") == "array"
    assert kind("[" * MAX_DEPTH + "]" * MAX_DEPTH) == "array"
    assert kind("[" * (MAX_DEPTH - 1) + "[],[]" + "]" * (MAX_DEPTH - 1)) == "array"
    assert kind("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=25,
    )
)
def test_an_object_is_one_exactly_where_the_standard_library_agrees(value: Any) -> None:
    text = json.dumps(value)
    assert is_object(text) == (isinstance(value, dict) and not _has_constant(value))


def _has_constant(value: Any) -> bool:
    if isinstance(value, float):
        return value != value or value in (float("inf"), float("-inf"))
    if isinstance(value, dict):
        return any(_has_constant(inner) for inner in value.values())
    return isinstance(value, list) and any(_has_constant(inner) for inner in value)


@pytest.mark.parametrize("number", ["1e309", "-1e309", "1" + "0" * 309, "-" + "9" * 5000])
def test_number_beyond_the_doubles_is_refused(number: str) -> None:
    assert kind(number) is None
    assert not is_object(f'{{"a": [{number}]}}')


@settings(deadline=None)
@given(st.text(st.characters(codec=None), max_size=20))
def test_a_quoted_string_is_utf_8_and_means_the_same(text: str) -> None:
    quoted = quote(text)
    quoted.encode("utf-8")
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert json.loads(quoted) in (text, expected)


def test_quoting_keeps_characters_as_they_are() -> None:
    assert quote('文"😀') == '"文\\"😀"'


def test_surrogates_are_spelled_as_escapes() -> None:
    assert escape_surrogates('"\ud800 é"') == '"\\ud800 é"'
