"""What runs on a Ray cluster: gateways, each with a store of its own on its node, and workers that run rollouts against them.

Needs the extra `ray`. Imported by Ray's workers as well, so it holds no state of a run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turnloom.client.remote import Client
from turnloom.errors import ConfigError
from turnloom.gateway.api import Gateway
from turnloom.harness.contract import Harness
from turnloom.rollout.attempt import RolloutSettings
from turnloom.rollout.contract import Rollout
from turnloom.rollout.runner import Job, rollout


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway is reached, from every node, and the tokens that its engine's context holds."""

    url: str
    admin_key: str = field(repr=False)
    context_tokens: int


class GatewayHost:
    """One gateway. It is started by the first call of `address`, and by the first after Ray has restarted its process.

    Its port stays the same, in a file beside the store, so that its sessions' URLs
    hold over restarts; agents ask again until it is back.
    """

    def __init__(self, options: Mapping[str, Any], store: str, host: str, admin_key: str) -> None:
        self._options, self._store, self._host, self._key = dict(options), Path(store), host, admin_key
        self._gateway: Gateway | None = None
        self._starting = asyncio.Lock()

    async def address(self) -> Address:
        async with self._starting:
            if self._gateway is None:
                self._gateway = await self._start()
        context = (await self._gateway.engine.capabilities()).context_length
        return Address(self._gateway.url, self._key, context)

    async def _start(self) -> Gateway:
        self._store.parent.mkdir(parents=True, exist_ok=True)
        kept = self._store.with_name(f"{self._store.name}.port")
        port = int(kept.read_text()) if kept.exists() else 0
        gateway = Gateway(**self._options, store=self._store, host=self._host, port=port, admin_key=self._key)
        await gateway.start()
        if not port:
            kept.write_text(gateway.url.rpartition(":")[2])
        return gateway

    async def pid(self) -> int:
        return os.getpid()

    async def stop(self, drain: float = 0.0) -> None:
        async with self._starting:
            gateway, self._gateway = self._gateway, None
            if gateway is not None:
                await gateway.stop(drain)


class RolloutWorker:
    """Runs rollouts beside each other, each against the gateway that it is given."""

    def __init__(self, harness: Harness, settings: RolloutSettings) -> None:
        self._harness, self._settings = harness, settings
        self._clients: dict[Address, Client] = {}
        self._running: set[asyncio.Task[Rollout]] = set()

    async def run(self, job: Job, gateway: Address) -> Rollout:
        client = self._clients.get(gateway)
        if client is None:
            client = self._clients[gateway] = Client(gateway.url, gateway.admin_key)
            await client.start()
        task = asyncio.create_task(
            rollout(
                client,
                job.task,
                self._harness,
                replace(self._settings, context_tokens=gateway.context_tokens),
                rollout_id=job.rollout,
                group=job.group,
                index=job.index,
                again=job.again,
            )
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await task

    async def stop(self) -> None:
        """Cancel what runs, and return when all of it is cleaned up."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for client in self._clients.values():
            await client.stop()

    async def pid(self) -> int:
        return os.getpid()


def import_ray() -> Any:
    """Raises ConfigError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed: pip install 'turnloom[ray]'") from error
    return ray
