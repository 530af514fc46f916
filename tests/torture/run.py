"""Rounds of `kill -9` under agents that ask again. The gateways are `turnloom serve`; the engine and the agents outlive them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.torture.agents import ADMIN, Agent, Manner
from tests.torture.streams import STREAMS
from tests.torture.verdict import Verdict
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer

AGENTS = 16
MANNERS: tuple[Manner, ...] = ("counts", "keys", "silent")


@dataclass
class Report:
    rounds: int
    agents: int
    seconds: float
    counted: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        head = f"{self.rounds} rounds of kill -9 under {self.agents} agents in {self.seconds:.0f} s"
        return [head, *(f"  {name:<32}{self.counted[name]:>7}" for name in sorted(self.counted)), *self.violations, self.verdict]

    @property
    def verdict(self) -> str:
        return f"{len(self.violations)} violations"


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def of(cls, *words: str) -> Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *words, stdin=pipe, stdout=pipe, env=_environment(), start_new_session=True
        )
        return cls(process)

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def end(self) -> None:
        """It and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "TURNLOOM_ADMIN_KEY": ADMIN, "PYTHONUNBUFFERED": "1"}


class Gateways:
    """One after the other, at one port and on one store."""

    def __init__(self, nursery: Process, words: Sequence[str], log: Path, seed: int, sabotage: str) -> None:
        self.nursery, self.words, self.log, self.sabotage = nursery, list(words), log, sabotage
        self.rng = random.Random(seed)
        self.pid = 0
        self.kills: list[float] = []

    async def start(self, *, wait: bool = True) -> None:
        order = {"words": self.words, "log": str(self.log), "seed": self.rng.getrandbits(32), "sabotage": self.sabotage}
        self.nursery.tell(json.dumps(order))
        self.pid = int(await self.nursery.line())
        while wait and "serving on" not in (said := await self.nursery.line()):
            if said.startswith("ended") or not said:
                raise RuntimeError(f"the gateway did not start: {self.log.read_text()[-2000:]}")

    async def stop(self, how: signal.Signals) -> None:
        if how is signal.SIGKILL:
            self.kills.append(time.time())
        os.kill(self.pid, how)
        self.nursery.tell("")
        while not (await self.nursery.line()).startswith("ended"):
            pass


async def torture(
    folder: Path, *, rounds: int, seed: int = 1, sabotage: str = "", agents: int = AGENTS, longest: float = 0.9, patience: float = 120
) -> Report:
    """Kill, start again, and in the end look at everything. `sabotage` names an error that is put into each gateway.

    `patience` is how many seconds the agents have after the last round, `longest` how long a round is at most.
    """
    began, rng = time.monotonic(), random.Random(seed)
    store, log, tokenizer = folder / "store.db", folder / "engine.jsonl", str(qwen_directory("qwen2.5"))
    engine = await Process.of("tests.torture.engine", "--tokenizer", tokenizer, "--log", str(log), "--seed", str(seed))
    nursery = await Process.of("tests.torture.nursery", tokenizer)
    try:
        port = _free_port()
        words = ["serve", "--engine", await engine.line(), "--tokenizer", tokenizer, "--store", str(store), "--port", str(port)]
        gateways = Gateways(nursery, [*words, "--loaded-sessions", "4"], folder / "gateway.log", seed, sabotage)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            crowd = [_agent(number, rng, http, f"http://127.0.0.1:{port}") for number in range(agents)]
            counted, lost = await _rounds(gateways, crowd, rng, rounds, longest, patience)
    finally:
        await nursery.end()
        await engine.end()
    verdict = Verdict(store, log, gateways.kills, qwen_tokenizer("qwen2.5"))
    await verdict.give(crowd)
    said = [f"the gateway logged: {line}" for line in gateways.log.read_text().splitlines() if "Traceback" in line or " ERROR " in line]
    return Report(rounds, agents, time.monotonic() - began, counted + verdict.counted, [*lost, *said, *verdict.found])


def _agent(number: int, rng: random.Random, http: aiohttp.ClientSession, base: str) -> Agent:
    manner = MANNERS[number // len(STREAMS) % len(MANNERS)]
    return Agent(number, list(STREAMS)[number % len(STREAMS)], manner, rng.random() < 0.7, random.Random(rng.getrandbits(32)), http, base)


async def _rounds(
    gateways: Gateways, agents: Sequence[Agent], rng: random.Random, rounds: int, longest: float, patience: float
) -> tuple[Counter[str], list[str]]:
    """What the gateways counted themselves, as far as they were asked before they died, and what went wrong on the way."""
    counted: Counter[str] = Counter()
    stop = asyncio.Event()
    await gateways.start()
    talks = [asyncio.create_task(agent.run(stop)) for agent in agents]
    for _ in range(rounds):
        await asyncio.wait(talks, timeout=rng.random() * longest, return_when=asyncio.FIRST_EXCEPTION)
        counted += await _repeats(agents[0])
        for agent in agents:
            agent.struck()
        await gateways.stop(signal.SIGKILL)
        if rng.random() < 0.1:
            counted["killed: starting"] += 1
            await gateways.start(wait=False)
            await asyncio.sleep(rng.random() * 0.5)
            await gateways.stop(signal.SIGKILL)
        await gateways.start()
    stop.set()
    ended, stuck = await asyncio.wait(talks, timeout=patience)
    counted += await _repeats(agents[0])
    for talk in stuck:
        talk.cancel()
    await gateways.stop(signal.SIGTERM)
    lost = [f"an agent gave up: {error}" for talk in ended if (error := talk.exception()) is not None]
    return counted, [*lost, *([f"{len(stuck)} agents never got their reply"] if stuck else [])]


async def _repeats(agent: Agent) -> Counter[str]:
    found: Counter[str] = Counter()
    with contextlib.suppress(aiohttp.ClientError, ConnectionError, asyncio.TimeoutError):
        async with agent.http.get(f"{agent.base}/metrics", timeout=aiohttp.ClientTimeout(1)) as answer:
            for name, value in re.findall(r'turnloom_repeats_total\{answer="(\w+)"\} (\d+)', await answer.text()):
                found[f"answered: {name}"] += int(value)
    return found


def _free_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def main(arguments: Any) -> int:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="turnloom-torture-") as folder:
        report = asyncio.run(torture(Path(folder), rounds=arguments.rounds, seed=arguments.seed, sabotage=arguments.sabotage))
    print("\n".join(report.lines()))
    return int(bool(report.violations))
