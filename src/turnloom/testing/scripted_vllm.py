"""A real HTTP server in vLLM's contract whose replies are scripted, for what a real one does not do on demand.

It samples nothing: each request takes the next `Reply`. `scale_out` and `dev` are
the endpoints that a server is started with: without the first, generate is 403.
Logprobs that a reply does not give follow from position and id (`logprob_at`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import orjson
from aiohttp import web

from turnloom.render.contract import Tokenizer
from turnloom.testing.scripted_reply import REFUSALS, Fault, Output, Reply, logprob_at

__all__ = ["ScriptedVLLM"]


class ScriptedVLLM:
    """`async with ScriptedVLLM(script) as server:` serves at `server.url` on a free port."""

    tokenizer: Tokenizer | None = None
    end_id: int | None = None
    weight_version = "default"

    def __init__(
        self,
        script: Sequence[Reply] = (),
        *,
        vocab_size: int = 200_000,
        context_length: int = 4096,
        scale_out: bool = True,
        dev: bool = True,
        logprobs_mode: str = "raw_logprobs",
        obey_aborts: bool = True,
        metrics: str | None = None,
    ) -> None:
        self.script = list(script)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.scale_out = scale_out
        self.dev = dev
        self.logprobs_mode = logprobs_mode
        self.obey_aborts = obey_aborts
        self.metrics = metrics
        """The text of `/metrics` in place of the true one."""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Path and body."""
        self.headers: list[Mapping[str, str]] = []
        self.aborts: list[tuple[str, list[str]]] = []
        self.pauses: list[str] = []
        self.looks = 0
        """At the metrics."""
        self.url = ""
        self._live: dict[str, asyncio.Event] = {}
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/health", _ok)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/inference/v1/generate", self._serve if self.scale_out else _forbidden)
        app.router.add_post("/inference/v1/abort_requests", self._abort if self.scale_out else _forbidden)
        if self.dev:
            app.router.add_post("/abort_requests", self._abort)
            app.router.add_get("/server_info", self._server_info)
            app.router.add_get("/weight_info", self._weight_info)
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._pause)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for aborted in self._live.values():
            aborted.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def wait_running(self, count: int) -> None:
        """Return once exactly `count` requests are being answered."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._live) == count)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "root": "scripted/root", "max_model_len": self.context_length}]})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode, "tokenizer": "scripted/tokenizer"}}}
        )

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _metrics(self, _: web.Request) -> web.Response:
        self.looks += 1
        gauges = f'vllm:num_requests_running{{engine="0"}} {len(self._live)}.0\nvllm:num_requests_waiting{{engine="0"}} 0.0\n'
        return web.Response(text=gauges if self.metrics is None else self.metrics)

    async def _pause(self, request: web.Request) -> web.Response:
        self.pauses.append(request.path_qs)
        return web.json_response({"status": "paused"})

    async def _abort(self, request: web.Request) -> web.Response:
        names = (await request.json())["request_ids"]
        self.aborts.append((request.path, names))
        if self.obey_aborts:
            for name in names:
                if name in self._live:
                    self._live[name].set()
        return web.Response()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if not body:
            return _error(400, "2 validation errors")
        self.requests.append((request.path, body))
        self.headers.append(request.headers)
        generate = request.path.startswith("/inference")
        params = body["sampling_params"] if generate else body
        prompt = list(body["token_ids"] if generate else body["prompt"])
        if "prompt_logprobs" in params:
            return self._prefill(prompt, generate=generate)
        reply = replace(self.script.pop(0), style="incremental")
        if reply.fault in REFUSALS:
            return _error(REFUSALS[reply.fault], f"scripted {reply.fault}")
        output = Output(self, reply, prompt, {"rid": body["request_id"], "sampling_params": {"max_new_tokens": params["max_tokens"]}})
        name = f"generate-tokens-{body['request_id']}" if generate else f"cmpl-{body['request_id']}-0"
        aborted = self._live[name] = asyncio.Event()
        await self._notify()
        try:
            return await self._stream(request, reply, output, aborted, generate=generate)
        finally:
            del self._live[name]
            await asyncio.shield(self._notify())

    async def _stream(
        self, request: web.Request, reply: Reply, output: Output, aborted: asyncio.Event, *, generate: bool
    ) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        if reply.fault is Fault.HANG:
            await aborted.wait()
        if reply.fault is Fault.RESET:
            transport.abort()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for data in output.events(aborted):
            await response.write(b"data: " + spoken(data, generate=generate) + b"\n\n")
        if reply.fault is Fault.CUT and not aborted.is_set():
            transport.abort()
        details = {"prompt_tokens_details": {"cached_tokens": reply.cached_tokens}}
        await response.write(b"data: " + orjson.dumps({"choices": [], "usage": details}) + b"\n\ndata: [DONE]\n\n")
        return response

    def _prefill(self, prompt: list[int], *, generate: bool) -> web.Response:
        said = {"prompt_logprobs": [None, *({str(t): {"logprob": logprob_at(i, t)}} for i, t in enumerate(prompt) if i)]}
        choice = {"index": 0, "token_ids": [1], "finish_reason": "length"}
        usage = {"prompt_tokens": len(prompt)}
        if generate:
            return web.json_response({"choices": [choice], "usage": usage, **said})
        return web.json_response({"choices": [choice | said], "usage": usage})

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def spoken(data: bytes, *, generate: bool) -> bytes:
    """A payload of `Output` as vLLM says it; what is no such payload stays as it is."""
    try:
        payload = orjson.loads(data)
    except ValueError:
        return data
    if "meta_info" not in payload:
        return data
    meta = payload["meta_info"]
    finish = meta["finish_reason"] or {"type": None}
    if finish.get("status_code"):
        return orjson.dumps({"error": {"message": finish["message"], "type": "InternalServerError", "code": finish["status_code"]}})
    triples = meta["output_token_logprobs"]
    choice: dict[str, Any] = {"index": 0, "token_ids": payload["output_ids"], "finish_reason": finish["type"]}
    choice["stop_reason"] = finish.get("matched")
    if generate:
        choice["logprobs"] = {"content": [{"token_id": token, "logprob": value, "rank": 1} for value, token, _ in triples]}
        choice["weight_versions"] = meta.get("weight_versions") if finish["type"] else None
    else:
        tokens = [f"token_id:{token}" for _, token, _ in triples]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": [value for value, _, _ in triples]}
    usage = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": meta["completion_tokens"]}
    return orjson.dumps({"request_id": meta["id"], "choices": [choice], "usage": usage})


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def _ok(_: web.Request) -> web.Response:
    return web.Response()


async def _forbidden(_: web.Request) -> web.Response:
    return _error(403, "Scale-out endpoints are disabled.")
