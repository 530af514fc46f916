"""What the answers of several engines have in common, and when they contradict what was asked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnloom.errors import EngineProtocol
from turnloom.types import VersionSpan


def check_prompt_tokens(counts: Mapping[str, Any], sent: int) -> None:
    """Raises EngineProtocol when the server counts another prompt than the one of `sent` tokens: it was cut, or something was added."""
    said = counts.get("prompt_tokens")
    if said is not None and said != sent:
        raise EngineProtocol(f"the engine saw a prompt of {said!r} tokens where {sent} were sent; it must neither cut it nor add to it")


def read_spans(spans: Any, count: int) -> tuple[VersionSpan, ...]:
    """`[{version, start, end}]` as far as it covers the `count` output tokens. Raises EngineProtocol."""
    try:
        read = tuple(VersionSpan(str(span["version"]), int(span["start"]), int(span["end"])) for span in spans)
    except (TypeError, KeyError, ValueError) as error:
        raise EngineProtocol(f"the engine's weight_versions cannot be read: {spans!r}") from error
    if any(not 0 <= span.start <= span.end for span in read):
        raise EngineProtocol(f"the engine's weight_versions are not spans of its output: {spans!r}")
    return tuple(VersionSpan(span.version, span.start, min(span.end, count)) for span in read if span.start < count)
