"""Where the rollouts of `turnloom run` are run: in this process, or on a Ray cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnloom.cli.common import say
from turnloom.cli.run_progress import say_table, watch
from turnloom.gateway.api import Gateway
from turnloom.harness.contract import Harness
from turnloom.rollout import contract
from turnloom.rollout.attempt import OnEvent, RolloutSettings
from turnloom.rollout.collect import write_samples
from turnloom.rollout.folder import RESULTS, RunFolder
from turnloom.rollout.ray_cluster import ClusterSettings, RayCluster
from turnloom.rollout.runner import Job, OnRollout, run_jobs
from turnloom.rollout.summary import summary_of


@dataclass(frozen=True, slots=True)
class Run:
    """What is to be run, wherever that is."""

    folder: RunFolder
    harness: Harness
    planned: Sequence[Job]
    settings: RolloutSettings
    concurrency: int
    formats: Sequence[str]


async def here(run: Run, gateway: Gateway) -> dict[str, Any]:
    """The summary, when all is done. What has ended is on disk whenever this is broken off."""
    async with gateway:
        settings = replace(run.settings, context_tokens=(await gateway.engine.capabilities()).context_length)

        async def go(left: Sequence[Job], ended: OnRollout, event: OnEvent) -> None:
            await run_jobs(gateway, left, run.harness, settings, concurrency=run.concurrency, on_rollout=ended, on_event=event)

        summary = await _all(run, go)
        return await _written(run, summary, gateway)


async def on_ray(run: Run, options: Mapping[str, Any], address: str, gateways: int, workers: int) -> dict[str, Any]:
    """As `here`. Each gateway's store is in the run's folder on its own node; events of the rollouts are not shown."""
    settings = ClusterSettings(str(run.folder.path.absolute()), gateways, workers, per_worker=-(-run.concurrency // workers))
    async with RayCluster(address or None, options, run.harness, run.settings, settings) as cluster:

        async def go(left: Sequence[Job], ended: OnRollout, _: OnEvent) -> None:
            await cluster.run_jobs(left, on_rollout=ended, concurrency=run.concurrency)

        summary = await _all(run, go)
        async with cluster.gateway() as gateway:
            return await _written(run, summary, gateway)


async def _all(run: Run, go: Callable[[Sequence[Job], OnRollout, OnEvent], Awaitable[None]]) -> dict[str, Any]:
    """All that is left to do of the run."""
    begun, folder, graded = time.monotonic(), run.folder, run.folder.graded
    left = [replace(job, again=folder.began) for job in run.planned if job.rollout not in graded]
    with watch(len(run.planned), len(run.planned) - len(left)) as shown:

        async def ended(rollout: contract.Rollout) -> None:
            await asyncio.to_thread(folder.add, rollout)
            shown.ended(rollout)

        try:
            await go(left, ended, shown.event)
        except asyncio.CancelledError:
            shown.tell(f"broken off: {shown.done} of {len(run.planned)} rollouts have ended; go on with the same command and --resume")
            raise
        finally:
            summary = summary_of(folder.rows, len(run.planned), time.monotonic() - begun)
            folder.write_summary(summary)
    return summary


async def _written(run: Run, summary: dict[str, Any], gateway: contract.Gateway) -> dict[str, Any]:
    paths = await write_samples(gateway, run.folder, run.formats)
    say_table(summary)
    for path in paths:
        say(f"samples: {path}")
    say(f"results: {run.folder.path / RESULTS}")
    say(f"store:   {run.folder.store}")
    return summary
