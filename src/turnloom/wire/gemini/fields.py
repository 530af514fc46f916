"""What Google's JSON allows beyond the letter: snake case, one object for a list of objects, and integers in strings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from turnloom.errors import BadRequest
from turnloom.wire import fields

CALL_PREFIX = "call_"
"""Begins every id of a function call that we mint: letters, digits, `_` and `-` up to 64 are all that some clients keep."""


def camel(sent: Mapping[str, Any]) -> Mapping[str, Any]:
    """An object with its own keys in camel case; what they hold stays as it is. The camel spelling wins where both came."""
    if not any("_" in key for key in sent):
        return sent
    return {**{_camel(k): v for k, v in sent.items() if "_" in k}, **{k: v for k, v in sent.items() if "_" not in k}}


@lru_cache(maxsize=1024)
def _camel(key: str) -> str:
    first, *rest = key.lstrip("_").split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)


def objects(value: Any, where: str, most: int) -> list[Mapping[str, Any]]:
    """The objects at `where` in camel case; one object counts as a list of one, absence as none."""
    return [camel(each) for each in fields.objects([value] if isinstance(value, dict) else value, where, most)]


_INTEGER = re.compile(r"-?[0-9]{1,19}(?:\.0{1,19})?", re.ASCII)


def with_integers(sent: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The object with those fields as integers that came as strings: protobuf's JSON takes both.

    https://protobuf.dev/programming-guides/json/#field-representation
    """
    spelled = {key: sent[key] for key in keys if isinstance(sent.get(key), str) and _INTEGER.fullmatch(sent[key])}
    return {**sent, **{key: int(text.partition(".")[0]) for key, text in spelled.items()}} if spelled else sent


def an_object(value: Any, where: str) -> Mapping[str, Any]:
    """The object at `where` in camel case; empty where it is absent or null."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: must be an object")
    return camel(value)
