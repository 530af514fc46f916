"""Results stand in the order of the calls that they answer, whatever order they came in, and are matched by the call they answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.histories import Weaver, assistant, call, request, result, system, user
from turnloom.core.match import CANONICAL, STRICT, Matcher, call_key
from turnloom.core.order import Answered, as_recorded, same_calls
from turnloom.core.records import Delta
from turnloom.core.restore import calls_before, restored, restored_tail
from turnloom.core.tree import Tree
from turnloom.types import Message, ToolCall, ToolResult

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


def by_definition(recorded: Message, came: Message) -> list[int | None]:
    """`same_calls` as its docstring says it, call by call: slow and plain."""
    ours, theirs = [c.id for c in recorded.calls], [c.id for c in came.calls]
    if len(set(ours)) == len(ours) == len(theirs) and set(ours) == set(theirs):
        return [ours.index(call_id) for call_id in theirs]
    if len(ours) == len(theirs) == 1:
        return [0]
    said, echoed = [call_key(c) for c in recorded.calls], [call_key(c) for c in came.calls]
    ways: tuple[Callable[[int, int], bool], ...] = (
        lambda i, j: theirs[i] == ours[j] and echoed[i] == said[j],
        lambda i, j: theirs[i] not in ours and ours[j] not in theirs and echoed[i] == said[j],
        lambda i, j: theirs[i] == ours[j],
        lambda i, j: True,
    )
    found: list[int | None] = [None] * len(theirs)
    left = list(range(len(ours)))
    for same in ways:
        for i in range(len(theirs)):
            place = next((j for j in left if same(i, j)), None) if found[i] is None else None
            if place is not None:
                found[i] = place
                left.remove(place)
    return found


CALLS = st.lists(st.builds(call, st.sampled_from(['{"n":1}', '{"n": 1}', '{"n":2}', "{}"]), st.sampled_from("abcde")), max_size=7)


@given(CALLS, CALLS)
def test_which_call_came_back_is_as_it_is_defined(recorded: list[ToolCall], came: list[ToolCall]) -> None:
    assert same_calls(assistant("", *recorded), assistant("", *came)) == by_definition(assistant("", *recorded), assistant("", *came))


@given(CALLS, st.lists(st.sampled_from("abcdef") | st.none(), max_size=10))
def test_the_next_of_several_calls_under_one_id_is_answered(recorded: list[ToolCall], ids: list[str | None]) -> None:
    """Committed in any pieces, each result stands at the place that counting from the reply gives; None is a message of the user's."""
    reply = assistant("", *recorded)
    answered = Answered(reply, reply)
    for number, given_id in enumerate(ids):
        places = [i for i, c in enumerate(recorded) if c.id == given_id]
        expected = places[min(ids[:number].count(given_id), len(places) - 1)] if places else -1
        assert answered.place(GO if given_id is None else result("r", given_id)) == expected


class Counted(str):
    """A string that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)


class Parts(tuple):  # type: ignore[type-arg]
    """Parts that count how many of them are looked at."""

    looked = 0

    def __iter__(self) -> Any:
        Parts.looked += len(self)
        return super().__iter__()


def fresh(text: str) -> Counted:
    return Counted(text)


IDS: dict[str, tuple[Callable[[int], str], Callable[[int], str]]] = {
    "the same": (lambda i: f"c{i}", lambda i: f"c{i}"),
    "renamed": (lambda i: f"c{i}", lambda i: f"x{i}"),
    "one for all": (lambda i: "c", lambda i: "c"),
    "half renamed": (lambda i: f"c{i}", lambda i: f"c{i}" if i % 2 else f"x{i}"),
}


@pytest.mark.parametrize(("ours", "theirs"), IDS.values(), ids=IDS)
def test_work_is_linear_in_the_calls_and_their_results(ours: Callable[[int], str], theirs: Callable[[int], str]) -> None:
    """A whole history resolved, staged, committed, restored and read again: what is compared and looked at grows with its calls."""

    def work(n: int) -> int:
        def reply(name: Callable[[int], str]) -> Message:
            return Message("assistant", Parts(ToolCall(fresh(name(i)), "ls", f'{{"n":{i}}}') for i in range(n)))

        came = [Message("tool", (ToolResult(fresh(theirs(i)), f"r{i}"),)) for i in range(n)]
        notes = [user("and")] if n else []
        w = Weaver()
        w.say(request(GO), reply(ours))
        Counted.compared = Parts.looked = 0
        asked = [GO, reply(theirs), *came[: n // 2], *notes, *came[n // 2 :]]
        w.say(request(*asked), assistant("Done."))
        pending = w.tree.prepare(request(*asked, assistant("Done."), user("n")))
        assert pending.base == "t1"
        restored(w.tree, pending)
        own = [GO, user("own"), reply(theirs), *reversed(came)]
        w.say(request(*own), assistant("Own."))
        return Counted.compared + Parts.looked

    small, large = work(100), work(400)
    assert large <= 4.5 * small


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
    for reused in (True, False):
        w = woven()
        pending = w.tree.prepare(asked)
        turn = Weaver().say(asked, assistant("x"), id="t1")
        w.tree.apply(w.tree.stage(pending, assistant("Done."), turn), pending if reused else None)
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
