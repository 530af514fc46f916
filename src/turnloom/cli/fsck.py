"""`turnloom fsck`: whether a store is whole."""

from __future__ import annotations

import json as spelling
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from turnloom.cli.common import DEFAULT_STORE, say
from turnloom.errors import ConfigError
from turnloom.store.fsck import Problem, check


def register(app: typer.Typer) -> None:
    app.command()(fsck)


def fsck(
    store: Annotated[Path, typer.Argument(help="The store to look at; a gateway may be writing it.")] = DEFAULT_STORE,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Read every row of a store, and check that its turns fit together and hold the very ids that the engine had.

    Exit code 1 when something is wrong; each finding says what to do. Nothing is changed.

    Example: `turnloom fsck turnloom.db`
    """
    if not store.is_file():
        raise ConfigError(f"there is no store at {store}")
    report = check(store)
    if json:
        typer.echo(spelling.dumps(asdict(report)))
    else:
        for problem in report.problems:
            say(_line(problem))
        found = len(report.problems)
        verdict = "clean" if not found else f"{found} problem{'s' if found > 1 else ''}"
        say(f"{store}: {report.sessions} sessions, {report.turns} turns, {report.tokens} sampled tokens: {verdict}")
    raise typer.Exit(int(bool(report.problems)))


def _line(problem: Problem) -> str:
    where = " ".join(part for part in (problem.session and f"session {problem.session}", problem.turn and f"turn {problem.turn}") if part)
    return f"{where or 'the file'}: {problem.what}; {problem.advice}"
