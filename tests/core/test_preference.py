"""Which of two equal replies a history goes on from, where nothing else tells them apart."""

from __future__ import annotations

import pytest

from tests.support.histories import Weaver, assistant, request, user
from turnloom.types import Outcome

ASKED = request(user("a"))
OWN = request(user("a"), assistant("A"), user("b"))
"""A history that brings a reply of the client's own."""


@pytest.mark.parametrize("outcome", [Outcome.ORPHANED, Outcome.ABORTED, Outcome.FAILED])
def test_the_clients_own_message_goes_before_a_turn_that_nobody_got(outcome: Outcome) -> None:
    w = Weaver()
    w.say(OWN, assistant("B"))
    w.say(ASKED, assistant("A"), outcome=outcome)
    assert w.tree.prepare(request(user("a"), assistant("A"))).base is None
    assert w.tree.prepare(request(user("a"), assistant("A"), user("c"))).base is None


def test_a_turn_that_was_delivered_goes_before_the_clients_own_message() -> None:
    w = Weaver()
    w.say(ASKED, assistant("A"))
    later = w.tree.prepare(request(user("a"), assistant("A"), user("b")))
    assert later.base == "t0"
    other = Weaver()
    other.say(OWN, assistant("B"))
    other.say(ASKED, assistant("A"))
    assert other.tree.prepare(request(user("a"), assistant("A"), user("c"))).base == "t1"


def test_of_two_that_were_delivered_the_newest_goes_on() -> None:
    w = Weaver()
    w.say(ASKED, assistant("A"))
    w.say(ASKED, assistant("A"))
    w.say(ASKED, assistant("A"), outcome=Outcome.ABORTED)
    assert w.tree.prepare(request(user("a"), assistant("A"), user("c"))).base == "t1"
