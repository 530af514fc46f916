"""What every client of a gateway can do. Types only.

`turnloom.Gateway` and `turnloom.Client` are a GatewayClient, `turnloom.BackgroundGateway` and `turnloom.BlockingClient` a
BlockingGatewayClient. What fails raises the same errors in all of them (`turnloom.errors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypedDict

from turnloom.core.credit import RewardRule
from turnloom.engine.contract import PauseMode
from turnloom.gateway.admin_answers import Damaged, Listed, PoolAnswer, PoolsAnswer, Status, StoreAnswer, TreeAnswer
from turnloom.store.contract import Limits, Repeats
from turnloom.types import Sample, Sampling


class Options(TypedDict, total=False):
    """What a session is opened with; docs/client.md says what each does."""

    id: str | None
    sampling: Sampling | Mapping[str, Any] | None
    limits: Limits | Mapping[str, Any] | None
    group: str
    rollout: str
    labels: Mapping[str, str] | None
    metadata: Mapping[str, Any] | None
    reward_rule: RewardRule
    repeats: Repeats


class SessionNames(Protocol):
    """`key`, `base_url`, `urls` and `env` are empty where the session was not opened by this client: no gateway keeps a key."""

    @property
    def id(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def base_url(self) -> str: ...

    @property
    def urls(self) -> Mapping[str, str]: ...

    @property
    def env(self) -> Mapping[str, str]: ...


class SessionClient(SessionNames, Protocol):
    async def status(self) -> Status:
        """What it is, was given and has used. Raises NotFound, as all of these do once it is dropped."""
        ...

    async def tree(self) -> TreeAnswer: ...

    async def samples(self) -> list[Sample]: ...

    async def reward(self, value: float, lineage: str = "") -> None:
        """Add a reward of the session, or of the samples that go through the turn `lineage`. Raises BadRequest."""
        ...

    async def finish(self, reward: float | None = None, *, drain: float | None = None) -> list[Sample]:
        """Close it, give its turns in flight `drain` seconds to end, and return its samples. Again gives the same."""
        ...

    async def drop(self) -> None:
        """Forget it and its turns."""
        ...

    async def stats(self) -> Mapping[str, int]:
        """Counts so far: `turns` (those in flight too), `tokens` (sampled), `lineages`, `forks`."""
        ...


class GatewayClient(Protocol):
    async def open_session(
        self,
        *,
        id: str | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        group: str = "",
        rollout: str = "",
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        reward_rule: RewardRule = "last",
        repeats: Repeats = "retry",
    ) -> SessionClient:
        """Raises BadRequest, and LimitReached where as many are open as may be."""
        ...

    async def handle(self, session_id: str) -> SessionClient:
        """A session on record. Raises NotFound."""
        ...

    async def drop(self, session_id: str) -> None:
        """Forget a session and its turns, also one that is damaged and cannot be looked at. Raises NotFound."""
        ...

    async def sessions(self, *, limit: int = 100, offset: int = 0, status: str | None = None) -> list[Listed | Damaged]:
        """Newest first; with `status` only the `open` or `closed` ones."""
        ...

    async def store_stats(self) -> StoreAnswer: ...

    async def engines(self) -> PoolsAnswer: ...

    async def pause(
        self, mode: PauseMode = "abort", *, pool: str = "policy", seconds: float | None = None, engines: bool = False
    ) -> PoolAnswer:
        """Hold a pool's requests, and with `engines` pause its servers. Raises NotFound for a pool that is not there."""
        ...

    async def resume(self, *, pool: str = "policy", engines: bool = False) -> PoolAnswer: ...


class BlockingSessionClient(SessionNames, Protocol):
    def status(self) -> Status:
        """What it is, was given and has used. Raises NotFound, as all of these do once it is dropped."""
        ...

    def tree(self) -> TreeAnswer: ...

    def samples(self) -> list[Sample]: ...

    def reward(self, value: float, lineage: str = "") -> None:
        """Add a reward of the session, or of the samples that go through the turn `lineage`. Raises BadRequest."""
        ...

    def finish(self, reward: float | None = None, *, drain: float | None = None) -> list[Sample]:
        """Close it, give its turns in flight `drain` seconds to end, and return its samples. Again gives the same."""
        ...

    def drop(self) -> None:
        """Forget it and its turns."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Counts so far: `turns` (those in flight too), `tokens` (sampled), `lineages`, `forks`."""
        ...


class BlockingGatewayClient(Protocol):
    def open_session(
        self,
        *,
        id: str | None = None,
        sampling: Sampling | Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        group: str = "",
        rollout: str = "",
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        reward_rule: RewardRule = "last",
        repeats: Repeats = "retry",
    ) -> BlockingSessionClient:
        """Raises BadRequest, and LimitReached where as many are open as may be."""
        ...

    def handle(self, session_id: str) -> BlockingSessionClient:
        """A session on record. Raises NotFound."""
        ...

    def drop(self, session_id: str) -> None:
        """Forget a session and its turns, also one that is damaged and cannot be looked at. Raises NotFound."""
        ...

    def sessions(self, *, limit: int = 100, offset: int = 0, status: str | None = None) -> list[Listed | Damaged]:
        """Newest first; with `status` only the `open` or `closed` ones."""
        ...

    def store_stats(self) -> StoreAnswer: ...

    def engines(self) -> PoolsAnswer: ...

    def pause(self, mode: PauseMode = "abort", *, pool: str = "policy", seconds: float | None = None, engines: bool = False) -> PoolAnswer:
        """Hold a pool's requests, and with `engines` pause its servers. Raises NotFound for a pool that is not there."""
        ...

    def resume(self, *, pool: str = "policy", engines: bool = False) -> PoolAnswer: ...
