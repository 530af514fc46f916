"""The Anthropic Messages dialect: `POST /v1/messages` and `/v1/messages/count_tokens`.

Field names, event order and error types follow Anthropic's public API reference
(version 2023-06-01). Sampling parameters that a client sends are read past: the
session pins them.
"""

from turnloom.wire.anthropic.dialect import AnthropicDialect

__all__ = ["AnthropicDialect"]
