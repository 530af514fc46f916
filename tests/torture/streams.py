"""What a client makes of a stream: in each dialect, whether it is whole, and the body that the same reply has in one piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


class Broken(Exception):
    """The stream says itself that it is no whole reply."""


@dataclass(frozen=True)
class Stream:
    """`body` gives the whole of a stream that has ended; None while it has not. Raises Broken."""

    path: str
    ended: bytes
    """Only the terminal event has this in it."""
    failed: bytes
    body: Callable[[list[Json]], Json]

    def whole(self, raw: bytes) -> Json | None:
        if self.failed in raw:
            raise Broken(raw[-300:])
        at = raw.find(self.ended)
        if at < 0 or b"\n\n" not in raw[at:]:
            return None
        return self.body(list(_events(raw)))


def _events(raw: bytes) -> Iterator[Json]:
    for line in raw.decode().split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _anthropic(events: list[Json]) -> Json:
    blocks: dict[int, Json] = {}
    written: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                blocks[event["index"]]["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                written[event["index"]] = written.get(event["index"], "") + delta["partial_json"]
    for index, text in written.items():
        blocks[index]["input"] = json.loads(text)
    return {"content": [blocks[index] for index in sorted(blocks)]}


def _chat(events: list[Json]) -> Json:
    content, calls = "", {}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                held = calls.setdefault(call["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                held["id"] += call.get("id") or ""
                held["function"]["name"] += call["function"].get("name") or ""
                held["function"]["arguments"] += call["function"].get("arguments") or ""
    return {"choices": [{"message": {"content": content, "tool_calls": [calls[index] for index in sorted(calls)]}}]}


def _responses(events: list[Json]) -> Json:
    whole: Json = events[-1]["response"]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    items = (item for item in whole["output"] if item["type"] == "message")
    if said != "".join(part["text"] for item in items for part in item["content"]):
        raise AssertionError(f"the deltas say {said!r}, and the whole {whole['output']}")
    return whole


def _gemini(events: list[Json]) -> Json:
    parts: list[Json] = []
    for event in events:
        for part in event["candidates"][0].get("content", {}).get("parts", []):
            if parts and "text" in part and "text" in parts[-1]:
                parts[-1] = {**parts[-1], **part, "text": parts[-1]["text"] + part["text"]}
            else:
                parts.append(part)
    return {"candidates": [{"content": {"parts": parts}}]}


STREAMS = {
    "anthropic": Stream("/v1/messages", b"event: message_stop\n", b"event: error\n", _anthropic),
    "openai_chat": Stream("/v1/chat/completions", b"data: [DONE]", b'data: {"error":', _chat),
    "openai_responses": Stream("/v1/responses", b"event: response.completed\n", b"event: response.failed\n", _responses),
    "gemini": Stream("/v1beta/models/m:streamGenerateContent?alt=sse", b'"finishReason":', b'{"error":', _gemini),
}
WHOLE = {name: stream.path for name, stream in STREAMS.items()} | {"gemini": "/v1beta/models/m:generateContent"}
