"""Rollouts on a Ray cluster: three gateways, a gateway and a worker killed in the middle, and nothing lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnloom import Client
from turnloom.errors import ConfigError
from turnloom.export.check import check_samples, read_samples
from turnloom.harness.registry import load_harness
from turnloom.rollout import RolloutSettings, RolloutStatus, demo_task
from turnloom.rollout.contract import Rollout
from turnloom.rollout.ray_cluster import ClusterSettings, RayCluster
from turnloom.rollout.runner import jobs
from turnloom.sandbox import LocalBackend
from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'turnloom[ray]'")

ROLLOUTS = 64

AGENT = """
import json, os, time, urllib.error, urllib.request
def ask(messages):
    body = json.dumps({"model": "m", "max_tokens": 50, "messages": messages}).encode()
    for _ in range(600):
        try:
            request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body)
            return json.load(urllib.request.urlopen(request, timeout=120))
        except urllib.error.HTTPError as error:
            if error.code < 500: raise
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise SystemExit("the gateway does not come back")
messages = []
for turn in range(3):
    messages.append({"role": "user", "content": f"step {turn}"})
    messages.append({"role": "assistant", "content": ask(messages)["content"]})
text = open("stats.py").read()
open("stats.py", "w").write(text.replace(" (len(values) + 1)", " len(values)"))
"""


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def cluster(engine: str, path: Path, **settings: int) -> RayCluster:
    options = {"engine": engine, "tokenizer": str(qwen_directory("qwen2.5"))}
    harness = load_harness("command", argv=[sys.executable, "-c", AGENT])
    (path / "sandboxes").mkdir()
    rollouts = RolloutSettings(sandbox=LocalBackend(parent=path / "sandboxes", grace=0.5).make, pause=0.1, boots=4)
    return RayCluster(None, options, harness, rollouts, ClusterSettings(str(path / "stores"), cpus=0.1, **settings))


@pytest.mark.usefixtures("_cluster")
async def test_64_rollouts_on_three_gateways_of_which_one_is_killed(tmp_path: Path) -> None:
    ended: list[Rollout] = []
    half, killed = asyncio.Event(), Counter[str]()

    async def keep(result: Rollout) -> None:
        ended.append(result)
        if len(ended) == 8:
            half.set()

    async def wreck(running: RayCluster) -> None:
        await half.wait()
        for name, placed in (("gateway", running._gateways[1]), ("worker", running._workers[0])):
            os.kill(await placed.actor.pid.remote(), signal.SIGKILL)
            killed[name] += 1

    tokenizer = qwen_tokenizer("qwen2.5")
    engine = ScriptedEngine(
        lambda *_: Reply("One two three", delay=0.05), tokenizer=tokenizer, end_id=tokenizer.control_tokens["<|im_end|>"]
    )
    async with engine, cluster(engine.url, tmp_path, gateways=3, workers=2, per_worker=32) as running:
        planned = jobs([demo_task()], ROLLOUTS)
        wrecker = asyncio.create_task(wreck(running))
        await running.run_jobs(planned, on_rollout=keep, concurrency=ROLLOUTS)
        await wrecker
        assert killed == {"gateway": 1, "worker": 1}
        assert Counter(result.status for result in ended) == {RolloutStatus.GRADED: ROLLOUTS}, [r.error for r in ended if r.error]
        assert {result.rollout_id for result in ended} == {job.rollout for job in planned}
        assert {result.reward for result in ended} == {1.0}
        samples = [sample for result in ended for sample in result.samples]
        assert check_samples(samples).ok
        assert {len(result.samples) for result in ended} == {1}
        async with running.gateway() as every:
            assert len(await (await every.handle(ended[0].session_id)).samples()) == 1
        on_record: Counter[str] = Counter()
        for address in running.addresses:
            async with Client(address.url, address.admin_key) as client:
                for listed in await client.sessions(limit=1000):
                    on_record[listed["id"]] += 1
                    assert listed.get("status") == "closed", listed
        assert set(on_record) >= {result.session_id for result in ended}
    assert list((tmp_path / "sandboxes").iterdir()) == []


@pytest.mark.usefixtures("_cluster")
async def test_a_cluster_that_is_too_small_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"100 gateways and 1 workers ask for 10.1 CPUs, and the cluster has 8"):
        async with cluster("http://127.0.0.1:1", tmp_path, gateways=100):
            pass


async def test_a_cluster_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        cluster("http://127.0.0.1:1", tmp_path, gateways=0)


def test_the_command_line_runs_on_a_cluster_and_goes_on_with_what_is_left(tmp_path: Path) -> None:
    """Two gateways, each with a store of its own; the samples of both are in one file, and a second run repeats nothing."""
    out, script = tmp_path / "run", tmp_path / "replies.json"
    script.write_text(json.dumps(["One", "Two", "Three"]))
    tokenizer = str(qwen_directory("qwen2.5"))
    words = [sys.executable, "-m", "turnloom.testing.scripted_engine", "--script", str(script), "--tokenizer", tokenizer]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        url = engine.stdout.readline().strip()
        run = [sys.executable, "-m", "turnloom.cli.main", "run", "demo", "--ray", "local", "--ray-gateways", "2", "--engine", url]
        run += ["--tokenizer", tokenizer, "--agent", "command", "--arg", sys.executable, "--arg=-c", "--arg", AGENT]
        try:
            for more in (["-n", "4", "--out", str(out)], ["-n", "4", "--out", str(out), "--resume"]):
                done = subprocess.run([*run, *more], capture_output=True, text=True, timeout=300)
                assert done.returncode == 0, done.stdout + done.stderr
        finally:
            engine.kill()
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in results] == ["graded"] * 4
    assert len(list(out.glob("gateway-*/turnloom.db"))) == 2
    samples = list(read_samples(out / "samples.jsonl"))
    assert {sample.rollout_id for sample in samples} == {row["rollout_id"] for row in results}
    assert check_samples(samples).ok
