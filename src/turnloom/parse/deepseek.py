"""The bodies that DeepSeek V3, R1 and V3.1 write: V3 a type, the name and a fenced JSON object; V3.1 the name and the object.

`function<｜tool▁sep｜>NAME`, a newline, the object between ```` ```json ```` and
```` ``` ````; or `NAME<｜tool▁sep｜>` and the object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from turnloom.parse.body import Attempt
from turnloom.parse.format import Format
from turnloom.parse.headed_json import HeadedJsonBody
from turnloom.parse.markup import Markup
from turnloom.parse.tags import tagged
from turnloom.types import CallStatus, Tool

_OPEN, _CLOSE, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```json"
_MARKUP = Markup(_OPEN, _CLOSE, (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),))


class V3Body(HeadedJsonBody):
    separators: ClassVar[tuple[str, ...]] = (_SEPARATOR, "\n")
    fence: ClassVar[str] = _FENCE
    tail: ClassVar[tuple[str, ...]] = ("```", _CLOSE)

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return super().decode(raw, tools) if self._labels[0] == "function" else [Attempt(CallStatus.MALFORMED)]


class V31Body(HeadedJsonBody):
    separators: ClassVar[tuple[str, ...]] = (_SEPARATOR,)
    tail: ClassVar[tuple[str, ...]] = (_CLOSE,)


V3 = Format("deepseek_v3", lambda template: _OPEN in template and _FENCE in template, tagged(V3Body, markup=_MARKUP))
V31 = Format("deepseek_v31", lambda template: _OPEN in template and _FENCE not in template, tagged(V31Body, markup=_MARKUP))
