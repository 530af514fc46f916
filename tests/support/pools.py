"""A gateway before several scripted engines that share one script: whoever is asked goes on with the same reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from tests.support.gateways import ADMIN, Bench
from turnloom.engine.pool import Patience
from turnloom.gateway.api import Gateway
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.tokenizer import HFTokenizer

QUICK = Patience(attempts=3, seconds=60, pause=0.0, longest=0.0)
"""It waits for nobody."""


class Story:
    """One reply to every prompt, and what goes wrong with one request after the other.

    `breaks` holds, for each request in the order in which they come, the tokens that it gives
    before its fault; the requests after them give all that is left of the reply.
    """

    def __init__(self, tokenizer: HFTokenizer, reply: str, *breaks: tuple[int, Fault], chunk: int = 3, **more: Any) -> None:
        self.whole = [*tokenizer.encode(reply), tokenizer.control_tokens["<|im_end|>"]]
        self.breaks, self.chunk, self.more = list(breaks), chunk, more
        self.prompt: list[int] | None = None
        """Of the turn that was begun last."""
        self.asked: list[tuple[str, list[int]]] = []
        """Who was asked, with which prompt; of all engines, in order."""

    def _given(self, prompt: list[int]) -> int:
        """How much of the reply the prompt ends with, where it goes on from the last one that was new."""
        start = len(self.prompt or ())
        if self.prompt is None or prompt != [*self.prompt, *self.whole[: len(prompt) - start]]:
            self.prompt, start = prompt, len(prompt)
        return len(prompt) - start

    def of(self, name: str) -> Any:
        def script(body: dict[str, Any], _: int) -> Reply:
            prompt = list(body["input_ids"])
            self.asked.append((name, prompt))
            rest = self.whole[self._given(prompt) :]
            if len(self.asked) > len(self.breaks):
                return Reply(ids=tuple(rest), chunk=self.chunk, **self.more)
            given, fault = self.breaks[len(self.asked) - 1]
            return replace(spoiled(rest, given, fault), chunk=self.chunk, **self.more)

        return script


_HALF = {Fault.STALL, Fault.CUT, Fault.ERROR_EVENT, Fault.GARBAGE, Fault.ABORT, Fault.ABORT_COLLAPSED, Fault.ABORT_400, Fault.ABORT_503}
"""Faults that come after half of the tokens."""


def spoiled(rest: Sequence[int], given: int, fault: Fault) -> Reply:
    """The fault after so many of the tokens, where it can come after some."""
    if fault in _HALF:
        return Reply(ids=(*rest[:given], *[0] * max(given, 1)), fault=fault)
    if fault is Fault.NO_FINISH:
        return Reply(ids=tuple(rest[:given] or rest), fault=fault)
    return Reply(ids=tuple(rest), fault=fault)


@asynccontextmanager
async def pooled(
    engines: Sequence[ScriptedEngine] | Mapping[str, ScriptedEngine], tokenizer: Any = None, **options: Any
) -> AsyncIterator[Bench]:
    """Engines of one pool, or one of each pool by name. Options starting with `session_` go to open_session, the rest to Gateway."""
    session = {k.removeprefix("session_"): options.pop(k) for k in list(options) if k.startswith("session_")}
    tokenizer = tokenizer or qwen_tokenizer("qwen2.5")
    options.setdefault("patience", QUICK)
    async with AsyncExitStack() as stack:
        several = list(engines.values()) if isinstance(engines, Mapping) else list(engines)
        for each in several:
            await stack.enter_async_context(each)
        urls: Any = {n: e.url for n, e in engines.items()} if isinstance(engines, Mapping) else ",".join(e.url for e in several)
        gateway = await stack.enter_async_context(Gateway(urls, tokenizer, admin_key=ADMIN, **options))
        handle = await gateway.open_session(**session)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        own = tokenizer["policy"] if isinstance(tokenizer, dict) else tokenizer
        yield Bench(gateway, several[0], own, handle, http)


async def until(*facts: Any) -> None:
    """Let others run until every fact (a function) holds."""
    async with asyncio.timeout(60):
        while not all(fact() for fact in facts):
            await asyncio.sleep(0.002)
