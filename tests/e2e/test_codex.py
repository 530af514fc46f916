"""Codex from npm, through its harness, against the gateway on a scripted engine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.agents import (
    ASIDE,
    END,
    assert_each_prompt_continues_the_one_before,
    assert_lawful,
    hermes,
    one_lineage,
    shell,
    stage,
    trained_texts,
)
from turnloom.harness import AgentOutcome, AgentRun, load_harness
from turnloom.types import COMPACTION, MAIN, SUBAGENT, CallStatus, Outcome

pytestmark = pytest.mark.node

MAKE = shell("codex", "printf 'one\\ntwo\\n' > notes.txt && wc -l notes.txt")
WINDOW = 131_072


def events(run: AgentRun, kind: str) -> list[dict[str, Any]]:
    """The events of this kind that `--json` wrote."""
    return [event for line in run.stdout.splitlines() if (event := json.loads(line))["type"] == kind]


@pytest.mark.parametrize(("tokenizer", "thought"), [
    pytest.param("qwen2.5", "", id="plain"),
    pytest.param("qwen3", "<think>\nFirst the notes.\n</think>\n\n", id="reasoning"),
])  # fmt: skip
async def test_a_task_of_tools_is_one_exact_lineage(tokenizer: str, thought: str) -> None:
    async with stage(tokenizer) as s:
        both = f"I look.\n{shell('codex', 'cat notes.txt')}\n{shell('codex', 'ls')}"
        s.replies = [f"{thought}{reply}" for reply in (f"I write the notes.\n{MAKE}", both, "The notes have two lines.")]
        run = await s.run(load_harness("codex", args=["--json"]), "Make notes.txt.", context_tokens=WINDOW)
        assert run.outcome is AgentOutcome.COMPLETED, run
        assert await s.sandbox.read_file("notes.txt") == b"one\ntwo\n"

        turns = await s.turns()
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 3
        assert [[c.status for c in t.calls] for t in turns] == [[CallStatus.OK], [CallStatus.OK] * 2, []]
        assert [t.fork for t in turns] == [None] * 3
        assert s.asides == [], "with these settings it makes no side requests"
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        assert await s.bench.handle.stats() == {"turns": 3, "tokens": sum(len(t.output) for t in turns), "lineages": 1, "forks": 0}
        (end,) = events(run, "turn.completed")
        assert end["usage"]["input_tokens"] == sum(t.prompt_len for t in turns)
        assert end["usage"]["output_tokens"] == sum(len(t.output) for t in turns)
        said = [event["item"] for event in events(run, "item.completed")]
        assert [item["text"] for item in said if item["type"] == "agent_message"][-1] == "The notes have two lines."

        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]
        assert "2 notes.txt" in s.bench.tokenizer.decode(sample.token_ids.tolist())


PATCH = "*** Begin Patch\n*** Add File: notes.txt\n+one\n+two\n*** End Patch\n"


@pytest.mark.parametrize(("model", "call"), [
    pytest.param("gpt-5.5", hermes("apply_patch", input=PATCH), id="freeform-patch"),
    pytest.param(
        "gpt-6-sol",
        hermes("functions__exec", input="text((await tools.exec_command({cmd: \"printf 'one\\\\ntwo\\\\n' > notes.txt\"})).output);"),
        id="freeform-script-in-a-namespace-of-additional-tools",
    ),
])  # fmt: skip
async def test_a_freeform_tool_gets_its_text_as_it_is(model: str, call: str) -> None:
    """A model name that Codex knows makes it send what that model is used to."""
    async with stage() as s:
        s.replies = [f"I write the notes.\n{call}", "Written."]
        run = await s.run(load_harness("codex"), "Make notes.txt.", context_tokens=WINDOW, model=model)
        assert (run.exit_code, run.stdout) == (0, "Written.\n"), run.stderr
        assert await s.sandbox.read_file("notes.txt") == b"one\ntwo\n"
        turns = await s.turns()
        assert [[c.status for c in t.calls] for t in turns] == [[CallStatus.OK], []]
        assert [t.fork for t in turns] == [None, None]
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]


async def test_a_malformed_call_that_is_echoed_is_bridged() -> None:
    broken = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "touch broken",}}\n</tool_call>'
    async with stage() as s:
        s.replies = [f"I try.\n{broken}\n{MAKE}", "Made."]
        run = await s.run(load_harness("codex"), "Make notes.txt.", context_tokens=WINDOW)
        assert (run.exit_code, run.stdout) == (0, "Made.\n")
        assert (await s.sandbox.exec(["ls"])).out == "notes.txt\n"
        turns = await s.turns()
        assert [[c.status for c in t.calls] for t in turns] == [[CallStatus.INVALID_JSON, CallStatus.OK], []]
        assert_each_prompt_continues_the_one_before(s.bench, turns)
        (sample,) = await s.bench.handle.finish()
        assert_lawful([sample])
        assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]


async def test_a_sub_agent_is_a_lineage_of_its_own() -> None:
    """It runs beside its parent, on the same key; its tools are the namespaced ones less those that make agents."""
    async with stage() as s:
        s.is_aside = lambda prompt: False  # The end of a sub-agent is told to its parent in words of the client's own.
        s.replies = [hermes("multi_agent_v1__spawn_agent", message="Count the sheep, please."), wait_for_it, "One sheep was counted."]
        s.others = {"Count the sheep": [shell("codex", "echo 1 > sheep.txt"), "There is one."]}
        run = await s.run(load_harness("codex", sub_agents=True), "Have the sheep counted.", context_tokens=WINDOW)
        assert (run.exit_code, run.stdout) == (0, "One sheep was counted.\n")
        assert await s.sandbox.read_file("sheep.txt") == b"1\n"
        turns = await s.turns()
        assert sorted(t.label for t in turns) == [MAIN] * 3 + [SUBAGENT] * 2
        for label in (MAIN, SUBAGENT):
            assert_each_prompt_continues_the_one_before(s.bench, [t for t in turns if t.label == label])
        assert (await s.bench.handle.stats())["lineages"] == 2
        assert [t.label for t in turns if t.fork] == [SUBAGENT], "where the second conversation begins"
        samples = await s.bench.handle.finish()
        assert_lawful(samples)
        assert len(samples) == 2


def wait_for_it(prompt: str) -> str:
    """The call that waits for the agent whose id the prompt holds."""
    agent = re.search(r"agent_id\W+([0-9a-f-]{36})", prompt)
    assert agent is not None, prompt[-400:]
    return hermes("multi_agent_v1__wait_agent", targets=[agent[1]], timeout_ms=20_000)


async def test_a_websocket_is_refused_once_and_it_falls_back() -> None:
    async with stage() as s:
        s.replies = [MAKE, "Made."]
        harness = load_harness("codex", args=["-c", "model_providers.turnloom.supports_websockets=true"])
        run = await s.run(harness, "Make notes.txt.", context_tokens=WINDOW)
        assert (run.exit_code, run.stdout) == (0, "Made.\n")
        assert run.stderr.count("failed to connect to Responses WebSocket") == 1
        assert_each_prompt_continues_the_one_before(s.bench, await s.turns())


async def test_a_compaction_is_labelled_and_the_conversation_starts_anew() -> None:
    """Codex counts by the usage it is told: the reply that goes over its window is kept, and then it asks for a summary."""
    async with stage() as s:
        s.replies = [MAKE, shell("codex", "seq 1 1500"), shell("codex", "cat notes.txt"), "The notes have two lines."]
        run = await s.run(load_harness("codex"), "Make notes.txt.", context_tokens=10_240)
        assert (run.exit_code, run.stdout) == (0, "The notes have two lines.\n")
        turns = await s.turns()
        assert [t.outcome for t in turns] == [Outcome.DELIVERED] * 5
        assert [t.label for t in turns] == [MAIN] * 3 + [COMPACTION, MAIN]
        assert len(s.asides) == 1
        *before, _, after = turns
        assert_each_prompt_continues_the_one_before(s.bench, before)
        assert after.base is None
        assert after.fork is not None
        samples = await s.bench.handle.finish()
        assert_lawful(samples)
        trained = sorted(text for sample in samples for text in trained_texts(s.bench, sample))
        assert trained == sorted(f"{reply}{END}" for reply in [*s.replies, ASIDE]), "every turn trains, once; the summary too"


async def test_fifteen_turns_are_one_lineage() -> None:
    async with stage() as s:
        await one_lineage(s, "codex", load_harness("codex"))
