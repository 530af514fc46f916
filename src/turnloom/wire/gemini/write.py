"""Writes a reply as a GenerateContentResponse, whole or as a stream of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from turnloom.errors import TurnloomError
from turnloom.parse.contract import ReasoningDelta, TextDelta
from turnloom.types import FinishReason, Reasoning, Text, ToolCall
from turnloom.wire.contract import Head, Reply, ReplyEvent, SampledToken, SampledTokens
from turnloom.wire.gemini.errors import error_object
from turnloom.wire.gemini.read import SSE, THOUGHTS
from turnloom.wire.json import spliced, whole_text, write
from turnloom.wire.refs import as_base64

_ONE_LINE = (
    (b"\n", b" "),
    (b"\r", b" "),
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
"""What some client takes for the end of a line. In JSON the first two stand between tokens only, the rest inside strings only."""

_UNLIKELY = -9999.0
"""Stands for a log-probability that is no finite number, which JSON has not."""


def whole(reply: Reply) -> bytes:
    parts = _Parts(reply.head)
    content = [p for part in reply.message.parts if (p := parts.of(part)) is not None]
    if not parts.signed:
        content.append(parts.last())
    return _bytes(reply.head, _candidate(content, reply, reply.tokens), reply)


class GeminiStream:
    """One response after another: server-sent events where `alt=sse` asks for them, else the items of one JSON array."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sse = head.request.wire.get(SSE) is True
        self._parts = _Parts(head)
        self._tokens: list[SampledToken] = []
        self._told = 0
        self._first = True
        self.content_type = "text/event-stream" if self._sse else "application/json"

    def begin(self) -> bytes:
        return b"" if self._sse else b"["

    def event(self, event: ReplyEvent, choice: int = 0) -> bytes:
        if isinstance(event, SampledTokens):
            self._tokens += event.tokens
            return b""
        part = self._parts.of(event)
        return b"" if part is None else self._item(_bytes(self._head, _candidate([part], tokens=self._take())))

    def ping(self) -> bytes:
        """An empty line, or white space inside the array: bytes that every client reads past.

        A response without candidates would do for Gemini CLI, but google-genai's
        chats forget a turn that had one.
        """
        return b"\n"

    def finish(self, reply: Reply, choice: int = 0) -> bytes:
        rest = reply.tokens[self._told :] if reply.tokens else self._take()
        last = self._item(_bytes(reply.head, _candidate([self._parts.last()], reply, rest), reply))
        return last if self._sse else last + b"]"

    def error(self, error: TurnloomError) -> bytes:
        """Google's error object, bare.

        Inside an event the JavaScript SDK reads it as an empty response, and the
        cut reply as a complete one; bare and without an empty line after it, it
        is an error to every official SDK, however the bytes are cut.
        """
        data = write(error_object(error))
        return data if self._sse else self._item(data) + b"]"

    def _item(self, data: bytes) -> bytes:
        first, self._first = self._first, False
        if not self._sse:
            return data if first else b"\r\n," + data
        for line_end, escaped in _ONE_LINE:
            data = data.replace(line_end, escaped)
        return b"data: " + data + b"\n\n"

    def _take(self) -> Sequence[SampledToken]:
        tokens, self._tokens = self._tokens, []
        self._told += len(tokens)
        return tokens


class _Parts:
    """Spells parts, and puts the reference to the turn on the first text and on the first call.

    Gemini signs the first call, and the last part of a text; but clients that put
    a streamed text together keep the signature of its first piece.
    """

    def __init__(self, head: Head) -> None:
        self._thoughts = head.request.wire.get(THOUGHTS) is True
        self._signature = as_base64(head.turn_id)
        self.signed: set[str] = set()
        """The kinds of parts that name the turn so far."""

    def of(self, said: object) -> dict[str, Any] | None:
        """None for what is not shown: reasoning that was not asked for, and text of no length."""
        if isinstance(said, ToolCall):
            call = {"id": said.id, "name": said.name, "args": spliced(whole_text(said.arguments))}
            return {"functionCall": call, **self._sign("call")}
        if isinstance(said, Reasoning | ReasoningDelta):
            return {"text": said.text, "thought": True} if self._thoughts and said.text else None
        if isinstance(said, Text | TextDelta) and said.text:
            return {"text": said.text, **self._sign("text")}
        return None

    def last(self) -> dict[str, Any]:
        """An empty text, since clients want a part in every content; signed where nothing else was."""
        return {"text": "", **({} if self.signed else self._sign("text"))}

    def _sign(self, kind: str) -> dict[str, str]:
        if kind in self.signed:
            return {}
        self.signed.add(kind)
        return {"thoughtSignature": self._signature}


def _candidate(parts: list[dict[str, Any]], reply: Reply | None = None, tokens: Sequence[SampledToken] = ()) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    if reply is not None:
        candidate["finishReason"] = "MAX_TOKENS" if reply.finish.reason is FinishReason.LENGTH else "STOP"
        if reply.tokens:
            candidate["avgLogprobs"] = math.fsum(_finite(t.logprob) for t in reply.tokens) / len(reply.tokens)
    if tokens:
        chosen = [{"token": t.text, "logProbability": _finite(t.logprob)} for t in tokens]
        candidate["logprobsResult"] = {"chosenCandidates": chosen}
    return candidate


def _bytes(head: Head, candidate: dict[str, Any], reply: Reply | None = None) -> bytes:
    response: dict[str, Any] = {"candidates": [candidate], "modelVersion": head.model, "responseId": head.turn_id}
    if reply is not None:
        response["usageMetadata"] = {
            "promptTokenCount": head.prompt_tokens,
            "candidatesTokenCount": reply.output_tokens,
            "totalTokenCount": head.prompt_tokens + reply.output_tokens,
        }
    return write(response)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _UNLIKELY
