"""`turnloom run`: an agent on a task with a scripted engine, from the command line to the checked file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, one_line

ASK = """
import json, os, sys, urllib.request
body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode())
print(json.load(urllib.request.urlopen(request))["content"][0]["text"])
"""


def test_run_prints_a_line_per_rollout_and_leaves_checked_files(cli: Cli, engine_url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = cli("run", "demo", "--agent", "sdk-agent", "-n", "2", "--engine", engine_url, "--out", out, "--concurrency", "1")
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    rollouts = [line for line in lines if " turns, " in line and " lineages, " in line]
    assert len(rollouts) == 2
    assert all("1 turns, " in line and "reward 0, completed" in line for line in rollouts)
    assert lines[-4:] == [
        f"samples: {out / 'samples.jsonl'}",
        f"samples: {out / 'samples.parquet'}",
        f"results: {out / 'results.jsonl'}",
        f"store:   {out / 'turnloom.db'}",
    ]
    assert lines[-5].split() == ["all", "2", "2", "0.000", "2", *lines[-5].split()[5:8], "2", "completed"]
    assert cli("check", out / "samples.jsonl").code == 0
    assert cli("check", out / "samples.parquet").code == 0
    assert "1 turns" in cli("show", "latest", "--store", out / "turnloom.db").out


def test_run_of_any_command_as_the_agent(cli: Cli, engine_url: str, tmp_path: Path) -> None:
    words = [w for word in (sys.executable, "-c", ASK, "{prompt}") for w in ("--arg", word)]
    said = cli("run", "demo", "--agent", "command", *words, "--engine", engine_url, "--out", tmp_path / "out", "--max-turns", "1")
    assert said.code == 0, said
    assert "1 turns, " in said.out


TURNLOOM = [sys.executable, "-m", "turnloom.cli.main"]


def command(*words: str) -> list[str]:
    return ["--agent", "command", *(w for word in words for w in ("--arg", word))]


def test_a_run_without_a_graded_rollout_ends_with_1_and_has_written_its_files(cli: Cli, engine_url: str, tmp_path: Path) -> None:
    said = cli("run", "demo", *command("true"), "--engine", engine_url, "--out", tmp_path / "out")
    assert said.code == 1
    assert said.out.splitlines()[-1] == "nothing was graded: 1 no_model_call"
    checked = cli("check", tmp_path / "out" / "samples.jsonl")
    assert (checked.code, checked.out.splitlines()[-1]) == (1, "no samples")


def test_what_an_agent_says_never_reaches_the_terminal_raw(cli: Cli, engine_url: str, tmp_path: Path) -> None:
    last_words = r"import sys; sys.stderr.write('\x1b]0;title\x07\x1b[2Jgone\x9b31m')"
    said = cli("run", "demo", *command(sys.executable, "-c", last_words), "--engine", engine_url, "--out", tmp_path / "out")
    assert "gone" in said.out
    assert all(line.isprintable() for line in said.out.split("\n"))


def test_a_reader_that_leaves_costs_no_samples(engine_url: str, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    words = ["run", "demo", *command(sys.executable, "-c", ASK, "{prompt}"), "-n", "3", "--engine", engine_url, "--out", str(out)]
    process = subprocess.Popen([*TURNLOOM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert "3 samples, " in cli("check", out / "samples.jsonl").out


HARNESS = """
from turnloom.harness.contract import Launch

class Mine:
    name = "mine"

    async def install(self, sandbox):
        return ()

    def command(self, context):
        return Launch(("true",), {})
"""


def test_a_harness_of_ones_own_need_take_no_options(cli: Cli, engine_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harness_of_mine.py").write_text(HARNESS, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    words = ("run", "demo", "--agent", "harness_of_mine:Mine", "--engine", engine_url, "--out", tmp_path / "out")
    assert "the agent made no model call" in cli(*words).out
    assert "does not take these options" in one_line(cli(*words, "--arg", "x"))


STAY = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(1000)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_run_with_its_agents_and_sandboxes(engine_url: str, tmp_path: Path, number: signal.Signals) -> None:
    scratch, started = tmp_path / "scratch", tmp_path / "started"
    scratch.mkdir()
    os.mkfifo(started)
    words = ["run", "demo", *command(sys.executable, "-c", STAY, str(started)), "--engine", engine_url, "--out", str(tmp_path / "out")]
    env = os.environ | {"TMPDIR": str(scratch)}
    # Under nohup or in a shell's background a signal is ignored, and a child would inherit that.
    handler = "signal.default_int_handler" if number == signal.SIGINT else "signal.SIG_DFL"
    heeded = f"import signal, runpy; signal.signal({int(number)}, {handler}); runpy.run_module({TURNLOOM[2]!r}, run_name='__main__')"
    start = [sys.executable, "-c", heeded]
    with subprocess.Popen([*start, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as process:
        agent = int(started.read_text("utf-8"))  # waits for the agent
        assert list(scratch.iterdir())
        process.send_signal(number)
        process.wait()
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(agent, 0)
    assert list(scratch.iterdir()) == []
