"""Output parsers: pure, incremental, nothing lost.

A *format* is how a model writes reasoning and tool calls (`formats` lists them,
by name or from the chat template; `format` says what one is). `tags` reads
formats in tags: which tags is data (`markup`), and the *body* of a call finds its
own end. Bodies in tags (`xml_body`, `invoke`, `glm`) share `walk`; bodies in JSON
(`json_body`, `deepseek`, `kimi`) share `json_scan`. `schema` types bare text by a
tool's JSON Schema; `strict_json` is JSON without Python's extensions. `contract`
is what callers rely on.

Rules: an attempt that is not exactly a call to a declared tool is delivered as
the text it is, with a CallRecord that says why; nothing is repaired. Where text
could be read two ways, the reading that runs nothing wins.
"""
