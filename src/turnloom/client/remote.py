"""A gateway somewhere else, by its admin API."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from turnloom.client.blocking import Blocking
from turnloom.client.http import Http
from turnloom.core.credit import RewardRule
from turnloom.engine.contract import PauseMode
from turnloom.errors import GatewayUnavailable, NotFound, StoreError
from turnloom.export.canonical import RowError, from_line
from turnloom.gateway.admin_answers import Damaged, Listed, PoolAnswer, PoolsAnswer, Status, StoreAnswer, TreeAnswer
from turnloom.gateway.admin_bodies import FinishBody, OpenBody, RewardBody
from turnloom.gateway.admin_engines import PauseBody, ResumeBody
from turnloom.gateway.opening import checked, said_limits, said_sampling
from turnloom.store.contract import Limits, Repeats
from turnloom.types import Sample, Sampling

Opened = Mapping[str, Any]


class RemoteSession:
    """One session. `finish` with a reward and `reward` are not asked twice when the connection breaks: each would count."""

    def __init__(self, http: Http, session_id: str, opened: Opened | None = None) -> None:
        self._http, self._path = http, f"/sessions/{quote(session_id, safe='', errors='surrogatepass')}"
        self.id = session_id
        opened = opened or {"key": "", "urls": {}, "env": {}}
        self.key: str = opened["key"]
        self.urls: Mapping[str, str] = opened["urls"]
        self.env: Mapping[str, str] = opened["env"]
        self.base_url = self.urls.get("anthropic", "")

    async def status(self) -> Status:
        answer: Status = await self._http.call("GET", self._path, has="id")
        return answer

    async def tree(self) -> TreeAnswer:
        answer: TreeAnswer = await self._http.call("GET", f"{self._path}/tree", has="turns")
        return answer

    async def samples(self) -> list[Sample]:
        raw = await self._http.read("GET", f"{self._path}/samples", kind="application/x-ndjson")
        try:
            return await asyncio.to_thread(lambda: [from_line(line) for line in raw.splitlines(keepends=True)])
        except RowError as error:
            raise GatewayUnavailable(f"what the gateway answered are no canonical samples: {error}") from error

    async def reward(self, value: float, lineage: str = "") -> None:
        body = checked(RewardBody, {"value": value, "lineage": lineage}).model_dump()
        await self._http.call("POST", f"{self._path}/reward", body, has="id", again=False)

    async def finish(self, reward: float | None = None, *, drain: float | None = None) -> list[Sample]:
        body = checked(FinishBody, {"reward": reward, "drain": drain}).model_dump()
        await self._http.call("POST", f"{self._path}/finish", body, has="id", again=reward is None)
        return await self.samples()

    async def drop(self) -> None:
        with suppress(StoreError):  # Damaged: it is there.
            await self.status()
        with suppress(NotFound):  # It was there: an attempt whose answer was lost has dropped it.
            await self._http.read("DELETE", self._path)

    async def stats(self) -> dict[str, int]:
        found = await self.status()
        return {
            "turns": found["turns"] + found["in_flight"],
            "tokens": found["sampled_tokens"],
            "lineages": found["lineages"],
            "forks": sum(found["forks"].values()),
        }


class Client:
    """A gateway at `url`, as an async context manager. `seconds` is how long one answer may take; None is as long as it takes.

    What may be asked twice is, when the connection breaks. A session has its id and its key from here, so that
    opening it may be asked twice too.
    """

    def __init__(self, url: str, admin_key: str, *, seconds: float | None = None) -> None:
        self.url = url
        self._http = Http(url, admin_key, seconds)

    async def start(self) -> Self:
        await self._http.start()
        return self

    async def stop(self) -> None:
        await self._http.stop()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

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
    ) -> RemoteSession:
        values = {
            "id": id or uuid.uuid4().hex,
            "key": f"tl-{secrets.token_urlsafe(32)}",
            "group": group,
            "rollout": rollout,
            "labels": {} if labels is None else labels,
            "metadata": {} if metadata is None else metadata,
            "reward_rule": reward_rule,
            "repeats": repeats,
        }
        body = checked(OpenBody, values).model_dump(exclude={"sampling", "limits"})
        body |= {"sampling": said_sampling(sampling), "limits": said_limits(limits)}
        opened = await self._http.call("POST", "/sessions", body, has="id")
        return RemoteSession(self._http, opened["id"], opened)

    async def handle(self, session_id: str) -> RemoteSession:
        session = RemoteSession(self._http, session_id)
        await session.status()
        return session

    async def drop(self, session_id: str) -> None:
        await RemoteSession(self._http, session_id).drop()

    async def sessions(self, *, limit: int = 100, offset: int = 0, status: str | None = None) -> list[Listed | Damaged]:
        query = {"limit": str(limit), "offset": str(offset), **({} if status is None else {"status": status})}
        found: list[Listed | Damaged] = (await self._http.call("GET", "/sessions", has="sessions", query=query))["sessions"]
        return found

    async def store_stats(self) -> StoreAnswer:
        answer: StoreAnswer = await self._http.call("GET", "/store", has="turns")
        return answer

    async def engines(self) -> PoolsAnswer:
        answer: PoolsAnswer = await self._http.call("GET", "/engines", has="pools")
        return answer

    async def pause(
        self, mode: PauseMode = "abort", *, pool: str = "policy", seconds: float | None = None, engines: bool = False
    ) -> PoolAnswer:
        body = checked(PauseBody, {"mode": mode, "pool": pool, "seconds": seconds, "engines": engines}).model_dump()
        answer: PoolAnswer = await self._http.call("POST", "/pause", body, has="paused")
        return answer

    async def resume(self, *, pool: str = "policy", engines: bool = False) -> PoolAnswer:
        body = checked(ResumeBody, {"pool": pool, "engines": engines}).model_dump()
        answer: PoolAnswer = await self._http.call("POST", "/resume", body, has="paused")
        return answer


class BlockingClient(Blocking[Client]):
    """A Client for code that is not async: the same calls, as a plain context manager."""

    def __init__(self, url: str, admin_key: str, *, seconds: float | None = None) -> None:
        super().__init__(
            lambda: Client(url, admin_key, seconds=seconds), "turnloom-client", "the client is not started; use `with BlockingClient(...)`"
        )
        self.url = url
