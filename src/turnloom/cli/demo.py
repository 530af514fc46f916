"""`turnloom demo`: the main job on the embedded engine, explained as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from turnloom.cli.common import run_async, say
from turnloom.cli.run_progress import result_line
from turnloom.cli.show import print_session
from turnloom.core.credit import weigh
from turnloom.errors import ConfigError
from turnloom.export.check import check_engine, check_file, read_samples
from turnloom.export.registry import export
from turnloom.export.report import format_engine_report, format_report
from turnloom.gateway.api import Gateway
from turnloom.harness.contract import Harness
from turnloom.harness.registry import load_harness, require
from turnloom.rollout.attempt import RolloutSettings
from turnloom.rollout.contract import Rollout, RolloutEvent, RolloutStatus
from turnloom.rollout.demo_task import demo_task
from turnloom.rollout.runner import run_rollouts
from turnloom.store.contract import Limits
from turnloom.store.lock import held
from turnloom.types import Sampling

ENGINE = "local:smollm2"
OPTIONS = {"sdk-agent": {"args": ("--examples", "--max-turns", "5")}}
TEMPERATURE = 0.6
OUTPUT_TOKENS = 160
MAX_TURNS = 8
TIME_BUDGET = 60.0
TOLERANCE, MEAN_TOLERANCE = 1.0, 0.1
"""Nats, at most and on average. The model is quantised to four bits and two rollouts share its batches, so the same token
computed again differs by tenths; after a context that is off by one token the average would be several nats."""
MARK = ".turnloom-demo"
"""The file that says a folder is the demo's own. Nothing is removed from any other."""
FILES = ("turnloom.db", "turnloom.db-wal", "turnloom.db-shm", "samples.jsonl", "samples.parquet")


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
    harness = load_harness(agent, **OPTIONS.get(agent, {}))
    run_async(require(harness))
    store = _fresh_store(out)
    _head(f"{n} rollouts of {agent}: a repository with one failing test, SmolLM2-135M on this machine's CPU")
    say("  what the model asks for runs on this machine, in a folder of its own but not isolated")
    if not run_async(_demo(harness, n, out, store)):
        raise typer.Exit(1)


def _fresh_store(out: Path) -> Path:
    """The store of a new demo. Raises ConfigError where a run that is no demo left one, StoreError while another demo runs."""
    path = out / "turnloom.db"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with held(path):
            for name in FILES if (out / MARK).exists() else ():
                (out / name).unlink(missing_ok=True)
            if path.exists():
                raise ConfigError(f"{path} holds an earlier run; choose another --out, or remove it")
        (out / MARK).touch()
    except OSError as error:
        raise ConfigError(f"cannot write in {out}: {error.strerror or error}; choose another --out") from error
    return path


def write_samples(results: Sequence[Rollout], out: Path) -> Path:
    """The canonical samples as JSON lines and as Parquet; the JSON file's path."""
    samples = weigh(s for r in results for s in r.samples)
    export(samples, out / "samples.parquet", "parquet")
    export(samples, out / "samples.jsonl", "canonical")
    return out / "samples.jsonl"


async def _demo(harness: Harness, n: int, out: Path, store: Path) -> bool:
    gateway = Gateway(
        ENGINE,
        store=store,
        sampling=Sampling(temperature=TEMPERATURE, max_tokens=OUTPUT_TOKENS),
        limits=Limits(max_turns=MAX_TURNS),
    )
    async with gateway:
        context = (await gateway.engine.capabilities()).context_length
        settings = RolloutSettings(context_tokens=context, output_tokens=OUTPUT_TOKENS, time_budget=TIME_BUDGET)
        results = await run_rollouts(gateway, demo_task(), harness, settings, n=n, concurrency=2, on_event=_progress)
        path = write_samples(results, out)
        graded = [result for result in results if result.status is RolloutStatus.GRADED]
        _results(results)
        if not graded:
            _head("verdict: nothing was graded, so there is nothing to check; see above")
            return False
        await _show(gateway, results)
        say("")
        _files(path, out)
        exact = await _exact(gateway, path)
    verdict = exact and len(graded) == len(results)
    _head("verdict: " + ("the samples are exact" if verdict else "something is wrong, see above"))
    return verdict


def _progress(event: RolloutEvent) -> None:
    say(f"  {event.rollout_id}: {event.stage} {event.detail}".rstrip())


def _results(results: Sequence[Rollout]) -> None:
    _head("rollouts")
    for result in results:
        say("  " + result_line(result))
    graded = [result for result in results if result.status is RolloutStatus.GRADED]
    if graded:
        solved = sum(result.reward == 1.0 for result in graded)
        say(
            f"  {solved} of {len(results)} solved the task. A model of 135M parameters mostly fails it; its samples are exact all the same."
        )


async def _show(gateway: Gateway, results: Sequence[Rollout]) -> None:
    """The longest session's tree."""
    longest = max(results, key=lambda r: r.turns)
    if not longest.session_id:
        return
    _head("the tree of the longest session, as `turnloom show` draws it")
    decode = gateway.tokenizer.decode if gateway.tokenizer else None
    print_session(await gateway.session(longest.session_id), decode)


def _files(path: Path, out: Path) -> None:
    _head("files")
    say(f"  samples  {path} (and samples.parquet)")
    say(f"  store    {out / 'turnloom.db'} (turnloom show latest --store ...)")


async def _exact(gateway: Gateway, path: Path) -> bool:
    """Whether the file keeps every law and the engine agrees with it."""
    _head("turnloom check, every law that the file can prove")
    report = check_file(path)
    for line in format_report(report):
        say(line)
    if not report.ok:
        return False
    _head("turnloom check --engine, every trained token's logprob computed again by prefill")
    compared = await check_engine(read_samples(path), gateway.engine, TOLERANCE)
    for line in format_engine_report(compared):
        say(line)
    return compared.ok and (compared.mean or 0.0) <= MEAN_TOLERANCE


def _head(text: str) -> None:
    say(f"==> {text}", bold=True)
