"""What a scripted engine answers beside `/generate`: health, loads, workers, aborts, pauses and weights, as SGLang 0.5.23 does.

Its faults are attributes that may be changed while it runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, eq=False)
class Live:
    """A request that is being answered. `forgotten`: its client has gone, and with it every way to stop it."""

    rid: str
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    forgotten: bool = False
    held: bool = False
    """It came while the server was paused: no load shows it and no abort reaches it."""


class Controls:
    """The state of a scripted engine, and the endpoints that show or change it."""

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        model: str,
        convention: str | None,
        weight_version: str,
        workers: Any,
        loads: bool,
        grammar_backend: str | None,
        obey_aborts: bool,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.model = model
        self.convention = convention
        self.weights = self.weight_version = weight_version
        """What samples, and what the server says of it."""
        self.workers = workers
        self.loads = loads
        self.grammar_backend = grammar_backend
        self.obey_aborts = obey_aborts
        self.abort_endpoint = workers is None
        """False answers `/abort_request` with 404, as a router does."""
        self.input_limit: int | None = None
        """The first length of a prompt that the server says it refuses."""
        self.load_floor = 0
        """Requests that the loads never fall below."""
        self.slow: dict[str, float] = {}
        """Seconds before a path is answered; inf is for ever."""
        self.aborts: list[dict[str, Any]] = []
        self.live: set[Live] = set()
        self.going = asyncio.Event()
        """Cleared while the server is paused."""
        self.going.set()
        self.changed = asyncio.Condition()
        self._pause_mode = ""

    @property
    def running(self) -> int:
        return len(self.live)

    def named(self, rid: str) -> Live | None:
        """The request of that id that the server still knows."""
        return next((each for each in self.live if each.rid == rid and not each.forgotten), None)

    def release(self) -> None:
        """Let every hanging, stalled or forgotten reply end as aborted, and a paused server go on."""
        self.going.set()
        for live in self.live:
            live.aborted.set()

    async def wait_running(self, count: int) -> None:
        """Return once exactly `count` requests are being answered."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.live) == count)

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        shown: dict[str, Handler] = {
            "/health": self._health,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
            "/workers": self._workers,
        }
        changed: dict[str, Handler] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update_weights,
        }
        for path, handler in shown.items():
            router.add_get(path, handler)
        for path, handler in changed.items():
            router.add_post(path, handler)

    @web.middleware
    async def delays(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if seconds := self.slow.get(request.path):
            await (asyncio.sleep(seconds) if math.isfinite(seconds) else asyncio.Event().wait())
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        await self.going.wait()
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        info: dict[str, Any] = {"model_path": self.model, "tokenizer_path": self.model, "is_generation": True}
        info["weight_version"] = self.weight_version
        info["vocab_size"] = self.vocab_size
        if self.convention is not None:
            info["logprob_convention"] = self.convention
        return web.json_response(info)

    async def _server_info(self, _: web.Request) -> web.Response:
        said: dict[str, Any] = {"context_length": self.context_length, "grammar_backend": self.grammar_backend, "version": "scripted"}
        if self.input_limit is not None:
            said["max_req_input_len"] = self.input_limit
        return web.json_response(said)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "max_model_len": self.context_length}]})

    async def _loads(self, _: web.Request) -> web.Response:
        if not self.loads:
            raise web.HTTPNotFound
        shown = self.load_floor + sum(not each.held for each in self.live)
        return web.json_response({"loads": [{"dp_rank": 0, "num_running_reqs": shown, "num_waiting_reqs": 0}]})

    async def _workers(self, _: web.Request) -> web.Response:
        said = self.workers() if callable(self.workers) else self.workers
        if said is None:
            raise web.HTTPNotFound
        if isinstance(said, int):
            return web.Response(status=said)
        return web.Response(body=said, content_type="application/json") if isinstance(said, bytes) else web.json_response(said)

    async def _abort(self, request: web.Request) -> web.Response:
        if not self.abort_endpoint:
            raise web.HTTPNotFound
        body = await request.json()
        self.aborts.append(body)
        if self.obey_aborts:
            self._stop(str(body.get("rid") or ""), everything=bool(body.get("abort_all")))
        return web.Response()

    def _stop(self, rid: str = "", *, everything: bool = False) -> None:
        """A live id stops every request whose own begins with it; one that is not live stops nothing."""
        if everything or self.named(rid) is not None:
            for live in self.live:
                if not live.held and not live.forgotten and live.rid.startswith(rid):
                    live.aborted.set()

    async def _pause(self, request: web.Request) -> web.Response:
        self._pause_mode = (await request.json()).get("mode", "abort")
        running = [each for each in self.live if not each.held]
        if self._pause_mode == "abort":
            self._stop(everything=True)
            async with self.changed:
                await self.changed.wait_for(lambda: not self.live.intersection(running))
        self.going.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self.going.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weights(self, request: web.Request) -> web.Response:
        """Waits for what runs, or aborts it; paused in place with a cache to flush it updates the weights and calls it a failure."""
        body = await request.json()
        if body.get("abort_all_requests"):
            self._stop(everything=True)
        paused = not self.going.is_set()
        if not paused:
            async with self.changed:
                await self.changed.wait_for(lambda: not self.live)
        self.weights = str(body.get("weight_version") or self.weights)
        if paused and self._pause_mode == "in_place" and self.live and body.get("flush_cache", True):
            message = "Weights were updated, but the cache was not flushed because requests are still running"
            return web.json_response({"success": False, "message": message}, status=400)
        self.weight_version = self.weights
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})
