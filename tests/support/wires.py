"""The least that each dialect asks for, and what of its bytes a client shows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

JSON_STRING = r'"((?:[^"\\]|\\.)*)"'
MODEL = "/v1beta/models/m"


@dataclass(frozen=True)
class Wire:
    """`whole` and `stream` are paths. `text` and `thought` find the pieces that a stream shows; `ping` is its keepalive."""

    name: str
    whole: str
    stream: str
    text: str
    ping: str
    thought: str = ""
    asks: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """What an error in a stream looks like."""

    def body(self, text: str, *, stream: bool = False) -> dict[str, Any]:
        if self.name.startswith("gemini"):
            return {"contents": [{"role": "user", "parts": [{"text": text}]}], **self.asks}
        asked = {"model": "m", "stream": stream, **self.asks}
        if self.name == "openai_responses":
            return {**asked, "input": text}
        return {**asked, "max_tokens": 100, "messages": [{"role": "user", "content": text}]}

    def path(self, stream: bool) -> str:
        return self.stream if stream else self.whole

    def shown(self, raw: bytes) -> str:
        return "".join(json.loads(f'"{piece}"') for piece in re.findall(self.text, raw.decode("utf-8", "ignore")))

    def thoughts(self, raw: bytes) -> str:
        return "".join(json.loads(f'"{piece}"') for piece in re.findall(self.thought, raw.decode("utf-8", "ignore")))

    def said(self, body: dict[str, Any]) -> str:
        """The text of a whole reply."""
        if self.name == "anthropic":
            return "".join(block.get("text", "") for block in body["content"])
        if self.name == "openai_chat":
            return str(body["choices"][0]["message"]["content"])
        if self.name == "openai_responses":
            return "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])
        return "".join(part.get("text", "") for part in body["candidates"][0]["content"]["parts"])


_GEMINI: dict[str, Any] = {
    "whole": f"{MODEL}:generateContent",
    "text": r'"text":' + JSON_STRING + r'(?:,"thoughtSignature":"[^"]*")?[}]',
    "thought": r'"text":' + JSON_STRING + r',"thought":true',
    "asks": {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}},
}
WIRES = {
    wire.name: wire
    for wire in (
        Wire(
            "anthropic",
            "/v1/messages",
            "/v1/messages",
            r'"type":"text_delta","text":' + JSON_STRING,
            'event: ping\ndata: {"type":"ping"}\n\n',
            r'"thinking":' + JSON_STRING + r"\}\}",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            error="event: error\n",
        ),
        Wire(
            "openai_chat",
            "/v1/chat/completions",
            "/v1/chat/completions",
            r'"delta":\{"content":' + JSON_STRING,
            '"choices":[]}\n\n',
            r'"reasoning_content":' + JSON_STRING,
            error='data: {"error":',
        ),
        Wire(
            "openai_responses",
            "/v1/responses",
            "/v1/responses",
            r'"response.output_text.delta"[^\n]*"delta":' + JSON_STRING,
            'event: keepalive\ndata: {"type":"keepalive",',
            r'"response.reasoning_text.delta"[^\n]*"delta":' + JSON_STRING,
            error="event: response.failed\n",
        ),
        Wire("gemini", stream=f"{MODEL}:streamGenerateContent?alt=sse", ping="\n", error='{"error":', **_GEMINI),
        Wire("gemini array", stream=f"{MODEL}:streamGenerateContent", ping="\n", error='{"error":', **_GEMINI),
    )
}
