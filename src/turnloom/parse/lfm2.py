r"""What LFM2 writes: `<|tool_call_start|>[name(key='value', n=1), …]<|tool_call_end|>`, calls as Python spells them.

Strings stand in single or double quotes, with Python's escapes of one letter,
`\x`, `\u` and `\U`; a backslash before anything else is itself, and a string may
run over lines. Lists, objects and other values are Python's or JSON's. Only named
arguments are read: a position has no name to give.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from turnloom.parse import strict_json
from turnloom.parse.body import Attempt, undeclared
from turnloom.parse.format import Format
from turnloom.parse.literal import Cursor, Notation
from turnloom.parse.markup import Markup
from turnloom.parse.nesting import Syntax
from turnloom.parse.tags import tagged
from turnloom.parse.value_body import ValueBody
from turnloom.types import CallStatus, Tool

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}
_NAME = re.compile(r"[^\W\d][\w.\-]*")


def _unquote(text: str) -> str:
    def escape(found: re.Match[str]) -> str:
        digits = found[1] or found[2] or found[3]
        if digits is None:
            return _LETTERS.get(found[4], found[0])
        return chr(int(digits, 16)) if int(digits, 16) < 0x110000 else found[0]

    # Two halves of a surrogate pair stay two: JSON reads their escapes as the character that they spell.
    return _ESCAPE.sub(escape, text[1:-1])


SYNTAX = Syntax(('"', "'"), escapes=True)
NOTATION = Notation(
    string=re.compile(r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+'""", re.DOTALL),
    unquote=_unquote,
    word=re.compile(r"""[^\[\](){},='":]+"""),
    key=_NAME,
)


_MARKUP = Markup("<|tool_call_start|>", "<|tool_call_end|>")


class Lfm2Body(ValueBody):
    fault = CallStatus.MALFORMED
    syntax = SYNTAX
    tail = (_MARKUP.close,)

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        cursor = Cursor(NOTATION, raw, self.span[0])
        attempts: list[Attempt] = []
        try:
            cursor.expect("[")
            while True:
                attempt = call(cursor, cursor.match(_NAME) or "", tools)
                attempts.append(replace(attempt, end=cursor.at))
                if cursor.take("]"):
                    return attempts
                cursor.expect(",")
        except ValueError:
            return [Attempt(CallStatus.MALFORMED)]


def call(cursor: Cursor, name: str, tools: Collection[str]) -> Attempt:
    """The call of that name with the arguments in parentheses that come next. Raises ValueError where there are none."""
    cursor.expect("(")
    arguments = strict_json.spell(cursor.members(")", "=", lambda key: cursor.value(2)))
    return undeclared(name, tools) or Attempt(CallStatus.OK, name, arguments)


# The first template only lists tools; how they are called was left to the model.
FORMAT = Format(
    "lfm2", lambda template: "<|tool_call_start|>" in template or "<|tool_list_start|>" in template, tagged(Lfm2Body, markup=_MARKUP)
)
