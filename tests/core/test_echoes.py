"""Whatever known clients do to a reply before they send it back, the history goes on; one other word, and it does not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.histories import LS, Weaver, assistant, call, request, result, user
from turnloom.core.match import CANONICAL, STRICT, Matcher
from turnloom.types import Message, Outcome, Part, Reasoning, Text, ToolCall

Echo = Callable[[Message, random.Random], Message]


def each(change: Callable[[Part, random.Random], Part | None]) -> Echo:
    """A change of every part; None leaves it out."""

    def echo(message: Message, rng: random.Random) -> Message:
        return Message(message.role, tuple(p for part in message.parts if (p := change(part, rng)) is not None))

    return echo


def text(change: Callable[[str], str | None]) -> Echo:
    def one(part: Part, rng: random.Random) -> Part | None:
        if not isinstance(part, Text):
            return part
        return None if (changed := change(part.text)) is None else Text(changed)

    return each(one)


def calls(change: Callable[[ToolCall, random.Random], ToolCall]) -> Echo:
    return each(lambda part, rng: change(part, rng) if isinstance(part, ToolCall) else part)


def reasoning(change: Callable[[Reasoning], Reasoning | None]) -> Echo:
    return each(lambda part, rng: change(part) if isinstance(part, Reasoning) else part)


def arguments(spell: Callable[[object, random.Random], str]) -> Echo:
    return calls(lambda c, rng: replace(c, arguments=spell(json.loads(c.arguments), rng)))


def shuffled(value: dict, rng: random.Random) -> str:
    return json.dumps(dict(rng.sample(sorted(value.items()), len(value))))


def joined(glue: str) -> Echo:
    """One string for all texts, before the calls: what a chat completion has room for."""

    def echo(message: Message, rng: random.Random) -> Message:
        words = glue.join(p.text for p in message.parts if isinstance(p, Text))
        return Message("assistant", (Text(words), *(p for p in message.parts if not isinstance(p, Text))))

    return echo


def swapped(message: Message, rng: random.Random) -> Message:
    """Parallel calls in another order."""
    found = rng.sample(message.calls, len(message.calls))
    return Message("assistant", tuple(found.pop() if isinstance(p, ToolCall) else p for p in message.parts))


ECHOES: dict[str, Echo] = {
    "faithful": lambda message, rng: message,
    "reasoning dropped": reasoning(lambda r: None),
    "reasoning trimmed": reasoning(lambda r: Reasoning(r.text.strip())),
    "arguments reordered": arguments(shuffled),
    "arguments respaced": arguments(lambda v, rng: json.dumps(v, indent=2, ensure_ascii=rng.random() < 0.5)),
    "arguments unparsed": arguments(lambda v, rng: json.dumps({"__unparsedToolInput": json.dumps(v, indent=1)})),
    "blank text dropped": text(lambda t: t if t.strip() else None),
    "blank text as an empty string": text(lambda t: t if t.strip() else ""),
    "text trimmed": text(str.strip),
    "an empty block added": lambda message, rng: Message("assistant", (*message.parts, Text(""))),
    "texts joined": joined(""),
    "texts joined by lines": joined("\n"),
    "ids lost": calls(lambda c, rng: replace(c, id="")),
    "ids invented": calls(lambda c, rng: replace(c, id=f"toolu_{rng.random()}", written="")),
    "calls swapped": swapped,
}
ONLY_BY_IDS: dict[str, Echo] = {
    "no arguments": arguments(lambda v, rng: "{}"),
    "defaults filled in": arguments(lambda v, rng: json.dumps({**v, "all": False})),
    "renamed to invalid": calls(lambda c, rng: replace(c, name="invalid", arguments=json.dumps({"tool": c.name}))),
}

words = st.text(st.sampled_from('ab é\n"{}世🙂'), max_size=6) | st.sampled_from(["", " \n", "I list", "two  words"])
values = st.dictionaries(words, words | st.integers(-(2**53), 2**53) | st.booleans() | st.none() | st.lists(words, max_size=2), max_size=3)
parts = st.one_of(
    words.map(Text),
    words.map(Reasoning),
    st.builds(lambda name, v: ToolCall("", name, json.dumps(v)), st.sampled_from(["ls", "cat"]), values),
)


def minted(found: list[Part]) -> Message:
    return Message("assistant", tuple(replace(p, id=f"call_t0{i:02d}") if isinstance(p, ToolCall) else p for i, p in enumerate(found)))


replies = st.lists(parts, min_size=1, max_size=5).map(minted)


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


def other_word(message: Message, rng: random.Random) -> Message | None:
    """One word more in a text, a call's name or an argument."""
    found = [i for i, p in enumerate(message.parts) if isinstance(p, ToolCall) or (isinstance(p, Text) and p.text.strip())]
    if not found:
        return None
    at = rng.choice(found)
    part = message.parts[at]
    if isinstance(part, Text):
        changed: Part = Text(rng.choice([part.text.rstrip() + " x", "x " + part.text, part.text.strip() + "x"]))
    elif isinstance(part, ToolCall) and rng.random() < 0.5:
        changed = replace(part, name=part.name + "x", id="")
    else:
        assert isinstance(part, ToolCall)
        changed = replace(part, arguments=json.dumps({**json.loads(part.arguments), "x": 1}), id="")
    return Message("assistant", (*message.parts[:at], changed, *message.parts[at + 1 :]))


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
