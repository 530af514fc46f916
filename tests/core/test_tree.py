"""Prepare, stage, apply: where a request attaches and what a turn adds."""

from __future__ import annotations

import pytest

from tests.support.histories import CAT, LS, Weaver, assistant, call, request, result, system, user
from turnloom.core.dump import dump_tree, lineage_count, summary
from turnloom.core.forks import explain
from turnloom.types import ForkKind, Message, Outcome, Reasoning, Text, ToolCall


def test_a_request_continues_the_deepest_turn_on_its_path() -> None:
    w = Weaver()
    first = w.say(request(user("a")), assistant("A"))
    second = w.say(request(user("a"), assistant("A"), user("b")), assistant("B"))
    assert (first.base, second.base) == (None, "t0")
    pending = w.tree.prepare(request(user("a"), assistant("A"), user("b"), assistant("B"), user("c"), user("d")))
    assert pending.base == "t1"
    assert pending.tail == (user("c"), user("d"))
    assert w.tree.held("t1").tolist() == [100, 101, 200, 201, 101, 101, 200, 201]


def test_prepare_mutates_nothing() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    before = (list(w.tree.nodes), dict(w.tree.turns))
    w.tree.prepare(request(user("new"), tools=(LS,)))
    w.tree.prepare(request(user("a"), assistant("A"), user("b")))
    assert (w.tree.nodes, w.tree.turns) == before


def test_a_rewritten_assistant_message_is_bridged_from_the_turn_before_it() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    w.say(request(user("a"), assistant("A"), user("b")), assistant("B"))
    pending = w.tree.prepare(request(user("a"), assistant("A"), user("b"), assistant("rewritten"), user("c")))
    assert pending.base == "t0"
    assert pending.tail == (user("b"), assistant("rewritten"), user("c"))


def test_best_of_n_siblings_are_told_apart_by_call_id_then_by_reasoning() -> None:
    w = Weaver()
    asked = request(user("a"), tools=(LS,))
    for i in range(3):
        w.say(asked, assistant("", call(id=f"id{i}"), thought=f"thought {i}"))
    for i in range(3):
        by_id = request(user("a"), assistant("", call(id=f"id{i}")), result("x"), tools=(LS,))
        assert w.tree.prepare(by_id).base == f"t{i}"
        by_reasoning = request(user("a"), assistant("", call(id="lost"), thought=f"thought {i}\n"), result("x"), tools=(LS,))
        assert w.tree.prepare(by_reasoning).base == f"t{i}"
    nameless = request(user("a"), assistant("", call(id="lost")), result("x"), tools=(LS,))
    assert w.tree.prepare(nameless).base == "t2", "with no evidence the newest"


def test_minted_ids_vouch_for_arguments_that_a_client_respelled() -> None:
    """Defaults filled in, text trimmed, numbers retyped, calls in another order: what the model wrote stands, and is counted."""
    w = Weaver()
    w.say(request(user("a"), tools=(LS,)), assistant("I list", call('{"n":"1"}', id="id0"), call('{"n":2}', id="id1")))
    came = assistant("I list", call('{"n":2,"all":false}', id="id1"), call('{"n":1}', id="id0"))
    pending = w.tree.prepare(request(user("a"), came, result("x"), result("y"), tools=(LS,)))
    assert (pending.base, pending.respelled) == ("t0", 1)
    faithful = assistant("I list", call('{"n":"1"}', id="id0"), call('{"n":2}', id="id1"))
    assert w.tree.prepare(request(user("a"), faithful, result("x"), tools=(LS,))).respelled == 0


@pytest.mark.parametrize(
    "came",
    [
        assistant("I delete", call('{"n":1}', id="id0")),
        assistant("I list", call('{"n":1}', id="id0", name="rm")),
        assistant("I list", call('{"n":1}', id="id0"), call('{"n":1}', id="id0")),
        assistant("I list", call('{"n":1}', id="id0"), call(id="unknown")),
        assistant("I list", call('{"n":1}', id="id9")),
        assistant("I list"),
    ],
    ids=["other words", "other tool", "repeated", "one more", "other id", "dropped"],
)
def test_a_call_id_does_not_vouch_for_anything_else(came: Message) -> None:
    w = Weaver()
    w.say(request(user("a"), tools=(LS,)), assistant("I list", call('{"n":"1"}', id="id0")))
    assert w.tree.prepare(request(user("a"), came, result("x"), tools=(LS,))).base is None


def test_an_id_of_another_branch_is_ignored() -> None:
    w = Weaver()
    w.say(request(user("a"), tools=(LS,)), assistant("", call('{"n":1}', id="id0")))
    forged = request(user("b"), assistant("", call('{"n":2}', id="id0")), result("x"), tools=(LS,))
    assert w.tree.prepare(forged).base is None


def test_equal_siblings_continue_where_the_history_goes_on() -> None:
    """The older of two equal replies is the one that was continued; the newer has no such child."""
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    w.say(request(user("a"), assistant("A"), user("b")), assistant("B"))
    w.say(request(user("a")), assistant("A"))
    assert w.tree.prepare(request(user("a"), assistant("A"), user("b"), assistant("B"), user("c"))).base == "t1"


def test_a_delivered_turn_is_preferred_to_one_that_nobody_got() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    w.say(request(user("a")), assistant("A"), outcome=Outcome.ORPHANED)
    assert w.tree.prepare(request(user("a"), assistant("A"), user("b"))).base == "t0"


TWINS = {
    "whitespace": (assistant("Done"), assistant("Done\n\n")),
    "reasoning between": (assistant("ab"), Message("assistant", (Text("a"), Reasoning("r"), Text("b")))),
    "edges of reasoning": (assistant("a", thought="t"), assistant("a", thought="t\n")),
    "spelling of arguments": (assistant("", call('{"a":1}', "s")), assistant("", call('{"a":1.0}', "s"))),
    "no text": (assistant("", call()), assistant(" ", call())),
}


@pytest.mark.parametrize(("one", "other"), TWINS.values(), ids=TWINS)
def test_of_near_twins_the_one_that_came_back_word_for_word_is_gone_on_from(one: Message, other: Message) -> None:
    for order in ([one, other], [other, one]):
        w = Weaver()
        for said in order:
            w.say(request(user("a")), said)
        for i, said in enumerate(order):
            assert w.tree.prepare(request(user("a"), said, user("b"))).base == f"t{i}"


def test_words_that_came_back_exactly_tell_twins_apart_though_the_reasoning_did_not() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("Done", thought="t"))
    w.say(request(user("a")), assistant("Done\n", thought="t"))
    assert w.tree.prepare(request(user("a"), assistant("Done"), user("b"))).base == "t0"


@pytest.mark.parametrize("echo", [call('{"n":1}', "id0"), call('{"n":2}', "id0")], ids=["as it was said", "with other arguments"])
def test_a_clients_copy_of_a_history_does_not_stand_before_the_held_turn(echo: ToolCall) -> None:
    """The copy was brought first and is followed by more of what comes."""
    w = Weaver()
    history = [user("a"), assistant("I list", echo), result("x", "id0")]
    w.say(request(*history, user("b")), assistant("ok"))
    w.say(request(user("a")), assistant("I list", call('{"n":1}', "id0")))
    assert w.tree.prepare(request(*history, user("b"))).base == "t1"
    assert w.tree.prepare(request(*history, user("b"), assistant("ok"), user("c"))).base == "t0", "a deeper turn is held"


def test_what_nobody_got_does_not_stand_before_a_clients_copy() -> None:
    w = Weaver()
    w.say(request(user("a"), assistant("A"), user("b")), assistant("ok"), outcome=Outcome.ABORTED)
    w.say(request(user("a")), assistant("A"), outcome=Outcome.ABORTED)
    pending = w.tree.prepare(request(user("a"), assistant("A"), user("b")))
    assert (pending.base, len(pending.path)) == (None, 4)


def test_two_turns_prepared_at_once_share_the_messages_that_both_bring() -> None:
    w = Weaver()
    asked = request(system("s"), user("a"))
    one, two = w.tree.prepare(asked), w.tree.prepare(asked)
    w.commit(one, assistant("A"))
    w.commit(two, assistant("B"))
    roles = [n.message.role if n.message else "head" for n in w.tree.nodes]
    assert roles == ["head", "system", "user", "assistant", "assistant"]


def test_deltas_apply_in_order_only() -> None:
    w = Weaver()
    pending = w.tree.prepare(request(user("a")))
    turn = w.commit(pending, assistant("A"))
    stale = w.tree.stage(w.tree.prepare(request(user("b"))), assistant("B"), turn)
    w.say(request(user("c")), assistant("C"))
    with pytest.raises(ValueError, match="out of order"):
        w.tree.apply(stale)


FORKS = {
    "the first turn is no fork": (None, [], request(user("a"))),
    "resampled": (ForkKind.RESAMPLED, [request(user("a"))], request(user("a"))),
    "history changed": (ForkKind.HISTORY_CHANGED, [request(user("a"), user("b"))], request(user("a"), user("x"))),
    "tools changed": (ForkKind.TOOLS_CHANGED, [request(user("a"), tools=(LS,))], request(user("a"), tools=(LS, CAT))),
    "system changed": (ForkKind.SYSTEM_CHANGED, [request(system("s"), user("a"))], request(system("t"), user("a"))),
    "new conversation": (ForkKind.NEW_CONVERSATION, [request(system("s"), user("a"))], request(system("sub"), user("z"))),
    "same system, other question": (ForkKind.NEW_CONVERSATION, [request(system("s"), user("a"))], request(system("s"), user("z"))),
}


@pytest.mark.parametrize(("kind", "before", "asked"), FORKS.values(), ids=FORKS)
def test_every_fork_has_its_reason(kind: ForkKind | None, before: list, asked: object) -> None:
    w = Weaver()
    for earlier in before:
        w.say(earlier, assistant("A"))
    fork = explain(w.tree, w.tree.prepare(asked))
    assert (fork.kind if fork else None) == kind


def test_leaving_recorded_tokens_has_a_reason_too() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    on = request(user("a"), assistant("A"), user("b"))
    assert explain(w.tree, w.tree.prepare(on)) is None
    w.say(on, assistant("B"))
    again = explain(w.tree, w.tree.prepare(on))
    assert again is not None
    assert again.kind is ForkKind.RESAMPLED
    branched = explain(w.tree, w.tree.prepare(request(user("a"), assistant("A"), user("c"))))
    assert branched is not None
    assert (branched.kind, branched.message_index) == (ForkKind.BRANCHED, 2)
    assert "recorded 'b', came 'c'" in branched.detail


def test_a_fork_says_what_differs() -> None:
    w = Weaver()
    w.say(request(user("a"), user("the quick brown fox")), assistant("A"))
    fork = explain(w.tree, w.tree.prepare(request(user("a"), user("the quick red fox"))))
    assert fork is not None
    assert fork.message_index == 1
    assert "character 10" in fork.detail
    w.say(request(user("t"), tools=(LS,)), assistant("A"))
    fork = explain(w.tree, w.tree.prepare(request(user("t"), tools=(CAT,))))
    assert fork is not None
    assert fork.detail == "tools added cat; removed ls"


def test_summary_and_dump() -> None:
    w = Weaver()
    w.say(request(user("a")), assistant("A"))
    w.say(request(user("a"), assistant("A"), user("b")), assistant("B"))
    w.say(request(user("a"), assistant("A"), user("c")), assistant("C\x1b[2J"), outcome=Outcome.ABORTED, error="gone")
    assert lineage_count(w.tree) == 2
    found = summary(w.tree)
    assert (found["turns"], found["lineages"], found["outcomes"]) == (3, 2, {"delivered": 2, "aborted": 1})
    text = "\n".join(dump_tree(w.tree))
    assert "\x1b" not in text
    assert "aborted: gone" in text
    assert "bridge +2" in text
