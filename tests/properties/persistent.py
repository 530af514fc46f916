"""Clients that leave, come again, come twice at once and come back for what they have; and an engine that knows what it said to whom."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.properties.driver import Conversation, Driver, MemoryResponder, shapes
from tests.properties.engine import ENDS, Call, RecordingEngine
from tests.properties.replies import Replies
from tests.properties.subjects import Subject
from turnloom.core.retry import SILENT, Intent
from turnloom.engine.contract import Chunk, Trace
from turnloom.errors import EngineAborted, EngineUnavailable, RenderError
from turnloom.gateway import answer as answering
from turnloom.gateway.answer import answer, identified
from turnloom.gateway.turn import take_turn
from turnloom.tokenizer import HFTokenizer
from turnloom.types import Finish, FinishReason, IntArray, Outcome, Request, Sampling, Turn, floats, ids

BEFORE: ContextVar[Turn | None] = ContextVar("before", default=None)
"""What is on record of the turn that is being made."""

FATES = {"whole": 70, "abort": 15, "die": 5, "slow": 10}


@dataclass
class Scripted(Call):
    script: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP
    asked: list[tuple[int, list[int], int | None]] = field(default_factory=list)
    """Of each request for it: after how many tokens, with which prompt, for how many."""


class Patient(RecordingEngine):
    """One output for each turn, in as many requests as it takes."""

    def __init__(self, tokenizer: HFTokenizer, replies: Replies, rng: random.Random) -> None:
        super().__init__(tokenizer, replies, rng)
        self.by_turn: dict[str, Scripted] = {}

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        rng, before = self.rng, BEFORE.get()
        if before is None:
            end = rng.choices(list(ENDS), list(ENDS.values()))[0]
            reason = FinishReason.LENGTH if end == "length" else FinishReason.STOP
            call = Scripted(rid, prompt.copy(), ids(), floats(), self._output(end, self.replies.draw(rng)), reason)
            self.by_turn[rid] = call
            self.calls.append(call)
        else:
            call = self.by_turn[before.id]
            # What was on its way to the gateway when its reader left was sampled, and is nobody's.
            call.output, call.logprobs = before.output, before.logprobs
        at = len(call.output)
        call.asked.append((at, prompt.tolist(), sampling.max_tokens))
        fate = rng.choices(list(FATES), list(FATES.values()))[0]
        stop = len(call.script) if fate in ("whole", "slow") else rng.randint(at, len(call.script))
        while at < stop:
            size = min(rng.randint(1, 16), stop - at)
            new = call.script[at : at + size]
            logprobs = floats([-rng.random() for _ in new])
            at += size
            call.output, call.logprobs = ids(call.script[:at]), floats([*call.logprobs.tolist(), *logprobs.tolist()])
            yield Chunk(ids(new), logprobs)
            for _ in range(8 if fate == "slow" else 1):
                await asyncio.sleep(0)
        if fate == "die":
            raise EngineUnavailable("died")
        yield Chunk(ids(), floats(), Finish(FinishReason.ABORT if fate == "abort" else call.reason))


@dataclass
class Asked:
    """One request, however often it came: what each client that got a reply got."""

    request: Request
    replies: list[Any] = field(default_factory=list)
    another: int = 0


class Persistent(Driver):
    """Asks until it has a reply, or gives up; now and then at the same time twice, and again for what it has."""

    def __init__(self, subject: Subject, replies: Replies, seed: int, **more: Any) -> None:
        super().__init__(subject, replies, seed, engine=Patient, **more)
        self.asked: list[Asked] = []
        self.counted: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, steps: list[tuple[str, int]]) -> Any:
        async def made(*args: Any) -> Turn:
            BEFORE.set(args[-1])
            return await take_turn(*args)

        with mock.patch.object(answering, "take_turn", made):
            return await super().run(steps)

    async def _ask(self, conversation: Conversation) -> None:
        body = conversation.body
        conversation.trail.append(copy.deepcopy(body["messages"]))
        raw = self.tongue.spoken(body)
        request = identified(self.tongue.dialect.read(raw, self.tongue.envelope), self.tongue.dialect.name, self.tongue.envelope, raw)
        reply = None
        for _ in range(6):
            calls, failed = len(self.engine.calls), self._failed()
            try:
                reply = await self._attempts(request, SILENT)
            except RenderError as error:
                self.refused["; ".join(shapes(request.messages)), str(error)] += 1
                conversation.body, conversation.trail = self._fresh("again"), []
                return
            self.requests |= {call.rid: request for call in self.engine.calls[calls:]}
            if len(self.engine.calls) > calls + 1:
                self.wrong.append("law 7: one request made two turns")
            if reply is not None or self.rng.random() < 0.1:
                break
            self.counted["asked again after a failure" if self._failed() > failed else "asked again"] += 1
        if reply is None:
            return
        if self.rng.random() < 0.3:
            await self._has_it_already(request, reply)
        content = self.tongue.heard(self.tongue.dialect.write([reply]))
        body["messages"].append({"role": "assistant", "content": self._echo(content)})
        body["messages"].append({"role": "user", "content": self._answers(content)})

    def _failed(self) -> int:
        return self.session.tree.failed

    async def _attempts(self, request: Request, intent: Intent) -> Any:
        """The same request from one client or several at once, each of which may leave; the reply that one of them got."""
        leaves = [self.rng.choices([None, 0, self.rng.randint(1, 20)], [60, 15, 25])[0] for _ in range(self.rng.choice([1, 1, 2, 3]))]
        outs = [MemoryResponder(leave) for leave in leaves]
        tasks = [asyncio.create_task(self._attempt(request, intent, out)) for out in outs]
        if self.rng.random() < 0.15:
            for _ in range(self.rng.randint(1, 30)):
                await asyncio.sleep(0)
            self.rng.choice(tasks).cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for live in list(self.session.live.values()):
            await live.ended.wait()
        for error in ended:
            if isinstance(error, RenderError) or (
                isinstance(error, BaseException)
                and not isinstance(error, EngineAborted | EngineUnavailable | ConnectionResetError | asyncio.CancelledError)
            ):
                raise error
        got = [out.reply for out in outs if out.reply is not None]
        for one in got[1:]:
            if (one.head.turn_id, one.message, one.output_tokens) != (got[0].head.turn_id, got[0].message, got[0].output_tokens):
                self.wrong.append(f"law 7: clients of one request got different replies: {one} and {got[0]}")
        self.counted["joined"] += len(got) > 1
        return got[0] if got else None

    async def _attempt(self, request: Request, intent: Intent, out: MemoryResponder) -> None:
        with contextlib.suppress(ConnectionResetError):
            await answer(self.parts, self.session, self.tongue.dialect, request, intent, out)  # type: ignore[arg-type]

    async def _has_it_already(self, request: Request, reply: Any) -> None:
        calls, turns = len(self.engine.calls), len(self.session.tree.turns)
        again = MemoryResponder(None)
        with contextlib.suppress(EngineAborted, EngineUnavailable):
            await self._attempt(request, Intent(again=True), again)
        self.counted["given again"] += 1
        if (len(self.engine.calls), len(self.session.tree.turns)) != (calls, turns):
            self.wrong.append("law 7: a retry made a turn")
        got = again.reply
        if got is None or (got.head.turn_id, got.message, got.finish) != (reply.head.turn_id, reply.message, reply.finish):
            self.wrong.append("law 7: a retry got another reply, or none")


def repeated(driver: Persistent) -> Iterator[str]:
    """Where a turn was not gone on with from what was on record, or a request has more turns than it may."""
    yield from driver.wrong
    by_request: Counter[str] = Counter()
    for turn in driver.session.tree.turns.values():
        call, at = driver.engine.by_turn[turn.id], f"turn {turn.index}"
        first = call.asked[0][2]
        for start, prompt, most in call.asked:
            if prompt != [*call.prompt.tolist(), *call.script[:start]]:
                yield f"law 7: {at} was not gone on with from its prompt and the {start} ids so far"
            if first is None or most != first - start:
                yield f"law 7: {at} may sample {most} after {start} of {first}"
        starts = [start for start, _, _ in call.asked]
        driver.counted["gone on with"] += len(call.asked) > 1
        if starts != sorted(starts) or len(turn.output) < starts[-1]:
            yield f"law 7: {at} lost what it had: asked after {starts}, and it has {len(turn.output)} ids"
        by_request[turn.fingerprint] += turn.outcome is not Outcome.DELIVERED and turn.outcome is not Outcome.FAILED
    if any(count > 1 for count in by_request.values()):
        yield "law 7: a request has two turns that nobody got"
