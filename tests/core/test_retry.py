"""What counts as a retry, both ways; and a turn that takes the place of its own beginning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.histories import CAT, LS, Weaver, assistant, call, request, result, system, user
from turnloom.core.match import CANONICAL, STRICT, Matcher
from turnloom.core.retry import SILENT, Answer, Answers, Identity, Intent
from turnloom.core.tree import Tree
from turnloom.errors import BadRequest
from turnloom.types import Finish, FinishReason, Message, Outcome, Request, Sampling, floats, ids

CUT = Finish(FinishReason.ABORT)
ASKED = request(user("a"))
SAME = Identity("f", "", 0)
KEYED = Identity("f", "k", 0)
AGAIN, ANOTHER = Intent(again=True), Intent(another=True)
NEW, REPLAY, RESUME = Answer.NEW, Answer.REPLAY, Answer.RESUME


def recorded(asked: Identity = SAME, *, gone_on: bool = False, **fields: Any) -> tuple[Weaver, Answers]:
    w = Weaver()
    known = {"fingerprint": asked.fingerprint, "idempotency": asked.idempotency, "choice": asked.choice, "acknowledged": True}
    w.say(ASKED, assistant("A"), **{**known, **fields})
    if gone_on:
        w.say(request(user("a"), assistant("A"), user("b")), assistant("B"))
    return w, Answers(w.tree.turns.values())


DELIVERED: dict[str, Any] = {}
UNHEARD = {"acknowledged": False}
LEFT = {"outcome": Outcome.ORPHANED, "acknowledged": False}
LEFT_IN_MIDDLE = {**LEFT, "finish": CUT}
CUT_OFF = {**LEFT_IN_MIDDLE, "outcome": Outcome.ABORTED}
OTHER_CHOICE_FAILED = {**LEFT, "outcome": Outcome.ABORTED}
FAILED = {**LEFT_IN_MIDDLE, "outcome": Outcome.FAILED}
HELD_TO_A_SCHEMA = {**LEFT_IN_MIDDLE, "sampling": Sampling(json_schema="{}")}


@pytest.mark.parametrize(
    ("fields", "silent", "again", "another"),
    [
        (DELIVERED, NEW, REPLAY, NEW),
        (UNHEARD, REPLAY, REPLAY, NEW),
        (LEFT, REPLAY, REPLAY, NEW),
        (LEFT_IN_MIDDLE, RESUME, RESUME, NEW),
        (CUT_OFF, RESUME, RESUME, NEW),
        (OTHER_CHOICE_FAILED, REPLAY, REPLAY, NEW),
        (FAILED, NEW, NEW, NEW),
        (HELD_TO_A_SCHEMA, NEW, NEW, NEW),
        ({**LEFT_IN_MIDDLE, "output": (), "logprobs": floats()}, RESUME, RESUME, NEW),
        ({**DELIVERED, "gone_on": True}, NEW, REPLAY, NEW),
        ({**UNHEARD, "gone_on": True}, NEW, REPLAY, NEW),
        ({**LEFT, "gone_on": True}, NEW, REPLAY, NEW),
        ({**LEFT_IN_MIDDLE, "gone_on": True}, NEW, NEW, NEW),
    ],
    ids=[
        "arrived",
        "nobody knows",
        "client left at the end",
        "client left in the middle",
        "cut off",
        "other choice failed",
        "failed",
        "held to a schema",
        "left before the first token",
        "arrived, gone on from",
        "nobody knows, gone on from",
        "client left at the end, gone on from",
        "client left in the middle, gone on from",
    ],
)
def test_what_a_repeated_request_gets(fields: dict[str, Any], silent: Answer, again: Answer, another: Answer) -> None:
    w, answers = recorded(**fields)
    for intent, expected in ((SILENT, silent), (AGAIN, again), (ANOTHER, another)):
        found, turn = answers.find(w.tree, SAME, intent, "", "")
        assert (found, turn) == (expected, None if expected is NEW else w.tree.turns["t0"])
    if expected is NEW:
        w, answers = recorded(KEYED, **fields)
        assert answers.find(w.tree, KEYED, ANOTHER, "", "")[0] is again, "a key says that it is the same request, whatever else is said"


def test_a_key_of_the_clients_own_stands_for_its_request() -> None:
    w, answers = recorded(KEYED, **LEFT)
    assert answers.find(w.tree, SAME, SILENT, "", "") == (NEW, None)
    assert answers.find(w.tree, Identity("f", "other", 0), SILENT, "", "") == (NEW, None)
    with pytest.raises(BadRequest, match="key of its own"):
        answers.find(w.tree, Identity("another request", "k", 0), SILENT, "", "")


def test_each_choice_is_a_reply_of_its_own() -> None:
    w, answers = recorded(**LEFT)
    assert answers.find(w.tree, Identity("f", "", 1), SILENT, "", "") == (NEW, None)


def test_another_model_or_pool_does_not_go_on_with_it() -> None:
    w, answers = recorded(**LEFT, model="m", pool="p")
    assert [answers.find(w.tree, SAME, SILENT, model, pool)[0] for model, pool in (("m", "p"), ("n", "p"), ("m", ""))] == [REPLAY, NEW, NEW]


def test_the_last_reply_is_what_is_asked_for_again() -> None:
    w, _ = recorded(**LEFT)
    w.say(ASKED, assistant("B"), fingerprint="f")
    found, turn = Answers(w.tree.turns.values()).find(w.tree, SAME, AGAIN, "", "")
    assert (found, turn) == (REPLAY, w.tree.turns["t1"])


def test_an_attempt_that_came_to_nothing_is_what_its_retry_means() -> None:
    """A second sample is asked for, refused, and asked for again: the first one is not given out as the second."""
    w, answers = recorded()
    answers.begun(SAME)
    assert answers.find(w.tree, SAME, AGAIN, "", "") == (NEW, None)


REPLIES = [
    assistant("I"),
    assistant("I list"),
    assistant("I list", call('{"n":1}', id="x0")),
    assistant("I list", call('{"n":1}', id="x0"), call('{"n":2}', id="x1")),
    assistant("", call('{"n":2}', id="x1"), thought="hm"),
    assistant("", thought="hm"),
]
OPENINGS = [(system("s"),), (user("a"),), (system("s"), user("a")), (user("a"), assistant("own"), user("b"))]


def histories() -> list[Request]:
    ends: list[tuple[Message, ...]] = [(), (user("n"),), (result("r", id="x0"),), (result("r", id="x1"), user("n"))]
    return [request(*o, r, *e, tools=t) for o in OPENINGS for r in REPLIES for e in ends for t in ((), (LS,))]


def seen(tree: Tree) -> list[tuple[object, ...]]:
    found = [tree.prepare(asked) for asked in histories()]
    return [(p.path, p.base, p.tail, p.respelled) for p in found]


def keys(tree: Tree) -> dict[bytes, list[int]]:
    return {key: list(nodes) for key, nodes in tree._openings.items() if nodes}


@settings(deadline=None)
@given(
    opening=st.sampled_from(OPENINGS),
    beginning=st.sampled_from(REPLIES),
    whole=st.sampled_from(REPLIES),
    siblings=st.lists(st.sampled_from(REPLIES), max_size=3),
    after=st.lists(st.sampled_from(REPLIES), max_size=2),
    matcher=st.sampled_from([CANONICAL, STRICT]),
)
def test_a_turn_gone_on_with_leaves_the_tree_as_if_it_had_been_whole_at_once(
    opening: tuple[Message, ...], beginning: Message, whole: Message, siblings: list[Message], after: list[Message], matcher: Matcher
) -> None:
    asked = request(*opening, tools=(LS,))

    def grown(first: Message, fields: dict[str, Any]) -> Weaver:
        w = Weaver(matcher)
        for each in siblings:
            w.say(asked, each)
        w.say(asked, first, **fields)
        for each in after:
            w.say(asked, each)
        return w

    cut, at_once = grown(beginning, LEFT_IN_MIDDLE), grown(whole, {})
    turn = at_once.tree.turns[f"t{len(siblings)}"]
    cut.tree.replace(turn, whole)
    assert seen(cut.tree) == seen(at_once.tree)
    assert keys(cut.tree) == keys(at_once.tree)
    assert (list(cut.tree.turns.values()), cut.tree.nodes, cut.tree.failed) == (list(at_once.tree.turns.values()), at_once.tree.nodes, 0)
    for w in (cut, at_once):
        w.say(request(*opening, whole, user("n"), tools=(LS,)), assistant("end"))
    assert seen(cut.tree) == seen(at_once.tree)


def test_what_another_turn_goes_on_from_is_not_replaced() -> None:
    w, _ = recorded(gone_on=True, **LEFT_IN_MIDDLE)
    before = list(w.tree.nodes)
    with pytest.raises(ValueError, match="gone on"):
        w.tree.replace(replace(w.tree.turns["t0"], output=ids([1])), assistant("more"))
    assert w.tree.nodes == before


def test_a_failed_turn_that_is_gone_on_with_fails_no_more() -> None:
    w = Weaver()
    w.say(request(user("a"), tools=(CAT,)), assistant("A"), outcome=Outcome.FAILED)
    assert w.tree.failed == 1
    w.tree.replace(replace(w.tree.turns["t0"], outcome=Outcome.DELIVERED), assistant("A B"))
    assert w.tree.failed == 0
