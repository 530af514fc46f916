"""Which engines answer which requests: pools by name, and the rules that send a request to one.

The policy's pool is the model under training, and answers all that no rule sends
elsewhere. Another pool may be another model: it has a tokenizer, a template and
parsers of its own, and what it samples does not train.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from turnloom.engine.contract import Engine
from turnloom.engine.open import open_engine
from turnloom.engine.pool import Patience, Pool
from turnloom.errors import ConfigError
from turnloom.types import MAIN, Request
from turnloom.wire.contract import Envelope

POLICY = "policy"

_NAMED = re.compile(r"([a-z][a-z0-9_-]{0,31})=(.+)", re.DOTALL)
_NAME_FORM = "lower-case letters, digits, - and _, at most 32, a letter first"

_ROUTE_FORM = "POOL=model:PATTERN, POOL=label:PATTERN or POOL=header:NAME:PATTERN"

Spec = str | Engine
"""An engine's URL, several with commas between them, or an Engine."""


@dataclass(frozen=True, slots=True)
class Route:
    """Requests whose model, label or header fits `pattern` (`*`, `?` and `[…]` as in file names) go to `pool`."""

    pool: str
    by: Literal["model", "label", "header"]
    pattern: str
    header: str = ""

    def fits(self, request: Request, envelope: Envelope) -> bool:
        found = {"model": request.model, "label": request.label or MAIN, "header": envelope.headers.get(self.header)}[self.by]
        return found is not None and fnmatchcase(found, self.pattern)


def read_route(words: str) -> Route:
    """`side=label:side`, `judge=model:judge-*`, `judge=header:x-role:judge`. Raises ConfigError."""
    named = _NAMED.fullmatch(words)
    by, _, pattern = named[2].partition(":") if named else ("", "", "")
    header = ""
    if by == "header":
        header, _, pattern = pattern.partition(":")
    if named is None or by not in ("model", "label", "header") or not pattern or (by == "header" and not header):
        raise ConfigError(f"{words!r} is no route; give {_ROUTE_FORM}")
    return Route(named[1], by, pattern, header.lower())  # type: ignore[arg-type]


def read_routes(words: Sequence[str], pools: Collection[str]) -> tuple[Route, ...]:
    """In the order given; then, for each pool that no route names, the requests whose label is its name.

    Raises ConfigError, also for a pool called `main` without a route: the task itself would never be the policy's.
    """
    routes = [read_route(each) for each in words]
    for route in routes:
        if route.pool not in pools:
            raise ConfigError(f"there is no pool {route.pool!r} to route to; there are: {', '.join(sorted(pools))}")
    named = {route.pool for route in routes} | {POLICY}
    if MAIN in pools and MAIN not in named:
        raise ConfigError(f"a pool called {MAIN!r} would take the task itself from the policy; name it otherwise, or give it a route")
    return (*routes, *(Route(pool, "label", pool) for pool in pools if pool not in named))


def routed(routes: Sequence[Route], request: Request, envelope: Envelope) -> str:
    """The name of the pool that answers, "" for the policy's. The first route that fits counts."""
    found = next((r.pool for r in routes if r.fits(request, envelope)), POLICY)
    return "" if found == POLICY else found


def by_pool(words: Sequence[str], *, several: bool = True) -> dict[str, str]:
    """`NAME=VALUE` and plain values, which are the policy's; `several` of one pool are joined with commas. Raises ConfigError."""
    found: dict[str, list[str]] = {}
    for each in words:
        named = _NAMED.fullmatch(each)
        pool, value = (named[1], named[2]) if named else (POLICY, each)
        if pool in found and not several:
            raise ConfigError(f"{each!r}: the pool {pool!r} has {found[pool][0]!r} already")
        found.setdefault(pool, []).append(value)
    return {pool: ",".join(values) for pool, values in found.items()}


async def open_pool(spec: Spec, patience: Patience) -> Pool:
    """Raises ConfigError for what names no engine."""
    if isinstance(spec, Pool):
        return spec
    if not isinstance(spec, str):
        return Pool([spec], patience)
    opened: list[Engine] = []
    try:
        for url in spec.split(","):
            opened.append(await open_engine(url.strip()))
        return Pool(opened, patience)
    except BaseException:
        for engine in opened:
            await engine.close()
        raise


def check_pools(engines: Mapping[str, Spec]) -> None:
    """Raises ConfigError where no pool is the policy's, or a name is none."""
    if POLICY not in engines:
        raise ConfigError(f"no engine is the policy's; name one `{POLICY}`, or give it without a name")
    for name in engines:
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", name):
            raise ConfigError(f"{name!r} cannot be a pool's name: {_NAME_FORM}")
