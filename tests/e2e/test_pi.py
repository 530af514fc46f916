"""pi from npm, through its harness, against the gateway on a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.agents import (
    ASIDE,
    END,
    assert_each_prompt_continues_the_one_before,
    assert_lawful,
    hermes,
    one_lineage,
    stage,
    trained_texts,
)
from turnloom.engine.pool import PATIENCE
from turnloom.harness import AgentOutcome, load_harness
from turnloom.harness.pi import ROUTES
from turnloom.testing.scripted_engine import Fault, Reply
from turnloom.types import CallStatus, Outcome

pytestmark = pytest.mark.node

MAKE = hermes("bash", command="printf 'one\\ntwo\\n' > notes.txt && wc -l notes.txt")
CHANGE = {"oldText": "two", "newText": "2"}


@pytest.mark.parametrize("api", ROUTES)
@pytest.mark.parametrize(("tokenizer", "thought"), [
    pytest.param("qwen2.5", "", id="plain"),
    pytest.param("qwen3", "<think>\nFirst the notes.\n</think>\n\n", id="reasoning"),
])  # fmt: skip
async def test_a_task_of_three_tools_is_one_exact_lineage(api: str, tokenizer: str, thought: str) -> None:
    async with stage(tokenizer) as s:
        calls = [f"I write the notes.\n{MAKE}", hermes("read", path="notes.txt"), hermes("edit", path="notes.txt", edits=[CHANGE])]
        s.replies = [f"{thought}{reply}" for reply in [*calls, "Changed."]]
        run = await s.run(load_harness("pi", api=api, args=["--mode", "json"]), "Make notes.txt, then change it.")
        assert run.outcome is AgentOutcome.COMPLETED, run
        assert await s.sandbox.read_file("notes.txt") == b"one\n2\n"

        turns = await s.turns()
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 4
        assert [t.fork for t in turns] == [None] * 4
        assert s.asides == [], "it makes no side requests"
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        assert await s.bench.handle.stats() == {"turns": 4, "tokens": sum(len(t.output) for t in turns), "lineages": 1, "forks": 0}
        replies = [event["message"] for event in events(run.stdout, "message_end") if event["message"]["role"] == "assistant"]
        assert [(r["usage"]["input"], r["usage"]["output"]) for r in replies] == [(t.prompt_len, len(t.output)) for t in turns]
        assert [r["stopReason"] for r in replies] == ["toolUse", "toolUse", "toolUse", "stop"]

        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]
        assert "2 notes.txt" in s.bench.tokenizer.decode(sample.token_ids.tolist())


@pytest.mark.parametrize("api", ROUTES)
async def test_fifteen_turns_are_one_lineage(api: str) -> None:
    async with stage() as s:
        await one_lineage(s, "pi", load_harness("pi", api=api))


@pytest.mark.parametrize("api", ROUTES)
async def test_a_call_that_comes_back_in_other_words_is_still_the_one_that_was_sent(api: str) -> None:
    """The model wrote the list of edits as text; pi reads it, and echoes the list under the id of the call that was sent."""
    async with stage() as s:
        s.replies = [MAKE, hermes("edit", path="notes.txt", edits=json.dumps([CHANGE])), "Changed."]
        run = await s.run(load_harness("pi", api=api), "Make notes.txt, then change it.")
        assert (run.exit_code, run.stdout) == (0, "Changed.\n")
        assert await s.sandbox.read_file("notes.txt") == b"one\n2\n"
        assert_each_prompt_continues_the_one_before(s.bench, await s.turns())
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]


@pytest.mark.parametrize("api", ROUTES)
async def test_a_malformed_call_that_is_echoed_is_bridged(api: str) -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "touch broken",}}\n</tool_call>'
    async with stage() as s:
        s.replies = [f"I try.\n{broken}\n{MAKE}", "Made."]
        run = await s.run(load_harness("pi", api=api), "Make notes.txt.")
        assert (run.exit_code, run.stdout) == (0, "Made.\n")
        assert (await s.sandbox.exec(["ls"])).out == "notes.txt\n"
        turns = await s.turns()
        assert [[c.status for c in t.calls] for t in turns] == [[CallStatus.INVALID_JSON, CallStatus.OK], []]
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]


@pytest.mark.parametrize("api", ROUTES)
async def test_a_full_context_makes_it_compact_and_go_on(api: str) -> None:
    """The words of our refusal are those that it compacts on, in each protocol."""
    async with stage(context=4_096) as s:
        s.replies = [*[hermes("bash", command=f"echo {n} >> notes.txt; yes notes are plain | head -150") for n in range(5)], "Done."]
        run = await s.run(load_harness("pi", api=api), "Make notes.txt, step by step.", context_tokens=4_096)
        assert run.outcome is AgentOutcome.COMPLETED, run
        assert s.given == len(s.replies), "it went on after the summary"
        assert s.asides, "it asked for no summary"
        *_, last = (body for body in s.bench.engine.requests if body not in s.asides)
        assert ASIDE in s.bench.tokenizer.decode(last["input_ids"]), "the summary stands in the new conversation"
        assert_lawful(await s.bench.handle.finish())


@pytest.mark.parametrize("api", ROUTES)
@pytest.mark.parametrize("fault", [Fault.HTTP_503, Fault.CUT, Fault.ABORT])
async def test_a_turn_whose_engine_gives_out_is_whole_to_the_agent(api: str, fault: Fault) -> None:
    """It asks once, and runs what was said on both sides of the seam."""
    said = f"I look at the notes, once more and again.\n{MAKE}"
    async with stage(patience=PATIENCE) as s:
        tokens = tuple(s.bench.tokenizer.encode(said, start=False))
        half = max(1, len(tokens) // 2)
        rest = said if fault is Fault.HTTP_503 else Reply(ids=tokens[half:], end=s.bench.engine.end_id)
        s.replies = [Reply(ids=tokens, fault=fault), rest, "Made."]
        run = await s.run(load_harness("pi", api=api), "Make notes.txt.")
        assert (run.exit_code, run.stdout) == (0, "Made.\n"), run.stderr
        assert (await s.sandbox.exec(["ls"])).out == "notes.txt\n"
        turns = await s.turns()
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 2
        assert [len(t.pieces) for t in turns] == [1 if fault is Fault.HTTP_503 else 2, 1]
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{said}{END}", f"Made.{END}"]


# Where an error shares a read with words, Google's SDK tells pi of an incomplete stream, and pi gives up.
FAILING = [(api, fault) for api in ROUTES for fault in (Fault.HTTP_503, Fault.CUT) if (api, fault) != ("google-generative-ai", Fault.CUT)]


@pytest.mark.parametrize(("api", "fault"), FAILING)
async def test_a_turn_that_fails_is_asked_for_again(api: str, fault: Fault) -> None:
    """Before the first byte and in the middle of a reply: what was said and lost neither runs nor trains."""
    async with stage() as s:
        lost = Reply(f"I look at the notes, once more and again.\n{hermes('bash', command='touch lost')}", fault=fault)
        s.replies = [MAKE, lost, hermes("read", path="notes.txt"), "Made."]
        run = await s.run(load_harness("pi", api=api), "Make notes.txt.")
        assert (run.exit_code, run.stdout) == (0, "Made.\n"), run.stderr
        assert (await s.sandbox.exec(["ls"])).out == "notes.txt\n"
        first, failed, *rest = await s.turns()
        assert failed.outcome is Outcome.FAILED
        assert_each_prompt_continues_the_one_before(s.bench, [first, *rest])
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in (MAKE, *s.replies[2:])]


def events(stdout: str, kind: str) -> list[dict[str, Any]]:
    """The events of this kind that `--mode json` wrote."""
    return [event for line in stdout.splitlines() if (event := json.loads(line))["type"] == kind]
