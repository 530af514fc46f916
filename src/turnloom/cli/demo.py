"""`turnloom demo`: the main job on the embedded engine, explained as it goes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from turnloom.cli.check import run_check
from turnloom.cli.common import load_session, reading, run_async
from turnloom.cli.run import result_line, rollouts, store_in, write_samples
from turnloom.cli.show import print_session
from turnloom.engine.open import open_engine
from turnloom.gateway.api import Gateway
from turnloom.gateway.session import Session
from turnloom.harness.registry import load_harness
from turnloom.rollout.contract import RolloutResult
from turnloom.rollout.demo_task import demo_task
from turnloom.store.contract import Limits
from turnloom.types import Sampling

ENGINE = "local:smollm2"
OUTPUT_TOKENS = 192
MAX_TURNS = 6
TIME_BUDGET = 60.0


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
    typer.echo(f"==> {n} rollouts of {agent} on a repository with one failing test; the model is SmolLM2-135M on this CPU")
    harness = load_harness(agent)
    if (out / "turnloom.db").exists():
        shutil.rmtree(out)
    results, verdict = run_async(_demo(agent_rollouts(harness, n, out), out))
    _ = results
    raise typer.Exit(0 if verdict else 1)


__all__ = ["Console", "Gateway"]
