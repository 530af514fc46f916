"""Rollouts past one machine: gateways and workers as Ray actors, placed on nodes, watched, and asked again when one is lost.

A session is pinned to its gateway by its URL, and a gateway to its node, where its
store is: Ray restarts a lost one there, with its sessions. A worker keeps nothing;
what a lost one was running is begun anew elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from types import TracebackType
from typing import Any, Self, cast

from turnloom.client.remote import Client
from turnloom.counters import swallowed
from turnloom.errors import ConfigError, GatewayUnavailable
from turnloom.harness.contract import Harness
from turnloom.rollout.attempt import RolloutSettings
from turnloom.rollout.contract import Cause, Rollout
from turnloom.rollout.ray_actors import Address, GatewayHost, RolloutWorker, import_ray
from turnloom.rollout.runner import Job, OnRollout
from turnloom.rollout.spread import Spread

log = logging.getLogger("turnloom.rollout")

WATCH_SECONDS = 1.0
"""Between two looks at a gateway. A look at one that Ray has restarted starts its gateway again."""

START_SECONDS = 300.0

STOP_SECONDS = 120.0
"""How long a worker may take to clean up, or a gateway to close."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """`gateways` and `workers` are spread over the nodes one by one. `folder` holds each gateway's store on its own node.

    `per_worker` rollouts run at once in one worker. `lost` is how often a job whose worker was lost is begun anew.
    `cpus` are what an actor asks Ray for.
    """

    folder: str
    gateways: int = 1
    workers: int = 1
    per_worker: int = 64
    lost: int = 3
    cpus: float = 0.5


@dataclass(slots=True, eq=False)
class _Placed:
    """An actor, and how many rollouts of ours it is at."""

    actor: Any
    address: Address | None = None
    load: int = 0
    there: asyncio.Event = field(default_factory=asyncio.Event)
    """It answers: Ray takes a while to restart one that was lost."""


class RayCluster:
    """Async context manager. `gateway` holds the options of `turnloom.Gateway`, all of which must pickle: engines and tokenizers by
    name. Connects to the cluster at `address` unless this process already is; None starts one here."""

    def __init__(
        self, address: str | None, gateway: Mapping[str, Any], harness: Harness, rollouts: RolloutSettings, settings: ClusterSettings
    ) -> None:
        if min(settings.gateways, settings.workers, settings.per_worker) < 1:
            raise ConfigError("at least one gateway, one worker and one rollout in it are needed")
        self._ray = import_ray()
        self._at, self._options, self._harness, self._rollouts = address, dict(gateway), harness, rollouts
        self._settings = settings
        self._ours = False
        self._gateways: list[_Placed] = []
        self._workers: list[_Placed] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> list[Address]:
        """Of the gateways, once started."""
        return [placed.address for placed in self._gateways if placed.address is not None]

    async def __aenter__(self) -> Self:
        if not self._ray.is_initialized():
            await asyncio.to_thread(self._ray.init, address=self._at, log_to_driver=False, include_dashboard=False)
            self._ours = True
        try:
            await self._place()
        except BaseException:
            await self._end()
            raise
        self._beside(self._watching())
        return self

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[Spread]:
        """All gateways as one, for what is left to do when the jobs have ended: each session is found where it is."""
        async with AsyncExitStack() as clients:
            yield Spread([await clients.enter_async_context(Client(each.url, each.admin_key)) for each in self.addresses])

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._end()

    async def _place(self) -> None:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        _check_room(nodes, self._settings)
        host, worker = self._ray.remote(GatewayHost), self._ray.remote(RolloutWorker)
        for number, node in enumerate(islice(cycle(nodes), self._settings.gateways)):
            options = self._options_on(node, max_restarts=-1, max_concurrency=1000)
            store = f"{self._settings.folder}/gateway-{number}/turnloom.db"
            key = secrets.token_urlsafe(32)
            self._gateways.append(_Placed(host.options(**options).remote(self._options, store, node["NodeManagerAddress"], key)))
        for node in islice(cycle(nodes), self._settings.workers):
            options = self._options_on(node, max_restarts=-1, max_concurrency=self._settings.per_worker + 8)
            self._workers.append(_Placed(worker.options(**options).remote(self._harness, self._rollouts)))
        async with asyncio.timeout(START_SECONDS):
            for placed in self._gateways:
                placed.address = await placed.actor.address.remote()
                placed.there.set()
            for placed in self._workers:
                await placed.actor.pid.remote()
                placed.there.set()

    def _options_on(self, node: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        return {"num_cpus": self._settings.cpus, "scheduling_strategy": strategy, **more}

    async def _watching(self) -> None:
        """A restarted gateway listens again when it is asked where it is."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for placed in self._gateways:
                try:
                    await asyncio.wait_for(placed.actor.address.remote(), START_SECONDS)
                except Exception as error:  # noqa: BLE001 (it is looked at again)
                    swallowed(log, "rollout.ray", "a gateway does not answer: %s", error)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for placed in (*self._workers, *self._gateways):
            try:
                await asyncio.wait_for(placed.actor.stop.remote(), STOP_SECONDS)
            except Exception as error:  # noqa: BLE001 (what is left is killed below)
                swallowed(log, "rollout.ray", "an actor did not stop: %s", error)
        for placed in (*self._gateways, *self._workers):
            self._ray.kill(placed.actor)
        if self._ours:
            await asyncio.to_thread(self._ray.shutdown)

    async def run_jobs(self, planned: Iterable[Job], *, on_rollout: OnRollout, concurrency: int = 64) -> None:
        """`runner.run_jobs` on the cluster: each job against the gateway with the fewest, in the worker with the fewest.

        `on_rollout` gets each as it ends. Raises GatewayUnavailable where workers are lost again and again.
        """
        waiting = iter(planned)
        places = min(concurrency, self._settings.workers * self._settings.per_worker)

        async def one() -> None:
            for job in waiting:
                await on_rollout(await self._run(job))

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(max(1, places)):
                    workers.create_task(one())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self, job: Job) -> Rollout:
        """Begun anew where its worker or its gateway is lost, as often as that may be: against the same gateway where that comes back,
        since it has what is left of the session."""
        result: Rollout | None = None
        gateway: _Placed | None = None
        for _ in range(self._settings.lost + 1):
            if gateway is None or not await _returns(gateway):
                gateway = await _least(self._gateways)
            worker = await _least(self._workers)
            for each in (gateway, worker):
                each.load += 1
            ref = worker.actor.run.remote(job, gateway.address)
            try:
                result = cast(Rollout, await ref)
            except asyncio.CancelledError:
                self._ray.cancel(ref)
                raise
            except self._ray.exceptions.RayActorError as error:
                self._lost(worker, job, str(error).splitlines()[0])
            else:
                if result.cause is not Cause.GATEWAY:
                    return result
                self._lost(gateway, job, result.error)
            finally:
                for each in (gateway, worker):
                    each.load -= 1
            job = replace(job, again=True)
        if result is None:
            raise GatewayUnavailable(f"the workers of rollout {job.rollout} were lost {self._settings.lost + 1} times")
        return result

    def _lost(self, placed: _Placed, job: Job, why: str) -> None:
        swallowed(log, "rollout.ray", "rollout %s lost its place: %s", job.rollout, why)
        if placed.there.is_set():
            placed.there.clear()
            self._beside(_back(placed))

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_room(nodes: Sequence[Mapping[str, Any]], settings: ClusterSettings) -> None:
    """Ray would wait for ever for what no node can ever give. Raises ConfigError."""
    wanted = (settings.gateways + settings.workers) * settings.cpus
    there = sum(float(node["Resources"].get("CPU", 0.0)) for node in nodes)
    if wanted > there:
        actors = f"{settings.gateways} gateways and {settings.workers} workers"
        raise ConfigError(f"{actors} ask for {wanted:g} CPUs, and the cluster has {there:g}: ask for fewer, or start it with more")


async def _least(placed: Sequence[_Placed]) -> _Placed:
    """The one with the fewest rollouts of those that are there; waits while none is."""
    while not (there := [each for each in placed if each.there.is_set()]):
        waits = [asyncio.create_task(each.there.wait()) for each in placed]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    return min(there, key=lambda each: each.load)


async def _returns(placed: _Placed) -> bool:
    try:
        await asyncio.wait_for(placed.there.wait(), START_SECONDS)
    except TimeoutError:
        return False
    return True


async def _back(placed: _Placed) -> None:
    """Returns when Ray has brought it back, and a gateway listens again."""
    while not placed.there.is_set():
        try:
            answer = placed.actor.pid if placed.address is None else placed.actor.address
            await asyncio.wait_for(answer.remote(), START_SECONDS)
        except Exception as error:  # noqa: BLE001 (it is asked again)
            log.debug("an actor is not back yet: %s", error)
            await asyncio.sleep(WATCH_SECONDS)
        else:
            placed.there.set()
