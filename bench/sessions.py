"""Whether a gateway stays as it was while sessions come and go: memory, and how long opening and finishing take.

    python bench/sessions.py [--sessions 10000] [--turns 20] [--at-once 32] [--json]

One gateway with a SQLite store in this process, and an engine that answers at once in
another. Sessions are opened, take their turns over HTTP and are finished, some at a
time. Each row is a tenth of them; what is compared is the last row with the first full
one, of this one run. Memory is this process's, the clients' part included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp

from turnloom import Gateway
from turnloom.gateway.handle import SessionHandle
from turnloom.testing.tokenizers import qwen_directory

REPLIES = ["I see, and then what?", "That is so.", "Three words more, if you please: river, stone, lamp."]
LOADED = 64


def resident() -> float:
    """MiB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Run:
    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession, turns: int) -> None:
        self.gateway, self.http, self.turns = gateway, http, turns
        self.opened: list[float] = []
        self.finished: list[float] = []

    async def session(self, number: int) -> None:
        began = time.perf_counter()
        handle = await self.gateway.open_session(id=f"s{number}", rollout=f"r{number}")
        self.opened.append(time.perf_counter() - began)
        await self._talk(handle)
        began = time.perf_counter()
        samples = await handle.finish(1.0)
        self.finished.append(time.perf_counter() - began)
        assert sum(sample.statuses["turns"] for sample in samples) == self.turns

    async def _talk(self, handle: SessionHandle) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(self.turns):
            messages.append({"role": "user", "content": f"Step {turn} of this session, please."})
            body = {"model": "m", "max_tokens": 100, "messages": messages}
            async with self.http.post(f"{handle.base_url}/v1/messages", json=body) as answer:
                reply = await answer.json()
                assert answer.status == 200, reply
            messages.append({"role": "assistant", "content": reply["content"]})

    def row(self, done: int, began: float) -> dict[str, float]:
        opened, finished = self.opened, self.finished
        self.opened, self.finished = [], []
        sessions = self.gateway._sessions
        assert sessions is not None
        return {
            "sessions": done,
            "turns/s": len(opened) * self.turns / (time.perf_counter() - began),
            "MiB": resident(),
            "loaded": sessions.loaded,
            "open p50 ms": 1000 * median(opened),
            "open p99 ms": 1000 * quantiles(opened, n=100)[98],
            "finish p50 ms": 1000 * median(finished),
            "finish p99 ms": 1000 * quantiles(finished, n=100)[98],
        }


async def measure(sessions: int, turns: int, at_once: int) -> list[dict[str, float]]:
    tokenizer, rows = str(qwen_directory("qwen2.5")), []
    with tempfile.TemporaryDirectory(prefix="turnloom-bench-") as folder:
        script = Path(folder, "replies.json")
        script.write_text(json.dumps(REPLIES))
        words = ["-m", "turnloom.testing.scripted_engine", "--script", str(script), "--tokenizer", tokenizer]
        engine = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        assert engine.stdout is not None
        try:
            url = (await engine.stdout.readline()).decode().strip()
            gateway = Gateway(url, tokenizer, store=Path(folder, "store.db"), loaded_sessions=LOADED)
            async with gateway, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as http:
                run, step = Run(gateway, http, turns), max(sessions // 10, 2)
                for first in range(0, sessions, step):
                    began, numbers = time.perf_counter(), iter(range(first, min(first + step, sessions)))

                    async def work(numbers: Any = numbers) -> None:
                        for number in numbers:
                            await run.session(number)

                    await asyncio.gather(*(work() for _ in range(at_once)))
                    rows.append(run.row(min(first + step, sessions), began))
                    print("  ".join(f"{name} {value:.5g}" for name, value in rows[-1].items()), flush=True)
        finally:
            engine.kill()
            await engine.wait()
    return rows


def ratios(rows: list[dict[str, float]]) -> dict[str, float]:
    """The last row's figures over the second's: the first one warms up."""
    first, last = rows[min(1, len(rows) - 1)], rows[-1]
    return {name: last[name] / first[name] for name in ("MiB", "open p50 ms", "finish p50 ms", "turns/s")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="the rows and the ratios as one JSON object at the end")
    given = parser.parse_args()
    measured = asyncio.run(measure(given.sessions, given.turns, given.at_once))
    compared = ratios(measured)
    print(json.dumps({"rows": measured, "ratios": compared}) if given.json else f"last over second: {compared}")
