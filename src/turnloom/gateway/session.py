"""One session's turns: what each may sample, how it is stored, what the tree comes to. Commits are durable before they are visible."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Unpack

from turnloom.core.records import Pending
from turnloom.core.retry import Answers, Identity, gone_on
from turnloom.core.tree import Tree
from turnloom.core.unroll import DEFAULT_TRAINING, UNLIMITED, Longest, Policy, Unrolled, unroll
from turnloom.counters import swallowed
from turnloom.engine.contract import Capabilities
from turnloom.engine.pool import worst
from turnloom.errors import BadRequest, LimitReached, PromptTooLong, StoreError
from turnloom.gateway import limits
from turnloom.gateway.lifecycle import Keeping, Lifecycle, merged
from turnloom.gateway.live import Live
from turnloom.gateway.prompt import Prompt
from turnloom.gateway.samples import credited, origin
from turnloom.store.contract import SessionRow, Store
from turnloom.types import AbortOutcome, Message, Outcome, Request, Sampling, Turn

log = logging.getLogger("turnloom.gateway")


class Session(Lifecycle):
    """A session with what its turns read and write. The last arguments say how it is kept."""

    def __init__(self, row: SessionRow, store: Store, tree: Tree | None = None, **kept: Unpack[Keeping]) -> None:
        super().__init__(row, store, tree, **kept)
        self.answers = Answers(self.tree.turns.values())
        self.live: dict[tuple[str, int], Live] = {}
        """Turns that are being made, by what they answer."""

    def make(self, asked: Identity | None, number: int, work: Callable[[Live], Awaitable[object]]) -> Live:
        """Begin a turn that answers `asked`; until it ends, who asks the same finds it."""
        live = Live(asked, number)
        if asked is not None:
            self.live[asked.place] = live
        live.start(work, self._made)
        return live

    def _made(self, live: Live) -> None:
        if live.asked is not None and self.live.get(live.asked.place) is live:
            del self.live[live.asked.place]

    def _tokens_left(self, choices: int, choice: int) -> int | None:
        """Raises LimitReached where turns that were in flight with this one have used them meanwhile."""
        if self.row.limits.max_tokens is None:
            return None
        left = limits.share(self.row.limits.max_tokens, self.usage.tokens, choices, choice)
        if left < 1:
            self._note("max_tokens")
            raise LimitReached(limits.too_many("sampled tokens", self.row.limits.max_tokens, 0))
        return left

    def sampling_for(self, request: Request, prompt: Prompt, engine: Capabilities, choice: int = 0) -> Sampling:
        """The pinned policy with the client's own stop strings, its schema, and the tokens that are left.

        Each further choice of a request has the next seed, else all would be one reply.

        Raises PromptTooLong, LimitReached, and BadRequest where the engine cannot hold a reply to a schema.
        """
        if request.json_schema and not engine.structured:
            raise BadRequest("structured output: this engine has no grammar backend; ask for JSON in the prompt instead")
        if request.json_schema and prompt.reasoning_open:
            raise BadRequest("structured output: this model begins every reply with its reasoning; ask for JSON in the prompt instead")
        prompt_tokens = len(prompt.ids)
        context = min(engine.context_length, self.row.limits.max_context or engine.context_length)
        # One token of the context stays unused: some engines refuse prompt and reply together equal to it.
        room = context - prompt_tokens - 1
        if room < 1:
            if context < engine.context_length:
                self._note("max_context")
            raise PromptTooLong(prompt_tokens, context - 2)
        left = self._tokens_left(request.choices, choice)
        pinned = self.row.sampling
        wishes = [n for n in (request.max_tokens, pinned.max_tokens, room, left) if n is not None]
        seed = None if pinned.seed is None else (pinned.seed + choice) % 2**63
        return replace(pinned, seed=seed, max_tokens=min(wishes), stop=(*pinned.stop, *request.stop), json_schema=request.json_schema)

    def begin(self, turn_id: str, started: float) -> None:
        """A turn is being made: should the gateway be killed, that is known."""
        task = asyncio.current_task()
        if task in self._in_flight:
            self._in_flight[task].turn = turn_id
        self._store.begin(self.row.id, turn_id, started)

    async def commit(self, pending: Pending, reply: Message, make: Callable[[int], Turn]) -> Turn:
        """Store the turn, then show it. Raises StoreError, and then nothing has changed."""
        async with self._lock:
            turn = make(len(self.tree.turns))
            delta = self.tree.stage(pending, reply, turn)
            try:
                await self._store.append(self.row.id, delta)
            except StoreError:
                self._store.cancel(self.row.id, turn.id)
                raise
            await self._measure()
            self.tree.apply(delta, pending)
            self._tokens += len(turn.output)
            self.answers.add(turn)
            return turn

    async def replace(self, turn: Turn, reply: Message) -> bool:
        """Put a turn that was gone on with in the place of its beginning; False where another turn goes on from that by now.

        Raises StoreError, and then nothing has changed.
        """
        async with self._lock:
            if gone_on(self.tree, turn):
                return False
            await self._store.replace(self.row.id, turn, reply)
            await self._measure()
            self._tokens += len(turn.output) - len(self.tree.turns[turn.id].output)
            self.tree.replace(turn, reply)
            self.answers.add(turn)
            return True

    async def _measure(self) -> None:
        """Ask the store how large the session has become, where that is limited."""
        if self.row.limits.max_bytes is not None:
            try:
                self._bytes = (await self._store.usage(self.row.id)).bytes
            except StoreError as error:
                swallowed(log, "gateway.measure", "how large session %s is could not be read: %s", self.row.id, error)

    def acknowledge(self, turn_id: str) -> None:
        """Its client has all of it."""
        self._store.acknowledge(self.row.id, turn_id)
        self.tree.amend(turn_id, acknowledged=True)

    async def amend(self, turn_id: str, *, outcome: Outcome | None = None, abort: str | None = None) -> None:
        async with self._lock:
            await self._store.amend(self.row.id, turn_id, outcome=outcome, abort=abort)
            self.tree.amend(turn_id, outcome, abort)

    def settle(self, turn_id: str, aborts: Sequence[Awaitable[AbortOutcome]]) -> None:
        """Write to the turn what comes of its aborts, when that is known."""

        async def settled() -> None:
            outcome = worst([await each for each in aborts])
            if outcome is not AbortOutcome.UNVERIFIED:
                try:
                    await self.amend(turn_id, abort=outcome)
                except (StoreError, KeyError) as error:
                    swallowed(log, "gateway.settle", "what became of the abort of turn %s could not be written: %s", turn_id, error)

        self._background(settled())

    def unroll(self, longest: Longest = UNLIMITED, policy: Policy = DEFAULT_TRAINING) -> Unrolled:
        """Its samples. One whose lineage earned a reward of its own has that, the others have the session's."""
        unrolled = unroll(self.tree, origin(self.row), policy, longest)
        rule, rewards = self.row.reward_rule, self.row.rewards
        earned = {reward.lineage: merged(rewards, reward.lineage, rule) for reward in rewards if reward.lineage}
        return replace(unrolled, samples=tuple(credited(self.tree, s, earned) for s in unrolled.samples))
