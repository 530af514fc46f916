"""Sub-agents and summaries of the agents that few headers tell apart: each is a conversation of its own, labelled for what it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.e2e.agents import assert_each_prompt_continues_the_one_before, assert_lawful, hermes, shell, stage
from turnloom.harness import AgentContext, AgentOutcome, Launch, load_harness, opencode
from turnloom.types import COMPACTION, MAIN, SIDE, SUBAGENT

pytestmark = pytest.mark.node

ORDER = "Count the sheep, please."


ORDERS = {
    "gemini-cli": hermes("invoke_agent", agent_name="generalist", prompt=ORDER),
    "opencode": hermes("task", description="Count", prompt=ORDER, subagent_type="general"),
    "qwen-code": hermes("agent", description="Count", prompt=ORDER, subagent_type="general-purpose"),
}


@pytest.mark.parametrize("agent", ORDERS)
async def test_a_sub_agent_is_a_lineage_of_its_own(agent: str) -> None:
    async with stage() as s:
        end = hermes("complete_task", result={"response": "One."}) if agent == "gemini-cli" else "One."
        s.replies = [ORDERS[agent], "One sheep was counted."]
        s.others = {ORDER: [shell(agent, "echo 1 > sheep.txt"), end]}
        run = await s.run(load_harness(agent), "Have the sheep counted.", context_tokens=131_072)
        assert run.outcome is AgentOutcome.COMPLETED, run
        assert "One sheep was counted." in run.stdout
        assert await s.sandbox.read_file("sheep.txt") == b"1\n"
        turns = await s.turns()
        assert [t.label for t in turns] == [MAIN, SUBAGENT, SUBAGENT, MAIN]
        for label in (MAIN, SUBAGENT):
            assert_each_prompt_continues_the_one_before(s.bench, [t for t in turns if t.label == label])
        assert (await s.bench.handle.stats())["lineages"] == 2
        assert_lawful(await s.bench.handle.finish())


@pytest.mark.parametrize("api", opencode.APIS)
async def test_the_titles_and_summaries_of_opencode_are_labelled(api: str) -> None:
    """It asks for a title unless it is given one, and for a summary when its context is nearly full."""

    class Untitled(opencode.OpenCode):
        def command(self, context: AgentContext) -> Launch:
            launch = super().command(context)
            return replace(launch, argv=tuple(word for word in launch.argv if word not in ("--title", "task")))

    async with stage() as s:
        s.is_aside = lambda prompt: "<tools>" not in prompt
        s.replies = [
            *[shell("opencode", f"echo {n} >> notes.txt; seq {n}000 {n}900") for n in range(1, 3)],
            *["Done."] * 4,
        ]  # It is told to go on.
        run = await s.run(Untitled(api=api), "Make notes.txt.", context_tokens=12_000, output_tokens=1024)
        assert run.outcome is AgentOutcome.COMPLETED, run
        turns = await s.turns()
        asides = {str(body["rid"])[:32] for body in s.asides}
        assert {t.label for t in turns if t.id not in asides} == {MAIN}
        title, *summaries = [t.label for t in turns if t.id in asides]
        assert title == SIDE
        assert set(summaries) == {COMPACTION}
        assert_lawful(await s.bench.handle.finish())


async def test_a_summary_of_qwen_code_is_labelled() -> None:
    async with stage() as s:
        s.is_aside = lambda prompt: "<tools>" not in prompt
        s.replies = [*[shell("qwen-code", f"echo {n} >> notes.txt; seq {n}000 {n}900") for n in range(1, 4)], "Done."]
        run = await s.run(load_harness("qwen-code"), "Make notes.txt.", context_tokens=24_000, output_tokens=1024)
        assert run.outcome is AgentOutcome.COMPLETED, run
        asides = {str(body["rid"])[:32] for body in s.asides}
        assert [t.label for t in await s.turns() if t.id in asides] == [COMPACTION]
        assert {t.label for t in await s.turns() if t.id not in asides} == {MAIN}
        assert_lawful(await s.bench.handle.finish())


async def test_qwen_code_goes_on_after_a_full_context() -> None:
    """Its next request then ends with a message of the assistant's, which it made up."""
    async with stage(context=17_000) as s:
        s.is_aside = lambda prompt: "<tools>" not in prompt
        s.replies = [*[shell("qwen-code", f"echo {n} >> notes.txt; seq {n}000 {n}200") for n in range(1, 5)], "Done."]
        run = await s.run(load_harness("qwen-code"), "Make notes.txt.", context_tokens=131_072, output_tokens=1024)
        assert (run.exit_code, run.stdout) == (0, "Done.\n"), run.stderr
        asides = {str(body["rid"])[:32] for body in s.asides}
        assert [t.label for t in await s.turns() if t.id in asides] == [COMPACTION]
        assert_lawful(await s.bench.handle.finish())
