"""The gateway on a thread with a loop of its own, for code that is not async."""

from __future__ import annotations

from typing import Any, Protocol

from turnloom.client.blocking import Blocking, Startable
from turnloom.engine.contract import PauseMode
from turnloom.gateway.pools import POLICY

NOT_STARTED = "the gateway is not started; use `async with Gateway(...)` or `with Gateway.background(...)`"


class InProcess(Startable, Protocol):
    """What a Gateway can do beyond what every client can."""

    url: str

    async def hold(self, mode: PauseMode = "abort", *, pool: str = POLICY, seconds: float | None = None) -> int: ...

    async def release(self, *, pool: str = POLICY) -> None: ...


class BackgroundGateway(Blocking[InProcess]):
    """A Gateway whose loop runs on a daemon thread. A plain context manager that takes what Gateway takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from turnloom.gateway.api import Gateway

        super().__init__(lambda: Gateway(*args, **kwargs), "turnloom-gateway", NOT_STARTED)

    @property
    def url(self) -> str:
        return self._inner.url if self._inner else ""

    def hold(self, mode: PauseMode = "abort", *, pool: str = POLICY, seconds: float | None = None) -> int:
        return self.call(self._started().hold(mode, pool=pool, seconds=seconds))

    def release(self, *, pool: str = POLICY) -> None:
        self.call(self._started().release(pool=pool))
