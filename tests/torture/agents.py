"""Scripted agents, one to a session: each asks until it has a whole reply, whatever breaks meanwhile, and goes on from that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.torture.streams import STREAMS, Broken, Json

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}
PAUSE = 0.05
AGAIN = "x-stainless-retry-count"


@dataclass(frozen=True)
class Got:
    """One whole reply, as its agent read it: its text, and each call's name and arguments."""

    mark: str
    text: str
    calls: tuple[tuple[str, str], ...]


@dataclass
class Agent:
    """`says_so`: it names its retries as the official SDKs do, and so may leave when it likes. `base` is read anew for each request."""

    number: int
    dialect: str
    key: str
    tools: bool
    says_so: bool
    rng: random.Random
    got: list[Got] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    history: list[Json] = field(default_factory=list)

    async def run(self, http: aiohttp.ClientSession, base: str, first: int, end: int) -> None:
        """Turns `first` to `end` of its one conversation."""
        for turn in range(first, end):
            mark = f"s{self.number}-0-{turn}"
            self._say(f"ask {mark} please")
            reply = await self._until_whole(http, base)
            self.got.append(Got(mark, *self._heard(reply)))
            await asyncio.sleep(self.rng.random() * 0.05)

    async def _until_whole(self, http: aiohttp.ClientSession, base: str) -> Json:
        stream, body = STREAMS[self.dialect], self._body()
        attempt = 0
        while True:
            headers = {"Authorization": f"Bearer {self.key}"} | ({AGAIN: str(attempt)} if self.says_so else {})
            leave = self.rng.randint(1, 2000) if self.says_so and self.rng.random() < 0.15 else None
            raw = b""
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, asyncio.TimeoutError, Broken):
                async with http.post(base + stream.path, json=body, headers=headers) as answer:
                    if answer.status in (429, 500, 503, 529):
                        self.counted[f"status {answer.status}"] += 1
                    elif answer.status != 200:
                        raise AssertionError(f"{self.dialect}: {answer.status} {await answer.text()}")
                    else:
                        async for piece in answer.content.iter_any():
                            raw += piece
                            if leave is not None and len(raw) > leave:
                                self.counted["left"] += 1
                                raw = b""
                                break
                        if (whole := stream.whole(raw)) is not None:
                            return whole
            attempt += 1
            self.counted["retries"] += 1
            await asyncio.sleep(PAUSE)

    def _say(self, text: str) -> None:
        if self.dialect == "gemini":
            answers = [
                {
                    "functionResponse": {
                        "name": p["functionCall"]["name"],
                        "id": p["functionCall"].get("id"),
                        "response": {"output": "found"},
                    }
                }
                for p in (self.history[-1]["parts"] if self.history else ())
                if "functionCall" in p
            ]
            self.history.append({"role": "user", "parts": [*answers, {"text": text}]})
        elif self.dialect == "openai_responses":
            called = [item for item in self.history if item.get("type") == "function_call"]
            answered = {item["call_id"] for item in self.history if item.get("type") == "function_call_output"}
            for item in called:
                if item["call_id"] not in answered:
                    self.history.append({"type": "function_call_output", "call_id": item["call_id"], "output": "found"})
            self.history.append({"type": "message", "role": "user", "content": text})
        elif self.dialect == "openai_chat":
            for call in (self.history[-1].get("tool_calls") or ()) if self.history else ():
                self.history.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
            self.history.append({"role": "user", "content": text})
        else:
            said = self.history[-1]["content"] if self.history else []
            results = [{"type": "tool_result", "tool_use_id": b["id"], "content": "found"} for b in said if b["type"] == "tool_use"]
            self.history.append({"role": "user", "content": [*results, {"type": "text", "text": text}]})

    def _body(self) -> Json:
        tool = {"name": "look", "description": "Looks"}
        if self.dialect == "gemini":
            declared = {"tools": [{"functionDeclarations": [{**tool, "parameters": SCHEMA}]}]} if self.tools else {}
            return {"contents": self.history, **declared}
        if self.dialect == "openai_responses":
            declared = {"tools": [{"type": "function", **tool, "parameters": SCHEMA}]} if self.tools else {}
            return {"model": "m", "stream": True, "input": self.history, **declared}
        if self.dialect == "openai_chat":
            declared = {"tools": [{"type": "function", "function": {**tool, "parameters": SCHEMA}}]} if self.tools else {}
            return {"model": "m", "stream": True, "messages": self.history, **declared}
        declared = {"tools": [{**tool, "input_schema": SCHEMA}]} if self.tools else {}
        return {"model": "m", "max_tokens": 500, "stream": True, "messages": self.history, **declared}

    def _heard(self, reply: Json) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Put the reply into the history as this client does; its text and its calls."""
        if self.dialect == "gemini":
            content = reply["candidates"][0]["content"]
            self.history.append({"role": "model", "parts": content["parts"]})
            calls = [(p["functionCall"]["name"], p["functionCall"]["args"]) for p in content["parts"] if "functionCall" in p]
            return "".join(p.get("text", "") for p in content["parts"]), _spelled(calls)
        if self.dialect == "openai_responses":
            self.history += reply["output"]
            calls = [(i["name"], json.loads(i["arguments"])) for i in reply["output"] if i["type"] == "function_call"]
            said = [part["text"] for i in reply["output"] if i["type"] == "message" for part in i["content"]]
            return "".join(said), _spelled(calls)
        if self.dialect == "openai_chat":
            message = reply["choices"][0]["message"]
            self.history.append({"role": "assistant", **{name: value for name, value in message.items() if value}})
            calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
            return message["content"], _spelled(calls)
        self.history.append({"role": "assistant", "content": reply["content"]})
        calls = [(b["name"], b["input"]) for b in reply["content"] if b["type"] == "tool_use"]
        return "".join(b["text"] for b in reply["content"] if b["type"] == "text"), _spelled(calls)


def _spelled(calls: list[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, json.dumps(arguments, sort_keys=True, ensure_ascii=False)) for name, arguments in calls)
