"""When an echoed message is the one on record."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.histories import assistant, call, result, system, user
from turnloom.core.match import canonical_arguments, message_key, tools_key
from turnloom.types import Message, Text, Tool

SAME = {
    "reasoning dropped": (assistant("hi", thought="hmm"), assistant("hi")),
    "edge whitespace": (assistant("\n hi \n"), assistant("hi")),
    "whitespace-only text dropped": (assistant("  \n", call()), assistant("", call())),
    "call id changed": (assistant("", call(id="a")), assistant("", call(id="b"))),
    "key order": (assistant("", call('{"a":1,"b":2}')), assistant("", call('{"b":2,"a":1}'))),
    "JSON spacing and escapes": (assistant("", call('{ "a" : "\\u00e9" }')), assistant("", call('{"a":"é"}'))),
    "1.0 became 1": (assistant("", call('{"n":1.0}')), assistant("", call('{"n":1}'))),
    "an integer beyond 2**53 rounded": (assistant("", call('{"n":9007199254740993}')), assistant("", call('{"n":9007199254740992}'))),
    "duplicate keys collapsed": (assistant("", call('{"a":1,"a":2}')), assistant("", call('{"a":2}'))),
    "lone surrogate replaced": (assistant("", call('{"a":"\\ud83d"}')), assistant("", call('{"a":"\ufffd"}'))),
    "calls reordered": (assistant("", call('{"a":1}'), call('{"a":2}')), assistant("", call('{"a":2}'), call('{"a":1}'))),
    "no arguments": (assistant("", call("{}")), assistant("", call(""))),
    "unparsed arguments": (assistant("", call("{bad")), assistant("", call('{"__unparsedToolInput": "{bad"}'))),
    "string or one block": (user("hi"), Message("user", (Text("hi"),))),
    "result of a renamed call": (result("out", id="a"), result("out", id="b")),
}

DIFFERENT = {
    "changed words": (assistant("hi there"), assistant("hi you")),
    "inner whitespace": (assistant("a  b"), assistant("a b")),
    "changed argument": (assistant("", call('{"a":1}')), assistant("", call('{"a":2}'))),
    "true is not 1": (assistant("", call('{"a":true}')), assistant("", call('{"a":1}'))),
    "changed tool": (assistant("", call(name="ls")), assistant("", call(name="rm"))),
    "call dropped": (assistant("hi", call()), assistant("hi")),
    "text is not a call": (assistant("ls{}"), assistant("", call())),
    "user whitespace": (user("hi"), user("hi ")),
    "role": (user("hi"), system("hi")),
    "error flag": (result("out"), result("out", is_error=True)),
    "field boundaries": (assistant("a", call(name="b")), assistant("ab", call(name=""))),
}


@pytest.mark.parametrize(("left", "right"), SAME.values(), ids=SAME)
def test_does_not_count(left: Message, right: Message) -> None:
    assert message_key(left) == message_key(right)


@pytest.mark.parametrize(("left", "right"), DIFFERENT.values(), ids=DIFFERENT)
def test_counts(left: Message, right: Message) -> None:
    assert message_key(left) != message_key(right)


def test_tools_are_compared_as_they_are_rendered() -> None:
    a, b = Tool("a", "d", "{}"), Tool("b", "d", "{}")
    assert tools_key([a, b]) == tools_key([a, b])
    assert len({tools_key(t) for t in ([], [a], [b], [a, b], [b, a], [Tool("a", "", "{}")], [Tool("a", "d", '{"x":1}')])}) == 7


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_every_json_spelling_has_one_canonical_form(value: dict) -> None:
    spellings = {
        canonical_arguments(json.dumps(value, ensure_ascii=a, indent=i, sort_keys=s)) for a in (0, 1) for i in (None, 2) for s in (0, 1)
    }
    assert len(spellings) == 1
    (canonical,) = spellings
    assert canonical_arguments(canonical) == canonical


@pytest.mark.parametrize("text", ["", "{", "nonsense", "[" * 100_000, '{"a": 1e999}'])
def test_what_cannot_be_canonical_is_compared_as_it_is(text: str) -> None:
    assert isinstance(canonical_arguments(text), str)
