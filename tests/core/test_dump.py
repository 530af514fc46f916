"""What a person is shown of a tree: every line of it, and the counts of a status page."""

from __future__ import annotations

from tests.support.histories import CAT, LS, Weaver, assistant, call, request, system, user
from turnloom.core.dump import clip, dump_samples, dump_tree, escaped, runs, shown, summary
from turnloom.core.unroll import Origin, unroll
from turnloom.types import CallRecord, CallStatus, Finish, FinishReason, Fork, ForkKind, Outcome


def woven() -> Weaver:
    """A branch after one reply, a turn nobody got, a request with no tools."""
    w = Weaver()
    asked = request(system("s"), user("a"), tools=(LS, CAT))
    bad = CallRecord(CallStatus.INVALID_JSON, "ls", "raw", 0, 3)
    w.say(asked, assistant("I list", call('{"p":1}')), calls=(bad, CallRecord(CallStatus.OK, "ls", "{}", 3, 4)))
    follow = (*asked.messages, assistant("I list", call('{"p":1}')))
    branched = Fork(ForkKind.BRANCHED, 3, "other words")
    w.say(request(*follow, user("b"), tools=(LS, CAT)), assistant("B"), output=(1, 2, 3))
    w.say(request(*follow, user("c"), tools=(LS, CAT)), assistant("C"), fork=branched, outcome=Outcome.FAILED, error="broke\n")
    w.say(request(user("z")), assistant("Z"), fork=Fork(ForkKind.TOOLS_CHANGED, 0, "removed"), finish=Finish(FinishReason.LENGTH))
    w.say(request(user("y")), assistant("Y"), fork=branched, outcome=Outcome.ORPHANED)
    return w


def test_every_message_stands_on_one_line_and_every_turn_under_its_reply() -> None:
    assert dump_tree(woven().tree) == [
        "tools: ls, cat",
        "   system    s",
        "   user      a",
        ' * assistant I list → ls({"p":1})',
        "             turn 0 · 2 prompt (2 encoded) · 2 sampled · stop · call invalid_json",
        "     user      b",
        " *   assistant B",
        "               turn 1 · 6 prompt (bridge +2) · 3 sampled · stop",
        "     user      c",
        " *   assistant C",
        "               turn 2 · 6 prompt (fork: branched at message 3, bridge +2) · 2 sampled · stop · failed: broke\\n",
        "tools: none",
        "   user      z",
        " * assistant Z",
        "             turn 3 · 2 prompt (fork: tools_changed at message 0, 2 encoded) · 2 sampled · length",
        "   user      y",
        " * assistant Y",
        "             turn 4 · 2 prompt (fork: branched at message 3, 2 encoded) · 2 sampled · stop · orphaned",
    ]


def test_lines_are_cut_at_the_width() -> None:
    lines = dump_tree(woven().tree, width=6)
    assert lines[0] == "tools: ls, c…"
    assert lines[3] == " * assistant I lis…"
    assert clip("abc", 3) == "abc"
    assert clip("abcd", 3) == "ab…"


def test_counts_are_exact() -> None:
    assert summary(woven().tree) == {
        "turns": 5,
        "outcomes": {"delivered": 3, "failed": 1, "orphaned": 1},
        "turn_labels": {"main": 5},
        "prompt_tokens": 2 + 6 + 6 + 2 + 2,
        "sampled_tokens": 2 + 3 + 2 + 2 + 2,
        "lineages": 4,
        "forks": {"branched": 2, "tools_changed": 1},
        "reencoded_tokens": {"branched": 4, "tools_changed": 2},
    }


def test_reasoning_is_counted_and_calls_follow_the_words() -> None:
    assert shown(assistant("hi", thought="hmm")) == "[thinks 3 chars] hi"
    assert shown(assistant("", call("{}"), call('{"a":1}', name="cat"))) == '→ ls({}) → cat({"a":1})'
    assert shown(assistant("hi", call("{}"))) == "hi → ls({})"


def test_nothing_that_moves_the_cursor_is_shown() -> None:
    assert escaped("a\x1b[2Jé\n\ud800\u202e世") == "a\\x1b[2Jé\\n\\ud800\\u202e世"


def test_samples_are_shown_without_text_where_no_tokenizer_is_there() -> None:
    w = woven()
    lines = dump_samples(unroll(w.tree, Origin("s")))
    assert lines[:2] == ["sample 0: 9 tokens, 5 trained, weight 0.5", "   context [0, 2) "]
    assert runs([]) == []
    assert runs([1, 1, 0, 1]) == [(0, 2), (2, 3), (3, 4)]
