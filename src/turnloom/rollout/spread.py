"""Several gateways as one: each session is opened where the fewest of ours are open, and stays there.

Its URL is what pins it: an agent that was given one gateway's address asks no other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from turnloom.counters import swallowed
from turnloom.errors import ConfigError, GatewayUnavailable, NotFound
from turnloom.rollout.contract import Gateway, SessionHandle
from turnloom.types import Sample

log = logging.getLogger("turnloom.rollout")


class Spread:
    """A `rollout.contract.Gateway` over others, started already.

    What counts as load is the sessions that were opened here and are not finished.
    A gateway that cannot be reached is passed over for that session, and asked
    again for the next.
    """

    def __init__(self, gateways: Sequence[Gateway]) -> None:
        if not gateways:
            raise ConfigError("there is no gateway to spread sessions over")
        self._gateways = tuple(gateways)
        self._open = [0] * len(gateways)

    @property
    def open(self) -> tuple[int, ...]:
        """Sessions of ours that are open, by gateway."""
        return tuple(self._open)

    async def open_session(self, *, id: str, group: str, rollout: str, metadata: dict[str, object]) -> SessionHandle:
        """Raises GatewayUnavailable where none can be reached, and what the one that was asked refuses."""
        lost: list[str] = []
        for place in sorted(range(len(self._gateways)), key=lambda place: (self._open[place], place)):
            self._open[place] += 1
            try:
                handle = await self._gateways[place].open_session(id=id, group=group, rollout=rollout, metadata=metadata)
            except GatewayUnavailable as error:
                self._open[place] -= 1
                lost.append(str(error))
                swallowed(log, "rollout.spread", "a gateway is passed over: %s", error)
            except BaseException:
                self._open[place] -= 1
                raise
            else:
                return _Placed(handle, self._open, place)
        raise GatewayUnavailable(f"none of {len(self._gateways)} gateways can be reached: {lost[0]}")

    async def handle(self, session_id: str) -> SessionHandle:
        """A session on record, wherever it is. Raises NotFound, and GatewayUnavailable where one that may have it cannot be reached."""
        lost: GatewayUnavailable | None = None
        for gateway in self._gateways:
            try:
                return await gateway.handle(session_id)
            except NotFound:
                continue
            except GatewayUnavailable as error:
                lost = error
        raise lost or NotFound(f"none of {len(self._gateways)} gateways has session {session_id!r}")


class _Placed:
    """A session that counts as its gateway's load until it is finished, however that ends."""

    def __init__(self, handle: SessionHandle, load: list[int], place: int) -> None:
        self._handle, self._load, self._place = handle, load, place
        self._counted = True

    @property
    def id(self) -> str:
        return self._handle.id

    @property
    def key(self) -> str:
        return self._handle.key

    @property
    def base_url(self) -> str:
        return self._handle.base_url

    async def finish(self, reward: float | None) -> list[Sample]:
        try:
            return await self._handle.finish(reward)
        finally:
            self._left()

    async def drop(self) -> None:
        try:
            await self._handle.drop()
        finally:
            self._left()

    def _left(self) -> None:
        if self._counted:
            self._counted = False
            self._load[self._place] -= 1

    async def samples(self) -> list[Sample]:
        return await self._handle.samples()

    async def status(self) -> Mapping[str, Any]:
        return await self._handle.status()

    async def tree(self) -> Mapping[str, Any]:
        return await self._handle.tree()
