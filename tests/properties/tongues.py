"""Clients of the four dialects: the driver's history in each one's words, and a reply of each as blocks.

The driver keeps a history as Anthropic JSON. A tongue writes it as its dialect's
request, and reads a reply into blocks that keep, under `wire`, the item that they
came in, so that opaque fields go back as they came.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from turnloom.wire.anthropic import AnthropicDialect
from turnloom.wire.contract import NO_ENVELOPE, Dialect, Envelope
from turnloom.wire.gemini import GeminiDialect
from turnloom.wire.openai_chat import OpenAIChatDialect
from turnloom.wire.openai_responses import OpenAIResponsesDialect

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tongue:
    """`request` gives the body for a history, `blocks` the blocks of a reply's body."""

    dialect: Dialect
    request: Callable[[Json], Json]
    blocks: Callable[[Json], list[Json]]
    envelope: Envelope = NO_ENVELOPE

    def spoken(self, body: Json) -> bytes:
        return orjson.dumps(self.request(body))

    def heard(self, raw: bytes) -> list[Json]:
        return self.blocks(json.loads(raw))


def blocks_of(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _texts(blocks: list[Json]) -> str:
    return "".join(b["text"] for b in blocks if b["type"] == "text")


def _kept(body: Json) -> list[Json]:
    """The history without what the tongue alone reads."""
    return [
        {**m, "content": [{k: v for k, v in b.items() if k != "wire"} for b in m["content"]]} if isinstance(m["content"], list) else m
        for m in body["messages"]
    ]


# Chat completions


def _chat(body: Json) -> Json:
    messages: list[Json] = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in body["messages"]:
        blocks, role = blocks_of(message["content"]), message["role"]
        if role == "assistant":
            messages.append(_chat_reply(blocks))
            continue
        for block in blocks:
            if block["type"] == "tool_result":
                messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]})
            elif messages and messages[-1]["role"] == role and isinstance(messages[-1]["content"], list) and block is not blocks[0]:
                messages[-1]["content"].append({"type": "text", "text": block["text"]})
            else:
                messages.append({"role": role, "content": [{"type": "text", "text": block["text"]}]})
    return {"model": "m", "max_tokens": body["max_tokens"], "messages": messages, **_chat_tools(body)}


def _chat_tools(body: Json) -> Json:
    tools = [{"type": "function", "function": {**t, "parameters": t["input_schema"]}} for t in body.get("tools", [])]
    return {"tools": tools} if tools else {}


def _chat_reply(blocks: list[Json]) -> Json:
    calls = [
        {"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": json.dumps(b["input"])}}
        for b in blocks
        if b["type"] == "tool_use"
    ]
    thought = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
    message: Json = {"role": "assistant", "content": _texts(blocks) or (None if calls else "")}
    return {**message, **({"tool_calls": calls} if calls else {}), **({"reasoning_content": thought} if thought else {})}


def _chat_blocks(reply: Json) -> list[Json]:
    message = reply["choices"][0]["message"]
    thought, text = message.get("reasoning_content"), message.get("content")
    found: list[Json] = [{"type": "thinking", "thinking": thought}] if thought else []
    found += [{"type": "text", "text": text}] if text else []
    return [*found, *map(_chat_call, message.get("tool_calls") or [])]


def _chat_call(call: Json) -> Json:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": json.loads(call["function"]["arguments"])}


# Responses


def _responses(body: Json) -> Json:
    items: list[Json] = []
    for message in body["messages"]:
        for block in blocks_of(message["content"]):
            items.append(_item(message["role"], block))
    tools = [
        {"type": "function", "name": t["name"], "description": t["description"], "parameters": t["input_schema"]}
        for t in body.get("tools", [])
    ]
    return {
        "model": "m",
        "input": items,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        **({"instructions": body["system"]} if body.get("system") else {}),
        **({"tools": tools} if tools else {}),
    }


def _item(role: str, block: Json) -> Json:
    wire = block.get("wire", {})
    if block["type"] == "tool_result":
        return {"type": "function_call_output", "call_id": block["tool_use_id"], "output": block["content"]}
    if block["type"] == "tool_use":
        return {**wire, "type": "function_call", "call_id": block["id"], "name": block["name"], "arguments": json.dumps(block["input"])}
    if block["type"] == "thinking":
        return {**wire, "type": "reasoning"}
    kind = "output_text" if role == "assistant" else "input_text"
    return {**wire, "type": "message", "role": role, "content": [{"type": kind, "text": block["text"]}]}


def _responses_blocks(reply: Json) -> list[Json]:
    found: list[Json] = []
    for item in reply["output"]:
        if item["type"] == "message":
            found += [{"type": "text", "text": part["text"], "wire": item} for part in item["content"]]
        elif item["type"] == "function_call":
            call = {"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": json.loads(item["arguments"])}
            found.append({**call, "wire": item})
        else:
            found.append({"type": "thinking", "thinking": "", "wire": item})
    return found


# Gemini


def _gemini(body: Json) -> Json:
    contents: list[Json] = []
    names: dict[str, str] = {}
    for message in body["messages"]:
        parts = []
        for block in blocks_of(message["content"]):
            if block["type"] == "tool_use":
                names[block["id"]] = block["name"]
            parts.append(_part(block, names))
        contents.append({"role": "model" if message["role"] == "assistant" else "user", "parts": parts})
    declared = [
        {"name": t["name"], "description": t["description"], "parametersJsonSchema": t["input_schema"]} for t in body.get("tools", [])
    ]
    return {
        "contents": contents,
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        **({"systemInstruction": {"parts": [{"text": body["system"]}]}} if body.get("system") else {}),
        **({"tools": [{"functionDeclarations": declared}]} if declared else {}),
    }


def _part(block: Json, names: dict[str, str]) -> Json:
    wire = {k: v for k, v in block.get("wire", {}).items() if k in ("thoughtSignature", "thought")}
    if block["type"] == "tool_result":
        response = {"id": block["tool_use_id"], "name": names.get(block["tool_use_id"], "gone"), "response": {"output": block["content"]}}
        return {"functionResponse": response}
    if block["type"] == "tool_use":
        return {**wire, "functionCall": {"id": block["id"], "name": block["name"], "args": block["input"]}}
    return {**wire, "text": block["thinking"] if block["type"] == "thinking" else block["text"]}


def _gemini_blocks(reply: Json) -> list[Json]:
    found: list[Json] = []
    for part in reply["candidates"][0].get("content", {}).get("parts", []):
        if "functionCall" in part:
            call = part["functionCall"]
            found.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": call.get("args", {}), "wire": part})
        elif part.get("thought"):
            found.append({"type": "thinking", "thinking": part["text"], "wire": part})
        else:
            found.append({"type": "text", "text": part["text"], "wire": part})
    return found


_THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}

TONGUES = {
    "anthropic": Tongue(AnthropicDialect(), lambda body: {**body, **_THINKING, "messages": _kept(body)}, lambda reply: reply["content"]),
    "openai_chat": Tongue(OpenAIChatDialect(), _chat, _chat_blocks),
    "openai_responses": Tongue(OpenAIResponsesDialect(), _responses, _responses_blocks),
    "gemini": Tongue(GeminiDialect(), _gemini, _gemini_blocks, Envelope(model="m", verb="generateContent")),
}
