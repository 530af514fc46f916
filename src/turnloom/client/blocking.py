"""An async client for code that is not: its loop runs on a daemon thread, and each call waits for what it does there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, Unpack

from turnloom.client.contract import GatewayClient, Options, SessionClient
from turnloom.engine.contract import PauseMode
from turnloom.errors import ConfigError
from turnloom.gateway.admin_answers import Damaged, Listed, PoolAnswer, PoolsAnswer, Status, StoreAnswer, TreeAnswer
from turnloom.types import Sample

T = TypeVar("T")


class Startable(GatewayClient, Protocol):
    async def start(self) -> Self: ...

    async def stop(self) -> None: ...


G = TypeVar("G", bound=Startable)


class BlockingSession:
    """One session, by way of another thread."""

    def __init__(self, session: SessionClient, owner: Blocking[Any]) -> None:
        self._session, self._owner = session, owner
        self.id, self.key, self.base_url = session.id, session.key, session.base_url
        self.urls, self.env = session.urls, session.env

    def status(self) -> Status:
        return self._owner.call(self._session.status())

    def tree(self) -> TreeAnswer:
        return self._owner.call(self._session.tree())

    def samples(self) -> list[Sample]:
        return self._owner.call(self._session.samples())

    def reward(self, value: float, lineage: str = "") -> None:
        self._owner.call(self._session.reward(value, lineage))

    def finish(self, reward: float | None = None, *, drain: float | None = None) -> list[Sample]:
        return self._owner.call(self._session.finish(reward, drain=drain))

    def drop(self) -> None:
        self._owner.call(self._session.drop())

    def stats(self) -> Mapping[str, int]:
        return self._owner.call(self._session.stats())


class Blocking(Generic[G]):
    """A plain context manager around what `make` makes, on the loop of its own thread. It can be entered again once it was left."""

    def __init__(self, make: Callable[[], G], name: str, not_started: str) -> None:
        self._make, self._name, self._not_started = make, name, not_started
        self._loop: asyncio.AbstractEventLoop | None = None
        """None outside of the `with`: what is called then is refused."""
        self._entry = threading.Lock()
        self._inner: G | None = None

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on that loop and wait for it. A caller that is interrupted cancels it.

        Raises ConfigError outside of the `with`, and where another thread leaves it meanwhile.
        """
        with self._entry:
            if self._loop is None:
                work.close()
                raise ConfigError(self._not_started)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ConfigError("this was closed by another thread before the call had come to its end") from None
        except BaseException:
            future.cancel()
            raise

    def _started(self) -> G:
        if self._inner is None:
            raise ConfigError(self._not_started)
        return self._inner

    def open_session(self, **options: Unpack[Options]) -> BlockingSession:
        return BlockingSession(self.call(self._started().open_session(**options)), self)

    def handle(self, session_id: str) -> BlockingSession:
        return BlockingSession(self.call(self._started().handle(session_id)), self)

    def drop(self, session_id: str) -> None:
        self.call(self._started().drop(session_id))

    def sessions(self, *, limit: int = 100, offset: int = 0, status: str | None = None) -> list[Listed | Damaged]:
        return self.call(self._started().sessions(limit=limit, offset=offset, status=status))

    def store_stats(self) -> StoreAnswer:
        return self.call(self._started().store_stats())

    def engines(self) -> PoolsAnswer:
        return self.call(self._started().engines())

    def pause(self, mode: PauseMode = "abort", *, pool: str = "policy", seconds: float | None = None, engines: bool = False) -> PoolAnswer:
        return self.call(self._started().pause(mode, pool=pool, seconds=seconds, engines=engines))

    def resume(self, *, pool: str = "policy", engines: bool = False) -> PoolAnswer:
        return self.call(self._started().resume(pool=pool, engines=engines))

    def __enter__(self) -> Self:
        with self._entry:
            if self._loop is not None:
                raise ConfigError("this is started already")
            self._loop = loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
        thread.start()
        try:
            self._inner = self.call(self._start())
        except BaseException:
            self._end()
            raise
        return self

    async def _start(self) -> G:
        return await self._make().start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        inner, self._inner = self._inner, None
        try:
            if inner is not None:
                self.call(inner.stop())
        finally:
            self._end()

    def _end(self) -> None:
        """Every call that still waits is cancelled on its loop, and so comes to its end in its own thread."""
        with self._entry:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
            loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
