"""A reference says which reply a message was, however a client spelled it anew. It vouches for no other word; forged, it is nothing."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.echoes import ECHOES, Echo, arguments, calls, each, replies, text
from tests.support.histories import LS, Weaver, assistant, call, request, result, user
from turnloom.core.match import CANONICAL, STRICT, Matcher
from turnloom.types import Message, Outcome, Part, Request, Text, ToolCall


def respaced(part: Part, rng: random.Random) -> Part:
    if not isinstance(part, Text):
        return part
    space = rng.choice(["\n", "  ", "\t", " \n "])
    return Text(space.join(["", *part.text.split(), ""]))


SPELLED: dict[str, Echo] = {
    **{
        name: ECHOES[name]
        for name in ("reasoning dropped", "ids lost", "ids invented", "arguments reordered", "text trimmed", "texts joined")
    },
    "arguments rewritten": arguments(lambda value, rng: json.dumps({"other": rng.random()})),
    "renamed to invalid": calls(lambda c, rng: replace(c, name="invalid")),
    "spaced anew": each(respaced),
}
NO_WORDS = text(lambda t: None)


def spelled_anew(reply: Message, names: list[str], rng: random.Random) -> Message:
    chosen = set(names)
    if "arguments rewritten" in chosen:  # Under an id that is none of ours, other arguments are another call.
        chosen -= {"ids lost", "ids invented"}
    for name in sorted(chosen, key=lambda n: not n.startswith("texts")):
        reply = SPELLED[name](reply, rng)
    return reply


def woven(reply: Message, matcher: Matcher = CANONICAL, outcome: Outcome = Outcome.DELIVERED) -> Weaver:
    """t0 is the reply; t1 follows it, t2 stands under other words, t3 under other tools."""
    w = Weaver(matcher)
    w.say(request(user("a"), tools=(LS,)), reply, outcome=outcome)
    w.say(request(user("a"), reply, *answers(reply), user("b"), tools=(LS,)), assistant("Later."))
    w.say(request(user("other"), tools=(LS,)), reply)
    w.say(request(user("a")), reply)
    return w


def answers(reply: Message) -> list[Message]:
    return [result(f"result {i}", id=c.id) for i, c in enumerate(reply.calls)]


def asked(came: Message) -> Request:
    return request(user("a"), came, *answers(came), user("c"), tools=(LS,))


def found(w: Weaver, came: Message) -> tuple[Any, ...]:
    """All that resolving the request comes to."""
    pending = w.tree.prepare(asked(came))
    return pending.path, pending.base, pending.slots, pending.respelled, len(pending.tail)


@settings(max_examples=200, deadline=None)
@given(replies, st.lists(st.sampled_from(sorted(SPELLED)), max_size=6), st.booleans(), st.integers())
def test_a_reply_that_names_its_turn_goes_on_however_it_is_spelled(reply: Message, names: list[str], silent: bool, seed: int) -> None:
    w, came = woven(reply), spelled_anew(reply, names, random.Random(seed))
    if silent and reply.calls:
        came = NO_WORDS(came, random.Random(seed))
    pending = w.tree.prepare(asked(replace(came, ref="t0")))
    assert pending.base == "t0"
    known = w.tree.index.matcher.key(came) in w.tree.index.keys[w.tree.node_of["t0"]]
    assert (pending.respelled == 0) == known or len(reply.calls) > 1, "what only the reference could vouch for is counted"
    if known:
        assert found(w, replace(came, ref="t0")) == found(w, came)


matchers = st.sampled_from([CANONICAL, STRICT])
FORGED = ["t1", "t2", "t3", "t9", "f" * 32, "", "0"]


@settings(max_examples=150, deadline=None)
@given(
    replies,
    st.lists(st.sampled_from(sorted(SPELLED)), max_size=3),
    st.sampled_from(FORGED),
    st.sampled_from([CANONICAL, STRICT]),
    st.integers(),
)
def test_a_forged_or_stale_reference_changes_nothing(reply: Message, names: list[str], ref: str, matcher: Matcher, seed: int) -> None:
    """One of another place, of other tools, of another session, of nobody."""
    w, came = woven(reply, matcher), spelled_anew(reply, names, random.Random(seed))
    assert found(w, replace(came, ref=ref)) == found(w, came)


def changed(message: Message, rng: random.Random) -> Message | None:
    """Other words, or other tools, or not as many calls."""
    spots = [i for i, p in enumerate(message.parts) if isinstance(p, ToolCall) or (isinstance(p, Text) and p.text.strip())]
    if not spots:
        return None
    at = rng.choice(spots)
    part = message.parts[at]
    if isinstance(part, Text):
        said = part.text.strip()
        others = [f"{said} x", f"x {said}", f"{said}x"]
        if not message.calls and len([p for p in message.parts if isinstance(p, Text)]) == 1:
            others += [""]
        new: list[Part] = [Text(rng.choice(others))]
    else:
        assert isinstance(part, ToolCall)
        new = rng.choice([[], [replace(part, name=part.name + "x")], [part, replace(part, id="more")]])
    return Message("assistant", (*message.parts[:at], *new, *message.parts[at + 1 :]))


@settings(max_examples=200, deadline=None)
@given(replies, st.lists(st.sampled_from(sorted(SPELLED)), max_size=2), st.integers(), st.sampled_from(Outcome))
def test_a_reference_vouches_for_no_other_word(reply: Message, names: list[str], seed: int, outcome: Outcome) -> None:
    rng = random.Random(seed)
    came = changed(reply, rng)
    if came is None:
        return
    came = spelled_anew(came, [n for n in names if n != "renamed to invalid"], rng)
    w = woven(reply, outcome=outcome)
    assert found(w, replace(came, ref="t0")) == found(w, came)
    assert w.tree.prepare(asked(replace(came, ref="t0"))).base is None


EDITED = {
    "two words made one": (assistant("now here"), assistant("nowhere")),
    "one word made two": (assistant("nowhere"), assistant("now here")),
    "no words and no calls": (assistant("All of it"), assistant("")),
    "words beside calls that had none": (assistant("", call()), assistant("I list", call())),
    "fewer words": (assistant("I list it", call()), assistant("I list", call())),
    "the other order of two tools": (
        assistant("x", call('{"a":1}', id="c0"), call('{"a":2}', id="c1", name="cat")),
        assistant("x", call('{"a":3}', id="n0", name="cat"), call('{"a":4}', id="n1")),
    ),
    "other arguments under another id": (
        assistant("x", call('{"path": "a"}', id="c0"), call('{"path": "b"}', id="c1")),
        assistant("x", call('{"path": "c"}', id="n0"), call('{"path": "d"}', id="n1")),
    ),
    "a call left out": (assistant("x", call(id="c0"), call(id="c1")), assistant("x", call(id="c0"))),
    "a call of the client's own": (assistant("x"), assistant("x", call())),
}


@pytest.mark.parametrize(("said", "came"), EDITED.values(), ids=EDITED)
def test_a_reply_that_its_client_edited_is_the_clients_own(said: Message, came: Message) -> None:
    assert woven(said).tree.prepare(asked(replace(came, ref="t0"))).base is None


def test_renamed_calls_with_other_arguments_are_answered_by_their_place() -> None:
    said = assistant("", call('{"a":1}', id="c0"), call('{"a":2}', id="c1"))
    came = replace(assistant("", call('{"b":1}', id="n0"), call('{"b":2}', id="n1")), ref="t0")
    w = woven(said)
    pending = w.tree.prepare(request(user("a"), came, result("second", id="n1"), result("first", id="n0"), tools=(LS,)))
    assert (pending.base, pending.respelled) == ("t0", 1)
    w.commit(pending, assistant("Done."))
    told = [m.text for m in w.tree.messages(w.tree.node_of[f"t{len(w.tree.turns) - 1}"])]
    assert told == ["a", "", "first", "second", "Done."]


@pytest.mark.parametrize("matcher", [CANONICAL, STRICT], ids=["canonical", "strict"])
@pytest.mark.parametrize("count", [2, 3, 200])
def test_of_equal_replies_it_is_the_one_that_is_named(matcher: Matcher, count: int) -> None:
    """The choices of one request, or a prompt that was asked again and again."""
    w, said = Weaver(matcher), assistant("Yes.")
    for i in range(count):
        w.say(request(user("a")), said, output=(300 + i,))
    newest = f"t{count - 1}"
    for ref, base in (("t0", "t0"), (newest, newest), (f"t{count // 2}", f"t{count // 2}"), ("", newest), ("t999", newest)):
        pending = w.tree.prepare(request(user("a"), replace(said, ref=ref), user("b")))
        assert (pending.base, pending.respelled) == (base, 0)


def test_call_ids_are_believed_before_a_reference() -> None:
    """A reference is one field, and the ids of calls are several."""
    w = Weaver()
    for i in range(2):
        w.say(request(user("a"), tools=(LS,)), assistant("", call(id=f"c{i}")))
    came = replace(assistant("", call(id="c0")), ref="t1")
    assert w.tree.prepare(request(user("a"), came, tools=(LS,))).base == "t0"


@settings(max_examples=100, deadline=None)
@given(replies, st.lists(st.sampled_from(sorted(SPELLED)), max_size=4), st.integers())
def test_to_the_strict_matcher_no_reference_vouches(reply: Message, names: list[str], seed: int) -> None:
    w, came = woven(reply, STRICT), spelled_anew(reply, names, random.Random(seed))
    joined = w.tree.prepare(asked(replace(came, ref="t0"))).base == "t0"
    assert joined == (STRICT.key(came) == STRICT.key(reply))


def test_a_turn_that_its_client_left_may_be_named_when_all_of_it_came_back() -> None:
    said = assistant("I list the files", call('{"a":1}', id="c0"))
    w = woven(said, outcome=Outcome.ORPHANED)
    whole = replace(assistant("I  list\nthe files", call('{"b":1}', id="n")), ref="t0")
    assert w.tree.prepare(asked(whole)).base == "t0"
    for part in (assistant("I list"), assistant("I list the files")):
        assert found(w, replace(part, ref="t0")) == found(w, part)
