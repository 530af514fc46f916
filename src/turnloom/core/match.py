"""When an echoed message is the one on record: two messages match when their keys are equal.

An assistant message is compared by its canonical projection, because clients
echo it in many spellings: edge whitespace, reasoning, tool-call ids, key order
and JSON spelling of arguments do not count; changed words do. Every other
message is the client's own and compared by its exact text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from turnloom.types import Message, Request, Text, Tool, ToolResult

_EXACT_FLOAT = 2**53
"""Beyond this a JavaScript client cannot hold every integer, so it echoes the nearest double."""


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """The keys of a request's tools and of each of its messages: one pass over its text."""

    tools: bytes
    messages: tuple[bytes, ...]


def request_keys(request: Request) -> RequestKeys:
    return RequestKeys(tools_key(request.tools), tuple(map(message_key, request.messages)))


def message_key(message: Message) -> bytes:
    """A 16-byte digest; equal keys mean the same message."""
    if message.role == "assistant":
        fields = [visible_text(message)]
        for call in message.calls:
            fields += [call.name, canonical_arguments(call.arguments)]
        return _digest(["assistant", *fields])
    errors = any(p.is_error for p in message.parts if isinstance(p, ToolResult))
    return _digest([message.role, message.text, "error" if errors else ""])


def visible_text(message: Message) -> str:
    """A reply's words without what clients drop: edge whitespace, blank blocks, reasoning."""
    texts = (p.text.strip() for p in message.parts if isinstance(p, Text))
    return "\n".join(t for t in texts if t)


def tools_key(tools: Sequence[Tool]) -> bytes:
    """A 16-byte digest of the tools as they are rendered: names, descriptions, schemas, order."""
    return _digest([field for t in tools for field in (t.name, t.description, t.parameters)])


def canonical_arguments(arguments: str) -> str:
    """One spelling for all JSON spellings of one value; text that is not JSON stays as it is."""
    try:
        return json.dumps(_canonical(json.loads(arguments)), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError, OverflowError):
        return arguments


def _canonical(value: object) -> object:
    """Lone surrogates as U+FFFD and integral floats as integers: what comes back through other languages' JSON."""
    if isinstance(value, dict):
        return {str(_canonical(k)): _canonical(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, bool) or value is None:
        return value
    assert isinstance(value, int | float)
    if isinstance(value, int) and abs(value) > _EXACT_FLOAT:
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _digest(fields: Sequence[str]) -> bytes:
    state = blake2b(digest_size=16)
    for field in fields:
        raw = field.encode("utf-8", "surrogatepass")
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.digest()
