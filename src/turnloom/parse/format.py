"""What one output format is: how to see that a chat template teaches it, and how to make its parser.

Each format's own file holds its Format; `formats` only lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnloom.parse.contract import Parser
from turnloom.types import Tool


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    opener: str
    closer: str

    def __post_init__(self) -> None:
        if not self.opener or not self.closer:
            raise ValueError("a reasoning tag is empty")


THINK = ReasoningTags("<think>", "</think>")

Build = Callable[[Sequence[Tool], bool, ReasoningTags | None], Parser]
"""(declared tools, reasoning already opened by the prompt, the reasoning tags or None when they are text) -> a fresh parser."""


@dataclass(frozen=True, slots=True)
class Format:
    """`taught_by` looks at a chat template's text; formats are asked in the order of FORMATS."""

    name: str
    taught_by: Callable[[str], bool]
    build: Build
    reads_reasoning: bool = True
    """False: reasoning tags stay text unless asked for."""
