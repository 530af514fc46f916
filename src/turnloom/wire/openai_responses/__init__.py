"""The OpenAI Responses dialect: `POST /v1/responses` and `/v1/responses/input_tokens`.

Item types, field names and the order of events follow OpenAI's public API
reference and the types of its official SDK. Sampling parameters that a client
sends are read past: the session pins them.
"""

from turnloom.wire.openai_responses.dialect import OpenAIResponsesDialect

__all__ = ["OpenAIResponsesDialect"]
