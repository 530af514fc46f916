"""The client of a llama.cpp HTTP server. `llama_completion` asks for tokens, `llama_slots` keeps a request's place.

One turn is many short requests: prefill, which is streamed and so stops when its
connection closes, then slices of a few tokens, which do not stop and need not.
Between two slices nothing decodes. A turn keeps its slot, and with it the cache,
to its end. Others of the same server may use that slot between two slices: the
turn then waits for them, and evaluates its prompt again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

from turnloom.engine.contract import AbortOutcome, Capabilities, Chunk, PauseMode, Trace
from turnloom.engine.http import BROKEN, EngineHTTP, refusal, words
from turnloom.engine.llama_completion import Completions, Policy, Step
from turnloom.engine.llama_slots import Slots, look_at_slots
from turnloom.engine.metrics import ABORTS, PROTOCOL_ERRORS
from turnloom.engine.once import Once
from turnloom.engine.prompts import check_prompt, room
from turnloom.errors import ConfigError, EngineError, EngineOverloaded, EngineProtocol, EngineRejected, EngineUnavailable
from turnloom.types import NO_FLOATS, NO_IDS, Finish, FinishReason, FloatArray, IntArray, Sampling, floats, ids

BUDGET = 5.0
"""Seconds for a whole abort, its check included."""

_CHECKS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds before each look at the slots."""

SLICE_SECONDS = 0.05
"""How long a slice may decode: what an abort waits for, and how often a reader sees new tokens."""

SLICE_TOKENS = 32

SEEDED_TOKENS = 4
"""A slice begins its own draws, so with a seed its length must not depend on the clock."""

T = TypeVar("T")


class _Aborted(Exception):
    pass


@dataclass(slots=True)
class _Flight:
    """A turn, with its slot as soon as it has one. `doing` is its request that the server may still work on, None between two.

    A streamed one stops when its connection closes, and `mark` is its seed: it shapes nothing, and tells it from others in `/slots`.
    """

    whole: list[int]
    seed: int = 0
    slot: int = -1
    mark: int = field(default_factory=lambda: secrets.randbits(31))
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    doing: asyncio.Task[Any] | None = None
    streamed: bool = False

    async def run(self, work: Coroutine[Any, Any, T], *, streamed: bool = False) -> T:
        """The result of `work`, which goes on when the caller is cancelled. Raises _Aborted as soon as the turn is aborted."""
        if self.aborted.is_set():
            work.close()
            raise _Aborted
        doing = asyncio.create_task(work)
        self.doing, self.streamed = doing, streamed
        waiting = asyncio.create_task(self.aborted.wait())
        try:
            await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self.aborted.is_set() or not doing.done():
            raise _Aborted
        if not isinstance(doing.exception(), EngineUnavailable):
            # An answer of any kind is the end of the work; a broken connection says nothing.
            self.doing = None
        return doing.result()


class LlamaServerEngine:
    """An `Engine` at `url`, a llama.cpp server or one that speaks as it does.

    `vocab_size` and `context_length` are for servers that do not say.
    `idle_timeout` is the seconds that one answer, prefill included, or a free
    slot may take. Logprobs are raw: ConfigError for any other `logprob_convention`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        vocab_size: int | None = None,
        context_length: int | None = None,
        logprob_convention: str | None = None,
        connect_timeout: float = 10.0,
        idle_timeout: float = 600.0,
    ) -> None:
        if logprob_convention not in (None, "raw"):
            raise ConfigError(
                f"a llama.cpp server's logprobs are asked for raw, not after {logprob_convention}; leave logprobs={logprob_convention} out"
            )
        self._http = EngineHTTP(url, api_key=api_key, connect_timeout=connect_timeout, idle_timeout=idle_timeout)
        self.url, self.name = self._http.url, self._http.name
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._idle_timeout = idle_timeout
        self._found = Once[tuple[Capabilities, Completions, Slots]]()
        self._slots = (0, Slots(0))
        """Their number, and who has them: turns that run keep theirs, whatever is forgotten of the server."""
        self._live: dict[str, _Flight] = {}
        self._leaving: set[asyncio.Task[AbortOutcome]] = set()

    async def capabilities(self) -> Capabilities:
        """Raises EngineOverloaded while the server loads its model, else as the contract says."""
        return (await self._find())[0]

    def forget(self) -> None:
        self._found.forget()

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        able, completions, slots = await self._find()
        check_prompt(prompt, able)
        if sampling.json_schema:
            raise EngineRejected("a llama.cpp server cannot hold a reply to a JSON schema: its grammar would begin anew in every slice")
        if rid in self._live:
            raise EngineRejected(f"the request id {rid} is in use")
        flight = self._live[rid] = _Flight(prompt.tolist(), secrets.randbits(64) if sampling.seed is None else sampling.seed)
        last, left = Chunk(NO_IDS, NO_FLOATS, Finish(FinishReason.LENGTH)), True
        try:
            await self._take(slots, flight)
            cached = await flight.run(completions.prefill(flight.slot, flight.whole, flight.mark), streamed=True)
            async with aclosing(_slices(flight, completions, sampling, room(prompt, sampling, able))) as slices:
                async for steps, finish in slices:
                    last = Chunk(ids(s.id for s in steps), floats(s.logprob for s in steps), finish, cached_tokens=cached)
                    if finish is None:
                        yield last
            left = False
        except _Aborted:
            trace, last = None, Chunk(NO_IDS, NO_FLOATS, Finish(FinishReason.ABORT, message="aborted"))
        except EngineError as error:
            if isinstance(error, EngineProtocol):
                PROTOCOL_ERRORS.inc()
            left = flight.doing is not None
            raise
        finally:
            del self._live[rid]
            self._let_go(slots, flight, trace, left=left)
        yield last

    async def abort(self, rid: str) -> AbortOutcome:
        """A request that this client does not have is not decoding: no other names its requests so."""
        flight = self._live.get(rid)
        if flight is None:
            return AbortOutcome.VERIFIED
        flight.aborted.set()
        return await self._see_out(flight)

    async def pause(self, mode: PauseMode) -> None:
        raise EngineRejected("a llama.cpp server cannot be paused; hold new turns at the gateway instead")

    async def resume(self) -> None:
        raise EngineRejected("a llama.cpp server cannot be paused, so there is nothing to resume")

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        """One request a position, each cut as sampling cuts it."""
        if not 1 <= start <= len(sequence):
            raise ValueError(f"start {start} is not within 1..{len(sequence)}")
        able, completions, slots = await self._find()
        check_prompt(sequence, able)
        whole = sequence.tolist()
        flight = _Flight(whole[:start])
        try:
            await self._take(slots, flight)
            await flight.run(completions.prefill(flight.slot, flight.whole, flight.mark), streamed=True)
            found = []
            for position in range(start, len(whole)):
                found.append(await flight.run(completions.logprob(flight.slot, whole[:position], whole[position])))
                flight.whole.append(whole[position])
            return floats(found)
        finally:
            self._let_go(slots, flight, None, left=flight.doing is not None)

    async def health(self) -> bool:
        return await self._http.healthy()

    async def close(self) -> None:
        while self._leaving:
            await asyncio.wait(self._leaving)
        await self._http.close()

    async def _take(self, slots: Slots, flight: _Flight) -> None:
        """Waits for a slot, as long as an answer may take. Raises EngineOverloaded, and _Aborted."""
        looked = await look_at_slots(self._http) or []
        acquiring = asyncio.create_task(slots.acquire(flight.whole, {state.id for state in looked if state.processing}))
        aborted = asyncio.create_task(flight.aborted.wait())
        try:
            await asyncio.wait({acquiring, aborted}, timeout=self._idle_timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            aborted.cancel()
            if acquiring.done():
                flight.slot = acquiring.result()
            else:
                acquiring.cancel()
        if flight.aborted.is_set():
            raise _Aborted
        if flight.slot < 0:
            raise EngineOverloaded(f"all slots of {self.name} were busy for {self._idle_timeout:.0f} s")

    def _let_go(self, slots: Slots, flight: _Flight, trace: Trace | None, *, left: bool) -> None:
        """Frees a turn's slot. `left` says that it was not at its end: then its work is seen out first, which goes on by itself."""

        def release() -> None:
            if flight.slot >= 0:
                slots.release(flight.slot, flight.whole)

        if not left:
            release()
            return

        async def leave() -> AbortOutcome:
            try:
                outcome = await self._see_out(flight)
            finally:
                release()
            ABORTS.labels(outcome.value).inc()
            return outcome

        task = asyncio.create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        if trace is not None:
            trace.aborts.append(task)

    async def _see_out(self, flight: _Flight) -> AbortOutcome:
        """What became of a turn's work: a slice's own answer proves that it is over, and of prefill the slots tell. Never raises."""
        doing = flight.doing
        if doing is None:
            return AbortOutcome.VERIFIED
        if not flight.streamed:
            await asyncio.wait({doing}, timeout=BUDGET)
            ended = doing.done() and not doing.cancelled() and not isinstance(doing.exception(), EngineUnavailable)
            doing.cancel()
            return AbortOutcome.VERIFIED if ended else AbortOutcome.UNVERIFIED
        doing.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(BUDGET):
                return await self._gone(flight.mark)
        return AbortOutcome.UNVERIFIED

    async def _gone(self, mark: int) -> AbortOutcome:
        """Whether no slot works on the request with this seed. One that was closed while it waited for its slot never gets there."""
        for pause in _CHECKS:
            await asyncio.sleep(pause)
            states = await look_at_slots(self._http)
            if states is None:
                break
            if not any(state.processing and state.seed in (mark, None) for state in states):
                return AbortOutcome.VERIFIED
        return AbortOutcome.UNVERIFIED

    async def _find(self) -> tuple[Capabilities, Completions, Slots]:
        return await self._found.get(self._find_server)

    async def _find_server(self) -> tuple[Capabilities, Completions, Slots]:
        props = await self._get("/props")
        settings = props.get("default_generation_settings")
        said = settings.get("n_ctx") if isinstance(settings, dict) else None
        models = (await self._http.info("/v1/models", needed=False)).get("data")
        meta = models[0].get("meta") if isinstance(models, list) and models and isinstance(models[0], dict) else None
        meta = meta if isinstance(meta, dict) else {}
        context = self._context_length or said or meta.get("n_ctx")
        if not isinstance(context, int) or context < 2:
            raise EngineProtocol(f"{self.name} does not say its context length; give it with the engine's URL")
        vocab = self._vocab_size or meta.get("n_vocab")
        vocab = vocab if isinstance(vocab, int) and vocab > 0 else None
        said = props.get("total_slots")
        count = said if isinstance(said, int) and said > 0 else 1
        path = props.get("model_path")
        able = Capabilities(
            model=str(props.get("model_alias") or path or "unknown"),
            context_length=context,
            vocab_size=vocab,
            logprob_convention="raw",
            tokenizer=str(path) if path else None,
        )
        plain = await self._find_plain_token()
        completions = Completions(self._http, vocab_size=vocab, certain=plain, patience=self._idle_timeout)
        if self._slots[0] != count:
            self._slots = count, Slots(count)
        return able, completions, self._slots[1]

    async def _get(self, path: str) -> dict[str, Any]:
        """Raises EngineError, which for a server that is loading its model is EngineOverloaded."""
        try:
            async with self._http.session.get(f"{self.url}{path}") as response:
                if response.status == 404:
                    raise ConfigError(f"{self.name} has no {path}: it is no llama.cpp server; see `turnloom doctor --engine URL`")
                if response.status != 200:
                    raise await refusal(response)
                found = orjson.loads(await response.read())
        except (*BROKEN, ValueError) as error:
            raise EngineUnavailable(f"{self.name} is not ready: {path}: {words(error)}") from error
        if not isinstance(found, dict):
            raise EngineProtocol(f"{self.name}{path} gave no object")
        return found

    async def _find_plain_token(self) -> int:
        """The id of a token that is whole characters."""
        said = await self._http.tell("/tokenize", {"content": "a"})
        tokens = said.get("tokens") if isinstance(said, dict) else None
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[-1], int):
            raise EngineProtocol(f"{self.name}/tokenize gave no tokens")
        return tokens[-1]


async def _slices(
    flight: _Flight, completions: Completions, sampling: Sampling, wanted: int
) -> AsyncGenerator[tuple[list[Step], Finish | None], None]:
    """The tokens of a turn, some at a time, and on the last ones why it ends. The first comes alone."""
    policy = Policy(sampling.temperature, max(sampling.top_k, 0), sampling.top_p)
    left, count = wanted, 1
    while left > 0:
        began = time.monotonic()
        work = completions.sample(flight.slot, flight.whole, policy, flight.seed, min(count, left))
        steps, decoding = await flight.run(work)
        # What a slice costs beside its tokens grows with the prompt. It shall not be more than the tokens cost.
        beside = time.monotonic() - began - decoding
        count = max(1, min(SLICE_TOKENS, int(max(SLICE_SECONDS, beside) * len(steps) / max(decoding, 1e-4))))
        if sampling.seed is not None:
            count = SEEDED_TOKENS
        left -= len(steps)
        flight.whole += [step.id for step in steps]
        if steps[-1].end:
            yield steps, Finish(FinishReason.STOP, matched=steps[-1].id)
            return
        yield steps, None if left else Finish(FinishReason.LENGTH)
