"""The Gemini dialect: `POST /v1beta/models/MODEL:generateContent`, `:streamGenerateContent` and `:countTokens`, and the same under `/v1`.

Field names, reply shapes and error codes follow Google's public API reference
(generativelanguage v1beta). Google reads every field in camelCase and in
snake_case, and a single object where a list of objects is due; so does this
dialect. Sampling parameters that a client sends are read past: the session
pins them.
"""

from turnloom.wire.gemini.dialect import GeminiDialect

__all__ = ["GeminiDialect"]
