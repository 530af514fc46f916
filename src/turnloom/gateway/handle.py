"""One session of a gateway in this process. It is looked up at each call: one that nobody uses leaves memory."""

from __future__ import annotations

import asyncio

from turnloom.core.dump import summary
from turnloom.core.unroll import DEFAULT_TRAINING, UNLIMITED, Longest, Training
from turnloom.gateway.admin_answers import Status, TreeAnswer, opened, status_answer, tree_answer
from turnloom.gateway.samples import Snapshot
from turnloom.gateway.sessions import Sessions
from turnloom.types import Sample


class SessionHandle:
    """`base_url` is where Anthropic and Gemini clients point, OpenAI ones at `{base_url}/v1`; `key` is its API key.

    Of a session that was not opened here the key is "", and so is all that holds it.
    """

    def __init__(
        self,
        sessions: Sessions,
        session_id: str,
        key: str,
        origin: str,
        longest: Longest = UNLIMITED,
        training: Training = DEFAULT_TRAINING,
    ) -> None:
        self._sessions = sessions
        self._longest, self._training = longest, training
        self.id = session_id
        self.key = key
        spelled = opened(session_id, key, origin)
        self.urls: dict[str, str] = {**spelled["urls"]} if key else {}  # type: ignore[dict-item]
        self.env: dict[str, str] = spelled["env"] if key else {}
        self.base_url = self.urls.get("anthropic", "")

    async def finish(self, reward: float | None = None, *, drain: float | None = None) -> list[Sample]:
        """Close the session, let its turns in flight end within `drain` seconds, and unroll it. Finishing again gives the same samples."""
        with (await self._sessions.by_id(self.id)).held() as session:
            await session.finish(reward, drain=drain)
            return await self.samples()

    async def reward(self, value: float, lineage: str = "") -> None:
        """Add a reward of the session, or of one lineage. Raises BadRequest for what is no finite number."""
        await (await self._sessions.by_id(self.id)).reward(value, lineage)

    async def samples(self) -> list[Sample]:
        snapshot = await self._snapshot()
        return await asyncio.to_thread(lambda: list(snapshot.samples(self._longest, self._training)))

    async def status(self) -> Status:
        snapshot = await self._snapshot()
        usage = await self._sessions.usage(self.id)
        return await asyncio.to_thread(status_answer, snapshot, usage)

    async def tree(self) -> TreeAnswer:
        return await asyncio.to_thread(tree_answer, await self._snapshot())

    async def drop(self) -> None:
        """Forget it and its turns. Raises NotFound the second time."""
        await self._sessions.drop(self.id)

    async def stats(self) -> dict[str, int]:
        """Counts so far: turns (those in flight too), sampled tokens, lineages, forks."""
        snapshot = await self._snapshot()
        found = await asyncio.to_thread(summary, snapshot.tree)
        return {
            "turns": found["turns"] + snapshot.in_flight,
            "tokens": found["sampled_tokens"],
            "lineages": found["lineages"],
            "forks": sum(found["forks"].values()),
        }

    async def _snapshot(self) -> Snapshot:
        return Snapshot.of(await self._sessions.by_id(self.id))
