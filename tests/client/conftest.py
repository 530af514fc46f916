"""The four clients behind one async face, so that one suite runs against them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.support.gateways import ADMIN, NONE, follow, user
from turnloom import BlockingClient, Client, Gateway
from turnloom.engine.sglang import SGLangEngine
from turnloom.testing.scripted_engine import ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer


class Async:
    """A blocking object's methods, each awaited in a thread; what they return is wrapped where it is a session."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        async def called(*args: Any, **kwargs: Any) -> Any:
            answer = await asyncio.to_thread(found, *args, **kwargs)
            return Async(answer) if hasattr(answer, "finish") else answer

        return called


@dataclass
class Side:
    """One client, and the engine behind its gateway."""

    client: Any
    engine: ScriptedEngine
    url: str

    async def talk(self, session: Any, *texts: str) -> None:
        """Turns of one conversation, each going on from the one before."""
        body, reply = user(texts[0]), {}
        async with aiohttp.ClientSession() as http:
            for number, text in enumerate(texts):
                if number:
                    body = follow(body, reply, text)
                async with http.post(f"{session.base_url}/v1/messages", json=body) as answer:
                    reply = await answer.json()
                    assert answer.status == 200, reply


@asynccontextmanager
async def side(kind: str, **options: Any) -> AsyncIterator[Side]:
    tokenizer = qwen_tokenizer("qwen2.5")
    engine = ScriptedEngine(["One", "Two", "Three", "Four"], tokenizer=tokenizer, end_id=tokenizer.control_tokens["<|im_end|>"])

    def make(kind: Callable[..., Any]) -> Any:
        return kind(SGLangEngine(engine.url), tokenizer, admin_key=ADMIN, patience=NONE, **options)

    async with engine:
        if kind == "in process, sync":
            inner = make(Gateway.background)
            background = await asyncio.to_thread(inner.__enter__)
            try:
                yield Side(Async(background), engine, background.url)
            finally:
                await asyncio.to_thread(inner.__exit__, None, None, None)
            return
        async with make(Gateway) as gateway:
            if kind == "in process, async":
                yield Side(gateway, engine, gateway.url)
            elif kind == "remote, async":
                async with Client(gateway.url, ADMIN) as client:
                    yield Side(client, engine, gateway.url)
            else:
                blocking = BlockingClient(gateway.url, ADMIN)
                await asyncio.to_thread(blocking.__enter__)
                try:
                    yield Side(Async(blocking), engine, gateway.url)
                finally:
                    await asyncio.to_thread(blocking.__exit__, None, None, None)


KINDS = ["in process, async", "in process, sync", "remote, async", "remote, sync"]


@pytest.fixture(params=KINDS)
async def one(request: pytest.FixtureRequest) -> AsyncIterator[Side]:
    async with side(request.param) as held:
        yield held
