"""Results stand in the order of the calls that they answer, whatever order they came in, and are matched by the call they answer."""

from __future__ import annotations

import itertools

import pytest

from tests.support.histories import Weaver, assistant, call, request, result, system, user
from turnloom.core.match import CANONICAL, STRICT, Matcher
from turnloom.core.order import as_recorded, same_calls
from turnloom.core.records import Delta
from turnloom.core.restore import calls_before, restored, restored_tail
from turnloom.core.tree import Tree
from turnloom.types import Message

GO = user("go")
FIRST, SECOND = call('{"a": 1}', "m0"), call('{"a": 2}', "m1")
SAID = assistant("", FIRST, SECOND)
ONE, TWO = result("one", "m0"), result("two", "m1")


def woven(matcher: Matcher = CANONICAL) -> Weaver:
    w = Weaver(matcher)
    w.say(request(GO), SAID)
    return w


def shown(w: Weaver, *messages: Message) -> list[Message]:
    """The history as the engine is shown it; where it goes on from a turn, the bridge's tail says the same."""
    pending = w.tree.prepare(request(*messages))
    whole = list(restored(w.tree, pending))
    if pending.base is not None:
        tail = list(restored_tail(pending, w.tree.reply(pending.base)))
        assert whole[len(whole) - len(tail) :] == tail
    return whole


@pytest.mark.parametrize("came", list(itertools.permutations([ONE, TWO])))
@pytest.mark.parametrize("echo", [SAID, assistant("", SECOND, FIRST)], ids=["in order", "calls swapped"])
def test_results_stand_in_the_recorded_order(echo: Message, came: tuple[Message, ...]) -> None:
    assert shown(woven(), GO, echo, *came, user("n")) == [GO, SAID, ONE, TWO, user("n")]


def test_results_of_a_clients_own_reply_stand_in_its_order() -> None:
    own = assistant("few-shot", call('{"z": 1}', "x"), call('{"z": 2}', "y"))
    asked = [GO, own, result("of y", "y"), result("of x", "x"), user("n")]
    right = [GO, own, result("of x", "x"), result("of y", "y"), user("n")]
    w = Weaver()
    assert shown(w, *asked) == right
    w.say(request(*asked), assistant("done"))
    swapped = assistant("few-shot", *reversed(own.calls))
    again = w.tree.prepare(request(GO, swapped, *asked[2:], assistant("done")))
    assert again.base == "t0", "the same history, its calls in another order"
    assert list(restored(w.tree, again))[1:4] == [swapped, result("of y", "y"), result("of x", "x")], "in the order of the calls shown"


def test_results_that_answer_nothing_stand_last_and_later_results_stay() -> None:
    asked = [GO, SAID, result("?", "other"), TWO, result("??", "another"), ONE, user("n"), result("late", "m1"), result("late", "m0")]
    assert shown(woven(), *asked) == [GO, SAID, ONE, TWO, asked[2], asked[4], *asked[6:]]


@pytest.mark.parametrize("matcher", [CANONICAL, STRICT], ids=["canonical", "strict"])
def test_the_order_in_which_results_come_is_no_other_history(matcher: Matcher) -> None:
    w = woven(matcher)
    w.say(request(GO, SAID, ONE, TWO), assistant("Done."))
    assert w.tree.prepare(request(GO, SAID, TWO, ONE, assistant("Done."), user("n"))).base == "t1"


def test_the_same_results_of_other_calls_are_another_history() -> None:
    w = woven()
    w.say(request(GO, SAID, result("ok", "m0"), result("err", "m1")), assistant("Done."))
    for order in itertools.permutations([result("err", "m0"), result("ok", "m1")]):
        assert w.tree.prepare(request(GO, SAID, *order, assistant("Done."), user("n"))).base == "t0"


def test_a_result_of_one_call_is_none_of_another() -> None:
    w = woven()
    w.say(request(GO, SAID, result("ok", "m0")), assistant("Done."))
    assert w.tree.prepare(request(GO, SAID, result("ok", "m0"), assistant("Done."), user("n"))).base == "t1"
    assert w.tree.prepare(request(GO, SAID, result("ok", "m1"), assistant("Done."), user("n"))).base == "t0"


def test_a_reply_of_ones_own_that_reuses_an_id_keeps_its_results() -> None:
    echo = assistant("", call('{"a":1}', "call_0"), call('{"a":2}', "call_1"))
    own = assistant("", call('{"z":9}', "call_0", name="cat"))
    asked = [GO, echo, result("one", "call_0"), result("two", "call_1"), own, result("own", "call_0"), user("n")]
    assert shown(woven(), *asked) == [GO, SAID, ONE, TWO, own, result("own", "call_0"), user("n")]


PAIRS = {
    "by id and words before words": ([call("{}", "m0"), call("{}", "m1")], [call("{}", "x"), call("{}", "m0")], [1, 0]),
    "an id nobody names goes to the same words": ([FIRST, SECOND], [call('{"a":2}', "x"), call('{"a":1}', "y")], [1, 0]),
    "ids before contradicting words": ([FIRST, SECOND], [call('{"a":2}', "m0"), call('{"a":1}', "m1")], [0, 1]),
    "then by place": ([FIRST, SECOND], [call('{"b":1}', "x"), call('{"b":2}', "y")], [0, 1]),
    "words are not taken from a call that its id names": (
        [call("{}", "m0"), call("{}", "m1")],
        [call("{}", "x"), call('{"n":1}', "m0")],
        [1, 0],
    ),
    "one id for all": ([FIRST, SECOND], [call('{"a":2}', "s"), call('{"a":1}', "s")], [1, 0]),
    "more than there are": ([FIRST], [FIRST, call("{}", "x")], [0, None]),
}


@pytest.mark.parametrize(("recorded", "came", "places"), PAIRS.values(), ids=PAIRS)
def test_which_call_came_back(recorded: list, came: list, places: list) -> None:
    assert same_calls(assistant("", *recorded), assistant("", *came)) == places


def test_ids_that_name_other_calls_than_their_words_are_counted() -> None:
    w = woven()
    crossed = assistant("", call('{"a":2}', "m0"), call('{"a":1}', "m1"))
    assert w.tree.prepare(request(GO, crossed, ONE, TWO)).respelled == 1
    assert w.tree.prepare(request(GO, assistant("", SECOND, FIRST), ONE, TWO)).respelled == 0
    assert w.tree.prepare(request(GO, assistant("", call('{"a":2}', "x"), call('{"a":1}', "y")))).respelled == 0


ECHOES = {
    "as recorded": (SAID, ("m0", "m1")),
    "swapped": (assistant("", SECOND, FIRST), ("m0", "m1")),
    "renamed": (assistant("", call('{"a":1}', "x"), call('{"a":2}', "y")), ("x", "y")),
    "renamed and swapped": (assistant("", call('{"a":2}', "y"), call('{"a":1}', "x")), ("x", "y")),
    "respelled": (assistant("", call('{"a":9}', "m0"), call('{"a":2, "b":0}', "m1")), ("m0", "m1")),
    "under one id": (assistant("", call('{"a":1}', "s"), call('{"a":2}', "s")), ("s", "s")),
    "ids lost with the calls only": (assistant("", call('{"a":1}', ""), call('{"a":2}', "")), ("m0", "m1")),
}


@pytest.mark.parametrize(("echo", "names"), ECHOES.values(), ids=ECHOES)
def test_a_tree_that_is_read_again_finds_the_same_histories(echo: Message, names: tuple[str, str]) -> None:
    w = Weaver()
    staged: list[Delta] = []
    apply = w.tree.apply
    w.tree.apply = lambda delta, pending=None: (staged.append(delta), apply(delta, pending))[1]  # type: ignore[method-assign]
    w.say(request(GO), SAID)
    asked = [GO, echo, result("one", names[0]), result("two", names[1]), result("?", "none"), user("n")]
    w.say(request(*asked), assistant("Done."))
    again = Tree()
    for delta in staged:
        again.apply(delta)
    for tree in (w.tree, again):
        for other, ids in ECHOES.values():
            for results in ([result("one", ids[0]), result("two", ids[1])], [result("two", ids[1]), result("one", ids[0])]):
                if ids[0] == ids[1] and results[0] == result("two", ids[1]):
                    continue  # One id for both: their order is all there is.
                pending = tree.prepare(request(GO, other, *results, result("?", "none"), user("n"), assistant("Done.")))
                assert pending.base == "t1", "the same results of the same calls"
    assert again.nodes == w.tree.nodes


def test_keys_of_the_request_spare_apply_none_of_the_order() -> None:
    """With and without the keys that were computed for the request, the same is found."""
    asked = request(GO, SAID, TWO, ONE, user("n"))
    for given in (True, False):
        w = woven()
        pending = w.tree.prepare(asked)
        turn = Weaver().say(asked, assistant("x"), id="t1")
        w.tree.apply(w.tree.stage(pending, assistant("Done."), turn), pending if given else None)
        for order in ([ONE, TWO], [TWO, ONE]):
            assert w.tree.prepare(request(GO, SAID, *order, user("n"), assistant("Done."))).base == "t1"


def test_messages_without_replies_stay_as_they_came() -> None:
    came = [system("s"), result("b", "x"), result("a", "y"), GO]
    assert as_recorded(came, came) == came


def test_calls_are_counted_as_they_are_on_record() -> None:
    w = Weaver(Matcher(lambda m: m.role.encode()))
    w.say(request(GO), SAID)
    own = assistant("own", FIRST)
    pending = w.tree.prepare(request(GO, assistant("", FIRST), GO, own, GO))
    assert (pending.base, len(pending.path)) == ("t0", 3)
    assert [calls_before(w.tree, pending, i) for i in range(3)] == [0, 0, 2]
