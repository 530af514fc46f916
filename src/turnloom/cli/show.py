"""`turnloom show`: one session's tree and samples in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from turnloom.cli.common import DEFAULT_STORE, StoreOption, find_row, load_session, reader_left, reading, run_async, say
from turnloom.core.dump import dump_samples, dump_tree, escaped, summary
from turnloom.engine.models import tokenizer_source
from turnloom.gateway.session import Session
from turnloom.tokenizer import load_tokenizer

_STYLES = ((" * ", "green"), ("   train", "bold green"), ("   context", "dim"), ("fork:", "yellow"), ("untrained:", "red"))


def register(app: typer.Typer) -> None:
    app.command()(show)


def show(
    session: Annotated[str, typer.Argument(help="A session's id, the start of one, or `latest`.")],
    store: StoreOption = DEFAULT_STORE,
    tokenizer: Annotated[
        str | None, typer.Option(help="Decode the samples' tokens with this tokenizer: a folder, hub id or .gguf file, or local:MODEL.")
    ] = None,
) -> None:
    """Show a session: its messages, its turns with their forks, and what of it trains.

    Example: `turnloom show latest --store runs/demo/turnloom.db`
    """
    found = run_async(_load(store, session))
    decode = load_tokenizer(tokenizer_source(tokenizer)).decode if tokenizer else None
    print_session(found, decode)
    if decode is None:
        say("tokens are not decoded: give --tokenizer")


async def _load(path: Path, wanted: str) -> Session:
    async with reading(path) as store:
        return await load_session(store, await find_row(store, wanted))


def session_lines(session: Session, width: int, decode: object = None) -> list[str]:
    row, figures = session.row, summary(session.tree)
    reward = "" if row.reward is None else f", reward {row.reward:g}"
    head = f"session {row.id} ({row.status}{reward}): {figures['turns']} turns, {figures['lineages']} lineages"
    room = max(width - 16, 40)
    samples = dump_samples(session.unroll(), decode, width=room)  # type: ignore[arg-type]
    return [head, "", *dump_tree(session.tree, width=room), "", *samples]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        reader_left()


def print_session(session: Session, decode: object = None) -> None:
    """The lines, coloured. Text is never read as markup, and its control characters are shown escaped."""
    console = _Console()
    for line in session_lines(session, console.width, decode):
        style = next((s for mark, s in _STYLES if line.startswith(mark) or (mark.endswith(":") and mark in line)), "")
        console.print(Text(escaped(line), style=style), soft_wrap=True)
