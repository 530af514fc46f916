"""Whatever known clients do to a reply before they send it back, the history goes on; one other word, and it does not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.echoes import ECHOES, ONLY_BY_IDS, other_word, replies
from tests.support.histories import LS, Weaver, assistant, call, request, result, user
from turnloom.core.match import CANONICAL, STRICT, Matcher
from turnloom.types import Message, Outcome, Text


def woven(reply: Message, matcher: Matcher = CANONICAL, outcome: Outcome = Outcome.DELIVERED) -> Weaver:
    w = Weaver(matcher)
    w.say(request(user("a"), tools=(LS,)), reply, outcome=outcome)
    return w


def base(w: Weaver, came: Message) -> str | None:
    return w.tree.prepare(request(user("a"), came, user("b"), tools=(LS,))).base


@settings(max_examples=600, deadline=None)
@given(replies, st.lists(st.sampled_from(sorted(ECHOES)), max_size=4), st.integers())
def test_every_way_to_echo_a_reply_goes_on(reply: Message, names: list[str], seed: int) -> None:
    w, rng, came = woven(reply), random.Random(seed), reply
    joins = [n for n in names if n.startswith("texts")]
    names = [n for n in names if n not in joins or n == joins[0]]
    for name in sorted(names, key=lambda n: (not n.startswith("texts"), "unparsed" in n)):
        came = ECHOES[name](came, rng)
    assert base(w, came) == "t0"
    assert w.tree.prepare(request(user("a"), came, tools=(LS,))).respelled == 0


@settings(max_examples=300, deadline=None)
@given(replies, st.sampled_from(sorted(ONLY_BY_IDS)), st.sampled_from(["faithful", "reasoning dropped", "text trimmed", "calls swapped"]))
def test_what_only_ids_can_vouch_for_is_counted(reply: Message, name: str, other: str) -> None:
    rng = random.Random(0)
    came = ONLY_BY_IDS[name](ECHOES[other](reply, rng), rng)
    w = woven(reply)
    assert base(w, came) == "t0"
    lost = ECHOES["ids lost"](came, rng)
    same = base(w, lost) == "t0"
    assert (w.tree.prepare(request(user("a"), came, tools=(LS,))).respelled == 0) == same, "counted where the ids were needed"
    assert not same or not reply.calls or name == "no arguments"


@settings(max_examples=600, deadline=None)
@given(replies, st.lists(st.sampled_from(sorted(ECHOES)), max_size=2), st.integers(), st.sampled_from(Outcome))
def test_another_word_never_goes_on(reply: Message, names: list[str], seed: int, outcome: Outcome) -> None:
    rng = random.Random(seed)
    came = other_word(reply, rng)
    if came is None:
        return
    for name in sorted(set(names), key=lambda n: "unparsed" in n):
        came = ECHOES[name](came, rng)
    assert base(woven(reply, outcome=outcome), came) is None


STRICT_DIFFERENT = {
    "whitespace": (assistant("hi "), assistant("hi")),
    "reasoning": (assistant("hi", thought="x"), assistant("hi")),
    "parts": (Message("assistant", (Text("a"), Text("b"))), assistant("ab")),
    "key order": (assistant("", call('{"a":1,"b":2}')), assistant("", call('{"b":2,"a":1}'))),
    "repeated key": (assistant("", call('{"a":1,"a":2}')), assistant("", call('{"a":2}'))),
    "1.0 and 1": (assistant("", call('{"a":1.0}')), assistant("", call('{"a":1}'))),
    "id": (assistant("", call(id="a")), assistant("", call(id="b"))),
    "name under the same id": (assistant("", call()), assistant("", call(name="invalid"))),
    "a user's blocks": (Message("user", (Text("a"), Text("b"))), user("a\nb")),
    "the call of a result": (result("x", id="a"), result("x", id="b")),
}


@pytest.mark.parametrize(("sent", "came"), STRICT_DIFFERENT.values(), ids=STRICT_DIFFERENT)
def test_strict_takes_nothing_for_the_same(sent: Message, came: Message) -> None:
    assert STRICT.key(sent) != STRICT.key(came)
    if sent.role == "assistant":
        assert base(woven(sent), came) == "t0", "the canonical matcher goes on"
        assert base(woven(sent, STRICT), came) is None
        assert base(woven(sent, STRICT), sent) == "t0"


def test_strict_leaves_only_the_json_spelling_to_the_client() -> None:
    sent, came = assistant("x", call('{ "a" : "\\u00e9" }')), assistant("x", call('{"a":"é"}'))
    assert STRICT.key(sent) == STRICT.key(came)


def test_a_key_of_ones_own_decides() -> None:
    w = woven(assistant("Hello"), Matcher(lambda m: m.text.lower().encode()))
    assert base(w, assistant("HELLO")) == "t0"
    assert base(w, assistant("goodbye")) is None


CALLED = Message("assistant", (Text("I list the files"), call('{"a":1}', id="c0"), call('{"a":2}', id="c1"), Text("and wait for them")))
SPOKEN = assistant("I list the files")


@pytest.mark.parametrize("outcome", [Outcome.ORPHANED, Outcome.ABORTED, Outcome.FAILED])
@pytest.mark.parametrize(
    ("said", "came"),
    [
        (SPOKEN, assistant("I list")),
        (CALLED, Message("assistant", CALLED.parts[:3])),
        (CALLED, Message("assistant", (*CALLED.parts[:3], Text("and")))),
    ],
    ids=["half the text", "up to the last call", "half the text after it"],
)
def test_the_beginning_of_a_reply_that_was_cut_off_stands_for_it(outcome: Outcome, said: Message, came: Message) -> None:
    w = woven(said, outcome=outcome)
    pending = w.tree.prepare(request(user("a"), came, user("go on"), tools=(LS,)))
    assert (pending.base, pending.respelled) == ("t0", 1)
    assert base(woven(said), came) is None, "what was delivered came back whole or was changed"
    assert base(woven(said, STRICT, outcome), came) is None


@pytest.mark.parametrize(
    "came",
    [
        assistant(""),
        assistant(" \n"),
        assistant("list"),
        assistant("I list the files and more"),
    ],
    ids=["nothing", "blank", "another beginning", "more"],
)
def test_what_is_no_beginning_does_not(came: Message) -> None:
    assert base(woven(SPOKEN, outcome=Outcome.ABORTED), came) is None


@pytest.mark.parametrize(
    "came",
    [
        assistant("I list the files"),
        assistant("I list the files", call('{"a":1}', id="c0")),
        assistant("I list the files", call('{"a":2}', id="c1")),
        assistant("I list", call('{"a":1}', id="c0"), call('{"a":2}', id="c1")),
        assistant("", call('{"a":1}', id="c0"), call('{"a":2}', id="c1")),
    ],
    ids=["no call", "the first call", "the second call", "calls after half the text", "calls without their text"],
)
def test_a_reply_with_a_call_that_no_client_saw_is_not_gone_on_from(came: Message) -> None:
    """Nobody will ever answer that call."""
    assert base(woven(CALLED, outcome=Outcome.ABORTED), came) is None


def test_a_whole_reply_is_preferred_to_the_beginning_of_another() -> None:
    w = woven(assistant("I list the files"), outcome=Outcome.ORPHANED)
    w.say(request(user("a"), tools=(LS,)), assistant("I list"))
    pending = w.tree.prepare(request(user("a"), assistant("I list"), user("b"), tools=(LS,)))
    assert (pending.base, pending.respelled) == ("t1", 0)
