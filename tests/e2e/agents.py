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
from typing import Any

import pytest

from tests.support.gateways import Bench, bench
from turnloom.export.check import check_samples
from turnloom.export.report import format_report
from turnloom.harness import AgentContext, AgentRun, Harness, run_agent
from turnloom.sandbox import LocalSandbox
from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Sample, Turn

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


@dataclass
class Stage:
    """A gateway, its engine, a session and a sandbox for the agent. `replies` is what the main conversation is answered, in order.

    A request that opens no conversation and whose last message is the client's own words, not a tool's result, is a side
    request; it is kept in `asides` and answered with `ASIDE`.
    """

    sandbox: LocalSandbox
    replies: list[Reply | str] = field(default_factory=list)
    asides: list[dict[str, Any]] = field(default_factory=list)
    given: int = 0
    bench: Bench = field(init=False)

    def answer(self, body: dict[str, Any], index: int) -> Reply | str:
        prompt = self.bench.tokenizer.decode(body["input_ids"])
        *_, last, _ = messages = prompt.split("<|im_start|>")[1:]
        opens = not any(message.startswith("assistant") for message in messages[:-1]) and "<tools>" in prompt
        if not opens and last.startswith("user") and not last.rstrip().endswith(f"</tool_response>{END}"):
            self.asides.append(body)
            return ASIDE
        if self.given == len(self.replies):
            raise AssertionError(f"the agent asked once more than the script answers: …{prompt[-400:]!r}")
        self.given += 1
        return self.replies[self.given - 1]

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


@asynccontextmanager
async def stage(tokenizer: str = "qwen2.5", *, node: bool = True) -> AsyncIterator[Stage]:
    if node:
        require_node()
    qwen = qwen_tokenizer(tokenizer)
    sandbox = LocalSandbox(grace=0.5)
    await sandbox.start()
    try:
        made = Stage(sandbox)
        engine = ScriptedEngine(made.answer, tokenizer=qwen, end_id=qwen.control_tokens[END], context_length=131_072)
        async with bench(tokenizer=qwen, engine=engine) as made.bench:
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
    sent = {str(body["rid"]): body["input_ids"] for body in b.engine.requests}
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
