"""The command line: one file per verb, one line per error, exit codes 0 fine, 1 a check failed, 2 cannot."""

from __future__ import annotations

import io
import logging
import sys
from typing import Annotated

import typer

from turnloom import __version__
from turnloom.cli import check, demo, doctor, engine, export, forks, fsck, run, sandbox, serve, show
from turnloom.core.dump import escaped
from turnloom.errors import EngineUnavailable, TurnloomError
from turnloom.gateway import logs

log = logging.getLogger("turnloom.cli")

app = typer.Typer(
    name="turnloom",
    help="Exact tokens for reinforcement learning of agents.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(show_it: bool) -> None:
    if show_it:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to standard error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    logs.configure(level=logging.INFO if verbose else logging.WARNING)


for verb in (demo, serve, engine, run, sandbox, show, forks, export, check, fsck, doctor):
    verb.register(app)


def main() -> None:
    """Run the command line; a known error is one line on standard error, and the whole of it with --verbose."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A terminal that knows few characters must not end the work.
    try:
        app(prog_name="turnloom")
    except (TurnloomError, OSError) as error:
        log.info("where it came from", exc_info=error)
        advice = "; start the engine, or correct --engine" if isinstance(error, EngineUnavailable) else ""
        sys.stderr.write(f"turnloom: {escaped(' '.join(str(error).split()) or type(error).__name__)}{advice}\n")
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
