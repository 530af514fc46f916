"""llama.cpp in this process through `xllamacpp`, one token at a time and exact. Owns the model and its slots; knows no SGLang.

`xllamacpp` has no call for decoding as such, only llama.cpp's own HTTP server,
so that is run on a private port with a key of its own and asked for one token a
request. Its prefix cache makes that as fast as a stream of many (measured on
SmolLM2-135M with two free processors: 55 to 75 tokens/s either way).

What a stream of many gets wrong, all measured:

- A token that leaves a character unfinished is **not reported at all**: its id
  and logprob are missing from the stream, and only `tokens_predicted` counts
  it. Half the tokens of Chinese text or emoji are such. A request that is not
  streamed lists every id in `tokens`, but still no logprob for these; it is
  read from the top logprobs of a second look at the same position (`_look_up`).
- Text that may begin a stop string is held back, while its tokens are not; at
  one token a request it sees no more than one. Stop strings are the caller's work.
- `ignore_eos` bans end tokens, which is another policy; SGLang samples them and
  goes on. Here nothing is banned, and `Step.end` says what llama.cpp takes for an end.
- `n_predict` 0 still samples a token.
- The default chain applies temperature after the truncating samplers; SGLang
  applies it before them, so the chain is given in that order.
- A request that is not streamed goes on when its client has left, so prefill,
  which may take long, is streamed.
- The connection of a stream is closed at its end without saying so before, and
  an idle one after five seconds. A request that finds it closed is asked again.

Logprobs are raw, before temperature and truncation, and include the end token's.

They are exact for the arithmetic that was done, and that depends on the shape of
a batch: the same token after the same ids, evaluated alone or beside another
sequence, in one piece or two, differs by a few hundredths in a model quantised
to four bits. A recomputation that cuts the sequence as the sampling did gives 0.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from turnloom.errors import ConfigError, EngineProtocol
from turnloom.gguf import read_metadata

_LOOKS = (64, 2048)
"""How many top logprobs to ask for at first, before the whole vocabulary, which takes most of a second."""

_FORCE = 1000.0
"""A logit bias that makes a token certain. Reported logprobs are those of the unbiased logits."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What shapes sampling: top_k 0, top_p 1.0 and min_p 0.0 are off; temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One sampled token. `end` when it ends a generation by the model's own account."""

    id: int
    logprob: float
    end: bool


class Slots:
    """llama.cpp's parallel sequences. A request takes the free one that holds most of its prompt already."""

    def __init__(self, count: int) -> None:
        self._held: list[list[int]] = [[] for _ in range(count)]
        self._free = set(range(count))
        self._room = asyncio.Semaphore(count)

    @contextlib.asynccontextmanager
    async def take(self, ids: list[int]) -> AsyncIterator[int]:
        """A slot; `ids` is what it will hold afterwards, and may grow meanwhile."""
        async with self._room:
            slot = max(self._free, key=lambda one: _common(self._held[one], ids))
            self._free.remove(slot)
            try:
                yield slot
            finally:
                self._held[slot] = ids
                self._free.add(slot)


class LlamaCpp:
    """A loaded model. `context` is the tokens one sequence may hold; `vocab_size` one more than the largest id."""

    def __init__(self, path: Path, *, parallel: int = 2, threads: int | None = None) -> None:
        """Loads the model, which takes about a second. Raises ConfigError without xllamacpp or a usable file."""
        require_xllamacpp()
        import xllamacpp

        pairs = read_metadata(path)
        self.path = path
        self.context = int(pairs.get(f"{pairs.get('general.architecture')}.context_length", 2048))
        self.vocab_size = len(pairs["tokenizer.ggml.tokens"])
        self._certain = int(pairs.get("tokenizer.ggml.eos_token_id", 0))
        self._key = secrets.token_hex(16)
        self._session: aiohttp.ClientSession | None = None
        self._evaluated: dict[int, list[int]] = {}
        """Per slot, the last ids that it was asked to evaluate."""
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel = parallel
        params.n_ctx = self.context * parallel
        params.kv_unified = False
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.api_keys = [self._key]
        params.cpuparams.n_threads = threads or default_threads()
        # Small batches, so that a long prompt holds up neither an abort nor the other sequences for long.
        params.n_batch = params.n_ubatch = 256
        params.warmup = False
        params.verbosity = -1
        params.sampling.penalty_repeat = 1.0
        try:
            self._server = xllamacpp.Server(params)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"llama.cpp cannot load {path}: {error}") from error
        self._url = str(self._server.listening_address)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def prefill(self, slot: int, ids: Sequence[int]) -> int:
        """Evaluate `ids` but the last into a slot's cache; the number that was there already. Stops when cancelled.

        What the cache holds is left alone: llama.cpp would evaluate the last of it again, in a batch of another
        shape, and every logprob after it would differ (by up to 0.2 in this quantised model, measured).
        """
        if len(ids) < 2:
            return 0
        if self._evaluated.get(slot, [])[: len(ids) - 1] == list(ids[:-1]):
            return len(ids) - 1
        body = self._body(slot, ids[:-1], stream=True)
        last = (await self._post(body, {"Connection": "close"})).rpartition("data: ")[2]
        return int(_checked(orjson.loads(last))["timings"]["cache_n"])

    async def step(self, slot: int, ids: Sequence[int], policy: Policy, seed: int) -> Step:
        """Sample the token after `ids`. The draw depends on `seed` and the position alone."""
        body = self._body(
            slot,
            ids,
            temperature=policy.temperature,
            top_k=policy.top_k,
            top_p=policy.top_p,
            min_p=policy.min_p,
            seed=_draw(seed, len(ids)),
        )
        answer = await self._ask(body)
        tokens = answer["tokens"]
        if len(tokens) != 1:
            raise EngineProtocol(f"llama.cpp sampled {tokens!r} where one token was asked for")
        token = int(tokens[0])
        value = _reported(answer, token)
        if value is None:
            value = await self._look_up(slot, ids, token)
        return Step(token, value, answer["stop_type"] == "eos")

    async def logprob(self, slot: int, ids: Sequence[int], token: int) -> float:
        """The logprob of `token` after `ids`: it is made certain, and its logprob is the unbiased one."""
        answer = await self._ask(self._body(slot, ids, logit_bias=[[token, _FORCE]]))
        if answer["tokens"] != [token]:
            raise EngineProtocol(f"llama.cpp gave {answer['tokens']!r} where {token} was certain")
        value = _reported(answer, token)
        return value if value is not None else await self._look_up(slot, ids, token)

    async def _look_up(self, slot: int, ids: Sequence[int], token: int) -> float:
        """The logprob of a token that llama.cpp does not report, from the top logprobs beside one that it does."""
        for count in (*_LOOKS, self.vocab_size):
            answer = await self._ask(self._body(slot, ids, n_probs=count, logit_bias=[[self._certain, _FORCE]]))
            for entry in answer["completion_probabilities"][0]["top_logprobs"]:
                if entry["id"] == token:
                    return float(entry["logprob"])
        raise EngineProtocol(f"llama.cpp gives no logprob for the token {token}")

    def _body(self, slot: int, ids: Sequence[int], **more: Any) -> dict[str, Any]:
        self._evaluated[slot] = prompt = list(ids)
        base = {
            "prompt": prompt,
            "n_predict": 1,
            "n_probs": 1,
            "return_tokens": True,
            "cache_prompt": True,
            "id_slot": slot,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "stream": False,
        }
        return base | more

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        return _checked(orjson.loads(await self._post(body)))

    async def _post(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
        for attempt in (1, 2, 3):
            try:
                async with self._http().post(f"{self._url}/completion", data=orjson.dumps(body), headers=headers) as response:
                    # Half a character in `content` may not be valid UTF-8; nothing here needs that text.
                    return (await response.read()).decode("utf-8", "replace").strip()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if attempt == 3:
                    raise
        raise AssertionError("unreachable")

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            self._session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session


def default_threads() -> int:
    """Half the processors. llama.cpp's threads wait for each other at every layer, so one that must share its
    processor (with the gateway, an agent, a test) slows all: on two busy ones, one thread decodes 4 times as fast as two."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


def require_xllamacpp() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError("the embedded engine needs xllamacpp: pip install 'turnloom[local]'")


def _reported(answer: dict[str, Any], token: int) -> float | None:
    found = answer.get("completion_probabilities")
    if not found:
        return None
    if len(found) != 1 or found[0]["id"] != token:
        raise EngineProtocol(f"llama.cpp's logprobs {found!r} are not for its token {token}")
    return float(found[0]["logprob"])


def _checked(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict) or "error" in answer:
        words = answer.get("error") if isinstance(answer, dict) else answer
        raise EngineProtocol(f"llama.cpp refused: {words}")
    return answer


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common prefix."""
    count = min(len(left), len(right))
    return next((index for index in range(count) if left[index] != right[index]), count)


def _draw(seed: int, position: int) -> int:
    """A 32-bit seed for one draw: splitmix64's finaliser (Steele et al. 2014) over seed and position.

    The largest value means "random" to llama.cpp and is left out.
    """
    mask = 2**64 - 1
    value = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) % (2**32 - 1)
