"""Two engines that die, abort, are cut off, refuse and come back at random, as one pool; and what they know of the output they gave."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tests.properties.driver import Driver
from tests.properties.engine import ENDS, Call, RecordingEngine
from tests.properties.replies import Replies
from turnloom.engine.contract import Chunk, Trace
from turnloom.engine.pool import Patience, Pool
from turnloom.errors import EngineOverloaded, EngineUnavailable
from turnloom.tokenizer import HFTokenizer
from turnloom.types import Finish, FinishReason, IntArray, Sampling, VersionSpan, floats, ids

PATIENCE = Patience(attempts=3, seconds=1e9, pause=0.0, longest=0.0)

FATES = {"whole": 55, "abort": 10, "abort with tokens": 8, "cut": 12, "dead": 8, "busy": 4, "no finish": 3}
"""How one request ends."""


@dataclass
class Pieced(Call):
    """`script` is what is left to be said in all, `asked` every request for it: (start, engine, rid, prompt, max_tokens)."""

    script: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP
    asked: list[tuple[int, str, str, list[int], int | None]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Of each token."""


class Mortal(RecordingEngine):
    """One of the two. What it says is the other's as well: the script of the turn."""

    def __init__(self, name: str, owner: Survivors) -> None:
        super().__init__(owner.tokenizer, owner.replies, owner.rng)
        self.name, self.owner = name, owner

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        rng, call = self.rng, self.owner.by_turn[rid[:-4]]
        start = len(call.output)
        call.asked.append((start, self.name, rid, prompt.tolist(), sampling.max_tokens))
        fate = rng.choices(list(FATES), list(FATES.values()))[0]
        if fate == "busy":
            raise EngineOverloaded("busy")
        if fate == "dead":
            raise EngineUnavailable("it is dead")
        rest = call.script[start:]
        size = len(rest) if fate in ("whole", "no finish") else rng.randint(0, len(rest))
        version, at = f"v{rng.randint(1, 2)}", 0
        listed = fate != "cut" and fate != "no finish" and rng.random() < 0.5
        while at < size:
            step = min(rng.randint(1, 16), size - at)
            if rng.random() < 0.1:
                version = f"v{rng.randint(1, 2)}"
            chunk = self._give(call, rest[at : at + step], version)
            at += step
            last = at == size and fate == "abort with tokens"
            if last:
                chunk = replace(chunk, finish=Finish(FinishReason.ABORT), versions=self._spans(call, start, listed))
            yield replace(chunk, version="said by mistake") if listed else chunk
            if last:
                return
        if fate == "cut":
            raise EngineUnavailable("it was cut off")
        if fate != "no finish":
            finish = Finish(call.reason if fate == "whole" else FinishReason.ABORT)
            yield Chunk(ids(), floats(), finish, self._spans(call, start, listed))

    def _give(self, call: Pieced, tokens: list[int], version: str) -> Chunk:
        logprobs = floats([-self.rng.random() for _ in tokens])
        call.output = ids([*call.output.tolist(), *tokens])
        call.logprobs = floats(np.concatenate([call.logprobs, logprobs]))
        call.versions += [version] * len(tokens)
        return Chunk(ids(tokens), logprobs, version=version)

    def _spans(self, call: Pieced, start: int, listed: bool) -> tuple[VersionSpan, ...]:
        return spans(call.versions[start:]) if listed else ()


class Survivors(RecordingEngine):
    """The pool, as the driver's engine."""

    def __init__(self, tokenizer: HFTokenizer, replies: Replies, rng: random.Random) -> None:
        super().__init__(tokenizer, replies, rng)
        self.by_turn: dict[str, Pieced] = {}
        self.pool = Pool([Mortal("one", self), Mortal("two", self)], PATIENCE)

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        end = self.rng.choices(list(ENDS), list(ENDS.values()))[0]
        reason = FinishReason.LENGTH if end == "length" else FinishReason.STOP
        script = self._output(end, self.replies.draw(self.rng))
        call = self.by_turn[rid] = Pieced(rid, prompt.copy(), ids(), floats(), script, reason)
        self.calls.append(call)
        stream = self.pool.sample(prompt, sampling, rid=rid, routing_key=routing_key, trace=trace)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()  # type: ignore[attr-defined]


def spans(versions: list[str]) -> tuple[VersionSpan, ...]:
    found: list[VersionSpan] = []
    for at, version in enumerate(versions):
        if found and found[-1].version == version:
            found[-1] = VersionSpan(version, found[-1].start, at + 1)
        else:
            found.append(VersionSpan(version, at, at + 1))
    return tuple(found)


def torn(driver: Driver) -> Iterator[str]:
    """Where the requests of a turn do not join up to what is on record of it; beside what the laws say of the whole."""
    rids: list[str] = []
    for turn_id, turn in driver.session.tree.turns.items():
        call, at = driver.engine.by_turn[turn_id], f"turn {turn.index}"
        rids += [rid for _, _, rid, _, _ in call.asked]
        first = call.asked[0][4]
        for start, name, rid, prompt, most in call.asked:
            if prompt != [*call.prompt.tolist(), *call.output[:start].tolist()]:
                yield f"{at}: {name} was not asked to go on from the prompt and the {start} ids so far"
            if most is None or first is None or most != first - start:
                yield f"{at}: {name} may sample {most} after {start} of {first}"
            if not rid.startswith(turn_id):
                yield f"{at}: the request {rid} has another turn's name"
        gave = {start: name for start, name, *_ in call.asked if start < len(call.output) or not start}
        if [(p.start, p.engine) for p in turn.pieces] != sorted(gave.items()):
            yield f"{at}: its pieces are {turn.pieces}, and it was asked for {call.asked}"
        if not all(p.why for p in turn.pieces[1:]):
            yield f"{at}: a piece does not say why the one before it ended"
        if turn.finish.reason is not FinishReason.ABORT and turn.versions != spans(call.versions):
            yield f"{at}: its versions are {turn.versions}, and the weights were {spans(call.versions)}"
    if len(set(rids)) != len(rids):
        yield "two requests had one name"
