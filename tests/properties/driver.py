"""Drives whole sessions through the real main path in memory, with an engine that remembers every call it got.

A session is a list of (action, seed) steps. The client keeps its histories as
Anthropic JSON, echoes replies the way real clients do, and forks, retries and
interleaves conversations. The log of the engine is the oracle of the laws.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from turnloom.core.unroll import Unrolled
from turnloom.engine.contract import AbortOutcome, Capabilities, Chunk
from turnloom.errors import EngineAborted, EngineUnavailable
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.session import Session
from turnloom.gateway.turn import Parts, take_turn
from turnloom.parse.formats import parser_factory
from turnloom.render.contract import Tokenizer
from turnloom.render.template import ChatTemplateRenderer
from turnloom.store.contract import Limits, SessionRow
from turnloom.store.memory import MemoryStore
from turnloom.types import Finish, FinishReason, FloatArray, IntArray, Sampling, floats, ids
from turnloom.wire.anthropic import AnthropicDialect
from turnloom.wire.contract import Reply

WORDS = "the a file README.md fix test 你好 世界 naïve 🙂 def main(): return 42 <b> {x} \n\n   indented \t émigré 1234567 --".split(" ")
CONTROL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
TOOLS = [
    {"name": "read_file", "description": "Read a file", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}},
    {
        "name": "bash",
        "description": "Run",
        "input_schema": {"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}}},
    },
]
ACTIONS = ("continue", "continue", "continue", "retry", "branch", "subagent", "edit", "tools", "compact", "client_assistant", "system_mid")


@dataclass
class Call:
    """What the engine was asked and what it gave out."""

    rid: str
    prompt: IntArray
    output: IntArray
    logprobs: FloatArray


class RecordingEngine:
    """Samples a scripted text, split into random pieces that BPE would not choose, and ends in every way an engine can."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.tokenizer, self.rng = tokenizer, rng
        self.calls: list[Call] = []

    async def capabilities(self) -> Capabilities:
        return Capabilities("m", 100_000, self.tokenizer.vocab_size, "raw")

    async def sample(self, prompt: IntArray, sampling: Sampling, *, rid: str, routing_key: str = "") -> AsyncIterator[Chunk]:
        rng = self.rng
        end = rng.choices(["stop", "other", "length", "abort", "die", "empty"], [70, 8, 10, 4, 4, 4])[0]
        tokens = [] if end == "empty" else self._tokens(rng.choice([self._text, self._call, self._bad_call])(rng))
        if end in ("stop", "empty"):
            tokens.append(self.tokenizer.control_tokens["<|im_end|>"])
        elif end == "other":
            tokens.append(self.tokenizer.control_tokens["<|endoftext|>"])
        sampled = ids(tokens)
        logprobs = floats([-rng.random() - 0.001 * i for i in range(len(tokens))])
        call = Call(rid, prompt.copy(), ids(), floats())
        self.calls.append(call)
        at = 0
        while at < len(tokens):
            step = rng.randint(1, 7)
            call.output, call.logprobs = sampled[: at + step], logprobs[: at + step]
            yield Chunk(sampled[at : at + step], logprobs[at : at + step])
            at += step
            if end == "die" and at < len(tokens) and rng.random() < 0.5:
                raise EngineUnavailable("died")
        reason = {"length": FinishReason.LENGTH, "abort": FinishReason.ABORT}.get(end, FinishReason.STOP)
        yield Chunk(ids(), floats(), Finish(reason))

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = []
        while text:
            cut = self.rng.randint(1, 9)
            tokens += self.tokenizer.encode(text[:cut])
            text = text[cut:]
        return tokens

    def _text(self, rng: random.Random) -> str:
        think = f"<think>\n{words(rng)}\n</think>\n\n" if rng.random() < 0.3 else ""
        return think + words(rng)

    def _call(self, rng: random.Random) -> str:
        def body() -> str:
            value = {"name": "bash", "arguments": {"n": rng.randint(0, 9), "cmd": words(rng)}}
            return json.dumps(value, ensure_ascii=rng.random() < 0.5)

        calls = "\n".join(f"<tool_call>\n{body()}\n</tool_call>" for _ in range(rng.randint(1, 2)))
        return self._text(rng) + "\n" + calls

    def _bad_call(self, rng: random.Random) -> str:
        return self._text(rng) + rng.choice(
            ["<tool_call>\n{bad", "<tool_call>{}</tool_call>", '<tool_call>{"name": "nope", "arguments": {}}</tool_call>']
        )

    async def abort(self, rid: str) -> AbortOutcome:
        return AbortOutcome.VERIFIED

    async def prompt_logprobs(self, sequence: IntArray, start: int) -> FloatArray:
        raise NotImplementedError

    async def health(self) -> bool:
        return True

    async def close(self) -> None:
        return None


class MemoryResponder:
    """Stands where the socket is. `leave_at` is the event at which the client goes away."""

    def __init__(self, leave_at: int | None) -> None:
        self.leave_at = leave_at
        self.events = 0
        self.reply: Reply | None = None

    def open(self, turn_id: str, model: str, prompt_tokens: int) -> None:
        pass

    async def event(self, event: object) -> None:
        self.events += 1
        if self.leave_at == self.events:
            raise ConnectionResetError("gone")

    async def finish(self, reply: Reply) -> None:
        if self.leave_at == 0:
            raise ConnectionResetError("gone at the last byte")
        self.reply = reply

    async def close(self) -> None:
        pass


def words(rng: random.Random, control: float = 0.1) -> str:
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 8))) or "w"
    return text + (" " + rng.choice(CONTROL) + "x" if rng.random() < control else "")


@dataclass
class Conversation:
    body: dict[str, Any]
    trail: list[list[dict[str, Any]]] = field(default_factory=list)
    """Earlier states of `messages`, to branch from."""


class Driver:
    def __init__(self, tokenizer: Tokenizer, renderer: ChatTemplateRenderer, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = RecordingEngine(tokenizer, self.rng)
        self.dialect = AnthropicDialect()
        ticks = iter(range(10**9))
        self.parts = Parts(
            engine=self.engine,
            tokenizer=tokenizer,
            renderer=renderer,
            parser=parser_factory("auto", tokenizer.chat_template),
            metrics=Metrics(),
            clock=lambda: float(next(ticks)),
            new_id=lambda: f"{next(ticks):032x}",
            default_model="m",
        )
        self.bodies: dict[str, dict[str, Any]] = {}

    async def run(self, steps: list[tuple[str, int]]) -> Session:
        store = MemoryStore()
        await store.open()
        row = SessionRow("s", "h", 0.0, Sampling(), Limits())
        await store.put_session(row)
        self.store, self.session = store, Session(row, store)
        self.conversations = [Conversation(self._fresh("main"))]
        for action, seed in steps:
            self.rng.seed(seed)
            await getattr(self, f"_{action}")(self.rng.choice(self.conversations))
        return self.session

    def _fresh(self, name: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "max_tokens": 5000, "messages": [self._user()]}
        if self.rng.random() < 0.8:
            body["system"] = f"You are {name}. " + words(self.rng)
        if self.rng.random() < 0.7:
            body["tools"] = copy.deepcopy(TOOLS[: self.rng.randint(1, 2)])
        return body

    def _user(self) -> dict[str, Any]:
        text = words(self.rng)
        return {"role": "user", "content": text if self.rng.random() < 0.5 else [{"type": "text", "text": text}]}

    async def _ask(self, conversation: Conversation) -> None:
        """One request; on a reply, echo it as some client would and answer its calls."""
        body = conversation.body
        conversation.trail.append(copy.deepcopy(body["messages"]))
        request = self.dialect.read(orjson.dumps(body))
        leave = self.rng.choices([None, 0, self.rng.randint(1, 20)], [88, 4, 8])[0]
        out = MemoryResponder(leave)
        before = len(self.engine.calls)
        try:
            turn = await take_turn(self.parts, self.session, self.dialect, request, out)  # type: ignore[arg-type]
            self.bodies[turn.id] = copy.deepcopy(body)
        except (EngineAborted, EngineUnavailable, ConnectionResetError):
            assert len(self.engine.calls) == before + 1
            return
        assert out.reply is not None
        content = json.loads(self.dialect.write(out.reply))["content"]
        body["messages"].append({"role": "assistant", "content": self._echo(content)})
        results = [{"type": "tool_result", "tool_use_id": b["id"], "content": words(self.rng)} for b in content if b["type"] == "tool_use"]
        follow = results + ([{"type": "text", "text": words(self.rng)}] if not results or self.rng.random() < 0.3 else [])
        body["messages"].append({"role": "user", "content": follow})

    def _echo(self, content: list[dict[str, Any]]) -> Any:
        """The reply as clients send it back (reasoning dropped or trimmed, arguments respelled, edges cut, cache marks)."""
        style = self.rng.choice(["faithful", "no_thinking", "trim", "reorder", "defaults", "cache", "string", "new_ids"])
        out = copy.deepcopy(content)
        if style == "no_thinking":
            out = [b for b in out if b["type"] != "thinking"]
        for block in out:
            if style == "trim" and block["type"] in ("text", "thinking"):
                block[block["type"]] = block[block["type"]].strip()
            if style == "reorder" and block["type"] == "tool_use":
                block["input"] = dict(sorted(block["input"].items(), reverse=True))
            if style == "defaults" and block["type"] == "tool_use":
                block["input"] = {**block["input"], "replace_all": False, "n": str(block["input"].get("n"))}
            if style == "new_ids" and block["type"] == "tool_use":
                block["id"] = "invented"
        if style == "cache" and out:
            out[-1]["cache_control"] = {"type": "ephemeral"}
        if style == "string" and len(out) == 1 and out[0]["type"] == "text":
            return out[0]["text"]
        return out

    async def _continue(self, conversation: Conversation) -> None:
        await self._ask(conversation)

    async def _retry(self, conversation: Conversation) -> None:
        if conversation.trail:
            conversation.body["messages"] = copy.deepcopy(conversation.trail[-1])
        await self._ask(conversation)

    async def _branch(self, conversation: Conversation) -> None:
        if conversation.trail:
            conversation.body["messages"] = copy.deepcopy(self.rng.choice(conversation.trail))
            if self.rng.random() < 0.5:
                conversation.body["messages"].append(self._user())
        await self._ask(conversation)

    async def _subagent(self, conversation: Conversation) -> None:
        self.conversations.append(Conversation(self._fresh(f"sub {self.rng.randint(0, 3)}")))
        await self._ask(self.conversations[-1])

    async def _edit(self, conversation: Conversation) -> None:
        messages = conversation.body["messages"]
        message = self.rng.choice(messages)
        if message["role"] == "assistant":
            message["content"] = "rewritten " + words(self.rng)
        elif isinstance(message["content"], str):
            message["content"] += " edited"
        else:
            message["content"].append({"type": "text", "text": "edited"})
        await self._ask(conversation)

    async def _tools(self, conversation: Conversation) -> None:
        conversation.body["tools"] = copy.deepcopy(self.rng.choice([TOOLS[:1], TOOLS, TOOLS[1:]]))
        await self._ask(conversation)

    async def _compact(self, conversation: Conversation) -> None:
        conversation.body["messages"] = [{"role": "user", "content": "Summary so far: " + words(self.rng)}]
        await self._ask(conversation)

    async def _client_assistant(self, conversation: Conversation) -> None:
        conversation.body["messages"] += [{"role": "assistant", "content": words(self.rng)}, self._user()]
        await self._ask(conversation)

    async def _system_mid(self, conversation: Conversation) -> None:
        conversation.body["messages"] += [{"role": "system", "content": "Note: " + words(self.rng)}, self._user()]
        await self._ask(conversation)

    def unroll(self) -> Unrolled:
        return self.session.unroll()
