"""`turnloom export`: samples of a store's sessions into a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turnloom.cli.common import (
    DEFAULT_STORE,
    OverlongOption,
    SkipLabelOption,
    StoreOption,
    load_sessions,
    reading,
    run_async,
    say,
    training,
)
from turnloom.core.credit import weigh
from turnloom.core.unroll import Longest, Overlong, Training
from turnloom.errors import ConfigError
from turnloom.export.registry import export as write
from turnloom.types import Sample


def register(app: typer.Typer) -> None:
    app.command()(export)


def export(
    out: Annotated[Path, typer.Argument(help="The file to write; its ending chooses the format.")],
    sessions: Annotated[list[str] | None, typer.Argument(help="Sessions to export. Default: all of the store.")] = None,
    store: StoreOption = DEFAULT_STORE,
    format: Annotated[str | None, typer.Option(help="canonical (JSON lines), parquet, or package.module:Name.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of a sample.", min=2)] = None,
    overlong: OverlongOption = Overlong.TRUNCATE,
    skip_label: SkipLabelOption = None,
) -> None:
    """Export samples for a trainer. Exit code 1 where a damaged session was left out.

    Example: `turnloom export samples.parquet --store runs/demo/turnloom.db`
    """
    chosen = format or _by_ending(out)
    left: list[str] = []
    samples, skipped = run_async(_collect(store, sessions, Longest(max_tokens, overlong), training(skip_label), left))
    write(samples, out, chosen)
    say(f"{len(samples)} samples, {sum(int(s.loss_mask.sum()) for s in samples)} trained tokens in {out}")
    if skipped:
        say(f"{skipped} sampled tokens do not train; `turnloom show SESSION` says why")
    if left:
        say(f"{len(left)} damaged sessions are left out")
        raise typer.Exit(1)


async def _collect(path: Path, wanted: list[str] | None, longest: Longest, policy: Training, left: list[str]) -> tuple[list[Sample], int]:
    samples: list[Sample] = []
    skipped = 0
    async with reading(path) as store:
        async for session in load_sessions(store, wanted, left):
            unrolled = session.unroll(longest, policy)
            samples += unrolled.samples
            skipped += sum(u.tokens for u in unrolled.untrained)
    return weigh(samples), skipped


def _by_ending(out: Path) -> str:
    known = {".jsonl": "canonical", ".parquet": "parquet"}
    if out.suffix not in known:
        raise ConfigError(f"{out} ends in neither .jsonl nor .parquet; name a format with --format")
    return known[out.suffix]
