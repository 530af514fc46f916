"""What Gemma 4 writes: `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1,list:[…],object:{…}}<tool_call|>`.

A string is whatever stands between two `<|"|>`, with no escapes: it cannot hold
that token. Keys are bare at every depth. Other values are JSON or Python words,
spelled as they are; one that is neither is typed by the tool's schema, where
only a string can be meant. Reasoning stands in `<|channel>thought … <channel|>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from turnloom.parse import schema, strict_json
from turnloom.parse.body import Attempt, undeclared
from turnloom.parse.format import Format
from turnloom.parse.literal import Cursor, Notation
from turnloom.parse.markup import Markup
from turnloom.parse.nesting import Syntax
from turnloom.parse.tags import tagged
from turnloom.parse.value_body import ValueBody
from turnloom.types import CallStatus, Tool

_QUOTE = '<|"|>'

NOTATION = Notation(
    string=re.compile(r'<\|"\|>(?s:.)*?<\|"\|>'),
    unquote=lambda text: text[len(_QUOTE) : -len(_QUOTE)],
    word=re.compile(r"[^\[\]{},<>]+"),
    key=re.compile(r"[^\[\]{}:,<>]+"),
)


_MARKUP = Markup("<|tool_call>", "<tool_call|>")


class Gemma4Body(ValueBody):
    fault = CallStatus.MALFORMED
    tail = (_MARKUP.close,)
    syntax = Syntax((_QUOTE,), escapes=False)
    head = re.compile(r"call:(?P<name>[^\[\](){}<>\s]*)(?=\{)")
    unfinished = re.compile(r"c|ca|cal|call|call:[^\[\](){}<>\s]*")

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        name = self.name
        if (failed := undeclared(name, tools)) is not None:
            return [failed]
        cursor = Cursor(NOTATION, raw, self.span[0])
        root = schema.load(tools[name].parameters)
        try:
            cursor.expect("{")
            arguments = strict_json.spell(cursor.members("}", ":", lambda key: _value(cursor, key, root)))
        except ValueError:
            return [Attempt(CallStatus.MALFORMED, name)]
        return [Attempt(CallStatus.OK, name, arguments)]


def _value(cursor: Cursor, key: str, root: Mapping[str, object]) -> str:
    start = cursor.at
    word = cursor.word()
    if word and word not in schema.PRINTED and strict_json.kind(word) is None:
        typed = schema.encode(word, schema.types_of(key, root))
        if typed is not None:
            return typed
        raise ValueError(f"{key!r} is of another type")
    cursor.at = start
    return cursor.value(2)


FORMAT = Format("gemma4", lambda template: "<|tool_call>" in template, tagged(Gemma4Body, markup=_MARKUP))
