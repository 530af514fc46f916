"""Replies of the Chat Completions dialect in tests, and its streams as chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from turnloom.parse.contract import ReasoningDelta, TextDelta
from turnloom.types import Finish, FinishReason, Message, Request, Text, Tool, ToolCall
from turnloom.wire.contract import Head, Reply, SampledToken
from turnloom.wire.openai_chat import OpenAIChatDialect

TURN = "0123456789abcdef0123456789abcdef"
CREATED = 1_700_000_000

OURS = {"reasoning_content"}
"""Fields that servers of open models send beyond OpenAI's own types."""


def head_of(request: Request, turn_id: str = TURN) -> Head:
    return Head(turn_id, "m", CREATED, 7, request)


def chat_reply(
    *parts: Any,
    finish: Finish = Finish(FinishReason.STOP),  # noqa: B008 (frozen)
    output_tokens: int = 3,
    tokens: tuple[SampledToken, ...] = (),
    turn_id: str = TURN,
    tools: tuple[Tool, ...] = (),
    choices: int = 1,
    logprobs: bool = False,
    include_usage: bool = False,
) -> Reply:
    request = Request(messages=(), tools=tools, choices=choices, logprobs=logprobs, wire={"include_usage": include_usage})
    return Reply(head_of(request, turn_id), Message("assistant", parts), finish, output_tokens, tokens)


def stream(reply: Reply, *events: Any, include_usage: bool | None = None, pings: int = 0) -> bytes:
    """The whole stream of one choice: of these events, or where there are none of the reply's own parts."""
    head = reply.head if include_usage is None else head_of(Request(messages=(), wire={"include_usage": include_usage}))
    writer = OpenAIChatDialect().stream(head)
    sent = writer.begin() + writer.ping() * pings
    for event in events or [_event(part) for part in reply.message.parts]:
        sent += writer.event(event)
    return sent + writer.finish(reply)


def _event(part: Any) -> Any:
    if isinstance(part, ToolCall):
        return part
    return TextDelta(part.text) if isinstance(part, Text) else ReasoningDelta(part.text)


def chunks_of(sent: bytes) -> list[dict[str, Any]]:
    """The data of each event; `[DONE]` is none."""
    found = []
    for block in sent.decode().split("\n\n"):
        if block and block != "data: [DONE]":
            assert block.startswith("data: ")
            found.append(json.loads(block.removeprefix("data: ")))
    return found


def extras(model: BaseModel) -> set[str]:
    """The fields, anywhere in it, that the model's type does not have."""
    return set(_extras(model))


def _extras(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or {}
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _extras(item)
