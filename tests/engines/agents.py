"""Agents that only talk: the official Anthropic SDK, streaming, several turns each, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import anthropic
from anthropic.types import MessageParam

from turnloom import Gateway
from turnloom.gateway.api import SessionHandle

MAX_TOKENS = 80


@dataclass
class Talker:
    """One session. `streaming` is set while a reply is on its way and some of it is here; `stops` are how replies ended."""

    handle: SessionHandle
    max_tokens: int = MAX_TOKENS
    streaming: asyncio.Event = field(default_factory=asyncio.Event)
    stops: list[str | None] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finished: bool = False

    async def talk(self, turns: int) -> None:
        """Raises what the SDK raises: nothing is asked twice."""
        messages: list[MessageParam] = []
        async with anthropic.AsyncAnthropic(base_url=self.handle.base_url, api_key=self.handle.key, max_retries=0, timeout=300) as client:
            for turn in range(turns):
                messages.append({"role": "user", "content": f"{turn}: say more of session {self.handle.id[:6]}"})
                said = ""
                async with client.messages.stream(model="m", max_tokens=self.max_tokens, messages=messages) as stream:
                    async for text in stream.text_stream:
                        said += text
                        self.streaming.set()
                    final = await stream.get_final_message()
                self.streaming.clear()
                assert "".join(block.text for block in final.content if block.type == "text") == said
                self.stops.append(final.stop_reason)
                self.sampled.append(final.usage.output_tokens)
                self.texts.append(said)
                messages.append({"role": "assistant", "content": said})
        self.finished = True


@dataclass
class Crowd:
    talkers: list[Talker]
    turns: int

    @staticmethod
    async def of(gateway: Gateway, count: int, turns: int, max_tokens: int = MAX_TOKENS) -> Crowd:
        return Crowd([Talker(await gateway.open_session(), max_tokens) for _ in range(count)], turns)

    async def talk(self) -> None:
        await asyncio.gather(*(talker.talk(self.turns) for talker in self.talkers))

    @property
    def whole(self) -> bool:
        """Every reply has all the tokens that were asked for: the model never ends one by itself."""
        return all(
            talker.stops == ["max_tokens"] * self.turns and talker.sampled == [talker.max_tokens] * self.turns for talker in self.talkers
        )


async def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
