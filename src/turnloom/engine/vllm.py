"""The client of one vLLM server. `vllm_stream` decodes, `vllm_stop` stops.

Asks `/inference/v1/generate`, ids in and ids out, where the server was started
with it (`--enable-scale-out`), else `/v1/completions` with ids. What a request
leaves open there, the server fills from the model's own `generation_config`, a
penalty for repetition included, so everything is said.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

import orjson

from turnloom.engine.answers import check_prompt_tokens
from turnloom.engine.call import Calls
from turnloom.engine.contract import AbortOutcome, Capabilities, Chunk, PauseMode, Trace
from turnloom.engine.http import BROKEN, INFO_SECONDS, EngineHTTP, refusal, words
from turnloom.engine.once import Once
from turnloom.engine.prompts import check_prompt, room
from turnloom.engine.sglang import ROUTING_HEADER
from turnloom.engine.vllm_stop import ABSENT, Requests
from turnloom.engine.vllm_stream import StreamDecoder, sound_logprob
from turnloom.errors import ConfigError, EngineProtocol, EngineRejected, EngineUnavailable
from turnloom.types import FloatArray, IntArray, Sampling, floats

log = logging.getLogger("turnloom.engine")

Route = Literal["generate", "completions"]

PATHS: dict[Route, str] = {"generate": "/inference/v1/generate", "completions": "/v1/completions"}

_CONVENTIONS = {"raw_logprobs": "raw", "processed_logprobs": "temperature"}

_WAIT_SECONDS = 3600.0
"""For a pause that waits until what runs has come to its end."""

_USAGE = {"include_usage": True, "continuous_usage_stats": True}


class VLLMEngine:
    """An `Engine` at `url`.

    `vocab_size` is the tokenizer's: vLLM says none. `context_length` is for
    servers that do not say. `logprob_convention` is for servers that were not
    started as development servers (`VLLM_SERVER_DEV_MODE=1`) and with another
    `--logprobs-mode` than the default, "raw". `route` None takes the better one
    that the server has. `idle_timeout` is the seconds a stream may stay silent,
    queueing and prefill included.
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
        route: Route | None = None,
    ) -> None:
        self._http = EngineHTTP(url, api_key=api_key, connect_timeout=connect_timeout, idle_timeout=idle_timeout)
        self.url, self.name = self._http.url, self._http.name
        self._calls = Calls(self._http, Requests(self._http))
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._convention = logprob_convention
        self._route = route
        self._found = Once[tuple[Capabilities, Route]]()

    async def capabilities(self) -> Capabilities:
        able, _ = await self._find()
        return able

    def forget(self) -> None:
        self._found.forget()

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        able, route = await self._find()
        body = sample_body(route, prompt, sampling, able, rid)
        # The header's id wins over the body's, and a proxy may set one.
        headers = {"X-Request-Id": rid} | ({ROUTING_HEADER: routing_key} if routing_key else {})
        decoder = StreamDecoder(able.vocab_size, prompt)
        stream = self._calls.stream(self._http.post(PATHS[route], body, headers), decoder, rid, trace)
        try:
            async for chunk in stream:
                # The last chunk is given when all is read: what is said of the cache comes after it.
                yield replace(chunk, cached_tokens=decoder.cached_tokens) if chunk.finish else chunk
        finally:
            await stream.aclose()

    async def abort(self, rid: str) -> AbortOutcome:
        return await self._calls.abort(rid)

    async def pause(self, mode: PauseMode) -> None:
        await self._tell(f"/pause?mode={mode}", seconds=_WAIT_SECONDS if mode == "wait" else INFO_SECONDS)

    async def resume(self) -> None:
        await self._tell("/resume")

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        if not 1 <= start <= len(sequence):
            raise ValueError(f"start {start} is not within 1..{len(sequence)}")
        able, route = await self._find()
        if len(sequence) >= able.context_length:
            raise EngineRejected(f"{len(sequence)} tokens, and one more that vLLM samples, are beyond the context of {able.context_length}")
        check_prompt(sequence, replace(able, context_length=len(sequence) + 2))
        rid = uuid.uuid4().hex
        said = await self._calls.ask(PATHS[route], prefill_body(route, sequence, able, rid), rid)
        try:
            check_prompt_tokens(said.get("usage") or {}, len(sequence))
            entries = (said if route == "generate" else said["choices"][0])["prompt_logprobs"]
            if len(entries) != len(sequence):
                raise EngineProtocol(f"{self.name} gave {len(entries)} prompt_logprobs for {len(sequence)} tokens")
            wanted = zip(sequence[start:].tolist(), entries[start:], strict=True)
            return floats(sound_logprob(token, entry[str(token)]["logprob"]) for token, entry in wanted)
        except (AttributeError, LookupError, TypeError) as error:
            raise EngineProtocol(f"{self.name} gave no usable prompt_logprobs") from error

    async def health(self) -> bool:
        return await self._http.healthy()

    async def close(self) -> None:
        await self._calls.close()
        await self._http.close()

    async def _tell(self, path: str, *, seconds: float = INFO_SECONDS) -> None:
        try:
            await self._http.tell(path, seconds=seconds)
        except EngineRejected as error:
            raise EngineRejected(f"{self.name} refuses {path}: {error}; vLLM has it when VLLM_SERVER_DEV_MODE=1 is set") from error

    async def _find(self) -> tuple[Capabilities, Route]:
        return await self._found.get(self._find_server)

    async def _find_server(self) -> tuple[Capabilities, Route]:
        return await self._find_capabilities(), self._route or await self._find_route()

    async def _find_route(self) -> Route:
        """An empty body is refused by an endpoint that is there, for being empty."""
        try:
            async with self._http.session.post(f"{self.url}{PATHS['generate']}", json={}) as response:
                if response.status in (400, 422):
                    return "generate"
                if response.status not in ABSENT:
                    raise await refusal(response)
            async with self._http.session.post(f"{self.url}{PATHS['completions']}", json={}) as response:
                if response.status not in (400, 422):
                    raise ConfigError(f"{self.name} is no vLLM server, or one without completions; see `turnloom doctor --engine URL`")
        except BROKEN as error:
            raise EngineUnavailable(f"cannot reach {self.name}: {words(error)}") from error
        log.info("%s has no %s, so %s is asked", self.name, PATHS["generate"], PATHS["completions"])
        return "completions"

    async def _find_capabilities(self) -> Capabilities:
        listed = (await self._http.info("/v1/models")).get("data")
        model = next((entry for entry in listed or () if isinstance(entry, dict)), {})
        config = (await self._said("/server_info?config_format=json")).get("vllm_config")
        server = config.get("model_config") if isinstance(config, dict) else None
        server = server if isinstance(server, dict) else {}
        version = (await self._said("/weight_info")).get("weight_version")
        context = self._context_length or model.get("max_model_len")
        if not isinstance(context, int):
            raise EngineProtocol(f"{self.name} does not say its context length; give it with the engine's URL")
        name = str(model.get("id") or "unknown")
        return Capabilities(
            model=name,
            context_length=context,
            vocab_size=self._vocab_size,
            logprob_convention=self._find_convention(server.get("logprobs_mode")),
            weight_version=None if version is None else str(version),
            tokenizer=str(server.get("tokenizer") or model.get("root") or name),
            structured=not server.get("skip_tokenizer_init", False),
        )

    async def _said(self, path: str) -> dict[str, Any]:
        """What a development server says there, {} where it is none.

        Raises EngineUnavailable for no answer in time: to take its logprobs for raw because it was slow to say
        that they are not would be wrong ever after.
        """
        try:
            async with asyncio.timeout(INFO_SECONDS), self._http.session.get(f"{self.url}{path}") as response:
                said = orjson.loads(await response.read()) if response.status == 200 else {}
        except BROKEN as error:
            raise EngineUnavailable(f"{self.name} is not ready: {path}: {words(error)}") from error
        except ValueError as error:
            raise EngineProtocol(f"{self.name} gave an answer that is not JSON at {path}") from error
        return said if isinstance(said, dict) else {}

    def _find_convention(self, mode: str | None) -> str:
        """The server's own word counts, where it gives one. Raises EngineProtocol when what it gives are no logprobs."""
        if mode is None:
            return self._convention or "raw"
        if mode not in _CONVENTIONS:
            raise EngineProtocol(f"{self.name} was started with --logprobs-mode {mode}, which gives no logprobs; leave it at raw_logprobs")
        found = _CONVENTIONS[mode]
        if self._convention not in (None, found):
            log.warning("%s says that its logprobs are %s, so they are not taken to be %r", self.name, mode, self._convention)
        return found


def sample_body(route: Route, prompt: IntArray, sampling: Sampling, able: Capabilities, rid: str) -> dict[str, Any]:
    """The body of a streamed request. Raises EngineRejected for a prompt that must not be sent, or logprobs that mean nothing."""
    if not rid:
        raise ValueError("a request needs an id: without one it could not be aborted")
    check_prompt(prompt, able)
    if able.logprob_convention == "temperature" and (sampling.top_p < 1 or sampling.top_k > 0):
        raise EngineRejected(
            "this vLLM gives the logprobs of what top_p and top_k left over (--logprobs-mode processed_logprobs): "
            "sample with top_p 1 and top_k -1, or start it with raw_logprobs"
        )
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": room(prompt, sampling, able),
        # None beside that of the sampled token.
        "logprobs": 0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.json_schema:
        params["structured_outputs"] = {"json": sampling.json_schema}
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if route == "generate":
        # Text is looked at for stop strings only.
        params["detokenize"] = bool(sampling.stop)
    return {**_body(route, prompt, params, able, rid), "stream": True, "stream_options": _USAGE}


def prefill_body(route: Route, sequence: IntArray, able: Capabilities, rid: str) -> dict[str, Any]:
    """The body of a request for the logprobs of `sequence` itself. vLLM samples at least one token."""
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
    return {**_body(route, sequence, params, able, rid), "stream": False}


def _body(route: Route, prompt: IntArray, params: dict[str, Any], able: Capabilities, rid: str) -> dict[str, Any]:
    if route == "generate":
        return {"request_id": rid, "token_ids": prompt.tolist(), "sampling_params": params}
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False}
    return {"request_id": rid, "model": able.model, "prompt": prompt.tolist(), **ids, **params}
