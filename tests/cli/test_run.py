"""`turnloom run`: an agent on a task with a scripted engine, from the command line to the checked file."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.cli.conftest import Cli

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
    assert lines[-2:] == [f"samples: {out / 'samples.jsonl'}", f"store:   {out / 'turnloom.db'}"]
    assert cli("check", out / "samples.jsonl").code == 0
    assert cli("check", out / "samples.parquet").code == 0
    assert "1 turns" in cli("show", "latest", "--store", out / "turnloom.db").out


def test_run_of_any_command_as_the_agent(cli: Cli, engine_url: str, tmp_path: Path) -> None:
    words = [w for word in (sys.executable, "-c", ASK, "{prompt}") for w in ("--arg", word)]
    said = cli("run", "demo", "--agent", "command", *words, "--engine", engine_url, "--out", tmp_path / "out", "--max-turns", "1")
    assert said.code == 0, said
    assert "1 turns, " in said.out
