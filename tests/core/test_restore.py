"""Messages as they are on record: replies as the model wrote them, results under the ids of the calls they answer."""

from __future__ import annotations

from tests.support.histories import Weaver, assistant, call, request, result, user
from turnloom.core.restore import restored, restored_tail
from turnloom.types import Message, ToolResult

ASKED = user("go")
SAID = assistant("I look.", call('{"a": 1}', "m0"), call('{"a": 2}', "m1"), thought="long thought")


def answered(*came: Message) -> tuple[list[Message], list[Message]]:
    """The whole history and the tail of a request in which `came` follows the question."""
    weaver = Weaver()
    weaver.say(request(ASKED), SAID)
    pending = weaver.tree.prepare(request(ASKED, *came))
    assert pending.base == "t0"
    return list(restored(weaver.tree, pending)), list(restored_tail(pending, SAID))


def ids_of(messages: list[Message]) -> list[str]:
    return [p.call_id for m in messages for p in m.parts if isinstance(p, ToolResult)]


def test_a_reply_that_matched_stands_as_it_was_written() -> None:
    came = assistant("I look.", call('{"a":1}', "m0"), call('{"a":2}', "m1"))
    whole, tail = answered(came, result("one", "m0"), user("more"))
    assert whole == [ASKED, SAID, result("one", "m0"), user("more")]
    assert tail == whole[2:]


def test_results_under_invented_ids_answer_the_recorded_calls() -> None:
    came = assistant("I look.", call('{"a": 1}', "x"), call('{"a": 2}', "y"))
    whole, tail = answered(came, result("two", "y"), result("one", "x"))
    assert whole[2:] == tail == [result("one", "m0"), result("two", "m1")]


def test_calls_in_another_order_under_other_ids_are_told_apart_by_what_they_say() -> None:
    came = assistant("I look.", call('{"a": 2}', "x"), call('{"a": 1}', "y"))
    assert answered(came, result("two", "x"), result("one", "y"))[1] == [result("one", "m0"), result("two", "m1")]


def test_one_id_for_several_calls_is_answered_in_their_order() -> None:
    came = assistant("I look.", call('{"a": 1}', "same"), call('{"a": 2}', "same"))
    assert ids_of(answered(came, result("one", "same"), result("two", "same"), result("again", "same"))[1]) == ["m0", "m1", "m1"]


def test_a_result_that_answers_nothing_on_record_keeps_its_id() -> None:
    came = assistant("I look.", call('{"a": 1}', "m0"), call('{"a": 2}', "m1"))
    assert ids_of(answered(came, result("?", "elsewhere"))[1]) == ["elsewhere"]


def test_what_no_turn_generated_stays_the_clients() -> None:
    weaver = Weaver()
    brought = assistant("few-shot", call("{}", "mine"))
    asked = request(ASKED, brought, result("r", "mine"), user("now"))
    weaver.say(asked, assistant("done"))
    again = request(*asked.messages, assistant(" done "), user("on"))
    assert restored(weaver.tree, weaver.tree.prepare(again)) == (*asked.messages, assistant("done"), user("on"))


def test_an_earlier_replys_renamed_calls_are_known_to_the_end_of_the_history() -> None:
    weaver = Weaver()
    weaver.say(request(ASKED), SAID)
    came = assistant("I look.", call('{"a": 1}', "x"), call('{"a": 2}', "y"))
    asked = request(ASKED, came, result("one", "x"), result("two", "y"))
    weaver.say(asked, assistant("", call("{}", "n0")))
    later = request(*asked.messages, assistant("", call("{}", "z")), result("three", "z"), result("late", "x"))
    assert ids_of(list(restored(weaver.tree, weaver.tree.prepare(later)))) == ["m0", "m1", "n0", "m0"]
