"""The body that Qwen3-Coder, Qwen3.5 and Nemotron 3 write, and that is read with no format configured.

`<function=NAME>`, `<parameter=KEY>` and their ends inside `<tool_call>`, as
`element_body` says; the block ends at the first `</parameter></function></tool_call>`
(with no parameter, `</function></tool_call>`). Values are typed by `schema`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from turnloom.parse.body import TOOL_CLOSE, TOOL_OPEN, Attempt, Ended
from turnloom.parse.element_body import ElementBody
from turnloom.parse.format import Format
from turnloom.parse.tags import tagged
from turnloom.parse.walk import typed_call
from turnloom.types import Tool


class XmlBody(ElementBody):
    opener: ClassVar[str] = "<function="
    parameter: ClassVar[str] = "<parameter="
    parameter_end: ClassVar[str] = "</parameter>"
    function: ClassVar[str] = "<function="
    function_end: ClassVar[str] = "</function>"
    opens: ClassVar[tuple[str, ...]] = (TOOL_OPEN,)
    closes: ClassVar[tuple[str, ...]] = (TOOL_CLOSE,)
    after_function: ClassVar[tuple[str, ...]] = (TOOL_CLOSE,)

    def _end_of_block(self, tag: str, at: int) -> Ended | None:
        return Ended(at + len(tag))

    def _confirms(self, bare: str) -> bool:
        return bare[0] == "{"

    def decode(self, raw: str, tools: Mapping[str, Tool]) -> list[Attempt]:
        return typed_call(self.name, self._values(raw), tools, framed=True)


_TAUGHT = re.compile(r"<tool_call>(?:\\n|\s)*<function=")

FORMAT = Format("qwen3_coder", lambda template: bool(_TAUGHT.search(template)), tagged(XmlBody))
