"""An engine in memory that remembers every call it got and ends replies in every way engines do."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from tests.properties.replies import Replies, Said
from turnloom.engine.contract import AbortOutcome, Capabilities, Chunk, Trace
from turnloom.errors import EngineUnavailable
from turnloom.tokenizer import HFTokenizer
from turnloom.types import Finish, FinishReason, FloatArray, IntArray, Sampling, floats, ids

ENDS = {"own": 62, "other": 8, "past": 8, "length": 10, "abort": 4, "die": 4, "empty": 4}


@dataclass
class Call:
    """What the engine was asked and what it gave out."""

    rid: str
    prompt: IntArray
    output: IntArray
    logprobs: FloatArray


class RecordingEngine:
    """Samples a template's replies, split into random pieces that BPE would not choose."""

    def __init__(self, tokenizer: HFTokenizer, replies: Replies, rng: random.Random) -> None:
        self.tokenizer, self.replies, self.rng = tokenizer, replies, rng
        self.name = "memory"
        self.calls: list[Call] = []
        self.script: Callable[[IntArray], list[int]] | None = None
        """The whole output after a prompt, where it is not drawn."""

    async def capabilities(self) -> Capabilities:
        return Capabilities("m", 100_000, self.tokenizer.vocab_size, "raw")

    def forget(self) -> None:
        return None

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        rng = self.rng
        end = "own" if self.script is not None else rng.choices(list(ENDS), list(ENDS.values()))[0]
        tokens = self.script(prompt) if self.script is not None else self._output(end, self.replies.draw(rng))
        sampled = ids(tokens)
        logprobs = floats([-rng.random() - 0.001 * i for i in range(len(tokens))])
        call = Call(rid, prompt.copy(), ids(), floats())
        self.calls.append(call)
        at = 0
        while at < len(tokens):
            step = rng.randint(1, 16)
            call.output, call.logprobs = sampled[: at + step], logprobs[: at + step]
            yield Chunk(sampled[at : at + step], logprobs[at : at + step])
            at += step
            if end == "die" and at < len(tokens) and rng.random() < 0.5:
                raise EngineUnavailable("died")
        reason = {"length": FinishReason.LENGTH, "abort": FinishReason.ABORT}.get(end, FinishReason.STOP)
        yield Chunk(ids(), floats(), Finish(reason))

    def _output(self, end: str, said: Said) -> list[int]:
        rng, ends = self.rng, self.replies.ends
        tokens = [] if end == "empty" else split(rng, self.tokenizer, said.text, rng.choice([4, 9, 40]))
        own = said.end if said.end is not None or not ends else rng.choice(ends)
        if own is None:
            return tokens
        if end == "past":
            more = rng.choice(
                [[rng.choice(ends)], self.tokenizer.encode("\n", start=False), self.tokenizer.encode(said.after, start=False)]
            )
            return [*tokens, own, *more]
        if end == "other":
            return [*tokens, rng.choice(ends)]
        return [*tokens, own] if end in ("own", "empty") else tokens

    async def abort(self, rid: str) -> AbortOutcome:
        return AbortOutcome.VERIFIED

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        raise NotImplementedError

    async def health(self) -> bool:
        return True

    async def close(self) -> None:
        return None


def split(rng: random.Random, tokenizer: HFTokenizer, text: str, longest: int) -> list[int]:
    """Ids of the text cut into pieces of 1 to `longest` characters, each encoded alone."""
    tokens: list[int] = []
    at = 0
    while at < len(text):
        piece = text[at : at + rng.randint(1, longest)]
        tokens += tokenizer.encode(piece, start=False)
        at += len(piece)
    return tokens
