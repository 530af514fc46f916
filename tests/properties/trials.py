"""Random and faithful sessions of each template, counted. A session's plan follows from its template's name and its number."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import get_context

from tests.properties.agreement import Agreement, Faithful
from tests.properties.driver import ACTIONS, Driver
from tests.properties.replies import Replies
from tests.properties.subjects import HARMONY, Subject, refusal, subject_of
from tests.properties.violations import by_law, violations
from turnloom.core.match import CANONICAL, STRICT, Matcher
from turnloom.gateway.policy import SAMPLED, History
from turnloom.render.profile import Profile
from turnloom.testing.corpus import entry

LONGEST_PLAN = 8
FAITHFUL_TURNS = (2, 6)
FAITHFUL_SHARE = 10
"""One faithful session of each segmentation for so many random ones."""

POLICIES: Sequence[tuple[History, Matcher, int]] = (
    (SAMPLED, CANONICAL, 66),
    (SAMPLED, STRICT, 6),
    (History("template"), CANONICAL, 12),
    (History("template", realign=6), CANONICAL, 8),
    (History("template", realign=200), CANONICAL, 8),
)
"""History policy, matcher, and how many of a hundred sessions have them."""


@dataclass
class Result:
    """One template's sessions. `broken` are violations by law, `examples` the first of each with its session's number."""

    name: str
    vocabulary: str = ""
    exact: bool = True
    profile: Profile | None = None
    unusable: str = ""
    sessions: int = 0
    turns: int = 0
    bridged: int = 0
    forks: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    checked: Counter[int] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    cut: Agreement = field(default_factory=Agreement)
    whole: Agreement = field(default_factory=Agreement)


def plan_of(rng: random.Random) -> list[tuple[str, int]]:
    return [(rng.choice(ACTIONS), rng.getrandbits(32)) for _ in range(rng.randint(1, LONGEST_PLAN))]


async def session_of(subject: Subject, replies: Replies, number: int) -> Driver:
    """Random session `number` of a template, to its end."""
    rng = random.Random(f"{subject.name} {number}")
    history, matcher, _ = rng.choices(POLICIES, [weight for *_, weight in POLICIES])[0]
    driver = Driver(subject, replies, rng.getrandbits(32), history, matcher)
    await driver.run(plan_of(rng))
    return driver


def run(name: str, sessions: int) -> Result:
    if why := refusal(name):
        return Result(name, unusable=why)
    subject = subject_of(name)
    result = Result(name, subject.vocabulary, subject.exact, subject.profile)
    asyncio.run(_run(result, subject, Replies(subject), sessions))
    return result


async def _run(result: Result, subject: Subject, replies: Replies, sessions: int) -> None:
    for number in range(sessions):
        driver = await session_of(subject, replies, number)
        result.sessions += 1
        _count(result, driver)
        found = violations(driver)
        result.checked.update(driver.checked)
        result.broken.update(by_law(found))
        for line in found:
            result.examples.setdefault(line.partition(":")[0], f"session {number}: {line}")
    for number in range(-(-sessions // FAITHFUL_SHARE)):
        for cut, total in ((True, result.cut), (False, result.whole)):
            rng = random.Random(f"{subject.name} faithful {number}")
            faithful = Faithful(subject, replies, rng.getrandbits(32), cut)
            total.add(await faithful.run(rng.randint(*FAITHFUL_TURNS)))


def _count(result: Result, driver: Driver) -> None:
    for turn in driver.session.tree.turns.values():
        result.turns += 1
        result.bridged += turn.base is not None
        if turn.fork is not None:
            result.forks[str(turn.fork.kind)] += 1
    result.refused.update(driver.refused)


def _family(name: str) -> str:
    return entry("trl/gptoss" if name == HARMONY else name).family


def _some(chosen: Sequence[str], sessions: int) -> list[Result]:
    """Templates of one family, which share a vocabulary, in one process."""
    found = []
    for name in chosen:
        found.append(run(name, sessions))
        print(f"{name}: {found[-1].unusable or _said(found[-1])}", file=sys.stderr, flush=True)
    return found


def _said(result: Result) -> str:
    return f"{result.sessions} sessions, {result.turns} turns, {sum(result.broken.values())} violations"


def results(chosen: Sequence[str], sessions: int, jobs: int) -> Iterator[Result]:
    """In the corpus's order."""
    families = [list(group) for _, group in groupby(sorted(chosen, key=_family), _family)]
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        found = {r.name: r for some in pool.map(_some, families, [sessions] * len(families)) for r in some}
    yield from (found[name] for name in chosen)
