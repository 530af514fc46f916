"""Which dialect a request speaks: by its route, or where no route is its own, by what it brings."""

from __future__ import annotations

from typing import NamedTuple

from aiohttp import web

from turnloom.wire.anthropic import AnthropicDialect
from turnloom.wire.contract import COUNT, Dialect, Envelope, Reading
from turnloom.wire.gemini import GeminiDialect
from turnloom.wire.openai_chat import OpenAIChatDialect
from turnloom.wire.openai_responses import OpenAIResponsesDialect


class Dialects(NamedTuple):
    anthropic: Dialect
    openai_chat: Dialect
    openai_responses: Dialect
    gemini: Dialect


TURNS = {
    "/v1/messages": "anthropic",
    "/v1/chat/completions": "openai_chat",
    "/v1/responses": "openai_responses",
}
COUNTS = {
    "/v1/messages/count_tokens": "anthropic",
    "/v1/responses/input_tokens": "openai_responses",
}
VERSIONS = ("/v1", "/v1beta")
"""Both are Gemini's; `/v1` is everybody's."""

GENERATE = ("generateContent", "streamGenerateContent")


def make_dialects(reading: Reading) -> Dialects:
    return Dialects(
        AnthropicDialect(reading),
        OpenAIChatDialect(reading),
        OpenAIResponsesDialect(reading),
        GeminiDialect(reading),
    )


def dialect_of(http: web.Request, dialects: Dialects) -> Dialect:
    """The dialect in which a request that no route of its own has claimed is answered."""
    path, headers = http.path, http.headers
    for route, name in (*TURNS.items(), *COUNTS.items()):
        if path.endswith(route):
            return getattr(dialects, name)  # type: ignore[no-any-return]
    if "x-goog-api-key" in headers or "key" in http.query or "/v1beta/" in path or path.rpartition(":")[2] in (*GENERATE, COUNT):
        return dialects.gemini
    if "/v1/responses" in path:
        return dialects.openai_responses
    if "anthropic-version" in headers or "x-api-key" in headers or "/v1/messages" in path:
        return dialects.anthropic
    return dialects.openai_chat if "/v1/" in path else dialects.anthropic


def envelope_of(http: web.Request) -> Envelope:
    headers = {name.lower(): value for name, value in http.headers.items()}
    named = http.match_info
    verb = COUNT if http.path.endswith(tuple(COUNTS)) else named.get("verb", "")
    return Envelope(headers, dict(http.query), named.get("model", ""), verb)
