"""What an agent does to its workspace, its home and its sandbox is its own doing: graded on what can be seen, or as not passed.

Each case is Python that stands for the agent. Real sandboxes, real git; the session only keeps what it was finished with.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from turnloom.errors import NotFound, SandboxError
from turnloom.harness import load_harness
from turnloom.rollout import CommandGrader, RepositoryTask, RolloutSettings, RolloutStatus, demo_task, grade_patch, run_rollouts
from turnloom.sandbox import LocalBackend, LocalSandbox, SandboxUnavailable

AGENT = """
import os, shutil, subprocess, sys
def fix():
    text = open("stats.py").read()
    open("stats.py", "w").write(text.replace(" (len(values) + 1)", " len(values)"))
def sh(script):
    subprocess.run(script, shell=True, check=True)
"""
USE = """open("stats.py", "a").write("\\nimport impl\\nmean = impl.mean\\n")
"""
IMPL = """open("impl/__init__.py", "w").write("def mean(v):\\n    if not v: raise ValueError\\n    return sum(v) / len(v)\\n")
"""
COMMIT = "git init -q; git add -A; git -c user.name=a -c user.email=a@b commit -qm x"


class Session:
    id, key, base_url = "session", "key", "http://127.0.0.1:1"

    def __init__(self):
        self.finished = []

    async def finish(self, reward):
        self.finished.append(reward)
        return []

    async def status(self):
        counts = {"in_flight": 0, "sampled_tokens": 1, "lineages": 1, "forks": {}, "outcomes": {"delivered": 1}, "reached": []}
        return {"turns": 1, **counts}

    async def drop(self):
        pass


class OneSession:
    def __init__(self):
        self.session = Session()

    async def open_session(self, **_):
        return self.session

    async def handle(self, session_id):
        raise NotFound(session_id)


async def rollout(body, tmp_path, task=None, sandbox=LocalSandbox):
    """One rollout of the agent. Its sandboxes are gone afterwards."""
    gateway = OneSession()
    settings = RolloutSettings(sandbox=lambda needs: sandbox(parent=tmp_path, grace=0.2), pause=0.01, retries=1)
    agent = load_harness("command", argv=[sys.executable, "-c", AGENT + body])
    (result,) = await run_rollouts(gateway, task or demo_task(), agent, settings=settings)
    assert gateway.session.finished == [result.reward]
    assert os.listdir(tmp_path) == []
    return result


HARMLESS = {
    "an empty repository inside": 'sh("git init -q sub")',
    "a broken repository inside": 'sh("mkdir -p sub/.git; echo x > sub/.git/HEAD; echo gitdir: nowhere > .git")',
    "a repository inside a repository": f'sh("mkdir -p a/b; cd a/b; touch f; {COMMIT}; cd ..; touch g; {COMMIT}")',
    "a worktree inside": 'sh("git worktree add -q sub")',
    "files beside the workspace": 'sh("mkdir ../base.git ../git; touch ../base.git/index.lock .git/index.lock")',
    "a git configuration in its home": 'sh("git config --global core.fsmonitor false; git config --global core.excludesFile /dev/fd/0")',
    "a file nobody may read": 'open("secret", "w"); os.chmod("secret", 0); os.chmod("stats.py", 0)',
    "a directory nobody may enter": 'os.makedirs("d/e"); open("d/e/x", "w"); os.chmod("d/e", 0); os.chmod("d", 0)',
    "a workspace nobody may enter": "os.chmod(os.getcwd(), 0)",
    "a read-only workspace": 'os.mkdir("d"); os.chmod("d", 0o500); os.chmod(os.getcwd(), 0o500)',
    "a FIFO": 'os.mkfifo("fifo")',
    "a large ignored file": 'os.mkdir("__pycache__"); open("__pycache__/big", "wb").truncate(3 << 30)',
    "a very deep tree": 'os.mkdir("deep"); os.chdir("deep")\nfor _ in range(1200): os.mkdir("d"); os.chdir("d")\n',
    "a tree deeper than a path is long": 'os.mkdir("deep"); os.chdir("deep")\nfor _ in range(3000): os.mkdir("d"); os.chdir("d")\n',
    "names that are odd": 'open("-rf", "w"); open("a\\nb", "w"); open(b"\\xff", "w"); sh("mkdir -- \'-x y\'; git init -q \'./-x y\'")',
}


@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS)
async def test_a_good_fix_is_rewarded_whatever_else_the_agent_left(body, tmp_path):
    result = await rollout(f"fix()\n{body}", tmp_path)
    assert (result.status, result.reward) == (RolloutStatus.GRADED, 1.0), result


RUINOUS = {
    "no workspace": "shutil.rmtree(os.getcwd())",
    "the workspace is a link": 'd = os.getcwd(); shutil.rmtree(d); os.symlink("/", d)',
    "the workspace is a link to a copy": 'd = os.getcwd(); os.rename(d, "../other"); os.symlink("other", d)',
    "the workspace is a file": 'd = os.getcwd(); shutil.rmtree(d); open(d, "w")',
    "no sandbox": "shutil.rmtree(os.path.dirname(os.getcwd()))",
    "the sandbox is a link": 'd = os.path.dirname(os.getcwd()); shutil.rmtree(d); os.symlink("/", d)',
    "a sparse file of 3 GB": 'fix(); open("big", "wb").truncate(3 << 30)',
    "a known file grown to 3 GB": 'fix(); open("stats.py", "ab").truncate(3 << 30)',
    "a name git does not take": 'fix(); os.mkdir(".GIT"); open(".GIT/x", "w")',
}


@pytest.mark.parametrize("body", RUINOUS.values(), ids=RUINOUS)
async def test_a_workspace_that_cannot_be_graded_is_not_passed_and_the_reason_is_given(body, tmp_path):
    result = await rollout(body, tmp_path)
    assert (result.status, result.reward, result.error) == (RolloutStatus.GRADED, 0.0, ""), result
    assert result.detail


NESTED = {
    "committed": f'os.mkdir("impl")\n{IMPL}sh("cd impl; {COMMIT}")\n',
    "not committed": f'sh("git init -q impl")\n{IMPL}',
    "committed to the outer one as well": f'os.mkdir("impl")\n{IMPL}sh("cd impl; {COMMIT}; cd ..; git add -A; git commit -qm x")\n',
    "in a submodule": f'os.mkdir("../lib")\nos.mkdir("impl")\n{IMPL}sh("mv impl/* ../lib; rmdir impl; cd ../lib; {COMMIT}; cd ../work; '
    'git -c protocol.file.allow=always submodule --quiet add ../lib impl")\n',
}


@pytest.mark.parametrize("body", NESTED.values(), ids=NESTED)
async def test_work_in_a_repository_inside_the_workspace_is_carried(body, tmp_path):
    result = await rollout(body + USE, tmp_path)
    assert result.reward == 1.0, result
    assert b"160000" not in result.patch


async def test_changes_in_a_repository_of_the_tasks_own_inside_the_workspace_are_carried(tmp_path):
    task = RepositoryTask(
        "nested", "p", CommandGrader(("grep", "-q", "2", "lib/a")), {"lib/a": b"1\n"}, setup=(("sh", "-c", f"cd lib; {COMMIT}"),)
    )
    result = await rollout(
        'sh("cd lib; git log -1 --format=%s | grep -qx x; echo 2 > a; git -c user.name=a -c user.email=a@b commit -qam y")', tmp_path, task
    )
    assert result.reward == 1.0, result
    assert result.patch.startswith(b"diff --git a/lib/a b/lib/a\n")


HIDING = {
    "an ignore file": ('h + "/ignore"', "*"),
    "an attributes file": ('h + "/attributes"', "* filter=lose"),
    "a configuration": ('h + "/config"', '[core]\\nexcludesFile=/dev/stdin\\n[filter "lose"]\\nclean=false'),
}


@pytest.mark.parametrize(("where", "text"), HIDING.values(), ids=HIDING)
async def test_git_files_in_the_agents_home_change_nothing(where, text, tmp_path):
    body = f"""
h = os.environ["HOME"] + "/.config/git"
os.makedirs(h)
open({where}, "w").write('''{text}\\n''')
os.mkdir("impl")
"""
    result = await rollout(body + IMPL + USE, tmp_path)
    assert result.reward == 1.0, result


async def test_nothing_the_agent_configured_is_run(tmp_path):
    marker = tmp_path.parent / f"{tmp_path.name}-ran"
    program = f"#!/bin/sh\ntouch {marker}\ncat\n"
    settings = '[core]\nfsmonitor={p}\nhooksPath=..\n[filter "x"]\nclean={p}\n[diff]\nexternal={p}\n'
    body = f"""
p = os.path.abspath("../run"); open(p, "w").write({program!r}); os.chmod(p, 0o755)
for place in (os.environ["HOME"] + "/.gitconfig", ".git/config"):
    open(place, "w").write({settings!r}.replace("{{p}}", p))
open(".gitattributes", "w").write("* filter=x diff=x\\n")
fix()
"""
    result = await rollout(body, tmp_path)
    assert result.reward == 1.0, result
    assert not marker.exists()


async def test_a_large_file_of_the_task_is_no_reason_to_refuse(tmp_path, monkeypatch):
    monkeypatch.setattr("turnloom.rollout.patch.FILE_LIMIT", 1 << 20)
    task = demo_task()
    task = replace(task, files={**task.files, "data": bytes(3 << 20)})
    assert (await rollout("fix()", tmp_path, task)).reward == 1.0


UNSTARTABLE = {
    "removed": 'os.remove("run.sh")',
    "not executable": 'os.chmod("run.sh", 0o644)',
    "without its interpreter": 'open("run.sh", "w").write("#!/no/such/interpreter\\n")',
}


@pytest.mark.parametrize("body", UNSTARTABLE.values(), ids=UNSTARTABLE)
async def test_a_grading_command_that_the_agent_broke_is_not_passed(body, tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "run.sh").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "task" / "run.sh").chmod(0o755)
    (tmp_path / "sandboxes").mkdir()
    task = RepositoryTask("own-runner", "p", CommandGrader(("./run.sh",)), tmp_path / "task")
    assert (await rollout("pass", tmp_path / "sandboxes", task)).reward == 1.0
    result = await rollout(body, tmp_path / "sandboxes", task)
    assert (result.status, result.reward) == (RolloutStatus.GRADED, 0.0), result
    assert "with the patch the grading cannot begin" in result.detail


async def test_a_grading_command_that_the_task_lacks_is_the_tasks_fault(tmp_path):
    task = replace(demo_task(), grader=CommandGrader(("./no-such-program",)))
    with pytest.raises(SandboxError, match="no-such-program"):
        await grade_patch(task, b"", LocalBackend().make)
    result = await rollout("fix()", tmp_path, task)
    assert (result.status, result.reward) == (RolloutStatus.FAILED, None), result


class OutOfProcesses(LocalSandbox):
    """Has no process left for the first command after the agent."""

    async def exec(self, argv, **options):
        if Path(self.workdir, "agent-was-here").exists():
            raise SandboxUnavailable("cannot start a command: no processes left")
        return await super().exec(argv, **options)


class OutOfDisk(LocalSandbox):
    """Every git command after the agent finds the disk full."""

    async def exec(self, argv, **options):
        if argv[0] == "git" and Path(self.workdir, "agent-was-here").exists():
            argv = ["sh", "-c", "echo 'error: unable to write file x: No space left on device' >&2; exit 128"]
        return await super().exec(argv, **options)


@pytest.mark.parametrize("sandbox", [OutOfProcesses, OutOfDisk])
async def test_a_sandbox_that_gives_out_is_not_the_agents_doing(sandbox, tmp_path):
    result = await rollout('fix(); open("agent-was-here", "w")', tmp_path, sandbox=sandbox)
    assert (result.status, result.reward) == (RolloutStatus.FAILED, None), result
    assert result.error.startswith("SandboxUnavailable: ")


class Unremovable(LocalSandbox):
    """Is removed, but reports a failure of a kind nobody expected."""

    async def stop(self):
        await super().stop()
        raise RuntimeError("the backend is confused")


async def test_a_sandbox_that_cannot_be_removed_costs_no_reward(tmp_path):
    assert (await rollout("fix()", tmp_path, sandbox=Unremovable)).reward == 1.0
