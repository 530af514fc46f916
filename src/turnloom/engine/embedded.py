"""A small inference server in this machine's own process: a GGUF file behind SGLang's HTTP contract.

Owns the requests; `llamacpp` owns the model. For a laptop, a demo and tests: it
keeps SGLang's shapes (cumulative streams, finish reasons, 400s), so that the
one client speaks to both. Where it differs, it says so: `/model_info` carries
`vocab_size` and `logprob_convention` "raw". The sampled end token is in the
ids, with its own logprob. An abort ends a request with the tokens so far.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson
from aiohttp import web

from turnloom.engine.generate_request import GenerateRequest, InvalidRequest, read_generate
from turnloom.engine.llama_completion import Step
from turnloom.engine.llama_slots import Slots
from turnloom.engine.llamacpp import LlamaCpp
from turnloom.engine.models import find_model
from turnloom.errors import ConfigError, EngineError
from turnloom.render.contract import Tokenizer
from turnloom.render.detokenize import IncrementalDecoder
from turnloom.tokenizer import load_tokenizer

WEIGHT_VERSION = "default"

T = TypeVar("T")


class _Aborted(Exception):
    pass


@dataclass(slots=True)
class _Job:
    """A request and what has been sampled for it."""

    request: GenerateRequest
    tokenizer: Tokenizer | None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[list[Any]] | None = None
    cached: int = 0
    finish: dict[str, Any] | None = None
    text: str = ""
    decoder: IncrementalDecoder | None = None

    def add(self, step: Step) -> None:
        params = self.request.params
        self.ids.append(step.id)
        self.logprobs.append(step.logprob)
        before = len(self.text)
        if self.tokenizer is not None:
            self.decoder = self.decoder or IncrementalDecoder(self.tokenizer)
            self.text += self.decoder.feed([step.id])
        if step.id in params.stop_token_ids or (step.end and not params.ignore_eos):
            self.finish = {"type": "stop", "matched": step.id}
        elif (stop := self._stop_string(before)) is not None:
            self.finish = {"type": "stop", "matched": stop}
        elif len(self.ids) >= params.max_new_tokens:
            self.finish = {"type": "length", "length": len(self.ids)}

    def _stop_string(self, before: int) -> str | None:
        for stop in self.request.params.stop:
            if stop in self.text[max(0, before - len(stop)) :]:
                return stop
        return None

    def payload(self, start: int = 0) -> bytes:
        """SGLang's JSON of the tokens from `start` on."""
        triples = [[value, token, None] for value, token in zip(self.logprobs[start:], self.ids[start:], strict=True)]
        meta: dict[str, Any] = {
            "id": self.request.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.request.prompt),
            "completion_tokens": len(self.ids),
            "cached_tokens": self.cached,
            "weight_version": WEIGHT_VERSION,
        }
        if self.request.return_logprob:
            meta["output_token_logprobs"] = triples
        if self.input_logprobs is not None:
            meta["input_token_logprobs"] = self.input_logprobs
        return orjson.dumps({"text": self.text, "output_ids": self.ids[start:], "meta_info": meta})


class EmbeddedServer:
    """The HTTP side of one model. `incremental` streams new tokens only, as SGLang does when told to."""

    def __init__(self, llama: LlamaCpp, *, name: str, parallel: int, incremental: bool = False) -> None:
        self._llama = llama
        self._name = name
        self._incremental = incremental
        self._slots = Slots(parallel)
        self._live: dict[str, _Job] = {}
        self._running = 0
        try:
            self._tokenizer: Tokenizer | None = load_tokenizer(llama.path)
        except ConfigError:
            # Ids need no tokenizer; only `text` and stop strings do, and a request for these is refused.
            self._tokenizer = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/get_model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/loads", self._loads)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        path = str(self._llama.path)
        info = {"model_path": self._name, "tokenizer_path": path, "is_generation": True, "weight_version": WEIGHT_VERSION}
        return web.json_response({**info, "vocab_size": self._llama.vocab_size, "logprob_convention": "raw"})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"context_length": self._llama.context, "incremental_streaming_output": self._incremental})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name, "max_model_len": self._llama.context}]})

    async def _loads(self, _: web.Request) -> web.Response:
        waiting = len(self._live) - self._running
        return web.json_response({"loads": [{"dp_rank": 0, "num_running_reqs": self._running, "num_waiting_reqs": waiting}]})

    async def _abort(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"{}")
        for rid, job in self._live.items():
            if body.get("abort_all") or rid == body.get("rid"):
                job.aborted.set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = read_generate(await request.read(), uuid.uuid4().hex, self._llama.context, self._llama.vocab_size, self._tokenizer)
            if asked.rid in self._live:
                raise InvalidRequest(f"duplicate request id {asked.rid}")
        except InvalidRequest as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        job = self._live[asked.rid] = _Job(asked, self._tokenizer)
        try:
            async with contextlib.aclosing(self._run(job)) as progress:
                if asked.stream:
                    return await self._stream(request, job, progress)
                async for _ in progress:
                    pass
            return web.Response(body=job.payload(), content_type="application/json")
        finally:
            del self._live[asked.rid]

    async def _stream(self, request: web.Request, job: _Job, progress: AsyncIterator[None]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        sent = 0
        try:
            async for _ in progress:
                await response.write(b"data: " + job.payload(sent if self._incremental else 0) + b"\n\n")
                sent = len(job.ids)
        except EngineError as error:
            await response.write(b"data: " + orjson.dumps({"error": {"message": str(error), "code": error.status}}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _run(self, job: _Job) -> AsyncGenerator[None, None]:
        """Yields after each token, at the end at the latest."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                whole = list(job.request.prompt)
                slot = await _unless(job.aborted, stack.enter_async_context(self._slots.take(whole)))
                self._running += 1
                stack.callback(self._stopped)
                if job.request.logprob_start is not None:
                    await self._score(job, slot, job.request.logprob_start)
                else:
                    job.cached = await _unless(job.aborted, self._llama.prefill(slot, whole))
                if not job.request.params.max_new_tokens:
                    job.finish = {"type": "length", "length": 0}
                async for _ in self._decode(job, slot, whole):
                    yield
        except _Aborted:
            job.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if not job.ids or (job.finish is not None and job.finish["type"] == "abort"):
            yield

    async def _decode(self, job: _Job, slot: int, whole: list[int]) -> AsyncIterator[None]:
        params = job.request.params
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        while job.finish is None:
            if job.aborted.is_set():
                raise _Aborted
            step = await self._llama.step(slot, whole, params.policy, seed)
            whole.append(step.id)
            job.add(step)
            yield

    async def _score(self, job: _Job, slot: int, start: int) -> None:
        """The logprobs of the prompt from `start` on. The first is null, as in SGLang."""
        prompt = job.request.prompt
        job.cached = await _unless(job.aborted, self._llama.prefill(slot, prompt[: start + 1]))
        job.input_logprobs = [[None, prompt[start], None]]
        for position in range(start + 1, len(prompt)):
            value = await _unless(job.aborted, self._llama.logprob(slot, prompt[:position], prompt[position]))
            job.input_logprobs.append([value, prompt[position], None])

    def _stopped(self) -> None:
        self._running -= 1


async def _unless(aborted: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or _Aborted as soon as the event is set; `work` is cancelled then."""
    doing, waiting = asyncio.create_task(work), asyncio.create_task(aborted.wait())
    try:
        await asyncio.wait([doing, waiting], return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise _Aborted
    finally:
        waiting.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])


async def serve_embedded(
    model: str | Path = "smollm2",
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    parallel: int = 2,
    threads: int | None = None,
    incremental: bool = False,
    ready: Callable[[str], object] | None = None,
) -> None:
    """Serve a GGUF file, or the model called `smollm2`, until cancelled. `ready` gets the URL once it answers. Raises ConfigError."""
    path = await asyncio.to_thread(find_model, model)
    llama = LlamaCpp(path, parallel=parallel, threads=threads)
    server = EmbeddedServer(llama, name=path.stem, parallel=parallel, incremental=incremental)
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
        if ready is not None:
            ready(f"http://{host}:{runner.addresses[0][1]}")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
        await llama.close()


async def _main(arguments: argparse.Namespace) -> None:
    def say(url: str) -> None:
        sys.stdout.write(url + "\n")
        sys.stdout.flush()

    options = dict(vars(arguments))
    with_parent = options.pop("with_parent")
    serving = asyncio.create_task(serve_embedded(options.pop("model"), **options, ready=say))
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, serving.cancel)
    watch = asyncio.create_task(_parent_gone(serving)) if with_parent else None
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    if watch is not None:
        watch.cancel()


async def _parent_gone(serving: asyncio.Task[None]) -> None:
    """Stops serving when standard input closes, as it does when the process that holds its other end ends, however it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    serving.cancel()


def main() -> None:
    """`python -m turnloom.engine.embedded --model smollm2`."""
    parser = argparse.ArgumentParser(description="Serve a GGUF model in SGLang's HTTP contract.")
    parser.add_argument("--model", default="smollm2", help="a .gguf file, or smollm2")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 for any free one")
    parser.add_argument("--parallel", type=int, default=2, help="requests decoded at once, each with the whole context")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--incremental", action="store_true", help="stream new tokens only, not all so far")
    parser.add_argument("--with-parent", action="store_true", help="stop when standard input closes")
    try:
        asyncio.run(_main(parser.parse_args()))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
