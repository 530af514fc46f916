"""From an agent's changes to a reward, with real git and real commands.

Each case is a shell script that stands for what an agent did in its sandbox.
"""

import sys
from contextlib import closing
from dataclasses import replace

import pytest

from turnloom.errors import TaskError
from turnloom.rollout import CommandGrader, RepositoryTask, demo_task, grade_patch
from turnloom.rollout import patch as patch_module
from turnloom.rollout.patch import PatchRefused, take_base, take_patch
from turnloom.sandbox import LocalBackend, LocalSandbox

FIX = "sed -i 's/ (len(values) + 1)/ len(values)/' stats.py"


async def patch_of(task, script):
    """What the script changes in a prepared workspace."""
    sandbox = LocalSandbox(grace=0.5)
    await sandbox.start()
    try:
        await task.prepare(sandbox)
        with closing(await take_base(sandbox)) as base:
            result = await sandbox.exec(["bash", "-c", script])
            assert result.exit_code == 0, result
            return await take_patch(sandbox, base)
    finally:
        await sandbox.stop()


async def grade(task, script):
    return await grade_patch(task, await patch_of(task, script), LocalBackend().make)


async def test_a_good_patch_gets_one():
    got = await grade(demo_task(), FIX)
    assert (got.reward, got.exit_code) == (1.0, 0), got.output


async def test_no_patch_gets_zero():
    assert await patch_of(demo_task(), "true") == b""
    got = await grade(demo_task(), "true")
    assert (got.reward, got.exit_code) == (0.0, 1)
    assert "FAILED" in got.output


TAMPERING = {
    "the test expects what the code gives": "sed -i 's/, 3)/, 2)/; s/, 5)/, 2.5)/' tests/test_stats.py",
    "the test is gone": "rm tests/test_stats.py",
    "the tests are gone": "rm -r tests",
    "the runner passes": "echo > tests/run.py",
    "the tests are elsewhere": "mv tests kept; mkdir other; echo > other/run.py; ln -s other tests",
    "a module stands in for Python's own": "echo 'import os; os._exit(0)' | tee unittest.py pathlib.py sitecustomize.py usercustomize.py",
    "a module beside the runner": "echo 'import os; os._exit(0)' > tests/unittest.py",
    "another test is added": "printf 'import os; os._exit(0)' > tests/test_a.py",
    "it is committed": "echo > tests/run.py; git add -A; git commit -qm pass",
    "git is told to lie": "echo > tests/run.py; printf 'tests/** filter=x -diff\\n' > .gitattributes; git config filter.x.clean true",
}


@pytest.mark.parametrize("script", TAMPERING.values(), ids=TAMPERING)
async def test_changing_the_tests_does_not_help(script):
    assert (await grade(demo_task(), script)).reward == 0.0


@pytest.mark.parametrize("script", TAMPERING.values(), ids=TAMPERING)
async def test_changing_the_tests_does_not_hurt_a_good_patch(script):
    got = await grade(demo_task(), f"{FIX}; {script}")
    assert got.reward == 1.0, got


REPOSITORY = {
    "committed": "git add -A; git commit -qm fixed",
    "history rewritten": "git checkout -q --orphan new; git add -A; git commit -qm all; git branch -D main; git gc -q --prune=now",
    "no repository": "rm -rf .git",
    "staged": "git add -A",
    "stashed and back": "git stash -q; git stash pop -q",
    "settings that would run things": "git config core.fsmonitor 'touch fsm'; git config diff.external false; git config core.pager false",
    "hooks": "printf '#!/bin/sh\\nexit 1\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/pre-commit",
}


@pytest.mark.parametrize("script", REPOSITORY.values(), ids=REPOSITORY)
async def test_the_patch_does_not_depend_on_the_agents_own_repository(script):
    task = demo_task()
    assert await patch_of(task, f"{FIX}; {script}") == await patch_of(task, FIX)


CHECK = """
import os, pathlib, sys
want = {
    "bin": bytes(range(256)) * 3, "new/deep/é file.txt": b"text\\n", "crlf.txt": b"a\\r\\nb", "no-newline": b"x", "empty": b"",
    "kept.bin": bytes(range(255, -1, -1)),
}
for name, data in want.items():
    assert pathlib.Path(name).read_bytes() == data, name
assert os.access("run.sh", os.X_OK)
assert os.readlink("link") == "bin"
assert not os.path.exists("removed.txt")
"""

CHANGES = """
python3 - <<'END'
import os, pathlib
pathlib.Path("bin").write_bytes(bytes(range(256)) * 3)
pathlib.Path("kept.bin").write_bytes(bytes(range(255, -1, -1)))
os.makedirs("new/deep")
pathlib.Path("new/deep/é file.txt").write_bytes(b"text\\n")
pathlib.Path("crlf.txt").write_bytes(b"a\\r\\nb")
pathlib.Path("no-newline").write_bytes(b"x")
pathlib.Path("empty").write_bytes(b"")
pathlib.Path("run.sh").write_bytes(b"#!/bin/sh\\n")
os.chmod("run.sh", 0o755)
os.symlink("bin", "link")
os.remove("removed.txt")
pathlib.Path(".gitattributes").write_text("* text=auto eol=lf\\n*.bin -diff\\n")
END
"""


async def test_new_binary_linked_and_removed_files_are_carried_byte_for_byte():
    files = {"removed.txt": b"old\n", "kept.bin": bytes(range(256))}
    task = RepositoryTask("carry", "p", CommandGrader((sys.executable, "check.py")), files, grader_files={"check.py": CHECK.encode()})
    got = await grade(task, CHANGES)
    assert got.reward == 1.0, got.output


async def test_grader_files_are_hidden_from_the_agent_and_win_over_what_it_put_there():
    task = RepositoryTask("hidden", "p", CommandGrader(("sh", "hidden/check.sh")), {"a": b""}, grader_files={"hidden/check.sh": b"exit 3"})
    for script in ("test ! -e hidden", "mkdir hidden; echo exit 0 > hidden/check.sh", "ln -s / hidden", "echo > hidden"):
        assert (await grade(task, script)).exit_code == 3, script


async def test_a_directory_of_files_and_of_grader_files(tmp_path):
    (tmp_path / "files" / "sub").mkdir(parents=True)
    (tmp_path / "files" / "sub" / "run.sh").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "files" / "sub" / "run.sh").chmod(0o755)
    (tmp_path / "grader").mkdir()
    (tmp_path / "grader" / "sub").symlink_to("nowhere")
    task = RepositoryTask("dirs", "p", CommandGrader(("sub/run.sh",)), tmp_path / "files")
    assert (await grade(task, "test -x sub/run.sh")).reward == 1.0


async def test_setup_is_the_bases_not_the_agents():
    task = RepositoryTask("setup", "p", CommandGrader(("cat", "made")), {"a": b"1"}, setup=(("cp", "a", "made"),))
    assert await patch_of(task, "test -e made") == b""
    assert (await grade(task, "true")).reward == 1.0


async def test_a_setup_that_fails_says_which():
    task = RepositoryTask("setup", "p", CommandGrader(("true",)), setup=(("sh", "-c", "echo why >&2; exit 7"),))
    with pytest.raises(TaskError, match="setup command 'sh' ended with 7: why"):
        await patch_of(task, "true")


async def test_a_repository_of_the_tasks_own_is_kept(tmp_path):
    task = RepositoryTask(
        "own", "p", CommandGrader(("true",)), {"a": b"1", "b": b"1"}, setup=(("sh", "-c", "git init -q . && git config a.b kept"),)
    )
    assert await patch_of(task, 'test "$(git config a.b)" = kept') == b""


async def test_a_patch_that_does_not_apply_gets_zero():
    got = await grade_patch(demo_task(), b"diff --git a/no b/no\n--- a/no\n+++ b/no\n@@ -1 +1 @@\n-a\n+b\n", LocalBackend().make)
    assert (got.reward, got.exit_code) == (0.0, None)
    assert "does not apply" in got.detail


@pytest.mark.parametrize("path", ["../outside", ".git/hooks/x", "/tmp/outside", "link/outside"])
async def test_a_forged_patch_cannot_leave_the_workspace(path):
    link = "diff --git a/link b/link\nnew file mode 120000\n--- /dev/null\n+++ b/link\n@@ -0,0 +1 @@\n+/tmp\n\\ No newline at end of file\n"
    forged = f"{link}diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    got = await grade_patch(replace(demo_task(), grader=CommandGrader(("true",))), forged.encode(), LocalBackend().make)
    assert (got.reward, got.exit_code) == (0.0, None), got


async def test_a_patch_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(patch_module, "PATCH_LIMIT", 1 << 20)
    with pytest.raises(PatchRefused, match="larger than 1 MiB"):
        await patch_of(demo_task(), "head -c 3000000 /dev/urandom > big")


async def test_a_grading_command_that_hangs_gets_zero_even_when_it_then_exits_with_zero():
    task = replace(demo_task(), grader=CommandGrader(("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.05; done"), timeout=0.5))
    got = await grade(task, FIX)
    assert (got.reward, got.exit_code) == (0.0, None)
    assert "did not end" in got.detail


async def test_a_score_of_ones_own():
    task = replace(demo_task(), grader=CommandGrader(("sh", "-c", "exit 25"), score=lambda code: (code or 0) / 100))
    assert (await grade(task, "true")).reward == 0.25


async def test_the_workspace_is_the_same_in_every_sandbox():
    task = replace(demo_task(), files={**demo_task().files, "ids": b""})
    first = await patch_of(task, "git rev-parse HEAD > ids")
    assert first
    assert first == await patch_of(task, "git rev-parse HEAD > ids")
