"""Claude Code from npm, through its harness, against the gateway on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.e2e.agents import (
    ASIDE,
    END,
    Stage,
    assert_each_prompt_continues_the_one_before,
    assert_lawful,
    hermes,
    one_lineage,
    stage,
    trained_texts,
    until,
)
from turnloom.gateway.respond import Responder
from turnloom.harness import AgentOutcome, AgentRun, load_harness
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import COMPACTION, MAIN, SUBAGENT, CallStatus, ForkKind, Outcome

pytestmark = pytest.mark.node

MAKE = hermes("Bash", command="printf 'one\\ntwo\\n' > notes.txt && wc -l notes.txt", description="Make the notes")


def look(s: Stage) -> str:
    return hermes("Read", file_path=f"{s.sandbox.workdir}/notes.txt")


def said(run: AgentRun) -> dict[str, Any]:
    """The last word of a run with `--output-format json`."""
    assert run.outcome is AgentOutcome.COMPLETED, run
    found = json.loads(run.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("bare", "tokenizer", "thought"), [
    pytest.param(True, "qwen2.5", "", id="bare"),
    pytest.param(False, "qwen2.5", "", id="full-prompt"),
    pytest.param(True, "qwen3", "<think>\nFirst the notes.\n</think>\n\n", id="reasoning"),
])  # fmt: skip
async def test_a_task_of_two_tools_is_one_exact_lineage(bare: bool, tokenizer: str, thought: str) -> None:
    async with stage(tokenizer) as s:
        s.replies = [f"{thought}I write the notes.\n{MAKE}", f"{thought}{look(s)}", f"{thought}The notes have two lines."]
        run = await s.run(
            load_harness("claude-code", bare=bare, args=["--output-format", "json"]), "Make notes.txt.", context_tokens=131_072
        )
        end = said(run)
        assert (end["result"], end["num_turns"], end["is_error"]) == ("The notes have two lines.", 3, False)
        assert await s.sandbox.read_file("notes.txt") == b"one\ntwo\n"

        turns = await s.turns()
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 3
        assert [[c.status for c in t.calls] for t in turns] == [[CallStatus.OK], [CallStatus.OK], []]
        assert [t.fork for t in turns] == [None] * 3
        assert s.asides == [], "with these settings it makes no side requests"
        assert len(s.bench.engine.requests) == 3
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        assert await s.bench.handle.stats() == {"turns": 3, "tokens": sum(len(t.output) for t in turns), "lineages": 1, "forks": 0}
        assert end["usage"]["input_tokens"] == sum(t.prompt_len for t in turns)
        assert end["usage"]["output_tokens"] == sum(len(t.output) for t in turns)

        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]
        final = s.bench.tokenizer.decode(sample.token_ids.tolist())
        assert "2 notes.txt" in final, "the first tool's result is in the context of what follows"
        assert "1\tone\n2\ttwo" in final


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "full-prompt"])
async def test_fifteen_turns_are_one_lineage(bare: bool) -> None:
    async with stage() as s:
        await one_lineage(s, "claude-code", load_harness("claude-code", bare=bare))


@pytest.mark.parametrize(("name", "arguments", "effect"), [
    pytest.param("Edit", {"old_string": "two", "new_string": "2"}, b"one\n2\n", id="default-filled-in"),
    pytest.param("Edit", {"old_string": "two", "new_string": "2  ", "replace_all": False}, b"one\n2\n", id="blanks-trimmed"),
    pytest.param("Read", {"offset": "1"}, b"one\ntwo\n", id="number-out-of-text"),
])  # fmt: skip
async def test_a_call_that_comes_back_in_other_words_is_still_the_one_that_was_sent(name: str, arguments: Any, effect: bytes) -> None:
    """Claude Code repairs a call's arguments and echoes the repaired ones, under the id of the call that was sent."""
    async with stage() as s:
        s.replies = [MAKE, look(s), hermes(name, file_path=f"{s.sandbox.workdir}/notes.txt", **arguments), "Done."]
        run = await s.run(load_harness("claude-code"), "Make notes.txt, then go on.")
        assert (run.exit_code, run.stdout) == (0, "Done.\n")
        assert await s.sandbox.read_file("notes.txt") == effect
        assert_each_prompt_continues_the_one_before(s.bench, await s.turns())
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]


async def test_a_malformed_call_arrives_as_text_and_the_agent_survives() -> None:
    broken = '<tool_call>\n{"name": "Bash", "arguments": {"command": "touch broken",}}\n</tool_call>'
    async with stage() as s:
        s.replies = [f"I try.\n{broken}"]
        run = await s.run(load_harness("claude-code"), "Make notes.txt.")
        assert (run.exit_code, run.stdout) == (0, f"I try.\n{broken}\n")
        assert (await s.sandbox.exec(["ls"])).out == ""
        (turn,) = await s.turns()
        assert [(c.status, c.raw) for c in turn.calls] == [(CallStatus.INVALID_JSON, broken)]
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert sample.statuses["call_invalid_json"] == 1


async def test_a_malformed_call_that_is_echoed_is_bridged() -> None:
    broken = '<tool_call>\n{"name": "Bash", "arguments": {"command": "touch broken",}}\n</tool_call>'
    async with stage() as s:
        s.replies = [f"I try.\n{broken}\n{MAKE}", "Made."]
        run = await s.run(load_harness("claude-code"), "Make notes.txt.")
        assert (run.exit_code, run.stdout) == (0, "Made.\n")
        assert (await s.sandbox.exec(["ls"])).out == "notes.txt\n"
        turns = await s.turns()
        assert [[c.status for c in t.calls] for t in turns] == [[CallStatus.INVALID_JSON, CallStatus.OK], []]
        assert [t.fork for t in turns] == [None, None]
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]


async def test_a_killed_agent_leaves_an_orphaned_turn_and_an_open_session(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = asyncio.Event()
    write = Responder.event

    async def seen(self: Responder, event: Any, choice: int) -> None:
        await write(self, event, choice)
        shown.set()

    monkeypatch.setattr(Responder, "event", seen)
    async with stage() as s:
        s.replies = [Reply("one two three four five six seven eight", chunk=1, fault=Fault.STALL), f"Again.\n{MAKE}", "Made."]
        killed = asyncio.create_task(s.run(load_harness("claude-code"), "Make notes.txt."))
        await asyncio.wait([killed, asyncio.create_task(shown.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert not killed.done(), killed
        assert s.bench.engine.running == 1
        killed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killed

        session = await s.bench.session()
        await until(lambda: session.in_flight == 0 and s.bench.engine.running == 0)
        (orphan,) = await s.turns()
        assert (orphan.outcome, orphan.error) == (Outcome.ORPHANED, "the client left")
        assert 0 < len(orphan.output) < 9
        assert s.bench.engine.aborts == [{"rid": f"{orphan.id}0001"}]

        run = await s.run(load_harness("claude-code"), "Make notes.txt.")
        assert (run.exit_code, run.stdout) == (0, "Made.\n")
        assert await s.sandbox.read_file("notes.txt") == b"one\ntwo\n"
        turns = await s.turns()
        assert [t.outcome for t in turns] == [Outcome.ORPHANED, Outcome.DELIVERED, Outcome.DELIVERED]
        assert_each_prompt_continues_the_one_before(s.bench, turns[1:])
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies[1:]]
        assert [(u.turn_id, u.reason) for u in session.unroll().untrained] == [(orphan.id, "outcome orphaned")]


async def test_a_sub_agent_is_a_lineage_of_its_own() -> None:
    async with stage() as s:
        order = {"description": "Count sheep", "prompt": "Count the sheep, please.", "subagent_type": "general-purpose"}
        s.replies = [hermes("Agent", **order, run_in_background=False), MAKE, "Counted, and noted."]
        s.others = {"Count the sheep": [hermes("Bash", command="echo 1 > sheep.txt", description="Count"), "There is one."]}
        run = await s.run(load_harness("claude-code", bare=False), "Have the sheep counted.", context_tokens=131_072)
        assert (run.exit_code, run.stdout) == (0, "Counted, and noted.\n")
        assert await s.sandbox.read_file("sheep.txt") == b"1\n"
        turns = await s.turns()
        assert [t.label for t in turns] == [MAIN, SUBAGENT, SUBAGENT, MAIN, MAIN]
        for label in (MAIN, SUBAGENT):
            assert_each_prompt_continues_the_one_before(s.bench, [t for t in turns if t.label == label])
        assert (await s.bench.handle.stats())["lineages"] == 2
        assert [t.label for t in turns if t.fork] == [SUBAGENT], "where the second conversation begins"
        samples = await s.bench.handle.finish()
        assert_lawful(samples)
        assert len(samples) == 2


async def test_two_sub_agents_at_once_are_two_lineages() -> None:
    """Their requests interleave on one key."""
    async with stage() as s:
        orders = [f"Count the {herd}, please." for herd in ("sheep", "goats")]
        calls = [
            hermes("Agent", description="Count", prompt=order, subagent_type="general-purpose", run_in_background=False) for order in orders
        ]
        s.replies = ["\n".join(calls), "Two herds were counted."]
        s.others = {o: [MAKE.replace("notes", o.split()[2][:-1]), look(s), f"Counted: {o}"] for o in orders}
        run = await s.run(load_harness("claude-code", bare=False), "Have the herds counted.", context_tokens=131_072)
        assert (run.exit_code, run.stdout) == (0, "Two herds were counted.\n")
        turns = await s.turns()
        assert sorted(t.label for t in turns) == [MAIN] * 2 + [SUBAGENT] * 6
        assert (await s.bench.handle.stats())["lineages"] == 3
        assert [t.label for t in turns if t.fork] == [SUBAGENT] * 2
        samples = await s.bench.handle.finish()
        assert_lawful(samples)
        assert sorted(len(trained_texts(s.bench, sample)) for sample in samples) == [2, 3, 3]


async def test_tools_that_are_loaded_late_are_one_fork_with_a_reason() -> None:
    """They are inserted between the tools that were there, so the next prompt is another one from there on."""
    async with stage() as s:
        s.replies = [hermes("ToolSearch", query="select:NotebookEdit,WebFetch", max_results=5), MAKE, "Made."]
        run = await s.run(load_harness("claude-code", bare=False, tool_search=True), "Make notes.txt.", context_tokens=131_072)
        assert (run.exit_code, run.stdout) == (0, "Made.\n")
        assert await s.sandbox.read_file("notes.txt") == b"one\ntwo\n"
        first, second, third = await s.turns()
        assert (first.fork, third.fork) == (None, None)
        assert second.fork is not None
        assert (second.fork.kind, second.fork.detail) == (ForkKind.TOOLS_CHANGED, "tools added NotebookEdit, WebFetch")
        assert_each_prompt_continues_the_one_before(s.bench, [second, third])
        samples = await s.bench.handle.finish()
        assert_lawful(samples)
        trained = [text for sample in samples for text in trained_texts(s.bench, sample)]
        assert sorted(trained) == sorted(f"{reply}{END}" for reply in s.replies)


async def test_a_full_context_makes_it_compact_and_go_on() -> None:
    """The words of our refusal are those that it compacts on."""
    async with stage(context=6_000) as s:
        s.replies = [*[hermes("Bash", command=f"seq {n}000 {n}150", description="Count") for n in range(1, 8)], "Done."]
        run = await s.run(load_harness("claude-code"), "Count.", context_tokens=131_072)
        assert (run.exit_code, run.stdout) == (0, "Done.\n")
        labels = [t.label for t in await s.turns()]
        assert labels.count(MAIN) == len(s.replies)
        assert set(labels) == {MAIN, COMPACTION}
        assert_lawful(await s.bench.handle.finish())


async def test_a_compaction_is_lineages_of_their_own_and_a_fork_with_a_reason() -> None:
    """The full prompt in a small context: summaries branch off the conversation, which then starts anew from one of them."""
    async with stage() as s:
        s.replies = [f"I write the notes.\n{MAKE}", look(s), "The notes have two lines."]
        run = await s.run(load_harness("claude-code", bare=False), "Make notes.txt.", context_tokens=32_768)
        assert (run.exit_code, run.stdout) == (0, "The notes have two lines.\n")
        assert s.asides, "it asked for no summary"
        turns = await s.turns()
        summaries = {str(body["rid"])[:32] for body in s.asides}
        assert [t.label for t in turns] == [COMPACTION if t.id in summaries else MAIN for t in turns]
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * len(s.bench.engine.requests)
        first, second, after = (t for t in turns if t.id not in summaries)
        assert_each_prompt_continues_the_one_before(s.bench, [first, second])
        for summary in (t for t in turns if t.id not in {first.id, second.id, after.id}):
            base = first if summary.base == first.id else second
            assert_each_prompt_continues_the_one_before(s.bench, [base, summary])
        assert after.base is None
        assert after.fork is not None
        assert after.fork.kind is ForkKind.NEW_CONVERSATION
        assert after.fork.detail

        samples = await s.bench.handle.finish()
        assert_lawful(samples)
        trained = sorted(text for sample in samples for text in trained_texts(s.bench, sample))
        assert trained == sorted(f"{reply}{END}" for reply in [*s.replies, *[ASIDE] * len(s.asides)]), "every turn trains, once"
