"""What a probe asks a server beside its client: what it is, how busy it is, and requests that no client of ours would send.

Every request is short, or is closed and seen to end. Ids that are sent are the caller's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import aiohttp
import orjson

from turnloom.engine.call import EventLines
from turnloom.engine.http import BROKEN, EngineHTTP, refusal, words
from turnloom.engine.llama_slots import look_at_slots
from turnloom.engine.probe_profile import EMBEDDED, Kind
from turnloom.engine.sglang import ROUTING_HEADER
from turnloom.engine.sglang_stop import read_workers
from turnloom.engine.vllm_stop import Requests
from turnloom.errors import ConfigError, EngineProtocol, EngineRejected, EngineUnavailable

ANSWER_SECONDS = 10.0
LONG = {"sglang": 3000, "vllm": 3000, "llamacpp": 300}
"""Tokens asked for where the request is to be left. llama.cpp's cannot be aborted by name."""

_TELLING = 4
"""Characters. As many that agree are no chance."""

_SEEN_EVENTS = 400
_GONE_SECONDS = 5.0
_LOOK = 0.1
_REFUSED = (401, 403)


@dataclass(frozen=True, slots=True)
class Identity:
    """`kind` None: it answers as none of the servers that are known. `said` is its own word about its model."""

    kind: Kind | None
    version: str = ""
    said: Mapping[str, Any] | None = None
    workers: tuple[Mapping[str, Any], ...] | None = None
    """A router's entries, each with its `url` as a base; None for a server."""


@dataclass(frozen=True, slots=True)
class Left:
    """What was seen of a request that was left without an abort."""

    style: str = ""
    readable: bool = False
    stops: bool | None = None
    """None where it cannot be told: others use the server, or the request was over too soon."""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    ids: list[int]
    text: str
    prompt_tokens: int | None
    cached_tokens: int | None = None


async def get(http: EngineHTTP, path: str, base: str = "", seconds: float = ANSWER_SECONDS) -> tuple[int, Any]:
    """Status and JSON, None where it is none. Raises EngineUnavailable where nothing answers."""
    try:
        async with asyncio.timeout(seconds), http.session.get(f"{base or http.url}{path}") as response:
            raw = await response.read()
    except BROKEN as error:
        raise EngineUnavailable(f"cannot reach {base or http.name}: {words(error)}") from error
    try:
        return response.status, orjson.loads(raw) if response.status == 200 else None
    except ValueError:
        return response.status, None


async def identify(http: EngineHTTP) -> Identity:
    """Raises EngineUnavailable where nothing answers, ConfigError where a key is missing or wrong."""
    status, listed = await get(http, "/workers")
    workers = _entries(listed) if isinstance(listed, dict) and isinstance(listed.get("workers"), list) else None
    refused = status in _REFUSED
    for path in ("/model_info", "/get_model_info"):
        status, said = await get(http, path)
        refused = refused or status in _REFUSED
        if workers is not None or (isinstance(said, dict) and "model_path" in said):
            _, server = await get(http, "/server_info")
            version = str(server.get("version") or "") if isinstance(server, dict) else ""
            if not version and isinstance(said, dict) and "logprob_convention" in said:
                version = EMBEDDED
            return Identity("sglang", version, said if isinstance(said, dict) else {}, workers)
    status, said = await get(http, "/props")
    refused = refused or status in _REFUSED
    if isinstance(said, dict) and "default_generation_settings" in said:
        return Identity("llamacpp", str(said.get("build_info") or ""), said)
    status, models = await get(http, "/v1/models")
    refused = refused or status in _REFUSED
    _, said = await get(http, "/version")
    if isinstance(said, dict) and "version" in said and not refused:
        return Identity("vllm", str(said["version"]), {})
    first = (models.get("data") or [None])[0] if isinstance(models, dict) else None
    if isinstance(first, dict) and first.get("owned_by") == "vllm":
        return Identity("vllm", "", {})
    if refused:
        raise ConfigError(f"{http.name} wants a key, or another one: set TURNLOOM_ENGINE_KEY, or ?key_env=NAME in the URL")
    return Identity(None)


async def needs_key(http: EngineHTTP) -> bool | None:
    """Whether it refuses who brings no key."""
    stranger = EngineHTTP(http.url)
    try:
        status, _ = await get(stranger, "/v1/models")
        return status in _REFUSED if status in (200, *_REFUSED) else None
    except EngineUnavailable:
        return None
    finally:
        await stranger.close()


def _entries(answer: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    found: dict[str, Mapping[str, Any]] = {}
    for entry in answer["workers"]:
        for url in read_workers({"workers": [entry]}):
            found[url] = {**entry, "url": url}
    return tuple(found.values())


async def load(http: EngineHTTP, kind: Kind, workers: Sequence[str]) -> int | None:
    """Requests that run or wait, as the server says it: what it says may be older than the last request. None where it does not."""
    if kind == "vllm":
        return await Requests(http).load()
    if kind == "llamacpp":
        slots = await look_at_slots(http)
        return None if slots is None else sum(slot.processing for slot in slots)
    total = 0
    for worker in workers or [http.url]:
        try:
            _, said = await get(http, "/v1/loads", worker)
            total += sum(int(rank["num_running_reqs"]) + int(rank.get("num_waiting_reqs") or 0) for rank in said["loads"])
        except (EngineUnavailable, LookupError, TypeError, ValueError, AttributeError):
            return None
    return total


def _request(
    kind: Kind, model: str, prompt: Sequence[int], rid: str, most: int, stop: int | None, *, stream: bool
) -> tuple[str, dict[str, Any]]:
    """Path and body; greedy unless it streams, and without an end of its own."""
    temperature, ends = 1.0 if stream else 0.0, {"ignore_eos": True}
    if kind == "sglang":
        params: dict[str, Any] = {
            "temperature": temperature,
            "max_new_tokens": most,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **ends,
        }
        if stop is not None:
            params["stop_token_ids"] = [stop]
        shared = {"return_logprob": True, "logprob_start_len": -1, "stream": stream}
        return "/generate", {"rid": rid, "input_ids": list(prompt), "sampling_params": params, **shared}
    if kind == "vllm":
        body: dict[str, Any] = {
            "request_id": rid,
            "model": model,
            "prompt": list(prompt),
            "max_tokens": most,
            "temperature": temperature,
            **ends,
        }
        body |= {"return_token_ids": True, "skip_special_tokens": False, "add_special_tokens": False, "repetition_penalty": 1.0}
        return "/v1/completions", {**body, "stream": stream, **({} if stop is None else {"stop_token_ids": [stop]})}
    body = {"prompt": list(prompt), "n_predict": most, "temperature": temperature, "return_tokens": True, **ends}
    return "/completion", {**body, "repeat_penalty": 1.0, "stream": stream}


async def short(
    http: EngineHTTP, kind: Kind, model: str, prompt: Sequence[int], rid: str, most: int, *, stop: int | None = None, base: str = ""
) -> Answer:
    """A greedy reply of at most `most` tokens, in one answer. Raises EngineError."""
    path, body = _request(kind, model, prompt, rid, most, stop, stream=False)
    said = await http.tell(path, body, base=base)
    try:
        if kind == "sglang":
            meta = said["meta_info"]
            return Answer(said["output_ids"], str(said.get("text") or ""), meta.get("prompt_tokens"), meta.get("cached_tokens"))
        if kind == "vllm":
            choice, usage = said["choices"][0], said.get("usage") or {}
            return Answer(choice["token_ids"], str(choice.get("text") or ""), usage.get("prompt_tokens"))
        return Answer(said["tokens"], str(said.get("content") or ""), said.get("tokens_evaluated"))
    except (LookupError, TypeError, AttributeError) as error:
        raise EngineProtocol(f"{http.name}{path} gave no usable answer") from error


def same_text(own: str, said: str) -> bool | None:
    """Whether two decoders agree on the text of the same ids; None where there is too little to tell.

    Spaces do not count, nor does what a server still holds back at the end. Bytes that are no character come out
    otherwise in a server that decodes token by token, with what stands beside them: then most must be the same.
    """
    exact = "\ufffd" not in own + said
    least, most = sorted((re.sub(r"[\s\ufffd]+", "", text) for text in (own, said)), key=len)
    if exact and least and not most.startswith(least):
        return False
    if len(least) < _TELLING:
        return None
    alike = sum(block.size for block in SequenceMatcher(None, least, most, autojunk=False).get_matching_blocks())
    return 2 * alike > len(least)


async def leave(
    http: EngineHTTP, kind: Kind, model: str, prompt: Sequence[int], rid: str, most: int, *, key: str, workers: Sequence[str]
) -> Left:
    """Begin a request of `most` tokens, wait until the server's load shows it, close the connection, and watch the load.

    A load that showed the request and then nothing is younger than the end of it. Raises EngineError.
    """
    before = await _idle(http, kind, workers)
    path, body = _request(kind, model, prompt, rid, most, None, stream=True)
    style, shown, seen = "", False, 0
    try:
        async with http.session.post(f"{http.url}{path}", json=body, headers={ROUTING_HEADER: key, "X-Request-Id": rid}) as response:
            if response.status != 200:
                raise await refusal(response)
            async with aclosing(_events(response)) as events:
                async for event in events:
                    seen += 1
                    style = _style(event, style)
                    if before == 0 and not shown:
                        shown = bool(await load(http, kind, workers))
                    if seen >= _SEEN_EVENTS or (seen >= 4 and (shown or before != 0)):
                        break
            response.close()
    except BROKEN as error:
        raise EngineUnavailable(f"{http.name} broke off: {words(error)}") from error
    if not shown:
        return Left(style, before is not None)
    seconds = await _gone(http, kind, workers)
    return Left(style, True, seconds is not None, seconds)


async def _idle(http: EngineHTTP, kind: Kind, workers: Sequence[str]) -> int | None:
    """The load, after a while in which what ran before may end: only beside nothing else is a request of ours seen."""
    if found := await load(http, kind, workers):
        await _gone(http, kind, workers)
        return await load(http, kind, workers)
    return found


async def _gone(http: EngineHTTP, kind: Kind, workers: Sequence[str]) -> float | None:
    """Seconds until nothing runs, None when something still does after a while."""
    clock = asyncio.get_running_loop().time
    began = clock()
    while clock() - began < _GONE_SECONDS:
        if await load(http, kind, workers) == 0:
            return clock() - began
        await asyncio.sleep(_LOOK)
    return None


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    """Raises EngineRejected for an event that is an error."""
    lines = EventLines()
    while True:
        async with asyncio.timeout(ANSWER_SECONDS):
            data = await response.content.readany()
        if not data:
            return
        for payload in lines.feed(data):
            try:
                event = orjson.loads(payload)
            except ValueError:
                continue
            if isinstance(event, dict):
                if event.get("error"):
                    raise EngineRejected(str(event["error"]))
                yield event


def _style(event: dict[str, Any], before: str) -> str:
    """Whether an event of SGLang's carries all tokens so far or new ones only; the first is both."""
    meta = event.get("meta_info")
    total, ids = (meta.get("completion_tokens"), event.get("output_ids")) if isinstance(meta, dict) else (None, None)
    triples = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(total, int) or not isinstance(ids, list) or not isinstance(triples, list):
        return before
    whole, whole_logprobs = len(ids) == total, len(triples) == total
    if whole and whole_logprobs:
        return before or "cumulative"
    return "incremental" if not whole and not whole_logprobs else "mixed"
