"""`turnloom run`: an agent on tasks, many times, from sandboxes to samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

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
from turnloom.cli.run_where import Run, here, on_ray
from turnloom.core.unroll import Longest, Overlong
from turnloom.engine.pool import PATIENCE
from turnloom.export.registry import load_format
from turnloom.gateway.api import Gateway
from turnloom.harness.contract import Harness
from turnloom.harness.registry import load_harness, require
from turnloom.rollout.attempt import RolloutSettings
from turnloom.rollout.contract import Task
from turnloom.rollout.demo_task import demo_task
from turnloom.rollout.folder import RunFolder, digest, tasks_digest
from turnloom.rollout.runner import jobs
from turnloom.rollout.task import load_task
from turnloom.sandbox.contract import Backend
from turnloom.sandbox.registry import load_sandbox
from turnloom.store.contract import Limits
from turnloom.types import Sampling

FREE = frozenset(
    """out resume engine engine_attempts engine_patience ray_workers concurrency boots guard retries max_failed formats""".split()
)
"""Options that a run may be resumed with other values of."""

SECRET = ("key", "token", "secret", "password", "env")
"""Options whose name has one of these in it are kept in a run's folder as a hash."""


def register(app: typer.Typer) -> None:
    app.command()(run)


def run(
    tasks: Annotated[str, typer.Argument(help="A task's folder with its task.toml, a folder of such folders, or `demo`.")],
    agent: Annotated[str, typer.Option(help="sdk-agent, pi, claude-code, command, or package.module:Name.")] = "sdk-agent",
    agent_option: Annotated[
        list[str] | None, typer.Option("--agent-option", help="NAME=VALUE for the agent, VALUE as JSON or as it is. Repeatable.")
    ] = None,
    argv: Annotated[
        list[str] | None,
        typer.Option("--arg", help="A word more for the agent's command line; for `command`, all of it. Repeatable."),
    ] = None,
    sandbox: Annotated[str, typer.Option(help="local (isolates nothing), another kind, or package.module:Name.")] = "local",
    sandbox_option: Annotated[
        list[str] | None, typer.Option("--sandbox-option", help="NAME=VALUE for the sandboxes, as --agent-option. Repeatable.")
    ] = None,
    n: Annotated[int, typer.Option("-n", help="Rollouts of each task: one group.", min=1)] = 1,
    engine: EngineOption = ["local:smollm2"],  # noqa: B006 (typer copies it)
    tokenizer: TokenizerOption = None,
    route: RouteOption = None,
    engine_attempts: EngineAttemptsOption = PATIENCE.attempts,
    engine_patience: EnginePatienceOption = PATIENCE.seconds,
    out: Annotated[Path, typer.Option(help="Folder for the store, results, logs and samples.")] = Path("runs/latest"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, if there is one; graded rollouts stay.")] = False,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="Of the samples, beside the canonical one: as for `export`. Repeatable.", show_default="parquet"),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Run on the Ray cluster at this address, `auto` for the one here, `local` to start one.")
    ] = None,
    ray_gateways: Annotated[int, typer.Option(help="Gateways on the cluster.", min=1)] = 1,
    ray_workers: Annotated[int, typer.Option(help="Processes on the cluster that run rollouts.", min=1)] = 1,
    concurrency: Annotated[int, typer.Option(help="Rollouts at once.", min=1)] = 4,
    boots: Annotated[int, typer.Option(help="Sandboxes that start at once.", min=1)] = 16,
    time_budget: Annotated[float, typer.Option(help="Seconds that an agent may take.", min=1)] = 600.0,
    guard: Annotated[
        float | None,
        typer.Option(help="Seconds for everything of one rollout.", min=1, show_default="the time budget and half an hour"),
    ] = None,
    retries: Annotated[int, typer.Option(help="How often a rollout is begun anew when its sandbox gives out.", min=0)] = 2,
    max_failed: Annotated[float, typer.Option(help="The share of rollouts that may end without a grade.", min=0, max=1)] = 0.0,
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
) -> None:
    """Run an agent on tasks, grade it, and write its samples.

    Exit code 0 when all were graded, 1 when none or too few were, 2 when it cannot run, 128 + a signal's number.

    Example: `turnloom run ./my-task --agent claude-code -n 8 --engine http://127.0.0.1:30000 --tokenizer Qwen/Qwen3-8B`
    """
    given = dict(locals())
    chosen = load_them(tasks)
    agent_options = {**template_kwargs(agent_option, "--agent-option"), **_words(agent, argv or ())}
    harness = load_harness(agent, **agent_options)
    sandbox_options = template_kwargs(sandbox_option, "--sandbox-option")
    backend = load_sandbox(sandbox, **sandbox_options)
    for name in formats or ():
        load_format(name)
    planned = jobs(chosen, n, name="")
    for task in chosen:
        backend.make(task.needs)  # What this kind can never meet is said before anything runs.
    run_async(_require(harness, backend))
    settings = RolloutSettings(backend.make, time_budget=time_budget, guard=guard, retries=retries, boots=boots)
    asked = _asked(given, chosen, agent_options, sandbox_options)
    with RunFolder.open(out, asked, resume=resume) as folder:
        options = dict(
            **engine_options(engine, tokenizer, route, engine_attempts, engine_patience),
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
        how = Run(folder, harness, planned, settings, concurrency, formats or ("parquet",))
        if ray is None:
            summary = run_async(here(how, Gateway(**options, store=folder.store)))
        else:
            summary = run_async(on_ray(how, options, "" if ray == "local" else ray, ray_gateways, ray_workers))
    if not _enough(summary, max_failed):
        raise typer.Exit(1)


async def _require(harness: Harness, backend: Backend) -> None:
    await require(harness)
    await backend.require()


def load_them(name: str) -> list[Task]:
    """The tasks that the argument names: of a folder that is none itself, those of its own folders, by name. Raises TaskError."""
    if name == "demo":
        return [demo_task()]
    path = Path(name)
    inside = sorted(place.parent for kind in ("toml", "json") for place in path.glob(f"*/task.{kind}"))
    own = any((path / f"task.{kind}").is_file() for kind in ("toml", "json"))
    return [load_task(each) for each in dict.fromkeys(inside)] if inside and not own else [load_task(path)]


def _words(agent: str, argv: Sequence[str]) -> dict[str, Any]:
    """The harness's option for the words of --arg. One of a user's own need not have it."""
    if agent == "command":
        return {"argv": argv}
    return {"args": argv} if argv else {}


def _asked(
    given: Mapping[str, Any], tasks: Sequence[Task], agent_options: Mapping[str, Any], sandbox_options: Mapping[str, Any]
) -> dict[str, Any]:
    """What makes two runs the same one, as JSON values."""
    asked = {name: value for name, value in given.items() if name not in FREE}
    asked |= {"ray": given["ray"] is not None}
    asked |= {"agent_option": _shown(agent_options), "sandbox_option": _shown(sandbox_options), "tasks_digest": tasks_digest(tasks)}
    plain: dict[str, Any] = json.loads(json.dumps(asked, default=str))
    return plain


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: digest(value) if any(word in name.lower() for word in SECRET) else value for name, value in options.items()}


def _enough(summary: Mapping[str, Any], max_failed: float) -> bool:
    """Whether so many were graded that the run counts as a success; says it where not."""
    graded, planned = summary["graded"], summary["planned"]
    if graded == planned:
        return True
    causes = ", ".join(f"{count} {cause}" for cause, count in summary["causes"].items())
    say(f"{planned - graded} of {planned} rollouts were not graded: {causes}" if graded else f"nothing was graded: {causes}")
    return bool(graded) and (planned - graded) / planned <= max_failed
