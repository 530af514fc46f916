"""`turnloom sandbox`: whether a kind of sandbox keeps its promises here, and away with what killed runs left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from turnloom.cli.common import run_async, say, template_kwargs
from turnloom.errors import ConfigError, TurnloomError
from turnloom.sandbox.conformance import CHECKS, Check
from turnloom.sandbox.contract import Backend, Needs
from turnloom.sandbox.registry import SANDBOXES, load_sandbox

_CHECK_TIME = 300.0


class Action(StrEnum):
    CHECK = "check"
    PRUNE = "prune"


def register(app: typer.Typer) -> None:
    app.command()(sandbox)


def sandbox(
    action: Annotated[Action, typer.Argument(help="check: run every check of the contract. prune: remove what killed runs left.")],
    name: Annotated[str | None, typer.Argument(help="The kind to check: local, bubblewrap, …, or package.module:Name.")] = None,
    kind: Annotated[str | None, typer.Option("--sandbox", help="The only kind to prune. Default: all there are.")] = None,
    image: Annotated[str, typer.Option(help="What to check it with, in the kind's own terms.")] = "",
    sandbox_option: Annotated[
        list[str] | None, typer.Option("--sandbox-option", help="NAME=VALUE for the one kind that is named. Repeatable.")
    ] = None,
) -> None:
    """Look after sandboxes; exit code 1 when a check fails, 2 when the kind cannot work here.

    Example: `turnloom sandbox check bubblewrap`
    """
    chosen, options = name or kind, template_kwargs(sandbox_option, "--sandbox-option")
    if action is Action.PRUNE:
        if options and chosen is None:
            raise ConfigError("--sandbox-option takes --sandbox: name the kind that has it")
        run_async(_prune((chosen,) if chosen else tuple(SANDBOXES), options, named=chosen is not None))
        return
    if chosen is None:
        raise ConfigError(f"name the kind of sandbox to check: one of {', '.join(SANDBOXES)}, or package.module:Name")
    failed = run_async(_check(load_sandbox(chosen, **options), Needs(image=image)))
    say(f"{chosen}: {len(CHECKS) - failed} of {len(CHECKS)} checks passed")
    raise typer.Exit(int(failed > 0))


async def _check(backend: Backend, needs: Needs) -> int:
    """Run every check in a sandbox of its own; how many failed."""
    await backend.require()
    failed = 0
    for check in CHECKS:
        problem = await _problem(backend, needs, check)
        failed += problem is not None
        words = check.__name__.replace("_", " ")
        say(f"ok      {words}" if problem is None else f"FAILED  {words}: {problem}")
    return failed


async def _problem(backend: Backend, needs: Needs, check: Check) -> str | None:
    place = backend.make(needs)
    try:
        async with asyncio.timeout(_CHECK_TIME):
            await place.start()
            await check(place)
    except TimeoutError:
        return f"it did not end within {_CHECK_TIME:.0f} s"
    except Exception as error:  # noqa: BLE001 (a check that fails is a finding, whatever it raised)
        return " ".join(str(error).split()) or type(error).__name__
    finally:
        await place.stop()
    return None


async def _prune(names: Sequence[str], options: Mapping[str, Any], *, named: bool) -> None:
    removed = 0
    for name in names:
        try:
            found = await load_sandbox(name, **options).prune()
        except TurnloomError as error:
            if named:
                raise
            say(f"{name}: not looked at: {error}")
            continue
        for left in found:
            say(f"{name}: removed {left}")
        removed += len(found)
    if not removed:
        say("nothing was left behind")
