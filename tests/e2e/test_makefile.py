"""The Makefile on a small checkout of its own, without a network: what it makes, what it removes, which paths it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

PROJECT = """
[project]
name = "turnloom"
version = "0"
optional-dependencies = {agent = [], local = [], test = [], lint = []}

[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "turnloom-0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        extras = "".join(f"Provides-Extra: {extra}\\n" for extra in ("agent", "local", "test", "lint"))
        wheel.writestr("turnloom-0.dist-info/METADATA", f"Metadata-Version: 2.1\\nName: turnloom\\nVersion: 0\\n{extras}")
        wheel.writestr("turnloom-0.dist-info/WHEEL", "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("turnloom-0.dist-info/RECORD", "")
    return name
"""


def checkout(place: Path) -> Path:
    place.mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", place)
    (place / "pyproject.toml").write_text(PROJECT, "utf-8")
    (place / "backend.py").write_text(BACKEND, "utf-8")
    return place


def make(where: Path, *words: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    """`make` as in a shell of its own; a variable that is None is not set."""
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TURNLOOM_CACHE", "XDG_CACHE_HOME", "OUT")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    wanted = kept | {"PYTHON": sys.executable, "PIP_NO_INDEX": "1"} | env
    given = {name: value for name, value in wanted.items() if value is not None}
    return subprocess.run(["make", *words], cwd=where, env=given, capture_output=True, text=True, timeout=600)


def refused(ended: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why nothing was done."""
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    return line


def environment(where: Path, cache: Path | str) -> Path:
    """Where `make clean` would look, as its dry run says."""
    ended = make(where, "-n", "clean", TURNLOOM_CACHE=str(cache))
    assert ended.returncode == 0, ended.stderr
    return Path(ended.stdout.splitlines()[-1].split("'")[1])


def test_an_environment_is_made_once_and_clean_removes_it(tmp_path: Path) -> None:
    tree, cache = checkout(tmp_path / "tree"), tmp_path / "cache"
    made = make(tree, "venv", TURNLOOM_CACHE=str(cache))
    assert made.returncode == 0, made.stderr
    place = Path(made.stdout.splitlines()[-1])
    assert place == environment(tree, cache)
    assert (place / "bin" / "python").exists()
    assert make(tree, "venv", TURNLOOM_CACHE=str(cache)).stdout == f"{place}\n"
    (cache / "model.gguf").touch()
    (tree / "runs").mkdir()
    assert make(tree, "clean", TURNLOOM_CACHE=str(cache)).returncode == 0
    assert not place.exists()
    assert not (tree / "runs").exists()
    assert (cache / "model.gguf").exists()


def test_an_environment_that_broke_off_is_finished_by_the_next_run(tmp_path: Path) -> None:
    tree, cache = checkout(tmp_path / "tree"), tmp_path / "cache"
    without_pip = tmp_path / "python"
    without_pip.write_text(
        f'#!/bin/sh\nif [ "$1 $2" = "-m venv" ] && [ ! -e "{tmp_path}/mended" ]; then\n'
        f'"{sys.executable}" -m venv --without-pip "$3"; exit 1; fi\nexec "{sys.executable}" "$@"\n',
        "utf-8",
    )
    without_pip.chmod(0o755)
    set_up = {"TURNLOOM_CACHE": str(cache), "PYTHON": str(without_pip)}
    assert make(tree, "venv", **set_up).returncode != 0
    (tmp_path / "mended").touch()
    ended = make(tree, "venv", **set_up)
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "mended").unlink()
    assert make(tree, "clean", **set_up).returncode == 0
    assert list((cache / "venvs").iterdir()) == []


def test_clean_removes_nothing_that_is_not_this_checkouts(tmp_path: Path) -> None:
    tree, cache = checkout(tmp_path / "tree"), tmp_path / "cache"
    place = environment(tree, cache)
    assert make(tree, "clean", TURNLOOM_CACHE=str(cache)).returncode == 0, "there is nothing yet"
    place.mkdir(parents=True)
    (place / "thesis.txt").touch()
    for says in (None, "/somewhere/else\n"):
        if says:
            (place / ".turnloom-checkout").write_text(says, "utf-8")
        ended = make(tree, "clean", TURNLOOM_CACHE=str(cache))
        assert ended.returncode != 0
        assert "does not say that it is this checkout's" in ended.stderr
        assert (place / "thesis.txt").exists()


@pytest.mark.parametrize(
    "character", [" ", "\t", "'", '"', "$x", "$(shell touch pwned)", "`touch pwned`", ";", "#", "\\", ":", "%", "*", "~", "&"]
)
def test_a_cache_that_make_cannot_hold_is_refused(tmp_path: Path, character: str) -> None:
    tree = checkout(tmp_path / "tree")
    for cache in (f"{tmp_path}/a{character}b", f"{tmp_path}/a/{character}"):
        assert "set TURNLOOM_CACHE to a plain one" in refused(make(tree, "clean", TURNLOOM_CACHE=cache))
    assert {p.name for p in tree.iterdir()} == {"Makefile", "pyproject.toml", "backend.py"}


def test_a_home_that_make_cannot_hold_is_refused(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree")
    assert "set TURNLOOM_CACHE to a plain one" in refused(make(tree, "clean", HOME=f"{tmp_path}/my home"))
    assert "set TURNLOOM_CACHE" in refused(make(tree, "clean", HOME=None))


@pytest.mark.parametrize("name", ["my tree", "it's", 'a"b', "a$HOME", "a;b", "a:b", "a#b"])
def test_a_checkout_that_make_cannot_hold_is_refused(tmp_path: Path, name: str) -> None:
    assert "move it to a plain one" in refused(make(checkout(tmp_path / name), "clean", TURNLOOM_CACHE=str(tmp_path / "cache")))


def test_two_checkouts_have_two_environments(tmp_path: Path) -> None:
    trees = [checkout(tmp_path / name) for name in ("a", "b", "é")]
    assert len({environment(tree, tmp_path / "cache") for tree in trees}) == 3


def test_an_empty_cache_is_the_users_and_a_relative_one_is_below_the_checkout(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree")
    assert environment(tree, "near").parent == tree / "near" / "venvs"
    for env in ({"HOME": f"{tmp_path}"}, {"XDG_CACHE_HOME": f"{tmp_path}/.cache"}):
        said = make(tree, "-n", "clean", TURNLOOM_CACHE="", **env).stdout
        assert f"'{tmp_path}/.cache/turnloom/venvs/" in said


def test_a_folder_for_the_demo_may_have_any_name(tmp_path: Path) -> None:
    tree, cache = checkout(tmp_path / "tree"), tmp_path / "cache"
    bin_ = environment(tree, cache) / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "turnloom").write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n", "utf-8")
    (bin_ / "turnloom").chmod(0o755)
    for stamp in (".made", ".demo"):
        (bin_.parent / stamp).touch()
    said = make(tree, "demo", "N=2", OUT="/o u't;`touch x`", AGENT="a b", TURNLOOM_CACHE=str(cache)).stdout
    assert said == "demo|--agent|a b|-n|2|--out|/o u't;`touch x`|"
