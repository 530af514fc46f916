"""Drives whole sessions through the real main path in memory, with an engine that remembers every call it got.

A session is a list of (action, seed) steps. The client keeps its histories as
Anthropic JSON, echoes replies the way real clients do, and forks, retries and
interleaves conversations. The log of the engine is the oracle of the laws.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.properties.engine import RecordingEngine
from tests.properties.replies import TOOLS, Replies, words
from tests.properties.subjects import Subject
from tests.properties.tongues import TONGUES, Tongue
from turnloom.core.match import CANONICAL, Matcher
from turnloom.core.tree import Tree
from turnloom.core.unroll import Unrolled
from turnloom.errors import EngineAborted, EngineOverloaded, EngineUnavailable, RenderError
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.observe import Observer
from turnloom.gateway.policy import SAMPLED, History
from turnloom.gateway.session import Session
from turnloom.gateway.turn import Parts, Served, take_turn
from turnloom.render.contract import Rendered, Renderer, Unbridgeable
from turnloom.store.contract import Limits, SessionRow
from turnloom.store.memory import MemoryStore
from turnloom.types import Message, Request, Sampling, Tool, ToolResult, Turn
from turnloom.wire.contract import Head, Reply

ACTIONS = ("continue", "continue", "continue", "retry", "branch", "subagent", "edit", "tools", "compact", "client_assistant", "system_mid")
WIRE_TOOLS = [{"name": t.name, "description": t.description, "input_schema": json.loads(t.parameters)} for t in TOOLS]


@dataclass(frozen=True, slots=True)
class Written:
    """One call of the renderer: what it was asked and what it gave. `reply` None is a whole prompt."""

    reply: Message | None
    output: Sequence[int]
    messages: Sequence[Message]
    tools: Sequence[Tool]
    rendered: Rendered
    calls_before: int = 0


class WatchedRenderer:
    """The renderer, remembering what it wrote."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.end_ids = renderer.end_ids
        self.written: list[Written] = []

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        rendered = self._renderer.render(messages, tools)
        self.written.append(Written(None, (), messages, tools, rendered))
        return rendered

    def bridge(
        self, reply: Message, output: Sequence[int], new: Sequence[Message], tools: Sequence[Tool], *, calls_before: int = 0
    ) -> Rendered | Unbridgeable:
        found = self._renderer.bridge(reply, output, new, tools, calls_before=calls_before)
        if isinstance(found, Rendered):
            self.written.append(Written(reply, output, new, tools, found, calls_before))
        return found


class MemoryResponder:
    """Stands where the socket is. `leave_at` is the event at which the client goes away."""

    number = 0

    def __init__(self, leave_at: int | None) -> None:
        self.leave_at = leave_at
        self.events = 0
        self.reply: Reply | None = None

    def open(self, head: Head) -> None:
        pass

    async def event(self, event: object) -> None:
        self.events += 1
        if self.leave_at == self.events:
            raise ConnectionResetError("gone")

    async def finish(self, reply: Reply) -> None:
        if self.leave_at == 0:
            raise ConnectionResetError("gone at the last byte")
        self.reply = reply


@dataclass
class Conversation:
    body: dict[str, Any]
    trail: list[list[dict[str, Any]]] = field(default_factory=list)
    """Earlier states of `messages`, to branch from."""


class Driver:
    """One session of one subject. `subjects` are those of the pools, by name.

    `refused` counts requests that the template refused, by what they held and its words."""

    def __init__(
        self,
        subject: Subject,
        replies: Replies,
        seed: int,
        history: History = SAMPLED,
        matcher: Matcher = CANONICAL,
        tongue: Tongue = TONGUES["anthropic"],
        engine: Callable[..., Any] = RecordingEngine,
    ) -> None:
        self.subject, self.replies, self.history, self.matcher = subject, replies, history, matcher
        self.rng = random.Random(seed)
        self.engine = engine(subject.tokenizer, replies, self.rng)
        self.subjects = {"": subject}
        self.renderer = WatchedRenderer(subject.renderer)
        self.tongue = tongue
        ticks = iter(range(10**9))
        self.parts = Parts(
            policy=Served(self.engine, subject.tokenizer, self.renderer, subject.parser, "m"),
            observe=Observer(Metrics()),
            clock=lambda: float(next(ticks)),
            new_id=lambda: f"{next(ticks):032x}",
            history=history,
        )
        self.requests: dict[str, Request] = {}
        self.refused: Counter[tuple[str, str]] = Counter()
        self.checked: Counter[int] = Counter()

    async def run(self, steps: list[tuple[str, int]]) -> Session:
        store = MemoryStore()
        await store.open()
        row = SessionRow("s", "h", 0.0, Sampling(), Limits())
        await store.put_session(row)
        self.store, self.session = store, Session(row, store, Tree(self.matcher))
        self.conversations = [Conversation(self._fresh("main"))]
        for action, seed in steps:
            self.rng.seed(seed)
            await getattr(self, f"_{action}")(self.rng.choice(self.conversations))
        return self.session

    def _fresh(self, name: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "m", "max_tokens": 5000, "messages": [self._user()]}
        if self.rng.random() < 0.8:
            body["system"] = f"You are {name}. " + self._words()
        if self.rng.random() < 0.7:
            body["tools"] = copy.deepcopy(WIRE_TOOLS[: self.rng.randint(1, 2)])
        return body

    def _user(self) -> dict[str, Any]:
        text = self._words()
        return {"role": "user", "content": text if self.rng.random() < 0.5 else [{"type": "text", "text": text}]}

    async def _ask(self, conversation: Conversation) -> None:
        """One request; on a reply, echo it as some client would and answer its calls."""
        body = conversation.body
        conversation.trail.append(copy.deepcopy(body["messages"]))
        request = self._routed(self.tongue.dialect.read(self.tongue.spoken(body), self.tongue.envelope))
        leave = self.rng.choices([None, 0, self.rng.randint(1, 20)], [88, 4, 8])[0]
        out = MemoryResponder(leave)
        before = len(self.engine.calls)
        try:
            await take_turn(self.parts, self.session, self.tongue.dialect, request, out)  # type: ignore[arg-type]
        except RenderError as error:
            assert len(self.engine.calls) == before
            self.refused["; ".join(shapes(request.messages)), str(error)] += 1
            conversation.body, conversation.trail = self._fresh("again"), []
            return
        except (EngineAborted, EngineOverloaded, EngineUnavailable, ConnectionResetError):
            assert len(self.engine.calls) == before + 1
            return
        finally:
            if len(self.engine.calls) > before:
                self.requests[self.engine.calls[-1].rid] = request
        assert out.reply is not None
        content = self.tongue.heard(self.tongue.dialect.write([out.reply]))
        body["messages"].append({"role": "assistant", "content": self._echo(content)})
        body["messages"].append({"role": "user", "content": self._answers(content)})

    def _routed(self, request: Request) -> Request:
        """The request with the pool that answers it."""
        return request

    def _answers(self, content: list[dict[str, Any]]) -> list[dict[str, Any]]:
        results = [{"type": "tool_result", "tool_use_id": b["id"], "content": self._words()} for b in content if b["type"] == "tool_use"]
        if self.rng.random() < 0.1:
            results.reverse()
        return results + ([{"type": "text", "text": self._words()}] if not results or self.rng.random() < 0.3 else [])

    def _words(self) -> str:
        return words(self.rng, self.replies.control)

    def _echo(self, content: list[dict[str, Any]]) -> Any:
        """The reply as clients send it back (reasoning dropped or trimmed, arguments respelled, edges cut, cache marks)."""
        style = self.rng.choice(["faithful", "no_thinking", "trim", "reorder", "defaults", "cache", "string", "new_ids"])
        out = copy.deepcopy(content)
        if style == "no_thinking":
            # A reply of nothing but reasoning would be gone: in some dialects there is no word for an empty message.
            out = [b for b in out if b["type"] != "thinking"] or out
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
        if style == "string" and len(out) == 1 and out[0]["type"] == "text" and "wire" not in out[0]:
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
            message["content"] = "rewritten " + self._words()
        elif isinstance(message["content"], str):
            message["content"] += " edited"
        else:
            message["content"].append({"type": "text", "text": "edited"})
        await self._ask(conversation)

    async def _tools(self, conversation: Conversation) -> None:
        conversation.body["tools"] = copy.deepcopy(self.rng.choice([WIRE_TOOLS[:1], WIRE_TOOLS, WIRE_TOOLS[1:]]))
        await self._ask(conversation)

    async def _compact(self, conversation: Conversation) -> None:
        conversation.body["messages"] = [{"role": "user", "content": "Summary so far: " + self._words()}]
        await self._ask(conversation)

    async def _client_assistant(self, conversation: Conversation) -> None:
        conversation.body["messages"] += [{"role": "assistant", "content": self._words()}, self._user()]
        await self._ask(conversation)

    async def _system_mid(self, conversation: Conversation) -> None:
        conversation.body["messages"] += [{"role": "system", "content": "Note: " + self._words()}, self._user()]
        await self._ask(conversation)

    def unroll(self) -> Unrolled:
        return self.session.unroll()


def shapes(messages: Sequence[Message]) -> list[str]:
    """What the profile calls the ways in which these messages go on, and what no profile promises."""
    found: set[str] = set()
    made: list[str] = []
    answered: list[str] = []
    for before, message in zip([None, *messages], messages, strict=False):
        kinds = (before.role if before else "", message.role)
        if message.role == "assistant":
            made, answered = [c.id for c in message.calls], []
        elif message.role == "tool":
            calls = [p.call_id for p in message.parts if isinstance(p, ToolResult)]
            found.update("result of no call" for c in calls if c not in made)
            answered += [c for c in calls if c in made]
        if message.role == "tool":
            found.add("tool+tool" if kinds[0] == "tool" else "tool")
        elif message.role == "user":
            found.add({"user": "user+user", "tool": "tool+user", "system": "system+user"}.get(kinds[0], "user"))
        if message.role != "tool" and answered != made[: len(answered)]:
            found.add("results out of order")
    if answered != made[: len(answered)]:
        found.add("results out of order")
    return sorted(found)


UNPROMISED = frozenset({"result of no call", "results out of order"})
"""Histories that no template must take."""


def unpromised(driver: Driver, turn: Turn) -> bool:
    """Whether the template may refuse or fail to go on with what this turn's request holds."""
    profile = driver.subjects[turn.pool].profile
    promised = {name: profile.bridges[name] == profile.whole[name] == "yes" for name in profile.bridges}
    return not all(promised.get(shape, False) for shape in shapes(driver.requests[turn.id].messages))
