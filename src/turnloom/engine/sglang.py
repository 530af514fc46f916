"""The client of one SGLang server, or of a router before several. Owns the HTTP; `stream` decodes, `abort` stops.

Always streams: a server notices that the client of a stream has gone at once,
and of anything else late or never. Aborts before it closes a connection: once
the connection is gone, a server may have forgotten the id to abort.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import orjson

from turnloom.engine.abort import abort_request, find_workers
from turnloom.engine.contract import LOGPROB_SLACK, AbortOutcome, Capabilities, Chunk
from turnloom.engine.metrics import PROTOCOL_ERRORS
from turnloom.engine.stream import INT32_END, EventLines, StreamDecoder, check_prompt_tokens, error_for_status
from turnloom.errors import EngineError, EngineProtocol, EngineRejected, EngineUnavailable
from turnloom.types import FloatArray, IntArray, Sampling, floats

log = logging.getLogger("turnloom.engine")

ROUTING_HEADER = "X-SMG-Routing-Key"
"""One value, one worker: the router's `manual` policy keeps it, even when a worker is added."""

_DRAIN = 1.0
"""Seconds to wait for `[DONE]` after the last chunk, so that the connection can be used again."""

_BROKEN = (aiohttp.ClientError, OSError)


class SGLangEngine:
    """An `Engine` at `url`, a worker or a router.

    `vocab_size` and `context_length` are for servers that do not say; SGLang
    says no vocabulary size, and an id beyond it kills the server, so give the
    tokenizer's. `idle_timeout` is the seconds a stream may stay silent, queueing and prefill included.
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
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._convention = logprob_convention
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout, sock_read=idle_timeout)
        self._session: aiohttp.ClientSession | None = None
        self._found: Capabilities | None = None
        self._finding = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    async def capabilities(self) -> Capabilities:
        async with self._finding:
            if self._found is None:
                self._found = await self._find_capabilities()
            return self._found

    async def sample(self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "") -> AsyncIterator[Chunk]:
        able = await self.capabilities()
        body = generate_body(prompt, sampling, able, rid)
        decoder = StreamDecoder(able.vocab_size, len(prompt))
        call = self._start("/generate", body, routing_key)
        leave = True
        try:
            try:
                response = await asyncio.shield(call)
                if response.status != 200:
                    leave = False
                    raise await _refusal(response)
                last = None
                async for chunk in _chunks(response, decoder):
                    if chunk.finish is not None:
                        last = chunk
                    else:
                        yield chunk
                if last is None:
                    raise EngineUnavailable(f"{self.url} ended the stream after {decoder.count} tokens without a finish reason")
                leave = False
                yield last
            except aiohttp.ClientConnectorError as error:
                leave = False
                raise EngineUnavailable(f"cannot reach {self.url}: {error}") from error
            except _BROKEN as error:
                words = str(error) or type(error).__name__
                raise EngineUnavailable(f"{self.url} broke off after {decoder.count} tokens: {words}") from error
            except EngineProtocol:
                PROTOCOL_ERRORS.inc()
                raise
        finally:
            await self._leave(call, rid if leave else "")

    async def abort(self, rid: str) -> AbortOutcome:
        return await abort_request(self._http(), self.url, rid)

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        if not 1 <= start <= len(sequence):
            raise ValueError(f"start {start} is not within 1..{len(sequence)}")
        able = await self.capabilities()
        _check_prompt(sequence, able)
        body = {
            "rid": uuid.uuid4().hex,
            "input_ids": sequence.tolist(),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            # The first entry is always null, so the one before the first that is wanted is asked for.
            "logprob_start_len": start - 1,
            "stream": False,
        }
        answer = await self._ask(body)
        try:
            check_prompt_tokens(answer["meta_info"], len(sequence))
            triples = answer["meta_info"]["input_token_logprobs"]
            found = [(float(value), index) for value, index, *_ in triples[1:]]
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise EngineProtocol(f"{self.url} gave no usable input_token_logprobs") from error
        sound = all(math.isfinite(value) and value <= LOGPROB_SLACK for value, _ in found)
        if [index for _, index in found] != sequence[start:].tolist() or not sound:
            raise EngineProtocol(f"{self.url} gave input_token_logprobs that are not those of the sequence")
        return floats(value for value, _ in found)

    async def health(self) -> bool:
        try:
            async with asyncio.timeout(5), self._http().get(f"{self.url}/health") as response:
                return response.status == 200
        except _BROKEN as error:
            log.info("%s is not healthy: %s", self.url, error)
            return False

    async def close(self) -> None:
        if self._leaving:
            await asyncio.wait(self._leaving)
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # Every turn in flight holds a connection, so their number is not this client's to limit.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self._session

    def _start(self, path: str, body: Mapping[str, Any], routing_key: str = "") -> asyncio.Task[aiohttp.ClientResponse]:
        """The request as a task of its own: cancelling a caller must not close the connection before the abort."""
        headers = {"Content-Type": "application/json"}
        if routing_key:
            headers[ROUTING_HEADER] = routing_key

        async def post() -> aiohttp.ClientResponse:
            return await self._http().post(f"{self.url}{path}", data=orjson.dumps(body), headers=headers)

        return asyncio.create_task(post())

    async def _leave(self, call: asyncio.Task[aiohttp.ClientResponse], rid: str) -> None:
        """Let go of the connection, after aborting `rid` if there is one. A second cancellation leaves this to go on by itself."""

        async def leave() -> None:
            if rid:
                await self.abort(rid)
            if not call.done():
                call.cancel()
                await asyncio.wait([call])
            if call.cancelled() or call.exception() is not None:
                return
            if rid:
                call.result().close()
            else:
                call.result().release()

        task = asyncio.create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        await asyncio.shield(task)

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        """One answer that is not streamed."""
        call = self._start("/generate", body)
        leave = True
        try:
            response = await asyncio.shield(call)
            leave = response.status == 200
            if response.status != 200:
                raise await _refusal(response)
            answer = orjson.loads(await response.read())
            leave = False
            return answer
        except _BROKEN as error:
            leave = not isinstance(error, aiohttp.ClientConnectorError)
            raise EngineUnavailable(f"{self.url} gave no answer: {str(error) or type(error).__name__}") from error
        except ValueError as error:
            raise EngineProtocol(f"{self.url} gave an answer that is not JSON") from error
        finally:
            await self._leave(call, body["rid"] if leave else "")

    async def _find_capabilities(self) -> Capabilities:
        model = await self._info("/model_info", "/get_model_info")
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
        """The least that the server, or a worker behind it, says of its context and its memory; whether it has a grammar backend."""
        for base in dict.fromkeys([self.url, *await self._workers()]):
            server = await self._info("/server_info", "/get_server_info", base=base, needed=False)
            said = [server.get("context_length"), server.get("max_total_num_tokens")]
            listed = (await self._info("/v1/models", base=base, needed=False)).get("data")
            said += [entry.get("max_model_len") for entry in listed or () if isinstance(entry, dict)][:1]
            if lengths := [self._context_length] if self._context_length else [n for n in said if isinstance(n, int) and n > 0]:
                return min(lengths), server.get("grammar_backend") not in (None, "none")
        raise EngineProtocol(f"{self.url} does not say its context length; give it with the engine's URL")

    async def _workers(self) -> list[str]:
        try:
            return await find_workers(self._http(), self.url)
        except _BROKEN as error:
            raise EngineUnavailable(f"cannot reach {self.url}: {error}") from error

    async def _info(self, *paths: str, base: str = "", needed: bool = True) -> dict[str, Any]:
        """The JSON object at the first path that has one; empty when none does and none is `needed`."""
        problem = ""
        for path in paths:
            try:
                async with asyncio.timeout(30), self._http().get(f"{base or self.url}{path}") as response:
                    found = orjson.loads(await response.read()) if response.status == 200 else None
                    if isinstance(found, dict):
                        return found
                    problem = f"{path} answered {response.status}"
            except (*_BROKEN, ValueError) as error:
                problem = f"{path}: {str(error) or type(error).__name__}"
        if needed:
            raise EngineUnavailable(f"{self.url} is not ready: {problem}")
        return {}


def generate_body(prompt: IntArray, sampling: Sampling, able: Capabilities, rid: str) -> dict[str, Any]:
    """The body of a streamed `/generate`. Raises EngineRejected for a prompt that must not be sent.

    Without `max_new_tokens` SGLang stops at 128. Some versions refuse prompt +
    output equal to the context, so one token of it stays unused.
    """
    if not rid:
        raise ValueError("a request needs an id: an empty one would abort every request")
    _check_prompt(prompt, able)
    room = able.context_length - len(prompt) - 1
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": room if sampling.max_tokens is None else min(sampling.max_tokens, room),
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


def _check_prompt(prompt: IntArray, able: Capabilities) -> None:
    if not len(prompt):
        raise EngineRejected("the prompt is empty")
    if len(prompt) + 1 >= able.context_length:
        raise EngineRejected(f"the prompt has {len(prompt)} tokens and the engine's context holds {able.context_length}")
    end = able.vocab_size if able.vocab_size is not None else INT32_END
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= end:
        raise EngineRejected(f"the prompt holds the id {low if low < 0 else high}, outside the engine's vocabulary of {end}")


async def _chunks(response: aiohttp.ClientResponse, decoder: StreamDecoder) -> AsyncIterator[Chunk]:
    """New tokens as they arrive, until the stream ends."""
    async for data in _payloads(response, decoder):
        chunk = decoder.feed(data)
        if chunk is not None:
            yield chunk


async def _payloads(response: aiohttp.ClientResponse, decoder: StreamDecoder) -> AsyncIterator[bytes]:
    lines, done = EventLines(), False
    while True:
        try:
            # Read to the very end, not only to `[DONE]`: a connection with bytes left on it cannot be used again.
            async with asyncio.timeout(_DRAIN if decoder.finished else None):
                data = await response.content.readany()
        except (TimeoutError, aiohttp.ClientError) as error:
            if not decoder.finished:
                raise
            log.info("the stream had no proper end after its last chunk: %s", str(error) or type(error).__name__)
            response.close()
            return
        if not data:
            return
        for payload in lines.feed(data):
            done = done or payload == b"[DONE]"
            if not done:
                yield payload


async def _refusal(response: aiohttp.ClientResponse) -> EngineError:
    """The error of a response that is not 200, with the server's own words."""
    text = (await response.content.read(4096)).decode("utf-8", "replace").strip()
    try:
        found = orjson.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        words = str(error.get("message") or error.get("detail") or text) if isinstance(error, dict) else str(error)
    except ValueError:
        words = text
    return error_for_status(response.status, words or f"the engine answered {response.status}")
