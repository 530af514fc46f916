"""Short ways to write messages and turns in tests of the pure core."""

from __future__ import annotations

import numpy as np

from turnloom.core.match import CANONICAL, Matcher
from turnloom.core.records import Pending
from turnloom.core.tree import Tree
from turnloom.core.unroll import prompt_crc
from turnloom.types import (
    Finish,
    FinishReason,
    Message,
    Outcome,
    Reasoning,
    Request,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    floats,
    ids,
)

LS = Tool("ls", "List", '{"type":"object"}')
CAT = Tool("cat", "Show", '{"type":"object"}')


def system(text: str) -> Message:
    return Message("system", (Text(text),))


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def assistant(text: str = "", *calls: ToolCall, thought: str = "") -> Message:
    parts = [Reasoning(thought)] if thought else []
    return Message("assistant", (*parts, *([Text(text)] if text else []), *calls))


def call(arguments: str = "{}", id: str = "c1", name: str = "ls") -> ToolCall:
    return ToolCall(id, name, arguments)


def result(text: str, id: str = "c1", is_error: bool = False) -> Message:
    return Message("tool", (ToolResult(id, text, is_error),))


def request(*messages: Message, tools: tuple[Tool, ...] = ()) -> Request:
    return Request(messages=messages, tools=tools)


class Weaver:
    """Commits scripted turns to a tree with readable tokens: prompt ids 100.., output ids 200.. ."""

    def __init__(self, matcher: Matcher = CANONICAL) -> None:
        self.tree = Tree(matcher)

    def say(
        self,
        asked: Request,
        reply: Message,
        *,
        output: tuple[int, ...] = (200, 201),
        outcome: Outcome = Outcome.DELIVERED,
        **fields: object,
    ) -> Turn:
        pending = self.tree.prepare(asked)
        return self.commit(pending, reply, output=output, outcome=outcome, **fields)

    def commit(
        self, pending: Pending, reply: Message, *, output: tuple[int, ...] = (200, 201), kept: int | None = None, **fields: object
    ) -> Turn:
        """`kept` is how many ids of the base's sequence the prompt begins with, all of them unless it was realigned."""
        base = fields.get("base", pending.base)
        held = self.tree.held(base)[:kept]  # type: ignore[arg-type]
        appended = fields.get("appended", ids([100 + len(self.tree.turns), 101]))
        prompt = ids(np.concatenate([held, appended]))  # type: ignore[list-item]
        index = len(self.tree.turns)
        known: dict[str, object] = {
            "id": f"t{index}",
            "index": index,
            "base": pending.base,
            "fork": None,
            "appended": appended,
            "prompt_len": len(prompt),
            "prompt_crc": prompt_crc(prompt),
            "output": ids(output),
            "logprobs": floats([-0.5] * len(output)),
            "finish": Finish(FinishReason.STOP),
            "outcome": Outcome.DELIVERED,
            "sampling": Sampling(),
        }
        turn = Turn(**{**known, **fields})  # type: ignore[arg-type]
        self.tree.apply(self.tree.stage(pending, reply, turn))
        return turn
