"""A real HTTP server in SGLang's contract whose replies are scripted: what an engine may do, on demand.

It samples nothing: each request takes the next `Reply` (or what a function of
the request returns). Beside `/generate` it serves what `Controls` has, and plays
a router's front when it is given `workers`. Every request body is kept in
`requests`, every abort in `aborts`.

Logprobs that a reply does not give follow from position and id alone
(`logprob_at`), so a prefill of the same sequence answers with the same numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import orjson
from aiohttp import web

from turnloom.render.contract import Tokenizer
from turnloom.testing.scripted_control import Controls, Live
from turnloom.testing.scripted_reply import REFUSALS, Fault, Output, Reply, experts_at, logprob_at, read_script

__all__ = ["Fault", "Reply", "Script", "ScriptedEngine", "experts_at", "logprob_at"]


Script = Sequence[Reply | str] | Callable[[dict[str, Any], int], Reply | str]
"""Replies in order, or a function of the request body and its index. A string is a reply of that text."""

Gate = Callable[[dict[str, Any], int], Awaitable[None]]
"""Called with the request body when that many chunks of its reply are out; the next is sampled when it returns."""


class ScriptedEngine(Controls):
    """`async with ScriptedEngine(script) as engine:` serves at `engine.url` on a free port.

    `workers` makes it a router's front: that JSON value answers `/workers`, or what
    a function returns (bytes are sent as they are, a number is a status, None a 404),
    and `/abort_request` is a 404. `loads` False leaves `/v1/loads` out, as old servers do.
    A `gate` holds streamed replies back, chunk by chunk. `forgetful`: it goes on with a
    reply whose client has gone, and no abort reaches that any more. `experts` is how many
    `routed_experts` it gives per token.
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
        forgetful: bool = False,
        lists_versions: bool = True,
        experts: int = 0,
        experts_from_start: bool = False,
    ) -> None:
        super().__init__(
            vocab_size=vocab_size,
            context_length=context_length,
            model=model,
            convention=convention,
            weight_version=weight_version,
            workers=workers,
            loads=loads,
            grammar_backend=grammar_backend,
            obey_aborts=obey_aborts,
        )
        self.script = script
        self.tokenizer = tokenizer
        self.end_id = end_id if end_id is not None or tokenizer is None else min(tokenizer.eos_ids, default=None)
        self.gate = gate
        self.forgetful = forgetful
        self.lists_versions = lists_versions
        self.experts = experts
        self.experts_from_start = experts_from_start
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.disconnects: list[str] = []
        """rids whose client was gone before the reply was over."""
        self.url = ""
        self._port = 0
        self._said: dict[tuple[int, ...], float] = {}
        self._runner: web.AppRunner | None = None
        self._sampled = 0
        self._ghosts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, host: str = "127.0.0.1", port: int | None = None) -> str:
        """Serve at `port`; without one at that of the last time, and the first time at a free one."""
        app = web.Application(client_max_size=1 << 30, middlewares=[self.delays])
        app.router.add_post("/generate", self._generate)
        self.add_routes(app.router)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, self._port if port is None else port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://{host}:{self._port}"
        return self.url

    async def stop(self) -> None:
        self.release()
        await self._end()

    async def kill(self) -> None:
        """As by a signal: no reply is ended, every connection breaks, nothing listens. `start` makes it live again."""
        if self._runner is not None and self._runner.server is not None:
            for site in list(self._runner.sites):
                await site.stop()
            for connection in list(self._runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        for ghost in self._ghosts:
            ghost.cancel()
        await self._end()
        self.going.set()

    async def _end(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._ghosts:
            await asyncio.wait(self._ghosts)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        prompt = list(body.get("input_ids") or ())
        if body.get("logprob_start_len", -1) >= 0:
            return self._prefill(body, prompt)
        if body.get("return_routed_experts") and not body.get("stream"):
            return self._one_token(body, prompt)
        rid = str(body.get("rid") or uuid.uuid4().hex)
        if self.named(rid) is not None:
            return await _refuse_streamed(request, body, f"Duplicate request ID detected: {rid}")
        self._sampled += 1
        index = self._sampled - 1
        reply = self._next(body, index)
        if reply is None:
            return _error(500, "the script has no more replies")
        if reply.fault in REFUSALS:
            return _error(REFUSALS[reply.fault], f"scripted {reply.fault}", reply.retry_after)
        live = Live(rid, held=not self.going.is_set())
        self.live.add(live)
        await self.notify()
        output = self._output(reply, prompt, body)
        try:
            return await self._answer(request, output, live)
        except (ConnectionError, asyncio.CancelledError):
            self.disconnects.append(rid)
            if self.forgetful and self._runner is not None:
                live.forgotten = True
                ghost = asyncio.create_task(self._go_on(output, live))
                self._ghosts.add(ghost)
                ghost.add_done_callback(self._ghosts.discard)
            raise
        finally:
            if not live.forgotten:
                await asyncio.shield(self._forget(live))

    async def _answer(self, request: web.Request, output: Output, live: Live) -> web.StreamResponse:
        transport, fault = request.transport, output.reply.fault
        if live.held:
            await self.going.wait()
            live.held = False
        if fault is Fault.HANG:
            await live.aborted.wait()
        if fault is Fault.RESET and transport is not None:
            transport.abort()
        if not output.body.get("stream"):
            output.sample(0, len(output.ids))
            return web.json_response(output.payload(0, len(output.ids), last=True))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for data in self._events(output, live):
            await response.write(b"data: " + data + b"\n\n")
        if fault is Fault.CUT and transport is not None and not live.aborted.is_set():
            transport.abort()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _events(self, output: Output, live: Live) -> AsyncIterator[bytes]:
        async for data in output.events(live.aborted, self.going):
            yield data
            output.sent += 1
            if self.gate is not None:
                await self.gate(output.body, output.sent)

    async def _go_on(self, output: Output, live: Live) -> None:
        """Sample what is left for nobody."""
        try:
            async for _ in self._events(output, live):
                pass
        finally:
            await self._forget(live)

    async def _forget(self, live: Live) -> None:
        self.live.discard(live)
        await self.notify()

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

    def _one_token(self, body: dict[str, Any], prompt: list[int]) -> web.Response:
        """Not of the script: how an engine's experts are probed."""
        output = Output(self, Reply(ids=(prompt[-1],), finish="length"), prompt, body, self)
        output.sample(0, 1)
        return web.json_response(output.payload(0, 1, last=True))

    def logprob(self, sequence: Sequence[int], position: int) -> float:
        """The logprob this engine gives sequence[position] after sequence[:position]: as sampled, or made up."""
        return self._said.get(tuple(sequence[: position + 1]), logprob_at(position, sequence[position]))

    def _output(self, reply: Reply, prompt: list[int], body: dict[str, Any]) -> Output:
        output = Output(self, reply, prompt, body, self)
        if reply.logprobs is not None:
            whole = (*prompt, *output.ids)
            for count, value in enumerate(reply.logprobs[: len(output.ids)], start=len(prompt) + 1):
                self._said[whole[:count]] = value
        return output


def _error(status: int, message: str, retry_after: str = "") -> web.Response:
    headers = {"Retry-After": retry_after} if retry_after else {}
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


async def _refuse_streamed(request: web.Request, body: dict[str, Any], message: str) -> web.StreamResponse:
    """SGLang finds what is wrong with a streamed request when its answer has begun."""
    if not body.get("stream"):
        return _error(400, message)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    await response.write(b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n")
    return response


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
