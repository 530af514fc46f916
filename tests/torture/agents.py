"""Scripted agents: each asks until it has a whole reply, whatever breaks meanwhile, goes on from that, and finishes its sessions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from tests.torture.streams import STREAMS, WHOLE, Broken, Json

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}
PAUSE = 0.05
RETRY_COUNT, KEY = "x-stainless-retry-count", "Idempotency-Key"
ADMIN = "admin-secret"
COME_BACK = (429, 500, 503, 529)
"""Statuses after which a client asks again."""

Manner = Literal["counts", "keys", "silent"]


@dataclass(frozen=True)
class Got:
    """One whole reply, as its agent read it: its text, each call's name and arguments, the turn it says it is, and when it was whole."""

    mark: str
    text: str
    calls: tuple[tuple[str, str], ...]
    turn: str
    at: float


@dataclass
class Life:
    """One session of an agent. `reward` and `samples` are what it was finished with and gave, once that was answered."""

    id: str
    key: str
    got: list[Got] = field(default_factory=list)
    struck: int = 0
    """Kills that found it with a request under way."""
    reward: float | None = None
    samples: list[Json] = field(default_factory=list)


@dataclass
class Agent:
    """`manner`: it counts its retries as the official SDKs do, or gives each request a key of its own, and then may leave when it
    likes; or it says nothing, and stays. `phase` is what it is doing."""

    number: int
    dialect: str
    manner: Manner
    tools: bool
    rng: random.Random
    http: aiohttp.ClientSession
    base: str
    lives: list[Life] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    history: list[Json] = field(default_factory=list)
    phase: str = "thinking"
    opened: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        """One session after the other, until it is told to stop; the last one is finished too."""
        while not stop.is_set():
            life = await self._open()
            for turn in range(self.rng.randint(2, 8)):
                mark = f"{life.id}-{turn}"
                self._say(f"ask {mark} please")
                reply, turn_id = await self._until_whole(life, mark)
                life.got.append(Got(mark, *self._heard(reply), turn_id, time.time()))
                self.phase = "thinking"
                await asyncio.sleep(self.rng.random() * 0.05)
                if stop.is_set():
                    break
            await self._finish(life)

    def struck(self) -> None:
        """The gateway is killed now."""
        self.counted[f"killed: {self.phase}"] += 1
        if self.lives and self.phase in ("asked", "reading", "asking again"):
            self.lives[-1].struck += 1

    async def _open(self) -> Life:
        """Where nobody answered, the session may be there or not: another one is opened."""
        self.phase, self.history = "opening", []
        while True:
            self.opened += 1
            if raw := await self._admin("POST", "", {"id": f"s{self.number}-{self.opened}"}):
                self.lives.append(Life(f"s{self.number}-{self.opened}", json.loads(raw)["key"]))
                return self.lives[-1]

    async def _finish(self, life: Life) -> None:
        self.phase, reward = "finishing", float(self.rng.randint(0, 9))
        while not await self._admin("POST", f"/{life.id}/finish", {"reward": reward}):
            pass
        while not (lines := await self._admin("GET", f"/{life.id}/samples")):
            pass
        life.reward, life.samples = reward, [json.loads(line) for line in lines.splitlines()]
        self.phase = "thinking"

    async def _admin(self, method: str, path: str, body: Json | None = None) -> bytes:
        """Nothing where it was not answered. Raises AssertionError where it was refused."""
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, asyncio.TimeoutError):
            headers = {"Authorization": f"Bearer {ADMIN}"}
            async with self.http.request(method, f"{self.base}/api/v1/sessions{path}", json=body, headers=headers) as answer:
                raw = await answer.read()
                if answer.status < 300:
                    return raw
                if answer.status not in COME_BACK:
                    raise AssertionError(f"{method} {path}: {answer.status} {raw[:300]!r}")
        await asyncio.sleep(PAUSE)
        return b""

    async def _until_whole(self, life: Life, mark: str) -> tuple[Json, str]:
        """The reply, and the turn that it says it is."""
        attempt = 0
        while True:
            headers = {"Authorization": f"Bearer {life.key}"}
            if self.manner == "counts":
                headers[RETRY_COUNT] = str(attempt)
            elif self.manner == "keys":
                headers[KEY] = mark
            self.phase = "asked"
            with contextlib.suppress(aiohttp.ClientError, ConnectionError, asyncio.TimeoutError, Broken):
                attempted = self._streamed if self.rng.random() < 0.8 else self._in_one
                if (whole := await attempted(headers)) is not None:
                    return whole
            attempt, self.phase = attempt + 1, "asking again"
            self.counted["retries"] += 1
            await asyncio.sleep(PAUSE)

    def _post(self, path: str, stream: bool, headers: dict[str, str]) -> Any:
        asked = {} if self.dialect == "gemini" else {"stream": stream}
        return self.http.post(self.base + path, json=self._body() | asked, headers=headers)

    async def _streamed(self, headers: dict[str, str]) -> tuple[Json, str] | None:
        stream, raw = STREAMS[self.dialect], b""
        leave = self.rng.randint(1, 2000) if self.manner != "silent" and self.rng.random() < 0.15 else None
        hurry = self.rng.random() < 0.5
        async with self._post(stream.path, True, headers) as answer:
            if self._turned_away(answer, await answer.text() if answer.status != 200 else ""):
                return None
            async for piece in answer.content.iter_any():
                raw, self.phase = raw + piece, "reading"
                if leave is not None and len(raw) > leave:
                    self.counted["left"] += 1
                    return None
                if hurry and stream.whole(raw) is not None:
                    break
            whole = stream.whole(raw)
            return None if whole is None else (whole, _turn(answer))

    async def _in_one(self, headers: dict[str, str]) -> tuple[Json, str] | None:
        async with self._post(WHOLE[self.dialect], False, headers) as answer:
            raw = await answer.read()
            return None if self._turned_away(answer, raw[:300].decode()) else (json.loads(raw), _turn(answer))

    def _turned_away(self, answer: aiohttp.ClientResponse, words: str) -> bool:
        """Raises AssertionError where it is not to come back."""
        if answer.status in COME_BACK:
            self.counted[f"status {answer.status}"] += 1
        elif answer.status != 200:
            raise AssertionError(f"{self.dialect}: {answer.status} {words}")
        return answer.status != 200

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
            return {"model": "m", "input": self.history, **declared}
        if self.dialect == "openai_chat":
            declared = {"tools": [{"type": "function", "function": {**tool, "parameters": SCHEMA}}]} if self.tools else {}
            return {"model": "m", "messages": self.history, **declared}
        declared = {"tools": [{**tool, "input_schema": SCHEMA}]} if self.tools else {}
        return {"model": "m", "max_tokens": 500, "messages": self.history, **declared}

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
            self.history.append({**{name: value for name, value in message.items() if value}, "role": "assistant"})
            calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]
            return message["content"] or "", _spelled(calls)
        self.history.append({"role": "assistant", "content": reply["content"]})
        calls = [(b["name"], b["input"]) for b in reply["content"] if b["type"] == "tool_use"]
        return "".join(b["text"] for b in reply["content"] if b["type"] == "text"), _spelled(calls)


def _turn(answer: aiohttp.ClientResponse) -> str:
    return answer.headers["x-request-id"].removeprefix("req_")


def _spelled(calls: list[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, json.dumps(arguments, sort_keys=True, ensure_ascii=False)) for name, arguments in calls)
