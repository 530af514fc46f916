"""A real HTTP server that forwards as sglang-router 0.3 does: sticky by routing key, and without the fields it does not know."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import aiohttp
import orjson
from aiohttp import web

_KNOWN = ("rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream")
_RETRIED = (408, 429, 500, 502, 503, 504)
_HEADER = "X-SMG-Routing-Key"


class ScriptedRouter:
    """`async with ScriptedRouter([url, …]) as router:`; `workers` may be changed while it runs.

    It answers `/abort_request` and everything else of the workers' with 404, and asks
    again up to `retries` times, with the same rid, where a worker cannot be reached or refuses.
    """

    def __init__(self, workers: list[str], *, retries: int = 5) -> None:
        self.workers = list(workers)
        self.retries = retries
        self.url = ""
        self.placed: dict[str, str] = {}
        """Routing key -> worker."""
        self.attempts: list[tuple[str, str]] = []
        """rid and worker of each request that was forwarded."""
        self._runner: web.AppRunner | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/workers", self._workers)
        app.router.add_post("/generate", self._generate)
        for path in ("/health", "/model_info", "/server_info", "/v1/models"):
            app.router.add_get(path, self._ask_one)
        self._http = aiohttp.ClientSession()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None and self._http is not None:
            await self._runner.cleanup()
            await self._http.close()

    async def _workers(self, _: web.Request) -> web.Response:
        listed = [{"id": str(n), "url": url, "is_healthy": True, "load": 0} for n, url in enumerate(self.workers)]
        return web.json_response({"workers": listed, "total": len(listed), "stats": {}})

    async def _ask_one(self, request: web.Request) -> web.Response:
        assert self._http is not None
        for worker in self.workers:
            try:
                async with self._http.get(worker + request.path) as answer:
                    return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
            except aiohttp.ClientError:
                continue
        return web.Response(status=503)

    def _place(self, key: str, tried: int) -> str:
        """A key's own worker as long as that is listed; the next in turn for the rest."""
        if tried == 0 and self.placed.get(key) in self.workers:
            return self.placed[key]
        worker = self.workers[(len(self.attempts)) % len(self.workers)]
        if key:
            self.placed[key] = worker
        return worker

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = orjson.loads(await request.read())
        sent = {name: body[name] for name in _KNOWN if name in body}
        status = 503
        for tried in range(self.retries + 1):
            if not self.workers:
                break
            worker = self._place(request.headers.get(_HEADER, ""), tried)
            self.attempts.append((str(body.get("rid")), worker))
            try:
                answered = await self._forward(request, worker, sent)
            except aiohttp.ClientConnectorError:
                continue
            if not isinstance(answered, int):
                return answered
            status = answered
        return web.json_response({"error": {"message": "no worker took the request"}}, status=status)

    async def _forward(self, request: web.Request, worker: str, sent: dict[str, Any]) -> web.StreamResponse | int:
        """The worker's answer as it comes, or the status that is to be asked again for. A worker that breaks off breaks the answer."""
        assert self._http is not None
        async with self._http.post(f"{worker}/generate", json=sent) as answer:
            if answer.status in _RETRIED:
                return answer.status
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
            await response.prepare(request)
            try:
                async for data in answer.content.iter_any():
                    await response.write(data)
            except (aiohttp.ClientError, asyncio.IncompleteReadError):
                if request.transport is not None:
                    request.transport.abort()
            return response
