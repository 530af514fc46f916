"""`make demo`, the first command of the README, run as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turnloom.export.check import check_file, read_samples

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.skipif(shutil.which("make") is None, reason="needs make")]

ROLLOUT = re.compile(r"^  (\S+)  (\d+) turns, (\d+) tokens, (\d+) lineages, (\d+) forks, reward ([\d.]+), \w+, \d+ s$", re.M)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What it printed, and its folder."""
    out = tmp_path_factory.mktemp("demo") / "out"
    # Not as a part of a make that runs these tests: its flags and its directory lines are its own.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    ended = subprocess.run(["make", "demo", "N=2", f"OUT={out}"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, out


def test_one_line_a_rollout_with_turns_tokens_lineages_and_reward(demo: tuple[str, Path]) -> None:
    rollouts = ROLLOUT.findall(demo[0])
    assert len(rollouts) == 2
    for _, turns, tokens, lineages, _, reward in rollouts:
        assert int(turns) >= 1
        assert int(tokens) >= 1
        assert int(lineages) >= 1
        assert float(reward) in (0.0, 1.0)


def test_the_small_model_is_spoken_of_plainly(demo: tuple[str, Path]) -> None:
    assert re.search(r"\d of 2 solved the task\. A model of 135M parameters mostly fails it; its samples are exact all the same\.", demo[0])


def test_the_tree_is_drawn(demo: tuple[str, Path]) -> None:
    _, _, tree = demo[0].partition("as `turnloom show` draws it\n")
    assert tree.startswith("session ")
    assert "\n * assistant " in tree
    assert re.search(r"turn 0 · \d+ prompt \(\d+ encoded\) · \d+ sampled", tree)
    assert re.search(r"^   train   \[\d+, \d+\) ", tree, re.M)


def test_the_files_are_there_and_keep_every_law(demo: tuple[str, Path]) -> None:
    printed, out = demo
    assert {"samples.jsonl", "samples.parquet", "turnloom.db"} <= {p.name for p in out.iterdir()}
    reports = [check_file(out / name) for name in ("samples.jsonl", "samples.parquet")]
    assert all(report.ok and report.rollouts >= 1 and report.trained >= 1 for report in reports)
    assert list(read_samples(out / "samples.jsonl")) == list(read_samples(out / "samples.parquet"))
    assert "every law holds" in printed


def test_the_engine_confirms_every_trained_token(demo: tuple[str, Path]) -> None:
    printed, out = demo
    trained = sum(int(s.loss_mask.sum()) for s in read_samples(out / "samples.jsonl"))
    assert re.search(rf"^{trained} tokens, max \S+, mean \S+: within the tolerance ", printed, re.M)
    assert printed.splitlines()[-1] == "==> verdict: the samples are exact"


SILENT = """
from turnloom.harness.contract import Launch

class Silent:
    name = "silent"

    async def install(self, sandbox):
        return ()

    def command(self, context):
        return Launch(("true",), {})
"""


def test_a_demo_without_a_graded_rollout_claims_nothing(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(SILENT, "utf-8")
    words = [sys.executable, "-m", "turnloom.cli.main", "demo", "--agent", "silent:Silent", "-n", "1", "--out", str(tmp_path / "out")]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(words, env=env, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "==> verdict: nothing was graded, so there is nothing to check; see above"
    assert "the agent made no model call" in ended.stdout
    assert "exact all the same" not in ended.stdout
    assert "every law holds" not in ended.stdout
