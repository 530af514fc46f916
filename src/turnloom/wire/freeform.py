"""Freeform tools: the client sends and wants one string, where the model has a tool with one property `input`.

OpenAI's dialects call them custom tools. This is the one place that turns a
string into such a call's arguments, and back.
"""

from __future__ import annotations

import json

from turnloom.wire.json import text_of

PARAMETERS = '{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}'

_NO_STRING = 'not {"input": string}: '
"""Stands before arguments that hold no string. It tells a client why its tool cannot take them, and here what they are."""


def described(description: str, syntax: str, definition: str) -> str:
    """The description of a tool whose string follows a grammar. No grammar holds the model to it: the client checks it."""
    rule = f"The text in `input` must follow this {syntax} grammar:\n{definition}"
    return f"{description}\n\n{rule}" if description else rule


def arguments_of(given: str) -> str:
    """The arguments, as JSON text, of a call with this string."""
    return given.removeprefix(_NO_STRING) if given.startswith(_NO_STRING) else text_of({"input": given})


def string_of(arguments: str) -> str:
    """The string that a call's arguments hold, so that `arguments_of` finds them again.

    Of arguments that hold none, nothing is lost: they are given as they were written, and said to be so,
    since any string at all may be one that a model meant.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    held = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return held if isinstance(held, str) and not held.startswith(_NO_STRING) else _NO_STRING + arguments
