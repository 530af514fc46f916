"""The client of one SGLang server, or of a router before several. `sglang_stream` decodes, `sglang_stop` stops."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from turnloom.engine.answers import check_prompt_tokens
from turnloom.engine.call import Calls
from turnloom.engine.contract import LOGPROB_SLACK, AbortOutcome, Capabilities, Chunk, PauseMode, Trace
from turnloom.engine.http import EngineHTTP
from turnloom.engine.once import Once
from turnloom.engine.prompts import check_prompt, room
from turnloom.engine.sglang_stop import Workers
from turnloom.engine.sglang_stream import ROUTED_EXPERTS, StreamDecoder, read_experts
from turnloom.errors import ConfigError, EngineProtocol
from turnloom.types import FloatArray, IntArray, Sampling, floats

log = logging.getLogger("turnloom.engine")

ROUTING_HEADER = "X-SMG-Routing-Key"
"""One value, one worker: the router's `manual` policy keeps it, even when a worker is added."""

_PAUSE_MODES = {"abort": "abort", "wait": "retract", "keep": "in_place"}
"""SGLang does not wait: `retract` puts what runs back into the queue, `in_place` freezes it."""


class SGLangEngine:
    """An `Engine` at `url`, a worker or a router.

    `vocab_size` and `context_length` are for servers that do not say; SGLang
    says no vocabulary size, and an id beyond it kills the server, so give the
    tokenizer's. `idle_timeout` is the seconds a stream may stay silent, queueing
    and prefill included.

    `arrays` may be ("routed_experts",): the last chunk then has the experts of
    every output token [n, layers * experts per token], if the server was started
    with `--enable-return-routed-experts`. A router drops the wish.
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
        arrays: Sequence[str] = (),
    ) -> None:
        if unknown := set(arrays) - {ROUTED_EXPERTS}:
            raise ConfigError(f"SGLang has no per-token array {', '.join(sorted(unknown))}; it has {ROUTED_EXPERTS}")
        self._http = EngineHTTP(url, api_key=api_key, connect_timeout=connect_timeout, idle_timeout=idle_timeout)
        self.url, self.name = self._http.url, self._http.name
        self._workers = Workers(self._http)
        self._calls = Calls(self._http, self._workers)
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._convention = logprob_convention
        self._found = Once[Capabilities]()
        self._arrays = bool(arrays)
        self._experts = Once[int]()
        """How many are chosen per token, over all layers."""
        self._paused = False

    async def capabilities(self) -> Capabilities:
        return await self._found.get(self._find_capabilities)

    def forget(self) -> None:
        self._found.forget()
        self._experts.forget()

    async def sample(
        self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "", trace: Trace | None = None
    ) -> AsyncIterator[Chunk]:
        able = await self.capabilities()
        body = generate_body(prompt, sampling, able, rid)
        experts = await self._experts.get(lambda: self._find_experts(int(prompt[-1]))) if self._arrays else 0
        if experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": len(prompt) - 1}
        call = self._http.post("/generate", body, {ROUTING_HEADER: routing_key} if routing_key else None)
        stream = self._calls.stream(call, StreamDecoder(able.vocab_size, len(prompt), experts), rid, trace)
        try:
            async for chunk in stream:
                yield chunk
        finally:
            await stream.aclose()

    async def abort(self, rid: str) -> AbortOutcome:
        return await self._calls.abort(rid)

    async def pause(self, mode: PauseMode) -> None:
        await self._workers.each("/pause_generation", {"mode": _PAUSE_MODES[mode]})
        self._paused = True

    async def resume(self) -> None:
        await self._workers.each("/continue_generation", {})
        self._paused = False

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        if not 1 <= start <= len(sequence):
            raise ValueError(f"start {start} is not within 1..{len(sequence)}")
        able = await self.capabilities()
        check_prompt(sequence, able)
        rid = uuid.uuid4().hex
        body = {
            "rid": rid,
            "input_ids": sequence.tolist(),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            # The first entry is always null, so the one before the first that is wanted is asked for.
            "logprob_start_len": start - 1,
            "stream": False,
        }
        said = await self._calls.ask("/generate", body, rid)
        try:
            check_prompt_tokens(said["meta_info"], len(sequence))
            triples = said["meta_info"]["input_token_logprobs"]
            found = [(float(value), index) for value, index, *_ in triples[1:]]
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise EngineProtocol(f"{self.name} gave no usable input_token_logprobs") from error
        sound = all(math.isfinite(value) and value <= LOGPROB_SLACK for value, _ in found)
        if [index for _, index in found] != sequence[start:].tolist() or not sound:
            raise EngineProtocol(f"{self.name} gave input_token_logprobs that are not those of the sequence")
        return floats(value for value, _ in found)

    async def health(self) -> bool:
        # A paused server leaves /health without an answer.
        return await self._http.healthy("/model_info" if self._paused else "/health")

    async def close(self) -> None:
        await self._calls.close()
        await self._http.close()

    async def _find_experts(self, token: int) -> int:
        """Asks for one token after one: whatever a server makes of the wish, its answer then has one row."""
        rid = uuid.uuid4().hex
        params = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
        body = {"rid": rid, "input_ids": [token], "sampling_params": params, "return_routed_experts": True, "stream": False}
        said = await self._calls.ask("/generate", body, rid)
        meta = said.get("meta_info") if isinstance(said, dict) else None
        found = meta.get(ROUTED_EXPERTS) if isinstance(meta, dict) else None
        if found is None:
            log.warning("%s gives no routed experts: start it with --enable-return-routed-experts, without a router", self.name)
        return 0 if found is None else read_experts(found, 1, 0).shape[1]

    async def _find_capabilities(self) -> Capabilities:
        model = await self._http.info("/model_info", "/get_model_info")
        context, structured = await self._find_server()
        vocab = self._vocab_size or model.get("vocab_size")
        version = model.get("weight_version")
        return Capabilities(
            model=str(model.get("model_path") or "unknown"),
            context_length=context,
            vocab_size=vocab if isinstance(vocab, int) else None,
            logprob_convention=self._convention or str(model.get("logprob_convention") or "temperature"),
            weight_version=None if version is None else str(version),
            tokenizer=model.get("tokenizer_path"),
            structured=structured,
        )

    async def _find_server(self) -> tuple[int, bool]:
        """The least that the server, or a worker behind it, says of its context and its memory; whether it has a grammar backend.

        SGLang takes prompts up to six tokens short of its context only, and says so as `max_req_input_len`,
        the first length it refuses. A context that prompts fit into is what is told here.
        """
        for base in dict.fromkeys([self.url, *await self._workers.find()]):
            server = await self._http.info("/server_info", "/get_server_info", base=base, needed=False)
            said = [server.get("context_length"), server.get("max_total_num_tokens")]
            listed = (await self._http.info("/v1/models", base=base, needed=False)).get("data")
            if isinstance(first_refused := server.get("max_req_input_len"), int):
                said.append(first_refused + 1)
            said += [entry.get("max_model_len") for entry in listed or () if isinstance(entry, dict)][:1]
            if lengths := [self._context_length] if self._context_length else [n for n in said if isinstance(n, int) and n > 0]:
                return min(lengths), server.get("grammar_backend") not in (None, "none")
        raise EngineProtocol(f"{self.name} does not say its context length; give it with the engine's URL")


def generate_body(prompt: IntArray, sampling: Sampling, able: Capabilities, rid: str) -> dict[str, Any]:
    """The body of a streamed `/generate`. Raises EngineRejected for a prompt that must not be sent.

    Without `max_new_tokens` SGLang stops at 128.
    """
    if not rid:
        raise ValueError("a request needs an id: an empty one would abort every request")
    check_prompt(prompt, able)
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": room(prompt, sampling, able),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.json_schema:
        params["json_schema"] = sampling.json_schema
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return {
        "rid": rid,
        "input_ids": prompt.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        # 0 would compute the whole prompt's logprobs and so defeat the prefix cache.
        "logprob_start_len": -1,
        "stream": True,
    }
