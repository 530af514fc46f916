"""A real HTTP server in SGLang's contract whose replies are scripted: what an engine may do, on demand.

It samples nothing: each request takes the next `Reply` (or what a function of
the request returns). It serves `/generate`, `/abort_request`, `/model_info`,
`/server_info`, `/v1/models`, `/v1/loads`, `/health` and, when it plays a router, `/workers`.
Every request body is kept in `requests`, every abort in `aborts`.

Logprobs that a reply does not give follow from position and id alone
(`logprob_at`), so a prefill of the same sequence answers with the same numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import orjson
from aiohttp import web

from turnloom.render.contract import Tokenizer
from turnloom.testing.scripted_reply import REFUSALS, Fault, Output, Reply, logprob_at, read_script

__all__ = ["Fault", "Reply", "Script", "ScriptedEngine", "logprob_at"]


Script = Sequence[Reply | str] | Callable[[dict[str, Any], int], Reply | str]
"""Replies in order, or a function of the request body and its index. A string is a reply of that text."""

Gate = Callable[[dict[str, Any], int], Awaitable[None]]
"""Called with the request body when that many chunks of its reply are out; the next is sampled when it returns."""


@dataclass(slots=True)
class _Live:
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """`async with ScriptedEngine(script) as engine:` serves at `engine.url` on a free port.

    `workers` makes it a router: that JSON value answers `/workers`, and
    `/abort_request` is a 404. `loads` False leaves `/v1/loads` out, as old servers do.
    A `gate` holds streamed replies back, chunk by chunk.
    """

    def __init__(
        self,
        script: Script = (),
        *,
        tokenizer: Tokenizer | None = None,
        end_id: int | None = None,
        vocab_size: int = 200_000,
        context_length: int = 32_768,
        model: str = "scripted",
        convention: str | None = "raw",
        weight_version: str = "default",
        workers: Any = None,
        loads: bool = True,
        grammar_backend: str | None = None,
        obey_aborts: bool = True,
        gate: Gate | None = None,
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.end_id = end_id if end_id is not None or tokenizer is None else min(tokenizer.eos_ids, default=None)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.model = model
        self.convention = convention
        self.weight_version = weight_version
        self.workers = workers
        self.loads = loads
        self.grammar_backend = grammar_backend
        self.obey_aborts = obey_aborts
        self.gate = gate
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts: list[dict[str, Any]] = []
        self.disconnects: list[str] = []
        """rids whose client was gone before the reply was over."""
        self.url = ""
        self._live: dict[str, _Live] = {}
        self._said: dict[tuple[int, ...], float] = {}
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Condition()

    @property
    def running(self) -> int:
        return len(self._live)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        if self.workers is None:
            app.router.add_post("/abort_request", self._abort)
        else:
            app.router.add_get("/workers", self._workers)
        if self.loads:
            app.router.add_get("/v1/loads", self._loads)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            self.release()
            await self._runner.cleanup()
            self._runner = None

    def release(self) -> None:
        """Let every hanging or stalled reply end as aborted."""
        for live in self._live.values():
            live.aborted.set()

    async def wait_running(self, count: int) -> None:
        """Return once exactly `count` requests are being answered."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._live) == count)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        info: dict[str, Any] = {"model_path": self.model, "tokenizer_path": self.model, "is_generation": True}
        info["weight_version"] = self.weight_version
        info["vocab_size"] = self.vocab_size
        if self.convention is not None:
            info["logprob_convention"] = self.convention
        return web.json_response(info)

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"context_length": self.context_length, "grammar_backend": self.grammar_backend, "version": "scripted"})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "max_model_len": self.context_length}]})

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"dp_rank": 0, "num_running_reqs": len(self._live), "num_waiting_reqs": 0}]})

    async def _workers(self, _: web.Request) -> web.Response:
        return web.json_response(self.workers)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.aborts.append(body)
        if self.obey_aborts:
            for rid, live in self._live.items():
                if body.get("abort_all") or rid == body.get("rid"):
                    live.aborted.set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        prompt = list(body.get("input_ids") or ())
        if body.get("logprob_start_len", -1) >= 0:
            return self._prefill(body, prompt)
        index = sum(1 for earlier in self.requests if earlier.get("logprob_start_len", -1) < 0) - 1
        reply = self._next(body, index)
        if reply is None:
            return _error(500, "the script has no more replies")
        if reply.fault in REFUSALS:
            return _error(REFUSALS[reply.fault], f"scripted {reply.fault}")
        rid = str(body.get("rid") or index)
        if rid in self._live:
            return _error(400, f"duplicate request id {rid}")
        live = self._live[rid] = _Live()
        await self._notify()
        try:
            return await self._answer(request, body, reply, self._output(reply, prompt, body), live)
        except (ConnectionError, asyncio.CancelledError):
            self.disconnects.append(rid)
            raise
        finally:
            del self._live[rid]
            await asyncio.shield(self._notify())

    async def _answer(self, request: web.Request, body: dict[str, Any], reply: Reply, output: Output, live: _Live) -> web.StreamResponse:
        transport = request.transport
        if reply.fault is Fault.HANG:
            await live.aborted.wait()
        if reply.fault is Fault.RESET and transport is not None:
            transport.abort()
        if not body.get("stream"):
            return web.json_response(output.payload(0, len(output.ids), last=True))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        async for data in output.events(live.aborted):
            await response.write(b"data: " + data + b"\n\n")
            sent += 1
            if self.gate is not None:
                await self.gate(body, sent)
        if reply.fault is Fault.CUT and transport is not None and not live.aborted.is_set():
            transport.abort()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _next(self, body: dict[str, Any], index: int) -> Reply | None:
        if callable(self.script):
            found = self.script(body, index)
        elif index < len(self.script):
            found = self.script[index]
        else:
            return None
        return Reply(found) if isinstance(found, str) else found

    def _prefill(self, body: dict[str, Any], prompt: list[int]) -> web.Response:
        start = body["logprob_start_len"]
        values = [[None, prompt[start], None]] if start < len(prompt) else []
        values += [[self.logprob(prompt, position), prompt[position], None] for position in range(start + 1, len(prompt))]
        meta = {"id": body.get("rid"), "finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(prompt)}
        return web.json_response(
            {"text": "", "output_ids": [], "meta_info": {**meta, "completion_tokens": 0, "input_token_logprobs": values}}
        )

    def logprob(self, sequence: Sequence[int], position: int) -> float:
        """The logprob this engine gives sequence[position] after sequence[:position]: as sampled, or made up."""
        return self._said.get(tuple(sequence[: position + 1]), logprob_at(position, sequence[position]))

    def _output(self, reply: Reply, prompt: list[int], body: dict[str, Any]) -> Output:
        output = Output(self, reply, prompt, body)
        if reply.logprobs is not None:
            whole = (*prompt, *output.ids)
            for count, value in enumerate(reply.logprobs[: len(output.ids)], start=len(prompt) + 1):
                self._said[whole[:count]] = value
        return output

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def _serve(arguments: argparse.Namespace) -> None:
    from turnloom.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    replies = read_script(arguments.script)

    def repeat(_: dict[str, Any], index: int) -> Reply:
        return replies[index % len(replies)]

    engine = ScriptedEngine(repeat, tokenizer=tokenizer, model=arguments.tokenizer or "scripted")
    sys.stdout.write(await engine.start(port=arguments.port) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    """`python -m turnloom.testing.scripted_engine --script replies.json`: prints its URL and answers from the script, over and over."""
    parser = argparse.ArgumentParser(description="An engine in SGLang's contract that answers from a script.")
    parser.add_argument("--script", type=Path, required=True, help="JSON list of texts or of replies")
    parser.add_argument("--tokenizer", help="tokenizer for replies given as text")
    parser.add_argument("--port", type=int, default=0)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
