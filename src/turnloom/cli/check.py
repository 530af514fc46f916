"""`turnloom check`: what a file of samples can prove, and what an engine says of its logprobs."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from turnloom.cli.common import run_async, say
from turnloom.engine.contract import Engine
from turnloom.engine.open import open_engine
from turnloom.export.check import TOLERANCE, check_engine, check_file, read_samples
from turnloom.export.report import EngineReport, format_engine_report, format_report
from turnloom.types import Sample


def register(app: typer.Typer) -> None:
    app.command()(check)


def check(
    file: Annotated[Path, typer.Argument(help="Canonical samples, JSON lines or Parquet.")],
    engine: Annotated[str | None, typer.Option(help="Recompute every trained token's logprob on this engine, by prefill.")] = None,
    tolerance: Annotated[float, typer.Option(help="Largest difference allowed, in nats. Use 1e-4 for float32 engines.")] = TOLERANCE,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Check a file of samples; exit code 1 when something is wrong, or when it holds none.

    Example: `turnloom check samples.jsonl --engine http://127.0.0.1:30000`
    """
    report = check_file(file)
    compared = run_async(_compare(list(read_samples(file)), engine, tolerance)) if engine and report.ok else None
    if json:
        say(_json({"file": report.to_dict(), "engine": compared.to_dict() if compared else None}))
    else:
        lines = format_report(report) + (format_engine_report(compared) if compared else [])
        if engine and compared is None:
            lines.append(
                "the engine was not asked: mend the file first" if report.rows else "the engine was not asked: there is nothing to ask"
            )
        for line in lines:
            say(line)
    raise typer.Exit(0 if report.ok and (compared is None or compared.ok) else 1)


def _json(value: object) -> str:
    """ASCII, whatever a file wrote as a session's name; a difference that is not finite is null."""
    return json_text.dumps(json_text.loads(json_text.dumps(value), parse_constant=lambda _: None))


async def _compare(samples: Sequence[Sample], url: str, tolerance: float) -> EngineReport:
    engine: Engine = await open_engine(url)
    try:
        return await check_engine(samples, engine, tolerance)
    finally:
        await engine.close()
