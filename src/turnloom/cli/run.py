"""`turnloom run`: an agent on a task, many times, from sandbox to samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from turnloom.cli.common import (
    ChatTemplateOption,
    EngineAttemptsOption,
    EngineOption,
    EnginePatienceOption,
    HistoryOption,
    HistoryPolicy,
    ImagesOption,
    ImagesPolicy,
    LabelerOption,
    MatchingOption,
    OverlongOption,
    RealignOption,
    RendererOption,
    RouteOption,
    SkipLabelOption,
    SpecialTokensOption,
    SpecialTokensPolicy,
    TemplateArgOption,
    TokenizerOption,
    ToolFormatOption,
    WithoutQuirkOption,
    engine_options,
    reading_options,
    run_async,
    say,
    template_kwargs,
    training,
)
from turnloom.core.credit import weigh
from turnloom.core.unroll import Longest, Overlong
from turnloom.engine.pool import PATIENCE
from turnloom.errors import ConfigError
from turnloom.export.registry import export
from turnloom.gateway.api import Gateway
from turnloom.harness.contract import Harness
from turnloom.harness.registry import load_harness, require
from turnloom.rollout.contract import RolloutEvent, RolloutResult, RolloutStatus, Task
from turnloom.rollout.demo_task import demo_task
from turnloom.rollout.runner import RolloutSettings, run_rollouts
from turnloom.rollout.task import load_task
from turnloom.store.contract import Limits
from turnloom.store.lock import held
from turnloom.types import Sampling


def register(app: typer.Typer) -> None:
    app.command()(run)


def run(
    task: Annotated[str, typer.Argument(help="A task's folder with its task.toml, or `demo`.")],
    agent: Annotated[str, typer.Option(help="sdk-agent, pi, claude-code, command, or package.module:Name.")] = "sdk-agent",
    n: Annotated[int, typer.Option("-n", help="Rollouts.", min=1)] = 1,
    engine: EngineOption = ["local:smollm2"],  # noqa: B006 (typer copies it)
    tokenizer: TokenizerOption = None,
    route: RouteOption = None,
    engine_attempts: EngineAttemptsOption = PATIENCE.attempts,
    engine_patience: EnginePatienceOption = PATIENCE.seconds,
    out: Annotated[Path, typer.Option(help="Folder for the store and the samples.")] = Path("runs/latest"),
    concurrency: Annotated[int, typer.Option(help="Rollouts at once.", min=1)] = 4,
    time_budget: Annotated[float, typer.Option(help="Seconds that an agent may take.", min=1)] = 600.0,
    tool_format: ToolFormatOption = "auto",
    matching: MatchingOption = "canonical",
    history: HistoryOption = HistoryPolicy.SAMPLED,
    realign: RealignOption = 0,
    renderer: RendererOption = "auto",
    chat_template: ChatTemplateOption = None,
    template_arg: TemplateArgOption = None,
    special_tokens: SpecialTokensOption = SpecialTokensPolicy.PLAIN,
    labeler: LabelerOption = "auto",
    images: ImagesOption = ImagesPolicy.REFUSE,
    without_quirk: WithoutQuirkOption = None,
    temperature: Annotated[float, typer.Option(help="Pinned for every turn.", min=0)] = 1.0,
    max_turns: Annotated[int | None, typer.Option(help="Turns a rollout may take.", min=1)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens a turn may sample.", min=1)] = None,
    max_sample_tokens: Annotated[int | None, typer.Option(help="Tokens of a sample.", min=2)] = None,
    overlong: OverlongOption = Overlong.TRUNCATE,
    skip_label: SkipLabelOption = None,
    argv: Annotated[
        list[str] | None,
        typer.Option("--arg", help="A word more for the agent's command line; for `command`, all of it. Repeatable."),
    ] = None,
) -> None:
    """Run an agent on a task, grade it, and write its samples; exit code 1 when no rollout was graded.

    Example: `turnloom run ./my-task --agent claude-code -n 8 --engine http://127.0.0.1:30000 --tokenizer Qwen/Qwen3-8B`
    """
    chosen = demo_task() if task == "demo" else load_task(Path(task))
    harness = load_harness(agent, **_words(agent, argv or ()))
    run_async(require(harness))
    gateway = Gateway(
        **engine_options(engine, tokenizer, route, engine_attempts, engine_patience),
        store=store_in(out),
        tool_format=tool_format,
        matching=matching,
        history=history.value,
        realign=realign,
        renderer=renderer,
        chat_template=chat_template,
        template_kwargs=template_kwargs(template_arg),
        special_tokens=special_tokens.value,
        **reading_options(labeler, images, without_quirk),
        longest=Longest(max_sample_tokens, overlong),
        skip_labels=training(skip_label).skip,
        sampling=Sampling(temperature=temperature, max_tokens=max_tokens),
        limits=Limits(max_turns=max_turns),
    )
    results = run_async(_run(gateway, chosen, harness, n, concurrency, time_budget))
    path = write_samples(results, out)
    for result in results:
        say(result_line(result))
    say(f"samples: {path}")
    say(f"store:   {out / 'turnloom.db'}")
    if not any(result.status is RolloutStatus.GRADED for result in results):
        say("nothing was graded")
        raise typer.Exit(1)


def _words(agent: str, argv: Sequence[str]) -> dict[str, Sequence[str]]:
    """The harness's option for the words of --arg. One of a user's own need not have it."""
    if agent == "command":
        return {"argv": argv}
    return {"args": argv} if argv else {}


def store_in(out: Path, earlier: Sequence[str] = ()) -> Path:
    """The path of a new run's store, in its folder. `earlier` names the files that may be removed for it.

    Raises ConfigError where another run left its store or the folder cannot be
    written, and StoreError while a running one holds it; then nothing is removed.
    """
    path = out / "turnloom.db"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with held(path):
            for name in earlier:
                (out / name).unlink(missing_ok=True)
            if path.exists():
                raise ConfigError(f"{path} holds an earlier run; choose another --out, or remove it")
    except OSError as error:
        raise ConfigError(f"cannot write in {out}: {error.strerror or error}; choose another --out") from error
    return path


async def _run(gateway: Gateway, task: Task, harness: Harness, n: int, concurrency: int, time_budget: float) -> list[RolloutResult]:
    async with gateway:
        return await rollouts(gateway, task, harness, n=n, concurrency=concurrency, time_budget=time_budget)


async def rollouts(
    gateway: Gateway, task: Task, harness: Harness, *, n: int, concurrency: int, time_budget: float, output_tokens: int = 4096
) -> list[RolloutResult]:
    """Run on a started gateway. Progress goes out line by line."""
    context = (await gateway.engine.capabilities()).context_length
    return await run_rollouts(
        gateway,
        task,
        harness,
        n=n,
        concurrency=concurrency,
        time_budget=time_budget,
        on_event=_progress,
        settings=RolloutSettings(context_tokens=context, output_tokens=output_tokens),
    )


def _progress(event: RolloutEvent) -> None:
    say(f"  {event.rollout_id}: {event.stage} {event.detail}".rstrip())


def result_line(result: RolloutResult) -> str:
    """One line a rollout: turns, tokens, lineages, reward."""
    reward = "none" if result.reward is None else f"{result.reward:g}"
    figures = f"{result.turns} turns, {result.tokens} tokens, {result.lineages} lineages, {result.forks} forks, reward {reward}"
    ended = result.outcome or result.status
    return f"{result.rollout_id}  {figures}, {ended}, {result.duration:.0f} s" + (f": {result.error}" if result.error else "")


def write_samples(results: Sequence[RolloutResult], out: Path) -> Path:
    """The canonical samples as JSON lines and as Parquet; the JSON file's path."""
    samples = weigh(s for r in results for s in r.samples)
    export(samples, out / "samples.parquet", "parquet")
    export(samples, out / "samples.jsonl", "canonical")
    return out / "samples.jsonl"
