"""Installing agents. `node` and `npm` are small programs put on PATH, so that each case is there on demand."""

import asyncio
import os
import shutil
import sys

import pytest

from turnloom.engine.models import cache_dir
from turnloom.errors import HarnessError
from turnloom.harness import load_harness
from turnloom.harness.registry import require
from turnloom.sandbox import LocalSandbox

NPM = """
import json, os, pathlib, sys, time
words = sys.argv[1:]
with open(os.environ["NPM_LOG"], "a") as log:
    log.write(json.dumps(words) + "\\n")
if os.environ.get("NPM_FAILS"):
    sys.exit("npm error network unreachable")
programs = pathlib.Path(words[words.index("--prefix") + 1], "node_modules", ".bin")
programs.mkdir(parents=True)
time.sleep(0.3)
for name in ("pi", "claude"):
    (programs / name).write_text("")
"""


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """A PATH with a node of a given version and an npm that notes its calls."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def program(name, text):
        (programs / name).write_text(f"#!{sys.executable}\n{text}")
        (programs / name).chmod(0o755)

    program("npm", NPM)
    program("node", "print('v20.20.2')")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("NPM_LOG", str(tmp_path / "npm.log"))
    monkeypatch.setenv("TURNLOOM_CACHE", str(tmp_path / "cache"))
    return program


@pytest.fixture
async def sandbox():
    sandbox = LocalSandbox()
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


def calls(tmp_path):
    log = tmp_path / "npm.log"
    return log.read_text().splitlines() if log.exists() else []


async def test_many_runs_install_once(tools, sandbox, tmp_path):
    program = (str(tmp_path / "cache" / "agents" / "pi-1.2.3" / "node_modules" / ".bin" / "pi"),)
    assert await asyncio.gather(*(load_harness("pi", version="1.2.3").install(sandbox) for _ in range(4))) == [program] * 4
    assert await load_harness("pi", version="1.2.3").install(sandbox) == program
    (call,) = calls(tmp_path)
    assert '"@mariozechner/pi-coding-agent@1.2.3"' in call
    assert '"--ignore-scripts=true"' in call


async def test_versions_live_side_by_side(tools, sandbox, tmp_path):
    for version in ("1.0.0", "2.0.0"):
        await load_harness("claude-code", version=version).install(sandbox)
    assert len(calls(tmp_path)) == 2
    assert {name for name in os.listdir(tmp_path / "cache" / "agents") if "lock" not in name} == {"claude-code-1.0.0", "claude-code-2.0.0"}


async def test_a_failed_install_says_why_and_leaves_nothing(tools, sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("NPM_FAILS", "1")
    with pytest.raises(HarnessError, match=r"npm cannot install @mariozechner/pi-coding-agent@.*network unreachable"):
        await load_harness("pi").install(sandbox)
    assert [name for name in os.listdir(tmp_path / "cache" / "agents") if "lock" not in name] == []
    monkeypatch.delenv("NPM_FAILS")
    assert await load_harness("pi").install(sandbox)


async def test_a_cancelled_install_leaves_nothing_half_made(tools, sandbox, tmp_path):
    tools("npm", NPM.replace("time.sleep(0.3)", "time.sleep(1000)"))
    installing = asyncio.ensure_future(load_harness("pi").install(sandbox))
    while not calls(tmp_path):
        await asyncio.sleep(0.02)
    installing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await installing
    tools("npm", NPM)
    assert await load_harness("pi").install(sandbox)


async def test_a_missing_node_says_what_to_do(tools, sandbox, tmp_path):
    os.remove(tmp_path / "bin" / "node")
    with pytest.raises(HarnessError, match=r"^pi needs Node.js 20 or newer: install it, or use --agent sdk-agent$"):
        await load_harness("pi").install(sandbox)


@pytest.mark.parametrize("version", ["v18.19.0", "nonsense"])
async def test_an_old_node_says_what_to_do(tools, sandbox, version):
    tools("node", f"print('{version}')")
    with pytest.raises(HarnessError, match=rf"^claude-code needs Node.js 20 or newer: .*found {version}"):
        await load_harness("claude-code").install(sandbox)


async def test_what_is_missing_is_said_before_anything_is_started(tools, tmp_path):
    await require(load_harness("claude-code"))
    assert calls(tmp_path) == []
    os.remove(tmp_path / "bin" / "npm")
    with pytest.raises(HarnessError, match=r"^pi is installed with npm, which is not on PATH: install npm, or use --agent sdk-agent$"):
        await require(load_harness("pi"))
    os.remove(tmp_path / "bin" / "node")
    with pytest.raises(HarnessError, match=r"^claude-code needs Node.js 20 or newer"):
        await require(load_harness("claude-code"))
    await require(load_harness("claude-code", program=["claude"]))
    await require(load_harness("command", argv=["true"]))


async def test_an_agent_that_is_installed_needs_no_npm(tools, sandbox, tmp_path):
    program = await load_harness("pi").install(sandbox)
    os.remove(tmp_path / "bin" / "npm")
    assert await load_harness("pi").install(sandbox) == program
    await require(load_harness("pi"))


async def test_a_program_of_ones_own_is_used_as_it_is(sandbox, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert await load_harness("pi", program=["/opt/pi"]).install(sandbox) == ("/opt/pi",)
    assert await load_harness("claude-code", program=["node", "cli.js"]).install(sandbox) == ("node", "cli.js")


async def test_a_damaged_cache_says_what_to_do(tools, sandbox, tmp_path):
    await load_harness("pi", version="1.2.3").install(sandbox)
    await asyncio.to_thread(shutil.rmtree, tmp_path / "cache" / "agents" / "pi-1.2.3" / "node_modules")
    with pytest.raises(HarnessError, match="remove that directory"):
        await load_harness("pi", version="1.2.3").install(sandbox)


def test_the_cache_is_the_users_unless_told(monkeypatch, tmp_path):
    monkeypatch.setenv("TURNLOOM_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TURNLOOM_CACHE", "here")
    assert cache_dir() == tmp_path / "here"
    monkeypatch.setenv("TURNLOOM_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "turnloom"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_dir() == tmp_path / ".cache" / "turnloom"
