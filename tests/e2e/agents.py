"""Real agents against a real gateway on a scripted engine: running one, and what must hold of its session afterwards."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest

from tests.support.gateways import NONE, Bench, bench
from turnloom.engine.pool import Patience
from turnloom.export.check import check_samples
from turnloom.export.report import format_report
from turnloom.harness import AgentContext, AgentOutcome, AgentRun, Harness, run_agent
from turnloom.sandbox import LocalSandbox
from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import MAIN, Outcome, Sample, Turn

OLDEST_NODE = 18
END = "<|im_end|>"
ASIDE = "A few words."


def require_node() -> None:
    """Skip, and say why, only where no usable Node.js is; what goes wrong after that is a failure."""
    node = shutil.which("node")
    if node is None:
        pytest.skip(f"a real agent needs Node.js {OLDEST_NODE} or newer, and there is no `node` on PATH")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"v(\d+)\.", said)
    if found is None or int(found[1]) < OLDEST_NODE:
        pytest.skip(f"a real agent needs Node.js {OLDEST_NODE} or newer, and `node` on PATH is {said.strip()!r}")


def hermes(name: str, **arguments: Any) -> str:
    """A tool call in the words that Qwen's templates ask for."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SHELLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "claude-agent-sdk": ("Bash", "command", {"description": "Do it"}),
    "claude-code": ("Bash", "command", {"description": "Do it"}),
    "codex": ("exec_command", "cmd", {}),
    "continue-cn": ("Bash", "command", {}),
    "gemini-cli": ("run_shell_command", "command", {}),
    "mini-swe-agent": ("bash", "command", {}),
    "openai-agents": ("bash", "command", {}),
    "opencode": ("bash", "command", {"description": "Do it"}),
    "pi": ("bash", "command", {}),
    "qwen-code": ("run_shell_command", "command", {"is_background": False}),
}
"""What each agent calls its shell, and the shell's command; what else the call must hold."""


def shell(agent: str, command: str) -> str:
    """A call of this agent's shell."""
    name, parameter, more = SHELLS[agent]
    return hermes(name, **{parameter: command, **more})


@dataclass
class Stage:
    """A gateway, its engine, a session and a sandbox for the agent. `replies` is what the main conversation is answered, in order.

    A reply may be a function of the prompt's text; it then gives way to what it returned. `others` are conversations with
    scripts of their own, each told by words that stand in a message of its user's.
    A request of none of these that `is_aside` is a side request; it is kept in `asides` and answered with `ASIDE`. As long as
    nothing else is said, that is one that opens no conversation, and whose last message is the client's own words, not a
    tool's result.
    """

    sandbox: LocalSandbox
    replies: list[Any] = field(default_factory=list)
    others: dict[str, list[Reply | str]] = field(default_factory=dict)
    is_aside: Callable[[str], bool] | None = None
    asides: list[dict[str, Any]] = field(default_factory=list)
    given: int = 0
    bench: Bench = field(init=False)

    def answer(self, body: dict[str, Any], index: int) -> Reply | str:
        prompt = self.bench.tokenizer.decode(body["input_ids"])
        messages = prompt.split("<|im_start|>")[1:]
        users = [message for message in messages if message.startswith("user") and "<tool_response>" not in message]
        for words, replies in self.others.items():
            if any(words in message for message in users):
                assert replies, f"the conversation about {words!r} asked once more than its script answers"
                return replies.pop(0)
        if (self.is_aside or self._interrupts)(prompt):
            self.asides.append(body)
            return ASIDE
        if self.given == len(self.replies):
            raise AssertionError(f"the agent asked once more than the script answers: …{prompt[-400:]!r}")
        self.given += 1
        reply = self.replies[self.given - 1]
        if callable(reply):
            reply = self.replies[self.given - 1] = reply(prompt)
        return cast(Reply | str, reply)

    def _interrupts(self, prompt: str) -> bool:
        *_, last, _ = messages = prompt.split("<|im_start|>")[1:]
        begun = self.given and any(message.startswith("assistant") for message in messages[:-1])
        opens = not begun and "<tools>" in prompt
        return not opens and last.startswith("user") and not last.rstrip().endswith(f"</tool_response>{END}")

    async def run(self, harness: Harness, prompt: str, **changes: Any) -> AgentRun:
        """The agent on this session. Raises what the installation raises: a failed one is a failure."""
        b = self.bench
        given: dict[str, Any] = {
            "base_url": b.handle.base_url,
            "api_key": b.handle.key,
            "prompt": prompt,
            "session_uuid": str(uuid.uuid4()),
        }
        given |= {"workdir": self.sandbox.workdir, "home": self.sandbox.home, "program": await harness.install(self.sandbox)}
        return await run_agent(harness, self.sandbox, AgentContext(**{**given, "time_budget": 120.0, **changes}))

    async def turns(self) -> list[Turn]:
        return list((await self.bench.session()).tree.turns.values())


def steps(agent: str, turns: int) -> list[str]:
    """`turns` replies, each with a call but the last; the second with two at once."""
    calls = [f"Step {i}.\n{shell(agent, f'echo {i} >> notes.txt; wc -l notes.txt')}" for i in range(1, turns)]
    calls[1] += f"\n{shell(agent, 'cat notes.txt')}"
    if agent == "mini-swe-agent":  # It ends with a command, not with words.
        return [*calls, f"Done.\n{shell(agent, 'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT')}"]
    return [*calls, "Done."]


async def one_lineage(s: Stage, agent: str, harness: Harness, turns: int = 15) -> None:
    """The agent takes `turns` turns, each of which continues the one before, and one sample trains them all."""
    s.replies = steps(agent, turns)
    run = await s.run(harness, "Make notes.txt, step by step.", context_tokens=131_072)
    assert run.outcome is AgentOutcome.COMPLETED, run
    assert await s.sandbox.read_file("notes.txt") == "".join(f"{i}\n" for i in range(1, turns)).encode()
    taken = await s.turns()
    assert [(t.outcome, t.fork, t.label) for t in taken] == [(Outcome.DELIVERED, None, MAIN)] * turns
    assert s.asides == []
    assert_each_prompt_continues_the_one_before(s.bench, taken)
    stats = await s.bench.handle.stats()
    assert (stats["turns"], stats["lineages"], stats["forks"]) == (turns, 1, 0)
    (sample,) = await s.bench.handle.finish()
    assert_lawful([sample])
    assert trained_texts(s.bench, sample) == [f"{reply}{END}" for reply in s.replies]


@asynccontextmanager
async def stage(
    tokenizer: str = "qwen2.5", *, node: bool = True, context: int = 131_072, patience: Patience = NONE
) -> AsyncIterator[Stage]:
    if node:
        require_node()
    qwen = qwen_tokenizer(tokenizer)
    sandbox = LocalSandbox(grace=0.5)
    await sandbox.start()
    try:
        made = Stage(sandbox)
        engine = ScriptedEngine(made.answer, tokenizer=qwen, end_id=qwen.control_tokens[END], context_length=context)
        async with bench(tokenizer=qwen, engine=engine, patience=patience) as made.bench:
            yield made
    finally:
        await sandbox.stop()


async def until(condition: Callable[[], object]) -> None:
    """Wait for it, ten seconds at most."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def assert_each_prompt_continues_the_one_before(b: Bench, turns: Sequence[Turn]) -> None:
    """What the engine was sent, request by request: the earlier prompt, the earlier output, and only then anything new."""
    sent = {str(body["rid"])[:32]: body["input_ids"] for body in reversed(b.engine.requests)}
    for earlier, later in pairwise(turns):
        held = sent[earlier.id] + earlier.output.tolist()
        assert sent[later.id][: len(held)] == held, f"turn {later.index} left turn {earlier.index}: {later.fork or later.base}"
        assert len(sent[later.id]) > len(held)
        assert later.base == earlier.id


def assert_lawful(samples: Sequence[Sample]) -> None:
    report = check_samples(samples)
    assert report.samples == len(samples) > 0
    assert report.ok, "\n".join(format_report(report))


def trained_texts(b: Bench, sample: Sample) -> list[str]:
    """The text of each turn that trains in this sample."""
    turns = sorted({int(t) for t in sample.turn_index[sample.loss_mask == 1]})
    return [b.tokenizer.decode(sample.token_ids[(sample.turn_index == t) & (sample.loss_mask == 1)].tolist()) for t in turns]
