"""Output parsers: pure, incremental, nothing lost.

A *format* is how a model writes reasoning and tool calls (`formats`, by name or
from the chat template). `tags` reads `<think>` and `<tool_call>`; the *body*
inside a block is `json_body` or `xml_body`; `schema` types bare text by a tool's
JSON Schema; `strict_json` is JSON without Python's extensions. `contract` is
what callers rely on.

Rules: an attempt that is not exactly a call to a declared tool is delivered as
the text it is, with a CallRecord that says why; nothing is repaired. Where text
could be read two ways, the reading that runs nothing wins.
"""
