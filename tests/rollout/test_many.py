"""Sixty-four rollouts at once on one machine: all are graded, and nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import bench
from turnloom.core.credit import weigh
from turnloom.export.canonical import write_jsonl
from turnloom.export.check import check_file
from turnloom.harness import load_harness
from turnloom.rollout import RolloutSettings, RolloutStatus, demo_task, run_rollouts
from turnloom.sandbox import LocalBackend
from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer

MANY = 64

AGENT = """
import json, os, urllib.request
body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "Shall I mend it?"}]}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())
said = json.load(urllib.request.urlopen(request))["content"][0]["text"]
if said == "Yes.":
    text = open("stats.py").read()
    open("stats.py", "w").write(text.replace(" (len(values) + 1)", " len(values)"))
"""


def processes() -> set[int]:
    """Living children of this process, and whatever carries the tag of a sandbox."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            ours = int(parent) == os.getpid() or b"TURNLOOM_SANDBOX=" in (entry / "environ").read_bytes()
        except OSError:
            continue
        if ours and state != b"Z":
            found.add(int(entry.name))
    return found


def descriptors() -> Counter[str]:
    """What each open descriptor is of: a file's path, or only the kind of a socket, a pipe or an event."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]] += 1
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="what is left of a rollout is read from /proc")
async def test_sixty_four_at_once_leave_no_process_descriptor_directory_or_session(tmp_path: Path) -> None:
    boxes = tmp_path / "boxes"
    boxes.mkdir()

    def reply(body: dict[str, Any], index: int) -> Reply:
        return Reply(text="Yes." if index % 2 == 0 else "No.")

    engine = ScriptedEngine(reply, tokenizer=qwen_tokenizer("qwen2.5"), end_id=151645)
    async with bench(engine=engine, store=tmp_path / "turnloom.db") as b:
        await b.handle.finish()
        harness = load_harness("command", argv=[sys.executable, "-I", "-S", "-c", AGENT])
        settings = RolloutSettings(LocalBackend(parent=boxes).make, pause=0.05)
        await run_rollouts(b.gateway, demo_task(), harness, settings)  # What is opened once stays open.
        gc.collect()
        before, living = descriptors(), processes()

        results = await run_rollouts(b.gateway, demo_task(), harness, settings, n=MANY, concurrency=MANY)

        assert [result.status for result in results] == [RolloutStatus.GRADED] * MANY, {result.error for result in results}
        assert sum(result.reward or 0 for result in results) == MANY / 2
        assert os.listdir(boxes) == []
        assert processes() <= living
        async with asyncio.timeout(30):
            while await b.gateway.sessions(status="open") or b.gateway.in_flight:
                await asyncio.sleep(0.05)
        gc.collect()
        left = descriptors() - before
        # A connection that is kept alive to the engine, or a reader of the store, may be one more than a single rollout needed.
        assert {kind: count for kind, count in left.items() if count > MANY // 4} == {}
        assert [kind for kind in left if kind.startswith(str(boxes)) or "deleted" in kind or kind == "pipe"] == []
        path = tmp_path / "samples.jsonl"
        assert write_jsonl(weigh(sample for result in results for sample in result.samples), path) == MANY
        assert check_file(path).ok
