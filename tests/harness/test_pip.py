"""Installing agents from PyPI. The Python that makes environments is a small program, so that each case is there on demand."""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from turnloom.errors import HarnessError
from turnloom.harness import load_harness
from turnloom.harness.registry import require
from turnloom.sandbox import LocalSandbox

PYTHON = """
import json, os, pathlib, shutil, sys, time
words = sys.argv[1:]
with open(os.environ["PIP_LOG"], "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[1] == os.environ.get("FAILS"):
    sys.exit(f"ERROR: {words[1]} has no network")
if words[1] == "venv":
    programs = pathlib.Path(words[2], "bin")
    programs.mkdir(parents=True)
    shutil.copy(__file__, programs / "python")
time.sleep(0.2)
"""


@pytest.fixture
def log(monkeypatch, tmp_path):
    """The calls of a Python that makes virtual environments whose Python is it again."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{PYTHON}")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PIP_LOG", str(tmp_path / "pip.log"))
    monkeypatch.setenv("TURNLOOM_CACHE", str(tmp_path / "cache"))
    return lambda: (tmp_path / "pip.log").read_text().splitlines() if (tmp_path / "pip.log").exists() else []


@pytest.fixture
async def sandbox():
    sandbox = LocalSandbox()
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


async def test_many_runs_install_once(log, sandbox, tmp_path):
    python = tmp_path / "cache" / "agents" / "mini-swe-agent-1.2.3" / "bin" / "python"
    started = await asyncio.gather(*(load_harness("mini-swe-agent", version="1.2.3").install(sandbox) for _ in range(4)))
    assert started == [(str(python), "-I", "-m", "minisweagent.run.mini")] * 4
    make, fill = log()
    assert '"venv"' in make
    assert fill.endswith('"mini-swe-agent==1.2.3"]')
    assert await load_harness("mini-swe-agent", version="1.2.3").install(sandbox) == started[0]
    assert len(log()) == 2


@pytest.mark.parametrize("step", ["venv", "pip"])
async def test_a_failed_install_says_why_and_leaves_nothing(log, sandbox, tmp_path, monkeypatch, step):
    monkeypatch.setenv("FAILS", step)
    with pytest.raises(HarnessError, match=rf"openai-agents==\S+: ERROR: {step} has no network"):
        await load_harness("openai-agents").install(sandbox)
    assert [name for name in os.listdir(tmp_path / "cache" / "agents") if "lock" not in name] == []
    monkeypatch.delenv("FAILS")
    assert await load_harness("openai-agents").install(sandbox)


async def test_a_damaged_cache_says_what_to_do(log, sandbox, tmp_path):
    await load_harness("openai-agents", version="1.2.3").install(sandbox)
    (tmp_path / "cache" / "agents" / "openai-agents-1.2.3" / "bin" / "python").unlink()
    with pytest.raises(HarnessError, match="remove that directory"):
        await load_harness("openai-agents", version="1.2.3").install(sandbox)


async def test_a_python_without_venv_says_what_to_do(log, monkeypatch):
    await require(load_harness("openai-agents"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HarnessError, match=r"^openai-agents needs Python's venv module \(Debian: python3-venv\)"):
        await require(load_harness("openai-agents"))
    await require(load_harness("openai-agents", program=["agent"]))
    assert log() == []


async def test_a_program_of_ones_own_is_used_as_it_is(sandbox):
    assert await load_harness("claude-agent-sdk", program=["python", "mine.py"]).install(sandbox) == ("python", "mine.py")


@pytest.mark.parametrize("name", ["openai-agents", "claude-agent-sdk"])
async def test_a_program_of_ours_is_there_and_imports_nothing_of_ours(log, sandbox, name):
    *_, program = await load_harness(name).install(sandbox)
    text = Path(program).read_text()
    assert "import" in text
    assert "turnloom" not in text
