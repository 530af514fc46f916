"""What one more request costs does not grow with how many there were: counted, never timed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.histories import LS, Weaver, assistant, call, request, system, user
from turnloom.core import align
from turnloom.core.align import agreement, sequence, shared_turns
from turnloom.core.forks import explain
from turnloom.core.match import CANONICAL, STRICT
from turnloom.errors import LimitReached
from turnloom.gateway.session import Session
from turnloom.store.contract import Limits, SessionRow
from turnloom.store.memory import MemoryStore
from turnloom.types import Message, Outcome, Request, Sampling, Tool, ids

GO = user("go")


class Looked(list):  # type: ignore[type-arg]
    """A list that counts how many of its items are looked at."""

    count = 0

    def __getitem__(self, at: Any) -> Any:
        self.count += 1
        return super().__getitem__(at)

    def __iter__(self) -> Any:
        self.count += len(self)
        return super().__iter__()


SHAPES: dict[str, tuple[Callable[[int], tuple[Request, Message]], Request]] = {
    "system messages": (lambda i: (request(system(f"s{i}"), GO), assistant("a")), request(system("new"), GO)),
    "first messages": (lambda i: (request(user(f"u{i}")), assistant("a")), request(user("new"))),
    "tools": (lambda i: (request(GO, tools=(Tool(f"t{i}", "", "{}"),)), assistant("a")), request(GO, tools=(LS,))),
    "siblings": (lambda i: (request(GO, user(f"u{i}")), assistant("a")), request(GO, user("new"))),
    "equal replies": (lambda i: (request(GO), assistant("a")), request(GO, assistant("a"), user("n"))),
    "equal replies, each continued": (
        lambda i: (request(GO, assistant("a"), user(f"u{i}")) if i % 2 else request(GO), assistant("a")),
        request(GO, assistant("a"), user("n")),
    ),
    "equal calls under one id": (
        lambda i: (request(GO), assistant("", call('{"n":1}'))),
        request(GO, assistant("", call('{"n":2}')), user("n")),
    ),
    "aborted replies": (
        lambda i: (request(GO), assistant(f"a{i}", call('{"n":1}'))),
        request(GO, assistant("b"), user("n")),
    ),
}


@pytest.mark.parametrize("matcher", [CANONICAL, STRICT], ids=["canonical", "strict"])
@pytest.mark.parametrize(("make", "asked"), SHAPES.values(), ids=SHAPES)
def test_a_request_looks_at_no_more_nodes_when_there_are_more(
    make: Callable[[int], tuple[Request, Message]], asked: Request, matcher
) -> None:
    counts = []
    for size in (300, 600):
        w = Weaver(matcher)
        w.say(request(GO), assistant("first"))
        for i in range(size):
            before, said = make(i)
            w.say(before, said, outcome=Outcome.ABORTED if said.text.startswith("a") and said.calls else Outcome.DELIVERED)
        w.tree.nodes = looked = Looked(w.tree.nodes)
        pending = w.tree.prepare(asked)
        explain(w.tree, pending)
        w.tree.stage(pending, assistant("x"), w.tree.turns["t0"])
        counts.append(looked.count)
    assert counts[0] == counts[1]


def test_the_ids_of_a_call_find_an_old_one_among_very_many_equal_replies() -> None:
    w = Weaver()
    for i in range(300):
        w.say(request(GO), assistant("", call("{}", f"id{i}")))
    assert w.tree.prepare(request(GO, assistant("", call("{}", "id7")), user("n"))).base == "t7"


def test_an_old_reply_that_was_continued_is_found_among_very_many_equal_ones() -> None:
    w = Weaver()
    w.say(request(GO), assistant("a"))
    w.say(request(GO, assistant("a"), user("b")), assistant("B"))
    for _ in range(300):
        w.say(request(GO), assistant("a"))
    assert w.tree.prepare(request(GO, assistant("a"), user("b"), assistant("B"), user("n"))).base == "t1"


def test_the_turns_of_a_session_are_not_counted_again_for_each() -> None:
    class Uncounted(dict):  # type: ignore[type-arg]
        def values(self) -> Any:
            raise AssertionError("every turn was looked at")

    async def run() -> None:
        w = Weaver()
        w.say(request(GO), assistant("a"))
        w.say(request(GO), assistant("b"), outcome=Outcome.FAILED)
        w.say(request(GO), assistant("c"))
        w.tree.amend("t2", Outcome.FAILED)
        session = Session(SessionRow("s", "h", 0.0, Sampling(), Limits(max_turns=2)), MemoryStore(), w.tree)
        w.tree.turns = Uncounted(w.tree.turns)
        with session.turn_slot(), pytest.raises(LimitReached), session.turn_slot():
            pass
        w.tree.amend("t2", Outcome.DELIVERED)
        with pytest.raises(LimitReached), session.turn_slot():
            pass

    asyncio.run(run())


def test_a_chain_of_realigned_turns_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Weaver()
    history = [GO]
    for i in range(50):
        pending = w.tree.prepare(request(*history))
        held = len(w.tree.held(pending.base))
        w.commit(pending, assistant(f"a{i}"), output=tuple(range(200, 210)), kept=held - 3 if held else None)
        history += [assistant(f"a{i}"), user(f"u{i}")]
    chain = w.tree.chain("t49")
    whole = sequence(chain)
    prompt = ids([whole[0], 7, *whole[2:].tolist(), *[1] * 50])
    made: list[int] = []
    monkeypatch.setattr(align, "sequence", lambda chain: (made.append(len(chain)), sequence(chain))[1])
    assert shared_turns(chain, agreement(whole, prompt), prompt) == 0
    assert made == []
