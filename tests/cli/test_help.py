"""`--help` of every verb says what it does, with an example and a word on every option."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from tests.cli.conftest import Cli
from turnloom import __version__
from turnloom.cli.main import app

GROUP = typer.main.get_command(app)
VERBS = sorted(GROUP.commands)  # type: ignore[attr-defined]


def test_the_verbs_are_those_we_know() -> None:
    assert VERBS == ["check", "demo", "doctor", "engine", "export", "forks", "fsck", "run", "sandbox", "serve", "show"]


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb: str) -> None:
    printed = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"})
    assert printed.exit_code == 0
    assert f"Example: turnloom {verb} " in printed.output


@pytest.mark.parametrize("verb", VERBS)
def test_every_parameter_has_a_help_text(verb: str) -> None:
    for parameter in GROUP.commands[verb].params:  # type: ignore[attr-defined]
        assert getattr(parameter, "help", "") or parameter.name == "help", f"{verb}: {parameter.name}"


def test_without_a_verb_the_help_is_shown(cli: Cli) -> None:
    said = cli()
    assert all(f" {verb} " in said.out + said.err for verb in VERBS)


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"{__version__}\n"
