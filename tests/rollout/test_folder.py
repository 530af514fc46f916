"""A run's folder: one writer, one set of settings, and results that survive a crash in the middle of a line."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from turnloom.errors import ConfigError, StoreError
from turnloom.harness import AgentOutcome, AgentRun
from turnloom.rollout import Cause, Rollout, RolloutStatus
from turnloom.rollout.folder import RESULTS, RunFolder
from turnloom.rollout.sessions import safe_name
from turnloom.rollout.summary import summary_of

SETTINGS = {"n": 2, "agent": "pi"}


def ended(name: str, status: RolloutStatus = RolloutStatus.GRADED, reward: float | None = 1.0, **more: Any) -> Rollout:
    run = AgentRun(0, AgentOutcome.COMPLETED, "out\udcff", "err", 2.0)
    cause = None if status is RolloutStatus.GRADED else Cause.SANDBOX
    figures = {"turns": 2, "tokens": 10, "lineages": 1, "forks": 0, "duration": 3.0, "agent": run, "cause": cause, **more}
    return Rollout(name, "g", "task", 0, f"s-{name}", status, reward, run.outcome, **figures)


def test_results_are_read_again_and_the_last_line_of_a_rollout_counts(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, SETTINGS, resume=False) as folder:
        assert not folder.began
        folder.add(ended("a", RolloutStatus.FAILED, None))
        folder.add(ended("b"))
        folder.add(ended("a", patch=b"diff", detail="it ended", output="said"))
    with RunFolder.open(tmp_path, SETTINGS, resume=True) as folder:
        assert folder.began
        assert folder.graded == {"a", "b"}
        assert [(row["rollout_id"], row["status"], row["session_id"]) for row in folder.rows] == [
            ("a", "graded", "s-a"),
            ("b", "graded", "s-b"),
        ]
        assert (folder.logs("a") / "agent.stdout").read_bytes() == b"out\\udcff"
        assert (folder.logs("a") / "patch.diff").read_bytes() == b"diff"
        assert (folder.logs("a") / "grade.txt").read_text("utf-8") == "it ended\nsaid"


def test_a_line_that_was_cut_off_is_removed_and_other_damage_is_said(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, SETTINGS, resume=False) as folder:
        folder.add(ended("a"))
    results = tmp_path / RESULTS
    whole = results.read_bytes()
    results.write_bytes(whole + b'{"rollout_id": "b", "status": "graded"}')
    with RunFolder.open(tmp_path, SETTINGS, resume=True) as folder:
        assert folder.graded == {"a"}
        assert results.read_bytes() == whole
        folder.add(ended("c"))
    results.write_bytes(b"{not json}\n" + whole)
    with pytest.raises(ConfigError, match=r"results\.jsonl line 1 is not the result of a rollout"):
        RunFolder.open(tmp_path, SETTINGS, resume=True)


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, SETTINGS, resume=False) as folder:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(folder.add, (ended(f"r{i}", detail="x" * 200_000) for i in range(40))))
    with RunFolder.open(tmp_path, SETTINGS, resume=True) as folder:
        assert folder.graded == {f"r{i}" for i in range(40)}


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, SETTINGS, resume=False) as folder:
        folder.add(ended("a"))
    with pytest.raises(ConfigError, match=r'other settings: agent was "pi", now "codex"; more was null, now 1[.]'):
        RunFolder.open(tmp_path, {"n": 2, "agent": "codex", "more": 1}, resume=True)
    with pytest.raises(ConfigError, match="go on with it with --resume"):
        RunFolder.open(tmp_path, SETTINGS, resume=False)


def test_one_process_writes_a_folder(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, SETTINGS, resume=False), pytest.raises(StoreError, match="is in use"):
        RunFolder.open(tmp_path, SETTINGS, resume=True)
    RunFolder.open(tmp_path, SETTINGS, resume=True).close()


@pytest.mark.parametrize("name", ["../../etc/x", "a/b", ".hidden", "x" * 300, "a b", "", "ü", "a\0b"])
def test_a_rollouts_name_is_one_safe_name_of_its_own(name: str) -> None:
    made = safe_name(name)
    assert len(made) <= 128
    assert made.replace("_", "").replace("-", "").replace(".", "").isalnum()
    assert not made.startswith(".")
    assert made != safe_name(name + "x")
    assert safe_name("task-1.2_x-0") == "task-1.2_x-0"


def test_a_summary_counts_rollouts_and_means_rewards_of_graded_ones() -> None:
    from turnloom.rollout.folder import row_of

    rows = [row_of(ended("a")), row_of(ended("b", reward=0.0, attempts=2)), row_of(ended("c", RolloutStatus.FAILED, None))]
    summary = summary_of(rows, 4, 9.0)
    assert (summary["planned"], summary["complete"], summary["rollouts"], summary["graded"]) == (4, False, 3, 2)
    assert (summary["reward_mean"], summary["retried"], summary["tokens"], summary["seconds"]) == (0.5, 1, 30, 9.0)
    assert summary["causes"] == {"sandbox": 1}
    assert summary["tasks"]["task"]["statuses"] == {"graded": 2, "failed": 1}
    assert summary_of([], 4, 0.0)["reward_mean"] is None
    json.dumps(summary, allow_nan=False)
