"""`turnloom forks`: why token sequences started anew, by count and by tokens, with examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from turnloom.cli.common import DEFAULT_STORE, StoreOption, load_sessions, reading, run_async, say
from turnloom.core.dump import clip
from turnloom.errors import ConfigError
from turnloom.types import Turn


@dataclass(frozen=True, slots=True)
class Example:
    """One fork: where it departs, and what stood there."""

    session: str
    turn: int
    message: int
    token: int
    detail: str
    recorded: str
    came: str
    joined_by: str


@dataclass(slots=True)
class Reason:
    """All forks of one kind. `tokens` are those of the prompts that were encoded anew."""

    count: int = 0
    tokens: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass(slots=True)
class Summary:
    sessions: int = 0
    turns: int = 0
    reasons: dict[str, Reason] = field(default_factory=dict)

    def add(self, session: str, turn: Turn, examples: int) -> None:
        self.turns += 1
        if (fork := turn.fork) is None:
            return
        reason = self.reasons.setdefault(fork.kind.value, Reason())
        reason.count += 1
        reason.tokens += len(turn.appended)
        if len(reason.examples) < examples:
            where = (session, turn.index, fork.message_index, fork.token_index)
            reason.examples.append(Example(*where, fork.detail, fork.recorded, fork.came, fork.joined_by))


def register(app: typer.Typer) -> None:
    app.command()(forks)


def forks(
    what: Annotated[
        str | None, typer.Argument(metavar="[SESSION|RUN]", help="A session as for `show`, or a run's folder or store. Default: all.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    examples: Annotated[int, typer.Option(help="Examples of each reason.", min=0)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Why token sequences started anew instead of going on, and what would have joined them.

    Example: `turnloom forks runs/demo`
    """
    path, session = _named(what, store)
    summary = run_async(_collect(path, session, examples))
    if as_json:
        say(json.dumps(asdict(summary)))
        return
    for line in lines(summary):
        say(line)


def _named(what: str | None, store: Path) -> tuple[Path, str | None]:
    """The store to read and the session to keep to, if one was named."""
    if what is not None:
        run = Path(what)
        try:
            if (run / DEFAULT_STORE).is_file():
                return run / DEFAULT_STORE, None
            if run.is_file():
                return run, None
        except OSError as error:
            raise ConfigError(f"there is no session or run {what[:40]!r}…: {error.strerror}") from None
        if "/" in what:
            raise ConfigError(f"there is no run at {clip(what, 80)}: name its folder, its store, or a session's id")
    return store, what


async def _collect(path: Path, session: str | None, examples: int) -> Summary:
    summary = Summary()
    async with reading(path) as store:
        async for found in load_sessions(store, None if session is None else [session], []):
            summary.sessions += 1
            for turn in found.tree.turns.values():
                summary.add(found.row.id, turn, examples)
    return summary


def lines(summary: Summary) -> Sequence[str]:
    """The reasons, those that cost most tokens first."""
    count = sum(reason.count for reason in summary.reasons.values())
    found = [f"{summary.sessions} sessions, {summary.turns} turns, {count} forks"]
    for kind, reason in sorted(summary.reasons.items(), key=lambda item: (-item[1].tokens, item[0])):
        found += ["", f"{kind}: {reason.count} forks, {reason.tokens} tokens encoded"]
        for example in reason.examples:
            found.append(f"  session {example.session}, turn {example.turn}, message {example.message}: {example.detail}")
            if example.token >= 0:
                found.append(f"    from token {example.token}: recorded {example.recorded!r}, came {example.came!r}")
            if example.joined_by:
                found.append(f"    would have gone on with --{example.joined_by.replace('=', ' ')}")
    return found
