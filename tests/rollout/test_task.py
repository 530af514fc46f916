"""Tasks and the directories they are read from."""

import json
from pathlib import Path

import pytest

from turnloom.errors import TaskError
from turnloom.rollout import CommandGrader, RepositoryTask, demo_task, load_task
from turnloom.rollout.graders import pass_or_fail

TOML = """
prompt = "Fix it."
setup = [["python3", "-c", "print(1)"]]
protected = ["tests"]

[eval]
argv = ["python3", "check.py"]
files = "grader"
timeout = 12
"""


def directory(place: Path, text: str, name: str = "task.toml") -> Path:
    for part in ("files", "grader"):
        (place / part).mkdir(exist_ok=True)
    (place / name).write_text(text)
    return place


def test_a_directory_gives_its_task(tmp_path):
    place = directory(tmp_path, TOML)
    task = load_task(place)
    assert task == load_task(place / "task.toml")
    assert (task.id, task.prompt, task.files, task.grader_files) == (tmp_path.name, "Fix it.", tmp_path / "files", tmp_path / "grader")
    assert task.setup == (("python3", "-c", "print(1)"),)
    assert (task.grader, task.protected) == (CommandGrader(("python3", "check.py"), timeout=12.0), ("tests",))


def test_json_says_the_same_and_a_prompt_may_be_a_file(tmp_path):
    (tmp_path / "prompt.md").write_text("Fix é.\n")
    place = directory(tmp_path, json.dumps({"id": "x", "prompt_file": "prompt.md", "eval": {"argv": ["true"]}}), "task.json")
    task = load_task(place)
    assert (task.id, task.prompt, task.grader_files) == ("x", "Fix é.\n", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt = ", "task.toml"),
        ("prompt = 'x'", "eval: Field required"),
        ("[eval]\nargv = ['true']", "either prompt or prompt_file"),
        ("prompt = 'x'\nprompt_file = 'y'\n[eval]\nargv = ['true']", "either prompt or prompt_file"),
        ("prompt_file = 'no.md'\n[eval]\nargv = ['true']", "prompt_file"),
        ("prompt = 'x'\n[eval]\nargv = 'true'", "eval.argv"),
        ("prompt = 'x'\n[eval]\nargv = []", "eval.argv"),
        ("prompt = 'x'\nsetup = ['make all']\n[eval]\nargv = ['true']", "setup.0"),
        ("prompt = 'x'\npromt = 'y'\n[eval]\nargv = ['true']", "promt: Extra inputs"),
        ("prompt = 'x'\nfiles = 'no'\n[eval]\nargv = ['true']", "files: there is no directory 'no'"),
        ("prompt = 'x'\n[eval]\nargv = ['true']\nfiles = 'no'", "eval.files: there is no directory 'no'"),
        ("prompt = 'x'\nprotected = ['../x']\n[eval]\nargv = ['true']", "not a path inside"),
        ("prompt = ''\n[eval]\nargv = ['true']", "needs an id and a prompt"),
    ],
)
def test_a_wrong_task_names_the_field(tmp_path, text, message):
    with pytest.raises(TaskError, match=message):
        load_task(directory(tmp_path, text))


def test_a_missing_task_says_so(tmp_path):
    with pytest.raises(TaskError, match=r"no task.toml or task.json"):
        load_task(tmp_path)


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x", "", "."])
def test_paths_stay_in_the_workspace(path):
    for where in ({"protected": (path,)}, {"grader_files": {path: b""}}):
        with pytest.raises(TaskError, match="not a path inside"):
            RepositoryTask("t", "p", CommandGrader(("true",)), **where)
    with pytest.raises(TaskError, match="not a path inside"):
        RepositoryTask("t", "p", CommandGrader(("true",)), {path: b""})


def test_only_an_exit_code_of_zero_passes():
    assert [pass_or_fail(code) for code in (0, 1, -9, None)] == [1.0, 0.0, 0.0, 0.0]


def test_the_demo_task_shows_the_agent_its_test():
    assert {"stats.py", "tests/run.py", "tests/test_stats.py"} <= set(demo_task().files)
