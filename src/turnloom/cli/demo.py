"""`turnloom demo`: the main job on the embedded engine, explained as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from turnloom.cli.common import run_async
from turnloom.cli.run import result_line, rollouts, store_in, write_samples
from turnloom.cli.show import print_session
from turnloom.export.check import check_engine, check_file
from turnloom.export.report import EngineReport, format_engine_report, format_report
from turnloom.gateway.api import Gateway
from turnloom.harness.contract import Harness
from turnloom.harness.registry import load_harness
from turnloom.rollout.contract import RolloutResult
from turnloom.rollout.demo_task import demo_task
from turnloom.store.contract import Limits
from turnloom.types import Sample, Sampling

ENGINE = "local:smollm2"
ARGUMENTS = {"sdk-agent": ("--examples", "--max-turns", "5")}
TEMPERATURE = 0.6
OUTPUT_TOKENS = 160
MAX_TURNS = 8
TIME_BUDGET = 60.0
TOLERANCE, MEAN_TOLERANCE = 3.0, 0.2
"""Nats, at most and on average. The model is quantised to four bits and two rollouts share its batches, so the same token
computed again differs by tenths; after a context that is off by one token the average would be several nats."""
MARK = ".turnloom-demo"
"""The file that says a folder is the demo's own. Nothing is removed from any other."""


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    agent: Annotated[str, typer.Option(help="sdk-agent, pi, claude-code, or package.module:Name.")] = "sdk-agent",
    n: Annotated[int, typer.Option("-n", help="Rollouts.", min=1)] = 4,
    out: Annotated[Path, typer.Option(help="Folder for the store and the samples; an earlier demo in it is replaced.")] = Path("runs/demo"),
) -> None:
    """A real agent, a real model of 135M parameters, a small real task; then the samples, checked.

    Example: `turnloom demo --agent pi -n 2`
    """
    harness, store = load_harness(agent, args=ARGUMENTS.get(agent, ())), _fresh_store(out)
    _say(f"{n} rollouts of {agent}: a repository with one failing test, SmolLM2-135M on this machine's CPU")
    typer.echo("  what the model asks for runs on this machine, in a folder of its own but not isolated")
    if not run_async(_demo(harness, n, out, store)):
        raise typer.Exit(1)


def _fresh_store(out: Path) -> Path:
    """The store of a new demo. Raises ConfigError where a run that is no demo left one."""
    if (out / MARK).exists():
        for name in ("turnloom.db", "turnloom.db-wal", "turnloom.db-shm", "samples.jsonl", "samples.parquet"):
            (out / name).unlink(missing_ok=True)
    store = store_in(out)
    (out / MARK).touch()
    return store


async def _demo(harness: Harness, n: int, out: Path, store: Path) -> bool:
    gateway = Gateway(
        ENGINE,
        store=store,
        sampling=Sampling(temperature=TEMPERATURE, max_tokens=OUTPUT_TOKENS),
        limits=Limits(max_turns=MAX_TURNS),
    )
    async with gateway:
        results = await rollouts(gateway, demo_task(), harness, n=n, concurrency=2, time_budget=TIME_BUDGET, output_tokens=OUTPUT_TOKENS)
        _results(results)
        samples = [s for r in results for s in r.samples]
        path = write_samples(results, out)
        await _show(gateway, results)
        typer.echo("")
        _say("files")
        typer.echo(f"  samples  {path} (and samples.parquet)\n  store    {out / 'turnloom.db'} (turnloom show latest --store ...)")
        _say("turnloom check, every law that the file can prove")
        report = check_file(path)
        typer.echo("\n".join(format_report(report)))
        _say("turnloom check --engine, every trained token's logprob computed again by prefill")
        compared = await _compare(samples, gateway)
        typer.echo("\n".join(format_engine_report(compared)))
    answered = all(r.turns for r in results)
    agrees = compared.ok and (compared.mean or 0.0) <= MEAN_TOLERANCE
    verdict = report.ok and agrees and answered and bool(samples)
    _say("verdict: " + ("the samples are exact" if verdict else "something is wrong, see above"))
    return verdict


def _results(results: Sequence[RolloutResult]) -> None:
    _say("rollouts")
    for result in results:
        typer.echo("  " + result_line(result))
    solved = sum(result.reward == 1.0 for result in results)
    typer.echo(
        f"  {solved} of {len(results)} solved the task. A model of 135M parameters mostly fails it; its samples are exact all the same."
    )


async def _show(gateway: Gateway, results: Sequence[RolloutResult]) -> None:
    """The longest session's tree."""
    longest = max(results, key=lambda r: r.turns)
    if not longest.session_id:
        return
    _say("the tree of the longest session, as `turnloom show` draws it")
    decode = gateway.tokenizer.decode if gateway.tokenizer else None
    print_session(await gateway.session(longest.session_id), Console(), decode)


async def _compare(samples: Sequence[Sample], gateway: Gateway) -> EngineReport:
    return await check_engine(samples, gateway.engine, TOLERANCE)


def _say(text: str) -> None:
    typer.secho(f"==> {text}", bold=True)
