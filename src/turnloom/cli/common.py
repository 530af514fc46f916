"""What several verbs share: options, printing, running on a loop, the store opened for reading, a session by the start of its id."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from turnloom.core.dump import clip, escaped
from turnloom.core.match import CANONICAL
from turnloom.core.unroll import DEFAULT_TRAINING, Overlong, Training
from turnloom.engine.pool import PATIENCE
from turnloom.errors import ConfigError, StoreError
from turnloom.gateway.pools import by_pool
from turnloom.gateway.session import Session
from turnloom.gateway.sessions import grown
from turnloom.store.contract import Entry, SessionRow, Store
from turnloom.store.sqlite import SQLiteStore
from turnloom.wire.quirks import ALL as ALL_QUIRKS
from turnloom.wire.quirks import Quirk

T = TypeVar("T")


class HistoryPolicy(StrEnum):
    SAMPLED = "sampled"
    TEMPLATE = "template"


class SpecialTokensPolicy(StrEnum):
    PLAIN = "plain"
    TEMPLATE = "template"


class ImagesPolicy(StrEnum):
    REFUSE = "refuse"
    PLACEHOLDER = "placeholder"


DEFAULT_STORE = Path("turnloom.db")

StoreOption = Annotated[Path, typer.Option("--store", help="The SQLite file that sessions are kept in.", show_default=True)]
EngineOption = Annotated[
    list[str],
    typer.Option(
        "--engine",
        help="sglang://HOST:PORT (a server or its router), vllm://…, llamacpp://…, local:MODEL. Repeated, or with commas: "
        "several of one model. NAME=URL: another pool.",
    ),
]
TokenizerOption = Annotated[
    list[str] | None,
    typer.Option("--tokenizer", help="A tokenizer's folder, hub id or .gguf file; NAME=… for a pool. Default: what the engine names."),
]
RouteOption = Annotated[
    list[str] | None,
    typer.Option("--route", help="POOL=label:PATTERN, POOL=model:PATTERN or POOL=header:NAME:PATTERN. The first that fits counts."),
]
EngineAttemptsOption = Annotated[
    int, typer.Option("--engine-attempts", help="How often a turn goes on after engines that gave no further token.", min=0)
]
EnginePatienceOption = Annotated[
    float, typer.Option("--engine-patience", help="Seconds that a turn goes on without a further token from failing engines.", min=0)
]
ToolFormatOption = Annotated[
    str, typer.Option("--tool-format", help="How the model writes tool calls: auto, a format (see the docs), or package.module:Name.")
]
MatchingOption = Annotated[
    str, typer.Option("--matching", help="When an echoed reply is the recorded one: canonical, strict, or package.module:name.")
]
HistoryOption = Annotated[
    HistoryPolicy, typer.Option("--history", help="sampled: append to the ids held. template: render every request whole.")
]
RealignOption = Annotated[
    int,
    typer.Option("--realign", help="With --history template: sampled ids of the last reply that may give way to the template's.", min=0),
]
RendererOption = Annotated[
    str, typer.Option("--renderer", help="Who writes prompts: auto, template, harmony, renderers, or package.module:Name.")
]
ChatTemplateOption = Annotated[
    str | None, typer.Option("--chat-template", help="A .jinja file to take instead of the tokenizer's own template.")
]
TemplateArgOption = Annotated[
    list[str] | None,
    typer.Option("--template-arg", help="NAME=VALUE for every rendering, VALUE as JSON or as it is. Repeatable."),
]
SpecialTokensOption = Annotated[
    SpecialTokensPolicy,
    typer.Option("--special-tokens", help="What a control token's spelling in a message is: plain text, or what the template makes of it."),
]
LabelerOption = Annotated[
    str, typer.Option("--labeler", help="What a request is for: auto knows some agents' side requests; or package.module:name.")
]
ImagesOption = Annotated[
    ImagesPolicy, typer.Option("--images", help="Whether an image is refused, or a placeholder in words stands for it.")
]
WithoutQuirkOption = Annotated[
    list[Quirk] | None, typer.Option("--without-quirk", help="A habit of clients that is not to be normalised. Repeatable.")
]
SkipLabelOption = Annotated[
    list[str] | None,
    typer.Option("--skip-label", help="Turns with this label do not train. Repeatable; '' is none.", show_default="side"),
]
OverlongOption = Annotated[Overlong, typer.Option("--overlong", help="What becomes of a sample with more tokens.")]


def engine_options(
    engines: Sequence[str], tokenizers: Sequence[str] | None, routes: Sequence[str] | None, attempts: int, seconds: float
) -> dict[str, Any]:
    """Who samples what, as arguments of `Gateway`. Raises ConfigError."""
    return {
        "engine": by_pool(engines),
        "tokenizer": by_pool(tokenizers or (), several=False),
        "routes": routes or (),
        "patience": replace(PATIENCE, attempts=attempts, seconds=seconds),
    }


def reading_options(labeler: str, images: ImagesPolicy, without: Sequence[Quirk] | None) -> dict[str, Any]:
    """How requests are read, as arguments of `Gateway`."""
    return {"labeler": labeler, "images": images.value, "quirks": ALL_QUIRKS - set(without or ())}


def training(skip: Sequence[str] | None) -> Training:
    """What `--skip-label` says."""
    return DEFAULT_TRAINING if skip is None else Training(frozenset(filter(None, skip)))


def template_kwargs(words: Sequence[str] | None, option: str = "--template-arg") -> dict[str, Any]:
    """What `--template-arg`, or another `option` of that form, says. Raises ConfigError."""
    given: dict[str, Any] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{option} {word!r} is not NAME=VALUE")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    return given


def say(text: str, *, bold: bool = False) -> None:
    """Print a line. Control characters, which an agent or a file may have written, are shown escaped.

    A reader that has left (`| head`) does not end the work: the rest goes nowhere.
    """
    try:
        typer.secho(escaped(text), bold=bold or None)
    except BrokenPipeError:
        reader_left()


def reader_left() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on uvloop where it is installed.

    SIGTERM and SIGHUP cancel the work as Ctrl-C does, so that it cleans up
    after itself; then they are SystemExit with 128 + the signal's number.
    """
    got: list[int] = []

    async def main() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def end(number: int) -> None:
            got.append(number)
            if len(got) == 1:  # A second one must not break off the clean-up.
                task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # As under nohup.
                loop.add_signal_handler(number, end, number)
        return await work

    with asyncio.Runner(loop_factory=_new_loop()) as runner:
        try:
            return runner.run(main())
        except asyncio.CancelledError:
            if got:
                raise SystemExit(128 + got[0]) from None
            raise


def _new_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop  # type: ignore[no-any-return]


@asynccontextmanager
async def reading(path: Path) -> AsyncIterator[SQLiteStore]:
    """The store, read-only: a gateway may be writing it. Raises ConfigError where there is none."""
    if not path.is_file():
        raise ConfigError(f"there is no store at {path}; name it with --store FILE")
    store = SQLiteStore(path, read_only=True)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def all_rows(store: Store, left: list[str] | None = None) -> list[SessionRow]:
    """Every session that can be read, newest first; of each other it says so, and puts its id into `left`."""
    entries: list[Entry] = []
    while page := await store.sessions(limit=500, offset=len(entries)):
        entries += page
    for entry in entries:
        if entry.row is None:
            say(f"turnloom: session {clip(entry.id, 80)} cannot be read: {entry.error}; see `turnloom fsck`")
            if left is not None:
                left.append(entry.id)
    return [entry.row for entry in entries if entry.row is not None]


async def find_row(store: Store, wanted: str) -> SessionRow:
    """The session whose id starts with `wanted`, or the newest for "latest". Raises ConfigError."""
    if (exact := await store.session(wanted)) is not None:
        return exact
    rows = await all_rows(store)
    if not rows:
        raise ConfigError("the store holds no session yet")
    matches = rows[:1] if wanted == "latest" else [r for r in rows if r.id.startswith(wanted)]
    if len(matches) != 1:
        known = ", ".join(r.id[:12] for r in (matches or rows)[:5])
        advice = f"say more of the id: {known}" if matches else f"the newest are: {known}"
        raise ConfigError(f"{len(matches) or 'no'} sessions start with {clip(wanted, 80)!r}; {advice}")
    return matches[0]


async def load_session(store: Store, row: SessionRow) -> Session:
    """Raises StoreError where it is damaged."""
    return Session(row, store, grown(CANONICAL, await store.deltas(row.id)))


async def load_sessions(store: Store, wanted: Sequence[str] | None, left: list[str]) -> AsyncIterator[Session]:
    """Those that `wanted` names, or all of the store, oldest first. What is damaged is said, and its id put into `left`."""
    if wanted:
        rows = list({row.id: row for row in [await find_row(store, each) for each in wanted]}.values())
    else:
        rows = list(reversed(await all_rows(store, left)))
    for row in rows:
        try:
            yield await load_session(store, row)
        except StoreError as error:
            left.append(row.id)
            say(f"turnloom: session {clip(row.id, 80)} is left out: {error}; see `turnloom fsck`")
