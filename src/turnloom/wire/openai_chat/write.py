"""Writes replies as a Chat Completions response, whole or as a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnloom.errors import TurnloomError
from turnloom.parse.contract import TextDelta
from turnloom.types import FinishReason, Request, Text, ToolCall
from turnloom.wire import freeform, sse
from turnloom.wire.contract import Head, Reply, ReplyEvent, SampledToken, SampledTokens
from turnloom.wire.json import whole_text, write
from turnloom.wire.openai_errors import error_object

_UNLIKELY = -9999.0
"""OpenAI's stand-in for a logprob that is no finite number."""


def whole(replies: Sequence[Reply]) -> bytes:
    choices = [
        {
            "index": i,
            "message": _message(reply),
            "logprobs": _logprobs(reply.tokens) if reply.head.request.logprobs else None,
            "finish_reason": _finish_reason(reply),
        }
        for i, reply in enumerate(replies)
    ]
    return write({**_opening(replies[0].head, "chat.completion"), "choices": choices, "usage": _usage(replies)})


def _message(reply: Reply) -> dict[str, Any]:
    """A reply that says nothing and calls nothing has an empty string for content: clients expect one to read."""
    said = reply.message
    content = "".join(p.text for p in said.parts if isinstance(p, Text))
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not said.calls else None, "refusal": None}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        freeform_names = _freeform(reply.head.request)
        message["tool_calls"] = [_call(call, call.name in freeform_names) for call in said.calls]
    return message


@dataclass(slots=True)
class _Choice:
    calls: int = 0
    spoke: bool = False
    reply: Reply | None = None


class OpenAIChatStream:
    """Chunks of all choices, each with the index of its own, then the usage where it was asked for, then `[DONE]`.

    Every choice is announced at once and in order: the official SDKs add up the
    choices of a stream as they first come.
    """

    content_type = "text/event-stream"

    def __init__(self, head: Head) -> None:
        self._request = head.request
        self._freeform = _freeform(head.request)
        self._usage_wanted = bool(head.request.wire.get("include_usage"))
        self._opening = _opening(head, "chat.completion.chunk")
        self._choices = [_Choice() for _ in range(head.request.choices)]

    def begin(self) -> bytes:
        return b"".join(self._delta(i, {"role": "assistant", "content": None}) for i in range(len(self._choices)))

    def event(self, event: ReplyEvent, choice: int = 0) -> bytes:
        if isinstance(event, SampledTokens):
            return self._delta(choice, {}, logprobs=_logprobs(event.tokens))
        if isinstance(event, ToolCall):
            return self._call(event, choice)
        if not event.text:
            return b""
        if isinstance(event, TextDelta):
            self._choices[choice].spoke = True
            return self._delta(choice, {"content": event.text})
        return self._delta(choice, {"reasoning_content": event.text})

    def ping(self) -> bytes:
        return self._chunk([])

    def finish(self, reply: Reply, choice: int = 0) -> bytes:
        state = self._choices[choice]
        state.reply = reply
        delta = {} if state.spoke or state.calls else {"content": ""}
        sent = self._delta(choice, delta, finish_reason=_finish_reason(reply))
        replies = [each.reply for each in self._choices if each.reply is not None]
        if len(replies) < len(self._choices):
            return sent
        if self._usage_wanted:
            sent += self._chunk([], usage=_usage(replies))
        return sent + sse.DONE

    def error(self, error: TurnloomError) -> bytes:
        return sse.data(error_object(error))

    def _call(self, call: ToolCall, choice: int) -> bytes:
        """The call is opened with its name, then its arguments follow: clients that add up only later pieces have them all."""
        state = self._choices[choice]
        index, state.calls = state.calls, state.calls + 1
        spelled = _call(call, call.name in self._freeform)
        kind, text = ("custom", "input") if call.name in self._freeform else ("function", "arguments")
        opened = {"index": index, **spelled, kind: {**spelled[kind], text: ""}}
        filled = {"index": index, kind: {text: spelled[kind][text]}}
        return self._delta(choice, {"tool_calls": [opened]}) + self._delta(choice, {"tool_calls": [filled]})

    def _delta(
        self, choice: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> bytes:
        return self._chunk([{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}])

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        chunk = {**self._opening, "choices": choices}
        return sse.data({**chunk, "usage": usage} if self._usage_wanted else chunk)


def _opening(head: Head, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.turn_id}", "object": kind, "created": head.created, "model": head.model, "system_fingerprint": None}


def _freeform(request: Request) -> frozenset[str]:
    return frozenset(tool.name for tool in request.tools if tool.freeform)


def _call(call: ToolCall, is_freeform: bool) -> dict[str, Any]:
    if is_freeform:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": freeform.string_of(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": whole_text(call.arguments)}}


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    """All choices have the one prompt, which counts once."""
    prompt, completion = replies[0].head.prompt_tokens, sum(reply.output_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _finish_reason(reply: Reply) -> str:
    if reply.finish.reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.calls else "stop"


def _logprobs(tokens: Sequence[SampledToken]) -> dict[str, Any]:
    return {"content": [_token(token) for token in tokens], "refusal": None}


def _token(token: SampledToken) -> dict[str, Any]:
    """A token that is part of a character has no text of its own, and its bytes are not known here."""
    known = "\ufffd" not in token.text
    return {
        "token": token.text,
        "bytes": list(token.text.encode("utf-8", "replace")) if known else None,
        "logprob": token.logprob if math.isfinite(token.logprob) else _UNLIKELY,
        "top_logprobs": [],
    }
