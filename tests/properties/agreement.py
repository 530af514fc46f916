"""Faithful clients: does a bridge spell what the template spells, and are its ids those of encoding that text anew?

The model writes what the template would write for its reply, and the client
sends it back unchanged. Where the template only appends (a rendering of the
longer history begins with what was rendered and said before) the text of a
bridged prompt must be the template's own. Its ids need not be: the share of
prompts whose ids also equal the full encoding is counted.
"""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from tests.properties.driver import WIRE_TOOLS, Driver, MemoryResponder
from tests.properties.replies import END, TOOLS, Replies, Said, plain_words
from tests.properties.subjects import Subject
from turnloom.core.match import call_key, visible_text
from turnloom.errors import RenderError
from turnloom.gateway.turn import take_turn
from turnloom.render.quirks import Quirk
from turnloom.types import IntArray, Message, Part, Reasoning, Text, Tool, ToolCall, ToolResult, Turn

CUT = 100
"""Sampled replies are cut at one in so many of their characters, as a model that leaves the tokenizer's own segmentation now and then."""


@dataclass
class Agreement:
    """Counts of bridged prompts. `same_ids` are of those whose text is the template's; `rewritten` are not comparable."""

    bridged: int = 0
    rewritten: int = 0
    same_text: int = 0
    same_ids: int = 0
    forked: int = 0
    rewrites: str = ""
    """The first place where the template wrote earlier text anew."""
    unread: int = 0
    """Prompts after a reply that was read as something else than the template spelled; not comparable either."""
    misreads: str = ""
    """The first of them."""
    wrong: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return self.bridged - self.rewritten - self.unread

    def add(self, other: Agreement) -> None:
        for name in ("bridged", "rewritten", "same_text", "same_ids", "forked", "unread"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.rewrites = self.rewrites or other.rewrites
        self.misreads = self.misreads or other.misreads
        self.wrong += other.wrong


class Faithful:
    """One conversation of a faithful client. `cut`: its replies leave the tokenizer's own segmentation now and then."""

    def __init__(self, subject: Subject, replies: Replies, seed: int, cut: bool) -> None:
        self.subject, self.replies, self.cut = subject, replies, cut
        self.driver = Driver(subject, replies, seed)
        self.rng = random.Random(seed)
        self.found = Agreement()
        self.tools: tuple[Tool, ...] = ()
        self.appends = True
        """So far the template only appended, and every reply was read as it was meant."""
        self.unread = False
        self.meant: Message | None = None
        control = subject.tokenizer.control_tokens
        self.closed_as = {control["<|return|>"]: control["<|end|>"]} if subject.harmony else {}
        """Harmony: what a model samples at its turn's end stays in a bridge; a history written anew has another id there."""

    async def run(self, turns: int) -> Agreement:
        driver, rng = self.driver, self.rng
        await driver.run([])
        body: dict[str, Any] = {"model": "m", "max_tokens": 5000, "messages": [{"role": "user", "content": plain_words(rng)}]}
        if rng.random() < 0.5:
            body["system"] = plain_words(rng)
        if rng.random() < 0.7:
            self.tools, body["tools"] = TOOLS, copy.deepcopy(WIRE_TOOLS)
        history: tuple[Message, ...] = driver.tongue.dialect.read(orjson.dumps(body)).messages
        before = ""
        for _ in range(turns):
            text = self.subject.whole(history, self.tools)
            self._appended(before, text)
            said = self._say(history, text)
            driver.engine.script = functools.partial(self._tokens, said)
            before = text + said.text
            out = MemoryResponder(None)
            turn = await take_turn(driver.parts, driver.session, driver.tongue.dialect, driver.tongue.dialect.read(orjson.dumps(body)), out)  # type: ignore[arg-type]
            self._compare(turn, history)
            self._read_back(driver.session.tree.reply(turn.id), said)
            assert out.reply is not None
            content = json.loads(driver.tongue.dialect.write([out.reply]))["content"]
            asked = [block["id"] for block in content if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call_id, "content": plain_words(rng)} for call_id in asked]
            follow = results or [{"type": "text", "text": plain_words(rng)}]
            body["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": follow}]
            new = driver.tongue.dialect.read(orjson.dumps({**body, "messages": body["messages"][-1:]})).messages
            tree = driver.session.tree
            history = (*tree.messages(tree.node_of[turn.id]), *(m for m in new if m.role != "system"))
        return self.found

    def _appended(self, before: str, text: str) -> None:
        if self.appends and not text.startswith(before):
            self.appends = False
            at = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), min(len(before), len(text)))
            start = max(0, at - 12)
            self.found.rewrites = f"{before[start : at + 28]!r} becomes {text[start : at + 28]!r}"

    def _read_back(self, read: Message, said: Said) -> None:
        if self.appends and self.meant is not None and _meaning(read) != _meaning(self.meant):
            self.appends, self.unread = False, True
            self.found.misreads = self.found.misreads or f"{said.text!r} is read as {read.parts!r}"

    def _compare(self, turn: Turn, history: Sequence[Message]) -> None:
        if turn.base is None or turn.fork is not None:
            self.found.forked += turn.index > 0
            return
        found, tokenizer = self.found, self.subject.tokenizer
        found.bridged += 1
        if not self.appends:
            found.unread += self.unread
            found.rewritten += not self.unread
            return
        prompt = [self.closed_as.get(token, token) for token in self.driver.engine.calls[-1].prompt.tolist()]
        whole = self.subject.renderer.render(history, self.tools).ids.tolist()
        bridged, own = tokenizer.decode(prompt), tokenizer.decode(whole)
        if bridged != own:
            at = next((i for i, (a, b) in enumerate(zip(bridged, own, strict=False)) if a != b), min(len(bridged), len(own)))
            start = max(0, at - 30)
            found.wrong.append(f"bridged {bridged[start : at + 40]!r}, the template {own[start : at + 40]!r}")
            return
        found.same_text += 1
        found.same_ids += prompt == whole

    def _say(self, history: Sequence[Message], prompt: str) -> Said:
        """The reply as the template will write it once the conversation goes on."""
        reply, new = self._reply()
        try:
            said = self._cut(prompt, self.subject.whole([*history, reply, *new], self.tools))
            if (said is None or said.end is None) and not self.subject.harmony:
                said = self._cut(prompt, self.subject.closed([*history, reply], self.tools)[1])
        except RenderError:
            said = None
        self.meant = _meant(reply, said) if said else None
        return said or Said(plain_words(self.rng), next(iter(self.replies.ends), None))

    def _cut(self, prompt: str, whole: str) -> Said | None:
        return self.replies.cut(whole[len(prompt) :]) if whole.startswith(prompt) else None

    def _reply(self) -> tuple[Message, list[Message]]:
        rng, profile = self.rng, self.subject.profile
        kinds = ["text", "call", "both", "calls"] if self.tools else ["text"]
        kind = rng.choice(kinds)
        if kind == "calls" and (Quirk.ONE_CALL in profile.quirks or self.subject.harmony):
            kind = "call"
        thought = [Reasoning(plain_words(rng))] if profile.reasoning == "kept" or profile.opens_reasoning else []
        calls = [self._call(i) for i in range({"text": 0, "call": 1, "both": 1, "calls": 2}[kind])]
        texts = [Text(f"{plain_words(rng)} {END}" if kind == "text" else plain_words(rng))] if kind in ("text", "both") else []
        if calls:
            last = calls[-1]
            calls[-1] = ToolCall(last.id, last.name, json.dumps({**json.loads(last.arguments), "cmd": f"{plain_words(rng)} {END}"}))
        new = [Message("tool", (ToolResult(c.id, "."),)) for c in calls] or [Message("user", (Text("."),))]
        return Message("assistant", (*thought, *texts, *calls)), new

    def _call(self, number: int) -> ToolCall:
        arguments = {"n": self.rng.randint(0, 9), "cmd": plain_words(self.rng)}
        return ToolCall(f"call0000{number}", "bash", json.dumps(arguments, ensure_ascii=False))

    def _tokens(self, said: Said, prompt: IntArray) -> list[int]:
        """A tokenizer that writes a space of its own before each stretch of text does so after the prompt's control token too."""
        tokenizer, text = self.subject.tokenizer, said.text
        cuts = [i for i in range(1, len(text)) if self.cut and self.rng.random() < 1 / CUT]
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        control = int(prompt[-1]) in tokenizer.special_ids
        end = next((sampled for sampled, written in self.closed_as.items() if written == said.end), said.end)
        tokens = [token for i, piece in enumerate(pieces) for token in tokenizer.encode(piece, start=control and not i)]
        return tokens if end is None else [*tokens, end]


def _meant(message: Message, said: Said) -> Message:
    """The reply less its last word, and less words that the template does not write with it."""
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, ToolCall):
            parts.append(replace(part, arguments=part.arguments.replace(f" {END}", "")))
        elif isinstance(part, Text) and (text := part.text.replace(f" {END}", "")) in said.text:
            parts.append(Text(text))
    return Message(message.role, tuple(parts))


def _meaning(message: Message) -> tuple[str, list[str]]:
    """Words and calls; a template may write no reasoning."""
    return visible_text(message), sorted(call_key(call) for call in message.calls)
