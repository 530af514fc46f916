"""Finds out, with a few small requests, what an engine is and does. Judges nothing: that is `probe_profile`.

Prompts are ids that every vocabulary has, drawn anew each time, so that no cache
knows them. Each step has its time; what a step leaves behind is aborted before the
probe ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from turnloom.engine import probe_http as raw
from turnloom.engine.contract import Engine, Trace
from turnloom.engine.http import EngineHTTP, words
from turnloom.engine.open import KEY_VARIABLE, open_engine
from turnloom.engine.probe_profile import Difference, Kind, Profile, WorkerProfile, measured_convention
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import EngineError, EngineOverloaded, EngineProtocol, EngineUnavailable
from turnloom.render.contract import Tokenizer
from turnloom.types import Finish, IntArray, Sampling, ids

log = logging.getLogger("turnloom.engine")

STEP_SECONDS = 120.0

_IDS = range(40, 240)
"""Ids that are sent. Every vocabulary reaches so far, and few models have control tokens here."""

_PROMPT = 272
"""Longer than one block of any prefix cache."""

_TOKENS = 48
_SHORT = 24
_HOT = 2.0
_DRAWS = 8
_KEYS = 6
_PROMPTS = 3
_MOST_WORKERS = 8
_BURST = 0.001
_WARM = 4


@dataclass(frozen=True, slots=True)
class Output:
    """`times` are the loop's at which chunks with tokens came, `began` that of the request."""

    prompt: IntArray
    ids: list[int]
    logprobs: list[float]
    finish: Finish | None
    cached_tokens: int
    version: str | None
    began: float
    times: list[float]

    @property
    def sequence(self) -> IntArray:
        return ids([*self.prompt.tolist(), *self.ids])


class Probe:
    """One engine while it is probed."""

    def __init__(self, engine: Engine, http: EngineHTTP, profile: Profile, tokenizer: Tokenizer | None, api_key: str | None) -> None:
        self.engine = engine
        self.profile = profile
        self.output: Output | None = None
        """What was sampled at temperature 1."""
        self._http = http
        self._api_key = api_key
        self._tokenizer = tokenizer
        self._key = uuid.uuid4().hex
        self._rng = np.random.default_rng(secrets.randbits(64))

    async def run(self) -> Profile:
        """Raises EngineUnavailable where no engine answers, EngineOverloaded while it loads its model, ConfigError for want of a key."""
        await self._identify()
        if self.profile.kind is not None and self.profile.kind != self.profile.asked:
            return self.profile
        if not await self._step("its own description", self._describe) or not await self._step("sampling", self._sample):
            return self.profile
        rest: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("recomputing logprobs", self._recompute),
            ("logprobs at temperature 2", self._convention),
            ("the prefix cache", self._cache),
            ("a stop token", self._stop_token),
            ("an abort", self._abort),
            ("a disconnect", self._disconnect),
        ]
        if self.profile.router:
            rest += [("the workers", self._workers), ("routing keys", self._placing)]
        for name, step in rest:
            await self._step(name, step)
        return self.profile

    async def close(self) -> None:
        await self.engine.close()
        await self._http.close()

    def _note(self, **found: Any) -> None:
        self.profile = replace(self.profile, **found)

    async def _step(self, name: str, step: Callable[[], Awaitable[None]]) -> bool:
        try:
            async with asyncio.timeout(STEP_SECONDS):
                await step()
        except TimeoutError:
            problem = f"no answer within {STEP_SECONDS:.0f} s"
        except EngineError as error:
            if not (self.profile.context_length or self.profile.router) and isinstance(error, EngineUnavailable | EngineOverloaded):
                raise
            problem = words(error)
        else:
            return True
        self._note(failures=(*self.profile.failures, (name, problem)))
        return False

    def _prompt(self, length: int) -> IntArray:
        end = min(_IDS.stop, self.profile.vocab_size or _IDS.stop)
        length = min(length, max(1, self.profile.context_length // 4))
        return ids(self._rng.integers(min(_IDS.start, end - 1), end, length))

    async def _identify(self) -> None:
        found = await raw.identify(self._http)
        workers = tuple(WorkerProfile(entry["url"], healthy=bool(entry.get("is_healthy", True))) for entry in found.workers or ())
        policy = next((str(entry["policy"]) for entry in found.workers or () if entry.get("policy")), None)
        self._note(
            kind=found.kind,
            version=found.version,
            router=found.workers is not None,
            workers=workers,
            policy=policy,
            key_needed=await raw.needs_key(self._http),
            health=await self._http.healthy(),
        )

    async def _describe(self) -> None:
        able = await self.engine.capabilities()
        self._note(
            model=able.model,
            context_length=able.context_length,
            vocab_size=able.vocab_size,
            convention=able.logprob_convention,
            weight_version=able.weight_version,
            structured=able.structured,
        )

    async def _draw(self, prompt: IntArray, sampling: Sampling, key: str = "") -> Output:
        clock = asyncio.get_running_loop().time
        began, times = clock(), []
        tokens: list[int] = []
        logprobs: list[float] = []
        finish, cached, version = None, 0, None
        stream = self.engine.sample(prompt, sampling, rid=uuid.uuid4().hex, routing_key=key or self._key)
        async with aclosing(stream) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if len(chunk.ids):
                    times.append(clock())
                tokens += chunk.ids.tolist()
                logprobs += chunk.logprobs.tolist()
                finish, cached = chunk.finish, max(cached, chunk.cached_tokens)
                version = chunk.versions[-1].version if chunk.versions else chunk.version or version
        return Output(prompt, tokens, logprobs, finish, cached, version, began, times)

    async def _sample(self) -> None:
        await self._draw(self._prompt(_WARM), Sampling(max_tokens=1))
        prompt = self._prompt(_PROMPT)
        found = self.output = await self._draw(prompt, Sampling(max_tokens=_TOKENS))
        if not found.ids:
            raise EngineProtocol(f"it ended a reply without a token: {found.finish}")
        bursts = 1 + sum(later - earlier > _BURST for earlier, later in zip(found.times, found.times[1:], strict=False))
        took = found.times[-1] - found.times[0]
        self._note(
            tokens=len(found.ids),
            bursts=bursts,
            prompt_sent=len(prompt),
            sampled_version=found.version,
            first_token_seconds=found.times[0] - found.began,
            tokens_per_second=(len(found.ids) - 1) / took if took > 0 and bursts > 2 else None,
        )

    async def _recompute(self) -> None:
        assert self.output is not None
        self._note(difference=await difference(self.engine, self.output))

    async def _convention(self) -> None:
        """Different tokens at one place, at a temperature where the two conventions are far apart."""
        prompt = self._prompt(16)
        drawn = await asyncio.gather(*(self._draw(prompt, Sampling(max_tokens=1, temperature=_HOT)) for _ in range(_DRAWS)))
        said = {found.ids[0]: found.logprobs[0] for found in drawn if found.ids}
        pairs = []
        for token, logprob in said.items():
            (alone,) = await self.engine.prompt_logprobs(ids([*prompt.tolist(), token]), len(prompt))
            pairs.append((logprob, float(alone)))
        exact = self.profile.difference.largest if self.profile.difference is not None else 0.0
        self._note(measured=measured_convention(pairs, _HOT, max(2e-3, 5 * exact)))

    async def _cache(self) -> None:
        assert self.output is not None
        again = await self._draw(self.output.prompt, Sampling(max_tokens=1))
        self._note(cached_tokens=again.cached_tokens)

    async def _stop_token(self) -> None:
        """A greedy reply, and the same again with one of its tokens as the one that ends it."""
        kind = self._known
        for _ in range(_PROMPTS):
            prompt = self._prompt(16)
            asked = self._http, kind, self.profile.model, prompt.tolist()
            free = await raw.short(*asked, uuid.uuid4().hex, _SHORT)
            agrees = self._text_agrees(free)
            self._note(text_agrees=self.profile.text_agrees if agrees is None else agrees)
            if self._tokenizer is None or agrees:
                break
        counted = free.prompt_tokens
        if counted is not None and counted != len(prompt):
            self._note(prompt_sent=len(prompt), prompt_counted=counted)
        elif counted is not None:
            self._note(prompt_counted=self.profile.prompt_sent)
        if kind == "llamacpp" or not free.ids:
            return
        at = max(free.ids.index(token) for token in free.ids)
        stopped = await raw.short(*asked, uuid.uuid4().hex, _SHORT, stop=free.ids[at])
        if stopped.ids in (free.ids[:at], free.ids[: at + 1]):
            self._note(end_kept=len(stopped.ids) > at)

    def _text_agrees(self, answer: raw.Answer) -> bool | None:
        if self._tokenizer is None or not answer.ids or max(answer.ids) >= self._tokenizer.vocab_size:
            return None
        return raw.same_text(self._tokenizer.decode(answer.ids), answer.text)

    async def _abort(self) -> None:
        """A stream that is left after some tokens; tried again where a reply ended too soon."""
        clock = asyncio.get_running_loop().time
        for _ in range(3):
            trace, count, left = Trace(), 0, clock()
            stream = self.engine.sample(
                self._prompt(16), Sampling(max_tokens=raw.LONG[self._known]), rid=uuid.uuid4().hex, routing_key=self._key, trace=trace
            )
            async with aclosing(stream) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    count += len(chunk.ids)
                    if count >= _WARM and chunk.finish is None:
                        left = clock()
                        break
            if trace.aborts:
                outcome = await trace.aborts[0]
                self._note(abort=outcome, abort_seconds=clock() - left)
                return

    async def _disconnect(self) -> None:
        rid, prompt, kind = uuid.uuid4().hex, self._prompt(16), self._known
        most = min(raw.LONG[kind], self.profile.context_length - len(prompt) - 1)
        asked = self._http, kind, self.profile.model, prompt.tolist(), rid, most
        stops: bool | None = None
        try:
            found = await raw.leave(*asked, key=self._key, workers=self._bases)
            stops = found.stops
        finally:
            if stops is not True:
                await self.engine.abort(rid)
        self._note(style=found.style, load_readable=found.readable, disconnect_stops=stops, disconnect_seconds=found.seconds)

    @property
    def _known(self) -> Kind:
        return self.profile.kind or self.profile.asked

    @property
    def _bases(self) -> list[str]:
        return [worker.url for worker in self.profile.workers]

    async def _workers(self) -> None:
        """Each worker by itself: what it says, and whether it computes the same logprobs."""
        self._note(workers=tuple([await self._worker(worker) for worker in self.profile.workers]))

    async def _worker(self, worker: WorkerProfile) -> WorkerProfile:
        assert self.output is not None
        try:
            await raw.get(self._http, "/v1/models", worker.url)
        except EngineUnavailable as error:
            log.info("%s", error)
            return replace(worker, reachable=False)
        engine = SGLangEngine(worker.url, api_key=self._api_key, vocab_size=self.profile.vocab_size)
        try:
            able = await engine.capabilities()
            own = await difference(engine, self.output) if able.vocab_size is None or self._fits(able.vocab_size) else None
            return replace(worker, model=able.model, context_length=able.context_length, weight_version=able.weight_version, difference=own)
        except EngineError as error:
            log.info("%s", error)
            return worker
        finally:
            await engine.close()

    def _fits(self, vocab_size: int) -> bool:
        assert self.output is not None
        return int(self.output.sequence.max()) < vocab_size

    async def _placing(self) -> None:
        """Some prompts for each of some keys: the worker that has one in its cache is where it came."""
        healthy = [worker.url for worker in self.profile.workers if worker.healthy and worker.reachable][:_MOST_WORKERS]
        if len(healthy) < 2 or len(healthy) < len([worker for worker in self.profile.workers if worker.healthy]):
            return
        places: list[set[str | None]] = []
        for _ in range(_KEYS):
            key, prompts = uuid.uuid4().hex, [self._prompt(_PROMPT // 3) for _ in range(_PROMPTS)]
            for prompt in prompts:
                await self._draw(prompt, Sampling(max_tokens=1), key)
            places.append({await self._place(prompt, healthy) for prompt in prompts})
            if None in places[-1]:
                return
        self._note(keys=len(places), keys_moved=sum(len(each) > 1 for each in places), places=len(set().union(*places)))

    async def _place(self, prompt: IntArray, workers: Sequence[str]) -> str | None:
        for worker in workers:
            found = await raw.short(self._http, "sglang", self.profile.model, prompt.tolist(), uuid.uuid4().hex, 1, base=worker)
            if 2 * (found.cached_tokens or 0) > len(prompt):
                return worker
        return None


async def difference(engine: Engine, output: Output) -> Difference:
    """Of the logprobs that came with an output and what `engine` computes for its tokens."""
    computed = await engine.prompt_logprobs(output.sequence, len(output.prompt))
    apart = np.abs(computed.astype(np.float64) - np.array(output.logprobs))
    return Difference(float(apart.max()), float(apart.mean()), len(apart))


async def open_probe(url: str, tokenizer: Tokenizer | None = None) -> Probe:
    """Raises ConfigError for a URL that names no engine."""
    engine = await open_engine(url)
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    form = parts.scheme.partition("+")[0]
    asked: Kind = "vllm" if form == "vllm" else "llamacpp" if form == "llamacpp" else "sglang"
    api_key = os.environ.get(options.get("key_env", [KEY_VARIABLE])[-1]) or None
    profile = Profile(
        name=engine.name,
        asked=asked,
        vocab_from="url" if "vocab_size" in options else "engine",
        tokenizer_vocab=None if tokenizer is None else tokenizer.vocab_size,
        loopback=(urlsplit(engine.name).hostname or "") in ("localhost", "127.0.0.1", "::1"),
    )
    return Probe(engine, EngineHTTP(getattr(engine, "url", engine.name), api_key=api_key), profile, tokenizer, api_key)


@dataclass(frozen=True, slots=True)
class Report:
    """What several engines are. `differences` are as `pool_findings` takes them; `unreachable` has each one's name and why."""

    profiles: tuple[Profile, ...]
    differences: tuple[Difference | None, ...] = ()
    unreachable: tuple[tuple[str, str], ...] = ()


async def probe_engines(urls: Sequence[str], tokenizer: Tokenizer | None = None) -> Report:
    """One after the other, then each one on the tokens of the first. Raises ConfigError for what names no engine."""
    probes: list[Probe] = []
    unreachable: list[tuple[str, str]] = []
    try:
        for url in urls:
            probe = await open_probe(url, tokenizer)
            probes.append(probe)
            try:
                await probe.run()
            except (EngineUnavailable, EngineOverloaded) as error:
                unreachable.append((probe.profile.name, words(error)))
        able = [probe for probe in probes if probe.profile.name not in dict(unreachable)]
        differences = [await _compared(able[0], other) for other in able[1:]]
        return Report(tuple(probe.profile for probe in able), tuple(differences), tuple(unreachable))
    finally:
        for probe in probes:
            await probe.close()


async def _compared(first: Probe, other: Probe) -> Difference | None:
    """None where the other must not get the first one's ids: it might not survive one that it does not have."""
    output, profile = first.output, other.profile
    if output is None or other.output is None:
        return None
    end = profile.vocab_size or profile.tokenizer_vocab
    if profile.asked == "sglang" and profile.model != first.profile.model and (end is None or int(output.sequence.max()) >= end):
        return None
    try:
        async with asyncio.timeout(STEP_SECONDS):
            return await difference(other.engine, output)
    except (EngineError, TimeoutError) as error:
        log.info("%s could not be compared: %s", profile.name, words(error))
        return None
