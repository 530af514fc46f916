"""A fork shows the tokens on both sides, against the nearest history, and the setting that would have joined them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.histories import CAT, LS, Weaver, assistant, call, request, system, user
from turnloom.core.align import agreement, sequence, shared_turns, used
from turnloom.core.forks import SHOWN_TOKENS, compare, explain, first_difference
from turnloom.core.match import CANONICAL, STRICT, Matcher
from turnloom.core.tree import Tree
from turnloom.types import Fork, ForkKind, IntArray, Message, Outcome, Request, Text, Tool, ids

WORDS: dict[str, int] = {}


def encode(*messages: Message, tools: str = "") -> list[int]:
    """Every word a token; each message opens with its role."""
    words = [*tools.split(), *(w for m in messages for w in (m.role, *m.text.split()))]
    return [WORDS.setdefault(w, 1000 + len(WORDS)) for w in words]


def decode(tokens: Sequence[int]) -> str:
    known = {i: w for w, i in WORDS.items()}
    return " ".join(known[t] for t in tokens)


def prompt_of(asked: Request) -> IntArray:
    return ids([*encode(*asked.messages, tools=" ".join(t.name for t in asked.tools)), *encode(assistant())])


def say(w: Weaver, asked: Request, text: str) -> None:
    """A turn whose tokens are the words of its messages."""
    pending = w.tree.prepare(asked)
    whole = prompt_of(asked)
    appended = whole[len(w.tree.held(pending.base)) :]
    w.commit(pending, assistant(text), output=tuple(encode(assistant(text))[1:]), appended=appended)


def fork_of(w: Weaver, asked: Request) -> Fork:
    fork = explain(w.tree, w.tree.prepare(asked), prompt_of(asked), decode)
    assert fork is not None
    return fork


S, A, B = system("be kind"), user("look around"), user("now act")
KINDS: dict[ForkKind, tuple[list[Request], Request, int, str, str]] = {
    ForkKind.RESAMPLED: ([request(S, A)], request(S, A), 7, "said 0", ""),
    ForkKind.HISTORY_CHANGED: (
        [request(A, user("go left")), request(user("something"), user("else"))],
        request(A, user("go right")),
        5,
        "left assistant said 0",
        "right assistant",
    ),
    ForkKind.TOOLS_CHANGED: (
        [request(A, tools=(LS,)), request(B, tools=(LS,))],
        request(A, tools=(LS, CAT)),
        1,
        "user look around assistant said 0",
        "cat user look around assistant",
    ),
    ForkKind.SYSTEM_CHANGED: (
        [request(S, A), request(system("other"), B)],
        request(system("be brief"), A),
        2,
        "kind user look around assistant said 0",
        "brief user look around assistant",
    ),
    ForkKind.NEW_CONVERSATION: ([request(S, A)], request(S, B), 4, "look around assistant said 0", "now act assistant"),
}


@pytest.mark.parametrize(("kind", "case"), KINDS.items(), ids=KINDS)
def test_every_new_sequence_shows_where_it_parts_from_the_nearest(kind: ForkKind, case: tuple) -> None:
    before, asked, token, recorded, came = case
    w = Weaver()
    for i, earlier in enumerate(before):
        say(w, earlier, f"said {i}")
    fork = fork_of(w, asked)
    assert (fork.kind, fork.token_index, fork.recorded, fork.came, fork.joined_by) == (kind, token, recorded, came, "")


def test_a_branch_is_compared_with_what_went_on_there() -> None:
    w = Weaver()
    said = [A, assistant("said 0")]
    say(w, request(A), "said 0")
    say(w, request(*said, user("go left")), "said 1")
    say(w, request(*said, user("go left"), assistant("said 1"), B), "said 2")
    fork = fork_of(w, request(*said, user("go right")))
    assert (fork.kind, fork.message_index) == (ForkKind.BRANCHED, 2)
    assert (fork.token_index, fork.recorded, fork.came) == (8, "left assistant said 1", "right assistant")


def test_no_more_than_a_few_tokens_are_shown() -> None:
    w = Weaver()
    long = " ".join(f"w{i}" for i in range(100))
    say(w, request(A, user(long)), "said 0")
    fork = fork_of(w, request(A, user("x " + long)))
    assert len(fork.recorded.split()) == len(fork.came.split()) == SHOWN_TOKENS


def test_without_a_prompt_nothing_is_compared() -> None:
    w = Weaver()
    say(w, request(A), "said 0")
    fork = explain(w.tree, w.tree.prepare(request(A)))
    assert fork == Fork(ForkKind.RESAMPLED, 1, "the same prompt was asked again")


def test_the_same_text_in_other_tokens_is_shown_token_by_token() -> None:
    spelled = {1: "ab", 2: "c", 3: "a", 4: "bc"}

    def join(tokens: Sequence[int]) -> str:
        return "".join(spelled[t] for t in tokens)

    fork = compare(Fork(ForkKind.RERENDERED, 0, "differs"), ids([9, 1, 2]), ids([9, 3, 4]), join)
    assert (fork.token_index, fork.recorded, fork.came) == (1, "abc", "abc")
    assert fork.detail == "differs; the same text in other tokens: recorded 'ab|c', came 'a|bc'"


JOINS = {
    "whitespace of a reply": (STRICT, assistant("said 0 "), "matching=canonical"),
    "another order of arguments": (STRICT, assistant("said 0", call('{"b":1,"a":2}')), ""),
    "other words": (STRICT, assistant("said 1"), ""),
    "a key of one's own": (Matcher(lambda m: repr(m).encode()), assistant(" said 0"), "matching=canonical"),
    "canonical itself": (CANONICAL, assistant("said 1"), ""),
}


@pytest.mark.parametrize(("matcher", "came", "joined"), JOINS.values(), ids=JOINS)
def test_what_the_canonical_matcher_would_have_joined_is_said(matcher: Matcher, came: Message, joined: str) -> None:
    w = Weaver(matcher)
    say(w, request(A), "said 0")
    assert fork_of(w, request(A, came, B)).joined_by == joined


def test_a_users_blocks_are_followed_to_the_reply_after_them() -> None:
    w = Weaver(STRICT)
    say(w, request(A, Message("user", (Text("a"), Text("b")))), "said 0")
    assert fork_of(w, request(A, user("a\nb"), assistant("said 0"), B)).joined_by == "matching=canonical"
    assert fork_of(w, request(A, user("a\nb"), user("c"))).joined_by == "", "no reply was reached: nothing to go on from"


def realigned_chain() -> Tree:
    """t0 [1 2 | 3 4 5], t1 keeps one of t0's sampled ids: [1 2 3 6 | 7], t2 goes on from it."""
    w = Weaver()
    w.commit(w.tree.prepare(request(A)), assistant("x"), appended=ids([1, 2]), output=(3, 4, 5))
    w.commit(w.tree.prepare(request(A, assistant("x"), B)), assistant("y"), appended=ids([6]), output=(7,), kept=3)
    w.commit(w.tree.prepare(request(A, assistant("x"), B, assistant("y"), A)), assistant("z"), appended=ids([8]), output=(9,))
    return w.tree


def test_a_sequence_leaves_off_what_was_realigned() -> None:
    chain = realigned_chain().chain("t2")
    assert used(chain) == [1, 1, 1]
    assert [sequence(chain[: n + 1]).tolist() for n in range(3)] == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 6, 7, 8, 9]]
    assert sequence(()).tolist() == []


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ([1, 2, 3, 6, 7, 8, 9, 0], 3),
        ([1, 2, 3, 6, 7, 8, 0], 2),
        ([1, 2, 3, 6, 0], 0),
        ([1, 2, 3, 4, 5, 0], 1),
        ([1, 2, 3, 4], 0),
        ([1, 2], 0),
        ([], 0),
    ],
)
def test_a_prompt_goes_on_from_the_deepest_turn_that_it_begins_with(prompt: list[int], count: int) -> None:
    chain = realigned_chain().chain("t2")
    asked = ids(prompt)
    assert shared_turns(chain, agreement(sequence(chain), asked), asked) == count


def test_agreement_is_the_longest_common_prefix() -> None:
    for left, right in pairwise([[], [1], [1, 2], [1, 3], [2]]):
        common = 0
        while common < min(len(left), len(right)) and left[common] == right[common]:
            common += 1
        assert agreement(ids(left), ids(right)) == common


NEAREST: dict[str, tuple[list[Request], Request, ForkKind, str]] = {
    "of several tool sets, the one that goes deepest": (
        [request(A), request(A, tools=(LS,)), request(A, assistant("said 1"), B, tools=(LS,))],
        request(A, assistant("said 1"), B, assistant("said 2"), A, tools=(LS, CAT)),
        ForkKind.TOOLS_CHANGED,
        "tools added cat",
    ),
    "of several system messages, the one that was followed": (
        [request(system("main, Monday"), A), request(system("a sub-agent"), B)],
        request(system("main, Tuesday"), A, assistant("said 0"), B),
        ForkKind.SYSTEM_CHANGED,
        "system text differs at character 6: recorded 'main, Monday', came 'main, Tuesday'",
    ),
    "a deep history under other tools before a shallow one under the same": (
        [
            request(A, tools=(LS,)),
            request(A, assistant("said 0"), user("sum up")),
            request(A, assistant("said 0"), B, tools=(LS,)),
            request(A, assistant("said 0"), B, assistant("said 2"), A, tools=(LS,)),
        ],
        request(A, assistant("said 0"), B, assistant("said 2"), A, assistant("said 3"), user("sum up")),
        ForkKind.TOOLS_CHANGED,
        "tools removed ls",
    ),
    "the same tools before others as near": (
        [request(A, user("left"), tools=(LS,)), request(A, user("left"))],
        request(A, user("right")),
        ForkKind.HISTORY_CHANGED,
        "user text differs at character 0: recorded 'left', came 'right'",
    ),
    "a history that opens alike, whatever was opened since": (
        [request(A, tools=(LS,)), *(request(user(f"other {i}"), tools=(Tool(f"t{i}", "", "{}"),)) for i in range(20))],
        request(A, tools=(CAT,)),
        ForkKind.TOOLS_CHANGED,
        "tools added cat; removed ls",
    ),
}


@pytest.mark.parametrize(("before", "asked", "kind", "detail"), NEAREST.values(), ids=NEAREST)
def test_a_fork_is_compared_with_the_nearest_history(before: list[Request], asked: Request, kind: ForkKind, detail: str) -> None:
    w = Weaver()
    for i, earlier in enumerate(before):
        say(w, earlier, f"said {i}")
    fork = fork_of(w, asked)
    assert (fork.kind, fork.detail) == (kind, detail)


HUGE = 10_000_000


def sizes(fork: Fork) -> int:
    return len(fork.detail) + len(fork.recorded) + len(fork.came) + len(fork.joined_by)


LONG: dict[str, tuple[Request, Request]] = {
    "one tool's name": (request(A), request(A, tools=(Tool("n" * 5_000_000, "", "{}"),))),
    "many tools": (request(A), request(A, tools=tuple(Tool(f"{i}" + "n" * 5_000, "", "{}") for i in range(400)))),
    "a message": (request(A, user("x" * HUGE + "a")), request(A, user("x" * HUGE + "b"))),
    "a system message": (request(system("x" * HUGE + "a"), A), request(system("x" * HUGE + "b"), A)),
    "characters that are shown escaped": (request(A, user("\U000e0001" * 100 + "a")), request(A, user("\U000e0001" * 100 + "b"))),
    "arguments": (
        request(A, assistant("", call(json.dumps("x" * HUGE))), B),
        request(A, assistant("", call(json.dumps("x" * HUGE + "y"))), B),
    ),
}


@pytest.mark.parametrize(("before", "asked"), LONG.values(), ids=LONG)
def test_whatever_came_a_fork_is_short(before: Request, asked: Request) -> None:
    w = Weaver()
    w.say(before, assistant("said"))
    fork = explain(w.tree, w.tree.prepare(asked), ids([1, 2]), lambda tokens: "t" * HUGE)
    assert fork is not None
    assert sizes(fork) < 2_000


def test_a_long_reason_of_the_template_is_cut() -> None:
    fork = compare(Fork(ForkKind.TEMPLATE, 0, "e" * HUGE), ids([1]), ids([2]), lambda tokens: f"{tokens[0]}" * HUGE)
    assert sizes(fork) < 2_000
    assert fork.detail.startswith("eee")
    split = compare(Fork(ForkKind.TEMPLATE, 0, "e" * HUGE), ids([1]), ids([2]), lambda tokens: "s" * HUGE)
    assert sizes(split) < 2_000
    assert "in other tokens" in split.detail


def test_a_few_tools_are_named_and_the_rest_counted() -> None:
    w = Weaver()
    say(w, request(A), "said")
    fork = explain(w.tree, w.tree.prepare(request(A, tools=tuple(Tool(f"t{i}", "", "{}") for i in range(9)))))
    assert fork is not None
    assert fork.detail == "tools added t0, t1, t2, t3, t4 and 4 more"


class Counted(str):
    """A text that counts the characters that are looked at one by one."""

    looked = 0

    def __iter__(self) -> Iterator[str]:
        Counted.looked += len(self)
        return super().__iter__()

    def __getitem__(self, at: object) -> Counted:
        Counted.looked += isinstance(at, int)
        return Counted(super().__getitem__(at))  # type: ignore[index]


@given(st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_the_first_difference_is_found_by_slices(left: str, right: str) -> None:
    Counted.looked = 0
    found = first_difference(Counted(left), Counted(right))
    assert found == next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert Counted.looked == 0


def test_strict_joins_by_canonical_what_canonical_would_have_joined() -> None:
    """By a key, by the ids of its calls, by its beginning, from another branch of the strict tree."""
    t = assistant("", call('{"n":1}', "m0"))
    cases = {
        "minted ids": (t, Outcome.DELIVERED, assistant("", call('{"n":2}', "m0"))),
        "beginning": (assistant("I list the files"), Outcome.ABORTED, assistant("I list")),
    }
    for said, outcome, came in cases.values():
        w = Weaver(STRICT)
        w.say(request(A), said, outcome=outcome)
        fork = explain(w.tree, w.tree.prepare(request(A, came, B)))
        assert fork is not None
        assert fork.joined_by == "matching=canonical"
    w = Weaver(STRICT)
    w.say(request(A), assistant("said"))
    asked = request(A, assistant("said "), B)
    w.say(asked, assistant("again"))
    fork = explain(w.tree, w.tree.prepare(request(A, assistant("said "), B, assistant("again"), A)))
    assert fork is None, "the client's own copy was followed"
    fork = explain(w.tree, w.tree.prepare(request(A, assistant("said "), B)))
    assert fork is not None
    assert fork.joined_by == "matching=canonical", "the reply itself is on another branch"
