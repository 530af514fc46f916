"""The OpenAI Chat Completions dialect: `POST /v1/chat/completions`.

Field names, chunks and finish reasons follow OpenAI's public API reference;
reasoning is spelled `reasoning_content`, as servers of open models do and agents
read. Sampling parameters that a client sends are read past: the session pins
them.
"""

from turnloom.wire.openai_chat.dialect import OpenAIChatDialect

__all__ = ["OpenAIChatDialect"]
