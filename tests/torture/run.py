"""Rounds of `kill -9` under agents that ask again. The gateways are `turnloom serve`; the engine and the agents outlive them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.torture.agents import Agent
from tests.torture.streams import STREAMS
from tests.torture.verdict import violations
from turnloom import Client
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer

ADMIN = "admin-secret"
SESSIONS = 16


@dataclass
class Report:
    rounds: int
    seconds: float
    counted: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        names = ("delivered", "orphaned", "aborted", "failed", "resumed", "interrupted", "retries", "left")
        figures = ", ".join(f"{self.counted[name]} {name}" for name in names)
        head = f"{self.rounds} rounds of kill -9 under {SESSIONS} sessions in {self.seconds:.0f} s: {figures}"
        return [head, *self.violations, f"{len(self.violations)} violations"]


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

    async def start(self) -> None:
        order = {"words": self.words, "log": str(self.log), "seed": self.rng.getrandbits(32), "sabotage": self.sabotage}
        self.nursery.tell(json.dumps(order))
        self.pid = int(await self.nursery.line())
        while "serving on" not in (said := await self.nursery.line()):
            if said.startswith("ended") or not said:
                raise RuntimeError(f"the gateway did not start: {self.log.read_text()[-2000:]}")

    async def stop(self, how: signal.Signals) -> None:
        os.kill(self.pid, how)
        self.nursery.tell("")
        while not (await self.nursery.line()).startswith("ended"):
            pass


async def torture(folder: Path, *, rounds: int, seed: int = 1, sabotage: str = "", longest: float = 0.9, patience: float = 120) -> Report:
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
        gateways = Gateways(nursery, words, folder / "gateway.log", seed, sabotage)
        await gateways.start()
        base = f"http://127.0.0.1:{port}"
        agents = [
            Agent(i, list(STREAMS)[i % 4], "", rng.random() < 0.7, i % 8 < 4, random.Random(rng.getrandbits(32))) for i in range(SESSIONS)
        ]
        async with Client(base, ADMIN) as client, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            handles = [await client.open_session(id=f"s{agent.number}") for agent in agents]
            for agent, handle in zip(agents, handles, strict=True):
                agent.key = handle.key
            stop = asyncio.Event()
            talks = [asyncio.create_task(_talk(agent, http, base, stop)) for agent in agents]
            for _ in range(rounds):
                await asyncio.wait(talks, timeout=rng.random() * longest, return_when=asyncio.FIRST_EXCEPTION)
                for talk in talks:
                    if talk.done():
                        talk.result()
                await gateways.stop(signal.SIGKILL)
                await gateways.start()
            stop.set()
            _, stuck = await asyncio.wait(talks, timeout=patience)
            for talk in stuck:
                talk.cancel()
            if not stuck:
                await asyncio.gather(*talks)
                for number, handle in enumerate(handles):
                    await handle.finish(float(number))
        await gateways.stop(signal.SIGTERM)
    finally:
        await nursery.end()
        await engine.end()
    lost = [f"{len(stuck)} agents never got their reply"] if stuck else []
    found, counted = await violations(store, log, agents, qwen_tokenizer("qwen2.5"))
    for agent in agents:
        counted += agent.counted
    return Report(rounds, time.monotonic() - began, counted, lost + found)


async def _talk(agent: Agent, http: aiohttp.ClientSession, base: str, stop: asyncio.Event) -> None:
    """Turn after turn, in conversations that stay small, until it is told to stop."""
    turn = 0
    while not stop.is_set():
        await agent.run(http, base, turn, turn + 1)
        turn += 1


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
