"""What a request is for: as it says itself, as a plug-in says, or as it is recognised."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from turnloom.errors import BadRequest, ConfigError
from turnloom.imports import load_object
from turnloom.types import Request
from turnloom.wire.contract import Envelope
from turnloom.wire.labels import recognise

HEADER = "x-turnloom-label"
LABEL = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FORM = "1 to 64 letters, digits, dots, dashes or underscores"

Labeler = Callable[[str, Envelope, Request], str]
"""(the dialect's name, what stands outside the body, the request) -> its label, "" for `main`. Pure."""


def labelled(labeler: Labeler, dialect: str, envelope: Envelope, request: Request) -> Request:
    """The request with its label. Raises BadRequest for a header that is no label, ConfigError for a plug-in's word that is none."""
    declared = envelope.headers.get(HEADER, "")
    if declared and not LABEL.fullmatch(declared):
        raise BadRequest(f"{HEADER}: must be {_FORM}")
    found = declared or labeler(dialect, envelope, request)
    if not isinstance(found, str) or (found and not LABEL.fullmatch(found)):
        raise ConfigError(f"the labeler gave {str(found)[:80]!r}; a label is {_FORM}")
    return replace(request, label=found)


def load_labeler(named: str | Labeler) -> Labeler:
    """`auto`, or the function at `package.module:name`. Raises ConfigError."""
    if named == "auto":
        return recognise
    if not isinstance(named, str):
        return named
    if ":" not in named:
        raise ConfigError(f"there is no labeler {named!r}; there are: auto, or package.module:name")
    found = load_object(named, "the labeler")
    if not callable(found):
        raise ConfigError(f"the labeler {named!r} is no function of the dialect's name, the envelope and the request")
    return found  # type: ignore[no-any-return]
