"""A real gateway on a real socket before a scripted engine, and a plain HTTP client for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.support.sse import read_sse
from turnloom.engine.pool import Patience
from turnloom.engine.sglang import SGLangEngine
from turnloom.gateway.api import Gateway, SessionHandle
from turnloom.gateway.session import Session
from turnloom.testing.scripted_engine import Script, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.tokenizer import HFTokenizer

ADMIN = "admin-secret"


@dataclass
class Answer:
    status: int
    body: Any
    headers: Any
    events: list[tuple[str, dict[str, Any]]]


@dataclass
class Bench:
    """One gateway, its engine and an open session."""

    gateway: Gateway
    engine: ScriptedEngine
    tokenizer: HFTokenizer
    handle: SessionHandle
    http: aiohttp.ClientSession

    async def session(self) -> Session:
        return await self.gateway.session(self.handle.id)

    async def post(self, body: Any, path: str = "/v1/messages", **headers: str) -> Answer:
        """POST to the session; an event stream is read to its end."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.handle.base_url + path, data=data, headers=headers) as answer:
            if answer.content_type == "text/event-stream":
                events = read_sse((await answer.read()).decode())
                return Answer(answer.status, None, answer.headers, events)
            return Answer(answer.status, json.loads(await answer.read()), answer.headers, [])

    async def admin(self, method: str, path: str, body: Any = None, key: str = ADMIN) -> tuple[int, Any]:
        async with self.http.request(
            method, f"{self.gateway.url}/api/v1{path}", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            raw = await answer.read()
            return answer.status, json.loads(raw) if answer.content_type == "application/json" else raw


NONE = Patience(attempts=0)
"""What an engine does to one request is seen as it is."""


@asynccontextmanager
async def bench(script: Script = (), *, tokenizer: HFTokenizer | None = None, engine: Any = None, **options: Any) -> AsyncIterator[Bench]:
    """Options starting with `session_` go to open_session, the rest to Gateway."""
    tokenizer = tokenizer or qwen_tokenizer("qwen2.5")
    session = {k.removeprefix("session_"): options.pop(k) for k in list(options) if k.startswith("session_")}
    end = tokenizer.control_tokens["<|im_end|>"]
    scripted = engine or ScriptedEngine(script, tokenizer=tokenizer, end_id=end)
    options.setdefault("patience", NONE)
    async with scripted, Gateway(SGLangEngine(scripted.url), tokenizer, admin_key=ADMIN, **options) as gateway:
        handle = await gateway.open_session(**session)
        async with aiohttp.ClientSession() as http:
            yield Bench(gateway, scripted, tokenizer, handle, http)


def user(text: str, **more: Any) -> dict[str, Any]:
    """A minimal request."""
    return {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": text}], **more}


def follow(body: dict[str, Any], reply: dict[str, Any], *content: dict[str, Any] | str) -> dict[str, Any]:
    """The next request of a faithful client: the reply echoed, then a user message."""
    blocks = [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]
    echoed = {"role": "assistant", "content": reply["content"]}
    return {**body, "messages": [*body["messages"], echoed, {"role": "user", "content": blocks}]}
