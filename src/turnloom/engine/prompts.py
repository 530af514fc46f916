"""What may be sent to an engine. Pure."""

from __future__ import annotations

from turnloom.engine.contract import Capabilities
from turnloom.errors import EngineRejected
from turnloom.types import IntArray, Sampling

INT32_END = 2**31


def check_prompt(prompt: IntArray, able: Capabilities) -> None:
    """Raises EngineRejected for a prompt that must not be sent: an id beyond the vocabulary kills some servers."""
    if not len(prompt):
        raise EngineRejected("the prompt is empty")
    if len(prompt) + 1 >= able.context_length:
        raise EngineRejected(f"the prompt has {len(prompt)} tokens and the engine's context holds {able.context_length}")
    end = able.vocab_size if able.vocab_size is not None else INT32_END
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= end:
        raise EngineRejected(f"the prompt holds the id {low if low < 0 else high}, outside the engine's vocabulary of {end}")


def room(prompt: IntArray, sampling: Sampling, able: Capabilities) -> int:
    """The tokens to ask for. Some engines refuse prompt + output equal to the context, so one token of it stays unused."""
    left = able.context_length - len(prompt) - 1
    return left if sampling.max_tokens is None else min(sampling.max_tokens, left)
