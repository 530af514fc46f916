"""`turnloom sandbox`: the contract of any kind of sandbox, and what killed runs left."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from turnloom.errors import SandboxError
from turnloom.sandbox.conformance import CHECKS
from turnloom.sandbox.local import LocalBackend, LocalSandbox


class Shouting(LocalSandbox):
    """Breaks one promise."""

    async def read_file(self, path: str, *, limit: int = 1 << 20) -> bytes:
        return (await super().read_file(path, limit=limit)).upper()


class ShoutingBackend(LocalBackend):
    def make(self, needs: object) -> LocalSandbox:
        return Shouting(grace=0.2)


class NowhereBackend(LocalBackend):
    async def require(self) -> None:
        raise SandboxError("this machine has no such thing")


@pytest.fixture(autouse=True)
def _few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(check for check in CHECKS if check.__name__ in ("files_are_kept_byte_for_byte", "standard_input_is_given_or_empty"))
    assert len(few) == 2
    monkeypatch.setattr("turnloom.cli.sandbox.CHECKS", few)


def test_every_check_has_its_line(cli: Cli) -> None:
    said = cli("sandbox", "check", "local")
    assert said.code == 0
    assert said.out == "ok      standard input is given or empty\nok      files are kept byte for byte\nlocal: 2 of 2 checks passed\n"


def test_a_broken_promise_is_named(cli: Cli) -> None:
    said = cli("sandbox", "check", f"{__name__}:ShoutingBackend")
    assert said.code == 1
    lines = said.out.splitlines()
    assert lines[0].startswith("ok ")
    assert lines[1].startswith("FAILED  files are kept byte for byte")
    assert lines[2].endswith("1 of 2 checks passed")


def test_a_kind_that_cannot_work_here_says_why(cli: Cli) -> None:
    said = cli("sandbox", "check", f"{__name__}:NowhereBackend")
    assert (said.code, said.err) == (2, "turnloom: this machine has no such thing\n")


def test_a_kind_has_to_be_named(cli: Cli) -> None:
    assert cli("sandbox", "check").code == 2
    assert "there is no sandbox 'shoebox'" in cli("sandbox", "check", "shoebox").err


def test_what_a_killed_run_left_is_removed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"turnloom-sandbox-{'a' * 32}"
    for words in (("sandbox", "prune"), ("sandbox", "prune", "--sandbox", "bubblewrap")):
        (left / "work").mkdir(parents=True)
        said = cli(*words)
        assert said.code == 0
        assert f"removed {left}" in said.out
        assert os.listdir(tmp_path) == []
    assert "nothing was left behind" in cli("sandbox", "prune", "--sandbox", "local").out
