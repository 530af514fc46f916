"""A call written as elements: a function with its name, parameters with their keys, each value bare text.

`<function NAME>`, then `<parameter KEY>VALUE</parameter>` any number of times,
then `</function>`, all inside a block; blanks may stand between the tags. A value
may hold any of the tags. A tag ends something only where the whole stays
well-formed:

- a value ends at a `</parameter>` that the next parameter or the end of the block follows;
- the block ends at the first `</parameter></function>` (with no parameter, `</function>`) that `_end_of_block` confirms;
- a function inside a value (its opening tag followed by a parameter or by `</function>`) is skipped to its own end;
- any other closing tag of the block is part of a value if the block does end later. If another call opens right
  after it, or the output is over, it was the end of a malformed block.

A value that holds the full ending without an opening of its own cannot be told
from the end; nor can one that holds `</parameter>` and a parameter's opening tag.
The spellings are a subclass's; what its tags say is too (`_name`, `_key`).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar

from turnloom.parse.body import Broken, Ended
from turnloom.parse.walk import Parameter, TagWalk
from turnloom.types import CallStatus


class Prev(Enum):
    """The tag before, if only blanks stand in between."""

    BLOCK = auto()
    HEADER = auto()
    VALUE_END = auto()
    FUNCTION_END = auto()
    NESTED = auto()
    NESTED_END = auto()
    DOUBTFUL_END = auto()
    OPEN = auto()
    CLOSE = auto()
    OTHER = auto()


_START = frozenset({Prev.HEADER, Prev.FUNCTION_END})


class ElementBody(TagWalk):
    """A walk over the tags that keeps where each value starts and ends."""

    opener: ClassVar[str]
    parameter: ClassVar[str]
    parameter_end: ClassVar[str]
    function: ClassVar[str]
    function_end: ClassVar[str]
    opens: ClassVar[tuple[str, ...]]
    """The tags before a block's function."""
    closes: ClassVar[tuple[str, ...]]
    after_function: ClassVar[tuple[str, ...]]
    """The tags that may stand after a `</function>` that ends one."""

    def __init_subclass__(cls) -> None:
        cls.tags = (cls.parameter_end, cls.function_end, *cls.closes, cls.parameter, cls.function, *cls.opens)

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.name = ""
        self._label = ""
        self._skip = len(self.opener)
        self._prev = Prev.BLOCK
        self._parameters: list[Parameter] = []
        self._value_end = -1
        self._function_end = -1
        self._depth = 0
        self._doubtful = -1
        """The end of the last closing tag that is not known to be part of a value."""
        self._reopened = -1
        """The start of the last tag that opens a block."""
        self._restart: Ended | None = None
        """How this block ended, if a call opens at that tag."""

    def feed(self, text: str) -> Ended | Broken | None:
        skip, self._skip = self._skip, 0
        self._at += skip
        return super().feed(text[skip:])

    def finish(self) -> Ended | None:
        return Ended(self._doubtful, CallStatus.MALFORMED) if self._doubtful > self._reopened else None

    def _name(self, label: str) -> str | None:
        """The name that the text of a function's opening tag says; None: it is not such a tag."""
        return label

    def _key(self, label: str) -> str | None:
        """The same of a parameter's."""
        return label

    def _confirms(self, bare: str) -> bool:
        """Text right after a block's opening tag that makes it a call's, beside the function tag."""
        return False

    def _end_of_block(self, tag: str, at: int) -> Ended | None:
        """What a tag of `after_function` right after the function's end says."""
        raise NotImplementedError

    def _values(self, raw: str) -> list[tuple[str, str]]:
        return [(parameter.key, raw[parameter.start : parameter.end]) for parameter in self._parameters]

    def _between(self, bare: str, at: int) -> Ended | Broken | None:
        if not bare:
            return None
        if self._prev is Prev.OPEN and self._restart is not None and self._confirms(bare):
            return self._restart
        if self._outside():
            return Broken(at, CallStatus.MALFORMED, restart=True)
        self._prev = Prev.OTHER
        return None

    def _outside(self) -> bool:
        """No value has started yet, so nothing but the format's own tags may stand here."""
        return not self._parameters and self._prev in _START

    def _read_tag(self, tag: str, at: int) -> Ended | Broken | None:
        prev = self._prev
        if self._outside() and tag not in ((self.parameter, self.function_end) if prev is Prev.HEADER else self.after_function):
            return Broken(at, CallStatus.MALFORMED, restart=True)
        if prev is Prev.FUNCTION_END and tag in self.after_function and (ended := self._end_of_block(tag, at)) is not None:
            if self._parameters:
                self._parameters[-1].end = self._value_end
            return ended
        if tag == self.function and prev is Prev.OPEN and self._restart is not None:
            return self._restart
        if tag == self.function and prev is Prev.DOUBTFUL_END:
            return Ended(self._doubtful, CallStatus.MALFORMED)
        self._prev = Prev.OTHER
        if tag == self.function:
            self._label, self._prev = "", Prev.NESTED
        elif tag == self.parameter:
            self._open_parameter(prev)
        elif tag == self.parameter_end:
            self._prev = Prev.VALUE_END
            self._value_end = self._value_end if self._depth else at
        elif tag == self.function_end:
            self._end_function(prev, at + len(tag))
        elif tag in self.closes:
            self._close(prev, at, at + len(tag))
        elif tag in self.opens:
            self._reopen(prev, at)
        return None

    def _open_parameter(self, prev: Prev) -> None:
        if prev is Prev.NESTED:
            self._depth += 1
        elif self._depth == 0 and prev in (Prev.HEADER, Prev.VALUE_END):
            self._label, self._prev = "", prev

    def _end_function(self, prev: Prev, end: int) -> None:
        if prev is Prev.NESTED:
            self._prev = Prev.NESTED_END
        elif self._depth and prev is Prev.VALUE_END:
            self._depth -= 1
            self._prev = Prev.NESTED_END
        elif prev in (Prev.HEADER, Prev.VALUE_END):
            self._prev, self._function_end = Prev.FUNCTION_END, end

    def _close(self, prev: Prev, at: int, end: int) -> None:
        """A block's closing tag that does not end this one."""
        if self._depth == 0 and prev is not Prev.NESTED_END:
            self._prev, self._doubtful = Prev.CLOSE, end

    def _reopen(self, prev: Prev, at: int) -> None:
        self._prev, self._reopened, self._restart = Prev.OPEN, at, None
        if prev is Prev.CLOSE:
            self._restart = Ended(self._doubtful, CallStatus.MALFORMED)
        elif prev is Prev.FUNCTION_END:
            self._restart = Ended(at, CallStatus.UNCLOSED)

    def _labelled(self, label: str | None, window: str, end: int) -> tuple[int, Ended | Broken | None]:
        """A NAME or KEY. One that is empty, too long or not closed by `>` on its line is none."""
        prev, self._prev = self._prev, Prev.OTHER
        closed = window.startswith(">", end)
        after = end + 1 if closed and label is not None else end
        said = label if closed else None
        if said is not None:
            said = self._name(said) if prev in (Prev.BLOCK, Prev.NESTED) else self._key(said)
        if prev is Prev.BLOCK and said is not None:
            self.name, self._prev = said, Prev.HEADER
        elif prev is Prev.NESTED:
            self._prev = Prev.NESTED if said else Prev.OTHER
        elif prev is not Prev.BLOCK and said:
            if self._parameters:
                self._parameters[-1].end = self._value_end
            self._parameters.append(Parameter(said, self._at + after))
        elif not self._parameters:
            return after, Broken(self._at + after, CallStatus.MALFORMED, restart=True)
        return after, None
