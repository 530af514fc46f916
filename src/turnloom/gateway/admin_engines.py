"""The admin API's side of the engines: held around a weight update, let go, looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from turnloom.engine.pool import Pool
from turnloom.errors import NotFound
from turnloom.gateway.admin_answers import EngineAnswer, PoolAnswer, PoolsAnswer
from turnloom.gateway.admin_body import AdminModel
from turnloom.gateway.pools import POLICY


class ResumeBody(AdminModel):
    """`engines`: the servers themselves are told as well, by their own calls."""

    pool: str = POLICY
    engines: bool = False


class PauseBody(ResumeBody):
    """`seconds` is the longest that `abort` and `wait` wait for what runs; None is 5 s for `abort`, and no limit for `wait`.

    With `keep`, and where the servers are paused too, the time limits of turns that run stand still as those of held ones do.
    """

    mode: Literal["abort", "wait", "keep"] = "abort"
    seconds: float | None = Field(None, ge=0, lt=2**31)


class Engines:
    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools

    async def pause(self, body: PauseBody) -> PoolAnswer:
        """Hold new requests to a pool's engines. Answers when what runs has ended as `mode` says.

        Turns that were broken off go on after the resume; their clients are kept alive meanwhile. Raises
        EngineError where a server cannot be paused; the gateway holds its requests all the same.
        """
        pool = self._pool(body.pool)
        await pool.hold(body.mode, body.seconds)
        if body.engines:
            await pool.pause(body.mode)
        return _state(pool)

    async def resume(self, body: ResumeBody) -> PoolAnswer:
        """Let the servers go on, where they were told to pause, then the gateway's requests.

        Raises EngineError where a server cannot be told; the requests go on all the same, with those that can.
        """
        pool = self._pool(body.pool)
        try:
            if body.engines:
                await pool.resume()
        finally:
            pool.release()
        return _state(pool)

    async def list(self) -> PoolsAnswer:
        return {"pools": {name: _state(pool) for name, pool in self._pools.items()}}

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            raise NotFound(f"no pool {name[:80]!r}; there are: {', '.join(self._pools)}")
        return self._pools[name]


def _state(pool: Pool) -> PoolAnswer:
    """`running` are requests that engines have, `held` turns that wait for the resume."""
    running = [*pool.gate.running.values()]
    engines: list[EngineAnswer] = [{"name": name, "running": running.count(name)} for name in pool.name.split(",")]
    return {"paused": pool.gate.shut, "running": len(running), "held": pool.gate.held, "engines": engines}
