"""llama.cpp's `/completion`, asked so that every id comes with its own logprob. Owns the requests; knows no slots' owner and no SGLang.

A stream is not usable for tokens, all measured:

- A token that leaves a character unfinished is **not reported at all**: its id
  and logprob are missing from the stream, and only `tokens_predicted` counts
  it. Half the tokens of Chinese text or emoji are such. A request that is not
  streamed lists every id in `tokens`, but still no logprob for these; it is
  read from the top logprobs of a second look at the same position.
- Text that may begin a stop string is held back, while its tokens are not. Stop
  strings are the caller's work, and none is sent.
- `ignore_eos` bans end tokens, which is another policy. Here nothing is banned,
  and `Step.end` says what llama.cpp takes for an end.
- A request that is not streamed goes on when its client has left. So tokens are
  asked for a few at a time, and prefill, which may take long, is streamed.
- `n_predict` 0 still samples a token.
- The connection of a stream is closed at its end without saying so before, and
  an idle one after five seconds. A request that finds it closed is asked again.

The server's own defaults shape the distribution (top_k 40, min_p 0.05 and what
its command line sets), so each is set here. The default chain applies
temperature after the truncating samplers; SGLang applies it before them, so the
chain is given in that order.

Logprobs are raw, before temperature and truncation, and include the end token's.
They are exact for the arithmetic that was done, and that depends on the shape of
a batch: the same token after the same ids, evaluated alone or beside another
sequence, in one piece or two, differs by a few hundredths in a model quantised
to four bits. A recomputation that cuts the sequence as the sampling did gives 0.0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from turnloom.engine.contract import LOGPROB_SLACK
from turnloom.engine.http import BROKEN, EngineHTTP, error_for_status, refusal, words
from turnloom.engine.prompts import INT32_END
from turnloom.errors import EngineProtocol, EngineUnavailable

_LOOKS = (64, 2048)
"""How many top logprobs to ask for at first, before the whole vocabulary, which takes most of a second."""

_FORCE = 1000.0
"""A logit bias that makes a token certain. Reported logprobs are those of the unbiased logits."""

_LOWEST = -1e30
"""llama.cpp gives the lowest float32 as the logprob of a probability that float32 cannot tell from 0."""

_FIELDS = ("tokens", "completion_probabilities", "stop_type", "truncated", "tokens_evaluated", "timings")
"""What is read of an answer. All of it would repeat the prompt's text in each."""

_TRIES = 3

_NEUTRAL: dict[str, Any] = {
    "samplers": ["temperature", "top_k", "top_p", "min_p"],
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "dynatemp_range": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "adaptive_target": -1.0,
    "min_keep": 0,
    "logit_bias": [],
    "ignore_eos": False,
    "grammar": "",
    "stop": [],
    "n_indent": 0,
    "t_max_predict_ms": -1,
    "backend_sampling": False,
    # A token of a draft that was accepted has no logprob.
    "speculative.n_max": 0,
}
"""Nothing but the model's own distribution, at temperature 1."""


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


class Completions:
    """One server's `/completion`. A request names its slot, one of llama.cpp's parallel sequences.

    `certain` is the id of any token whose text has no unfinished character.
    `vocab_size` None is one that is not known. `patience` is the seconds that one
    answer may take, its wait for the slot included. Everything raises EngineRejected,
    EngineOverloaded, EngineUnavailable or EngineProtocol.
    """

    def __init__(self, http: EngineHTTP, *, vocab_size: int | None, certain: int, patience: float) -> None:
        self._http = http
        self._patience = patience
        self._id_end = vocab_size or INT32_END
        self._certain = certain
        self._evaluated: dict[int, list[int]] = {}
        """Per slot, the ids that its cache holds, if nobody else asked for it."""

    async def prefill(self, slot: int, ids: Sequence[int], seed: int = 0) -> int:
        """Evaluate `ids` but the last into a slot's cache; the number that was there already. Stops when cancelled.

        What the cache holds is left alone: llama.cpp would evaluate the last of it again, in a batch of another
        shape, and every logprob after it would differ (by up to 0.2 in a model quantised to four bits, measured).
        `seed` shapes nothing; it tells this request from others in `/slots`.
        """
        whole = list(ids[:-1])
        if not whole or self._evaluated.get(slot, [])[: len(whole)] == whole:
            return len(whole)
        self._evaluated.pop(slot, None)
        sent = _body(slot, whole, stream=True, n_predict=1, seed=seed)
        answer = await self._post(sent, {"Connection": "close"})
        _check_prompt(answer, len(whole))
        self._evaluated[slot] = whole
        timings = answer.get("timings")
        cached = timings.get("cache_n") if isinstance(timings, dict) else None
        return cached if isinstance(cached, int) else 0

    async def sample(self, slot: int, ids: Sequence[int], policy: Policy, seed: int, count: int = 1) -> tuple[list[Step], float]:
        """Sample up to `count` tokens after `ids`, at least one; also the seconds that the server worked on them, as it says.

        The draws depend on `seed`, the position and `count` alone.

        It goes on at the server when cancelled, for `count` tokens at most.
        """
        before = list(ids)
        shape = {"temperature": policy.temperature, "top_k": policy.top_k, "top_p": policy.top_p, "min_p": policy.min_p}
        answer = await self._ask(slot, before, n_predict=count, seed=draw(seed, len(before)), **shape)
        tokens, logprobs = read_tokens(answer, count, self._id_end)
        self._evaluated[slot] = before + tokens[:-1]
        seconds = _seconds(answer)
        steps = []
        for place, (token, value) in enumerate(zip(tokens, logprobs, strict=True)):
            end = place == len(tokens) - 1 and answer.get("stop_type") == "eos"
            if value is None:
                value = await self._look_up(slot, before + tokens[:place], token)
            steps.append(Step(token, value, end))
        return steps, seconds

    async def logprob(self, slot: int, ids: Sequence[int], token: int) -> float:
        """The logprob of `token` after `ids`: it is made certain, and its logprob is the unbiased one."""
        answer = await self._ask(slot, list(ids), logit_bias=[[token, _FORCE]])
        tokens, logprobs = read_tokens(answer, 1, self._id_end)
        if tokens != [token]:
            raise EngineProtocol(f"llama.cpp gave {tokens!r} where {token} was certain")
        value = logprobs[0]
        return value if value is not None else await self._look_up(slot, ids, token)

    async def _look_up(self, slot: int, ids: Sequence[int], token: int) -> float:
        """The logprob of a token that llama.cpp does not report, from the top logprobs beside one that it does."""
        for count in (*_LOOKS, self._id_end):
            answer = await self._ask(slot, list(ids), n_probs=count, logit_bias=[[self._certain, _FORCE]])
            found = answer.get("completion_probabilities")
            try:
                entries = {entry["id"]: entry["logprob"] for entry in found[0]["top_logprobs"]}  # type: ignore[index]
            except (LookupError, TypeError) as error:
                raise EngineProtocol(f"llama.cpp gives no top_logprobs where the one of token {token} is wanted") from error
            if token in entries:
                return _checked_logprob(token, entries[token])
        raise EngineProtocol(f"llama.cpp gives no logprob for the token {token}")

    async def _ask(self, slot: int, ids: list[int], **more: Any) -> dict[str, Any]:
        self._evaluated.pop(slot, None)
        answer = await self._post(_body(slot, ids, **more))
        _check_prompt(answer, len(ids))
        self._evaluated[slot] = ids
        return answer

    async def _post(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The answer, of a stream its last event."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        data = orjson.dumps(body)
        for attempt in range(1, _TRIES + 1):
            try:
                async with asyncio.timeout(self._patience):
                    return await self._post_once(data, sent, stream=body["stream"])
            except BROKEN as error:
                closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
                if closed and not isinstance(error, aiohttp.ClientConnectorError) and attempt < _TRIES:
                    continue
                raise EngineUnavailable(f"{self._http.name} gave no answer: {words(error)}") from error
        raise AssertionError("unreachable")

    async def _post_once(self, data: bytes, headers: Mapping[str, str], *, stream: bool) -> dict[str, Any]:
        async with self._http.session.post(f"{self._http.url}/completion", data=data, headers=headers) as response:
            if response.status != 200:
                raise await refusal(response)
            # Half a character may not be valid UTF-8; nothing here needs the text.
            text = (await response.read()).decode("utf-8", "replace").strip()
        return _read_answer(_last_event(text) if stream else text, self._http.name)


def read_tokens(answer: Mapping[str, Any], count: int, id_end: int) -> tuple[list[int], list[float | None]]:
    """Ids and logprobs of an answer that is not streamed; None where llama.cpp reported none. Raises EngineProtocol.

    The reported ones are some of the tokens in their order. Where they fit in more than one way, what is not the same
    in all of them counts as not reported.
    """
    tokens = answer.get("tokens")
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= count:
        raise EngineProtocol(f"llama.cpp sampled {tokens!r} where up to {count} tokens were asked for")
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < id_end:
            raise EngineProtocol(f"llama.cpp sent {token!r}, which is no token id")
    found = answer.get("completion_probabilities") or []
    if not isinstance(found, list) or not all(isinstance(entry, dict) and "id" in entry for entry in found):
        raise EngineProtocol("llama.cpp's completion_probabilities cannot be read")
    reported = [entry["id"] for entry in found]
    first = _places(reported, tokens)
    last = [len(tokens) - 1 - place for place in reversed(_places(reported[::-1], tokens[::-1]))]
    if len(first) != len(reported):
        raise EngineProtocol(f"llama.cpp's logprobs are for {reported!r}, which are not among its tokens {tokens!r} in this order")
    logprobs: list[float | None] = [None] * len(tokens)
    for entry, low, high in zip(found, first, last, strict=True):
        value = _checked_logprob(entry["id"], entry.get("logprob"))
        if low == high:
            logprobs[low] = value
    return tokens, logprobs


def draw(seed: int, position: int) -> int:
    """A 32-bit seed for what is drawn in one request: splitmix64's finaliser (Steele et al. 2014) over seed and position.

    The largest value means "random" to llama.cpp and is left out.
    """
    mask = 2**64 - 1
    value = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) % (2**32 - 1)


def _body(slot: int, prompt: list[int], **more: Any) -> dict[str, Any]:
    base = {
        "prompt": prompt,
        "n_predict": 1,
        "n_probs": 1,
        "post_sampling_probs": False,
        "return_tokens": True,
        "cache_prompt": True,
        "id_slot": slot,
        "stream": False,
        "response_fields": _FIELDS,
    }
    return base | _NEUTRAL | more


def _seconds(answer: Mapping[str, Any]) -> float:
    """The time of the first token, which counts as prompt, and of the others; 0 where the server does not say."""
    timings = answer.get("timings")
    parts = [timings.get(name) for name in ("prompt_ms", "predicted_ms")] if isinstance(timings, dict) else []
    return sum(part for part in parts if isinstance(part, int | float)) / 1000


def _places(wanted: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The earliest place of each of `wanted` in `tokens`, in order; shorter than `wanted` where they are not all there."""
    places: list[int] = []
    for place, token in enumerate(tokens):
        if len(places) < len(wanted) and token == wanted[len(places)]:
            places.append(place)
    return places


def _checked_logprob(token: int, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineProtocol(f"llama.cpp's logprob for token {token} is {value!r}")
    if value > LOGPROB_SLACK or value < _LOWEST:
        raise EngineProtocol(f"llama.cpp's logprob for token {token} is {value!r}, which is none")
    return float(value)


def _check_prompt(answer: Mapping[str, Any], sent: int) -> None:
    said = answer.get("tokens_evaluated", sent)
    if said != sent or answer.get("truncated"):
        raise EngineProtocol(f"llama.cpp saw a prompt of {said!r} tokens where {sent} were sent; it must neither cut it nor add to it")


def _last_event(text: str) -> str:
    """The payload of a stream's last event; between events stand comments, which keep the connection of a long prefill alive."""
    lines = [line for line in text.split("\n") if line.startswith(("data:", "error:"))]
    return lines[-1].partition(":")[2].strip() if lines else ""


def _read_answer(text: str, name: str) -> dict[str, Any]:
    """Raises EngineError: that of an `error` that came with status 200, or EngineProtocol."""
    try:
        answer = orjson.loads(text)
    except ValueError as error:
        raise EngineProtocol(f"{name} gave an answer that is not JSON: {text[:80]!r}") from error
    if not isinstance(answer, dict):
        raise EngineProtocol(f"{name} gave an answer that is not an object: {text[:80]!r}")
    problem = answer if "tokens_evaluated" not in answer and "message" in answer else answer.get("error")
    if problem is None:
        return answer
    if not isinstance(problem, dict):
        raise EngineUnavailable(f"{name}: {problem}")
    code = problem.get("code")
    raise error_for_status(code if isinstance(code, int) else 500, str(problem.get("message") or problem))
