"""Output parsers: pure, incremental, nothing lost.

A *format* is how a model writes reasoning and tool calls (`formats` lists them,
by name or from the chat template; `format` says what one is). Every parser is a
`reader`; `tags` is the one for formats in tags, of which `llama3` and `harmony`
are not. Which tags is data (`markup`), and the *body* of a block finds its own
end: in tags (`xml_body`, `invoke`, `glm`, which share `walk`), as a labelled
object (`deepseek`, `kimi`, which share `headed_json`), or as a head and a value
(`mistral`, `gemma4`, `lfm2`, `phi4`, `cohere`, which share `value_body`).
`nesting` finds where a bracketed value ends; `json_calls` says what calls in JSON
are, `literal` what values near to JSON are, `schema` what bare text is by a
tool's JSON Schema; `strict_json` is JSON without Python's extensions. `contract`
is what callers rely on.

Rules: an attempt that is not exactly a call to a declared tool is delivered as
the text it is, with a CallRecord that says why; nothing is repaired. Where text
could be read two ways, the reading that runs nothing wins.
"""
