"""One small request in each dialect, and what its errors must look like."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema_rs

from turnloom.gateway.openapi import document


@dataclass(frozen=True)
class Spoken:
    """How one dialect is asked. `schema` begins the names of its schemas in the OpenAPI document; `stream` is the path of a stream."""

    name: str
    schema: str
    path: str
    stream: str
    body: Callable[[str], dict[str, Any]]
    said: Callable[[Any], str]
    """The text of a body that is not streamed."""

    def ask(self, text: str, *, stream: bool = False, **more: Any) -> tuple[str, bytes]:
        """(path, body)."""
        body = {**self.body(text), **({"stream": True} if stream and self.name != "gemini" else {}), **more}
        return (self.stream if stream else self.path), json.dumps(body).encode()


def _message(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


ALL: Mapping[str, Spoken] = {
    spoken.name: spoken
    for spoken in (
        Spoken(
            "anthropic",
            "Anthropic",
            "/v1/messages",
            "/v1/messages",
            _message,
            lambda body: "".join(block["text"] for block in body["content"] if block["type"] == "text"),
        ),
        Spoken(
            "openai_chat",
            "OpenAIChat",
            "/v1/chat/completions",
            "/v1/chat/completions",
            _message,
            lambda body: body["choices"][0]["message"]["content"],
        ),
        Spoken(
            "openai_responses",
            "OpenAIResponses",
            "/v1/responses",
            "/v1/responses",
            lambda text: {"model": "m", "input": [{"role": "user", "content": text}]},
            lambda body: "".join(item["content"][0]["text"] for item in body["output"] if item["type"] == "message"),
        ),
        Spoken(
            "gemini",
            "Gemini",
            "/v1beta/models/m:generateContent",
            "/v1beta/models/m:streamGenerateContent?alt=sse",
            lambda text: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
            lambda body: "".join(part.get("text", "") for part in body["candidates"][0]["content"]["parts"]),
        ),
    )
}

DOCUMENT: dict[str, Any] = json.loads(document())


@cache
def validator(schema: str) -> jsonschema_rs.Validator:
    """Of a schema of the OpenAPI document, by name."""
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]})


def error_of(spoken: Spoken, status: int, raw: bytes) -> str:
    """The message of an error that has the dialect's own shape, and a status that is documented."""
    assert f"{spoken.schema}{status}" in DOCUMENT["components"]["responses"], raw[:500]
    told = json.loads(raw)
    validator(f"{spoken.schema}Error").validate(told)
    return str(told["error"]["message"])
