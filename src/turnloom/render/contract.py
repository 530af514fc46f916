"""What a renderer and the tokenizer behind it promise. Both are pure once made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnloom.types import IntArray, Message, Tool


class Tokenizer(Protocol):
    """A tokenizer with its chat template. No method adds BOS or EOS of its own."""

    name: str
    chat_template: str
    control_tokens: Mapping[str, int]
    """Spelling -> id of every added token that means something to the model (`<|im_end|>`, `<tool_call>`)."""
    special_ids: frozenset[int]
    """Ids whose token is marked special."""
    eos_ids: frozenset[int]
    vocab_size: int
    """One more than the largest id."""
    byte_tokens: Mapping[int, int]
    """Id -> value of the tokens that are one byte, where a decoder falls back to such; else empty."""

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Spellings of control tokens become control tokens.

        `start` False: `text` goes on from other text, so that a tokenizer which
        opens every text with a space of its own does not.
        """
        ...

    def encode_plain(self, text: str) -> list[int]:
        """For text in the middle of other text. No id of the result is a control token; decoding gives `text` back."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens kept; invalid UTF-8 as U+FFFD; no clean-up of spaces."""
        ...

    def apply_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, /, *, generation_prompt: bool, **kwargs: Any
    ) -> str:
        """The chat template's text. Raises RenderError with the template's own words when it refuses."""
        ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """`ids` is a whole prompt, or for a bridge only what is appended to the held ids.

    `reasoning_open`: the prompt ends inside the model's reasoning. `escaped`:
    control-token spellings found in message text and encoded as plain text.
    """

    ids: IntArray
    reasoning_open: bool = False
    escaped: int = 0


@dataclass(frozen=True, slots=True)
class Unbridgeable:
    """Why this history cannot be continued by appending tokens."""

    detail: str


class Renderer(Protocol):
    end_ids: frozenset[int]
    """Ids that end a turn: a trailing one stays in the ids and never shows in the text."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        """The whole prompt with the generation prompt. Raises RenderError."""
        ...

    def bridge(
        self, reply: Message, output: Sequence[int], new: Sequence[Message], tools: Sequence[Tool], *, calls_before: int = 0
    ) -> Rendered | Unbridgeable:
        """Only the ids to append after a held reply that was sampled as `output`. Raises RenderError.

        `calls_before` is how many tool calls the history before the reply has: some templates number them.
        """
        ...
