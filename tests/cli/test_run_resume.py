"""A run that is broken off, by a kill or by Ctrl-C, goes on with the same command and repeats nothing that was graded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, one_line

TURNLOOM = [sys.executable, "-m", "turnloom.cli.main"]

AGENT = """
import json, os, sys, time, urllib.request
place, gate = sys.argv[1:]
began = os.open(place, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
os.write(began, b"x")
number = os.fstat(began).st_size
body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "Begin."}]}
def ask():
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())).read()
if gate == "-" or number <= 2 or os.path.exists(gate + ".open"):
    if not (gate == "-" and number % 2 == 0):
        ask()
else:
    ask()
    open(gate, "w").close()
    time.sleep(1000)
"""


def words(engine_url: str, tmp_path: Path, *more: str, gate: str = "") -> list[str]:
    agent = [sys.executable, "-c", AGENT, str(tmp_path / "began"), gate or str(tmp_path / "gate")]
    given = [word for each in agent for word in ("--arg", each)]
    return [
        "run",
        "demo",
        "--agent",
        "command",
        *given,
        "--engine",
        engine_url,
        "--out",
        str(tmp_path / "out"),
        "--concurrency",
        "1",
        *more,
    ]


def results(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text("utf-8").splitlines()]


def began(tmp_path: Path) -> int:
    return (tmp_path / "began").stat().st_size


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_broken_off_goes_on(engine_url: str, tmp_path: Path, cli: Cli, number: signal.Signals, monkeypatch: Any) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    os.mkfifo(tmp_path / "gate")
    asked = words(engine_url, tmp_path, "-n", "4", "--resume")
    with subprocess.Popen([*TURNLOOM, *asked], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        (tmp_path / "gate").read_text("utf-8")  # waits for the third agent
        process.send_signal(number)
        told = process.communicate()[0].splitlines()[-1]
    assert told.startswith("[2/4] " if number == signal.SIGKILL else "broken off: 2 of 4 rollouts have ended; go on with ")
    assert process.returncode in (128 + number, -number)
    first = results(tmp_path)
    assert [row["rollout_id"] for row in first] == ["demo-stats-0", "demo-stats-1"]
    assert [row["status"] for row in first] == ["graded"] * 2
    with open(tmp_path / "out" / "results.jsonl", "ab") as file:
        file.write(b'{"rollout_id": "demo-stats-2", "sta')  # A line that the crash cut off.

    (tmp_path / "gate.open").touch()
    other = one_line(cli(*asked, "--temperature", "0.5"))
    assert other.startswith(f"{tmp_path / 'out'} holds a run with other settings: temperature was 1.0, now 0.5.")
    assert "go on with it with --resume" in one_line(cli(*(word for word in asked if word != "--resume")))
    said = subprocess.run([*TURNLOOM, *asked], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr.count("removing the sandbox")) == (0, int(number == signal.SIGKILL)), said
    assert results(tmp_path)[:2] == first
    assert [row["rollout_id"] for row in results(tmp_path)] == [f"demo-stats-{index}" for index in range(4)]
    assert began(tmp_path) == 5
    assert "[3/4] demo-stats-2  1 turns, " in said.stdout
    assert "4 samples, " in cli("check", tmp_path / "out" / "samples.jsonl").out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))
    assert (summary["complete"], summary["graded"], summary["reward_mean"], summary["turns"]) == (True, 4, 0.0, 4)
    assert list(scratch.iterdir()) == []

    again = cli(*asked)
    assert (again.code, began(tmp_path)) == (0, 5)
    assert len(results(tmp_path)) == 4


def test_failed_rollouts_are_begun_anew_and_the_last_line_counts(engine_url: str, tmp_path: Path, cli: Cli) -> None:
    asked = words(engine_url, tmp_path, "-n", "2", "--retries", "0", "--resume", gate="-")
    said = cli(*asked)
    assert said.code == 1
    assert said.out.splitlines()[-1] == "1 of 2 rollouts were not graded: 1 no_model_call"
    assert [row["status"] for row in results(tmp_path)] == ["graded", "no_model_call"]
    again = cli(*asked)
    assert (again.code, began(tmp_path)) == (0, 3)
    assert [(row["rollout_id"], row["status"]) for row in results(tmp_path)][2:] == [("demo-stats-1", "graded")]
    assert "2 samples, " in cli("check", tmp_path / "out" / "samples.jsonl").out


def test_a_share_of_failures_may_be_allowed(engine_url: str, tmp_path: Path, cli: Cli) -> None:
    asked = words(engine_url, tmp_path, "-n", "2", "--retries", "0", "--max-failed", "0.5", gate="-")
    assert cli(*asked).code == 0


def test_every_rollout_has_its_logs(engine_url: str, tmp_path: Path, cli: Cli) -> None:
    script = "import os, sys; exec(sys.argv[1]); print('out'); print('err', file=sys.stderr); open('new.txt', 'w').write('new')"
    given = [w for word in (sys.executable, "-c", script, ASK) for w in ("--arg", word)]
    said = cli("run", "demo", "--agent", "command", *given, "--engine", engine_url, "--out", tmp_path / "out")
    assert said.code == 0, said
    place = tmp_path / "out" / "logs" / "demo-stats-0"
    assert sorted(path.name for path in place.iterdir()) == ["agent.stderr", "agent.stdout", "grade.txt", "patch.diff"]
    assert (place / "agent.stdout").read_text("utf-8") == "out\n"
    assert (place / "agent.stderr").read_text("utf-8") == "err\n"
    assert "+new" in (place / "patch.diff").read_text("utf-8")
    assert (place / "grade.txt").read_text("utf-8").startswith("the grading command ended with 1\n")


ASK = """
import json, os, urllib.request
body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "Hello"}]}
urllib.request.urlopen(urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())).read()
"""


def test_an_engine_that_is_not_there_leaves_a_folder_that_can_be_used(engine_url: str, tmp_path: Path, cli: Cli) -> None:
    asked = words("http://127.0.0.1:9", tmp_path, "--temperature", "0.5")
    assert "start the engine" in one_line(cli(*asked))
    assert cli(*words(engine_url, tmp_path)).code == 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--sandbox", "nowhere"], "there is no sandbox 'nowhere'"),
        (["--sandbox-option", "typo=1"], "sandbox 'local' does not take these options"),
        (["--sandbox-option", "typo"], "--sandbox-option 'typo' is not NAME=VALUE"),
        (["--agent-option", "typo=1"], "agent 'command' does not take these options"),
        (["--format", "xml"], "no export format 'xml'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(engine_url: str, tmp_path: Path, cli: Cli, more: list[str], told: str) -> None:
    assert told in one_line(cli(*words(engine_url, tmp_path), *more))
    assert not (tmp_path / "out").exists()


def test_a_folder_of_tasks_is_run_in_groups(engine_url: str, tmp_path: Path, cli: Cli) -> None:
    for name in ("two", "one"):
        (tmp_path / "tasks" / name / "files").mkdir(parents=True)
        (tmp_path / "tasks" / name / "task.toml").write_text('prompt = "Do it."\n[eval]\nargv = ["true"]\n', "utf-8")
    given = [w for word in (sys.executable, "-c", ASK) for w in ("--arg", word)]
    out = ("--out", tmp_path / "out")
    said = cli("run", tmp_path / "tasks", "-n", "2", "--agent", "command", *given, "--engine", engine_url, *out)
    assert said.code == 0, said
    rows = results(tmp_path)
    assert sorted(row["rollout_id"] for row in rows) == ["one-0", "one-1", "two-0", "two-1"]
    assert {(row["task"], row["group_id"], row["reward"]) for row in rows} == {("one", "one", 1.0), ("two", "two", 1.0)}
    table = [" ".join(line.split()[:4]) for line in said.out.splitlines()[-8:-4]]
    assert table == ["task rollouts graded reward", "one 2 2 1.000", "two 2 2 1.000", "all 4 4 1.000"]
