"""Calls written as JSON objects, alone or in a list: what such an object says. Never finds where one ends in a stream.

An object has a name, arguments, and in some formats an id, each under a key
that the format chooses; with no arguments the call has none. The arguments are
an object, or a string that holds one, and keep the model's spelling: number
formats, duplicate keys, escapes and spaces. Other members are ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from turnloom.parse import strict_json
from turnloom.parse.body import Attempt, printable, undeclared
from turnloom.parse.nesting import JSON, Nesting
from turnloom.types import CallStatus


@dataclass(frozen=True, slots=True)
class Keys:
    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()


def read_object(text: str, tools: Collection[str], keys: Keys) -> Attempt:
    """What the one object that `text` is says."""
    try:
        found = strict_json.members(text)
    except ValueError:
        return Attempt(CallStatus.INVALID_JSON)
    names = [member.value for member in found if member.key in keys.name]
    name = names[-1] if names and isinstance(names[-1], str) else ""
    if (failed := undeclared(name, tools)) is not None:
        return failed
    given = [member for member in found if member.key in keys.arguments]
    arguments = _arguments(given[0]) if given else "{}"
    if arguments is None or len(names) > 1 or len(given) > 1:
        return Attempt(CallStatus.MALFORMED, name)
    ids = [member.value for member in found if member.key in keys.id]
    written = str(ids[0]) if len(ids) == 1 and isinstance(ids[0], str) else ""
    return Attempt(CallStatus.OK, name, arguments, printable(written))


def read_list(raw: str, span: tuple[int, int], tools: Collection[str], keys: Keys) -> list[Attempt]:
    """The calls in the list of objects that stands at `span` in the block; one bad attempt where it is none."""
    start, stop = span
    raw = raw[:stop]
    attempts: list[Attempt] = []
    at = first = _after(raw, start, "[")
    while at >= 0 and raw.startswith("{", at):
        value = Nesting(JSON)
        value.feed(raw, at)
        if not value.ended:
            break
        attempts.append(replace(read_object(raw[at : value.at], tools, keys), end=value.at))
        if _after(raw, value.at, "]") == stop:
            return attempts
        at = _after(raw, value.at, ",")
    empty = not attempts and first >= 0 and _after(raw, first, "]") == stop
    return [Attempt(CallStatus.MALFORMED if empty else CallStatus.INVALID_JSON)]


def read_arguments(name: str, text: str, tools: Collection[str], written: str = "") -> Attempt:
    """The call of that name whose arguments are the one object that `text` is."""
    if (failed := undeclared(name, tools)) is not None:
        return failed
    if not strict_json.is_object(text):
        return Attempt(CallStatus.INVALID_JSON, name)
    return Attempt(CallStatus.OK, name, strict_json.escape_surrogates(text), written)


def _arguments(member: strict_json.Member) -> str | None:
    """The text of the object that the member is or holds."""
    if isinstance(member.value, dict):
        return strict_json.escape_surrogates(member.text)
    if isinstance(member.value, str) and strict_json.is_object(member.value):
        return strict_json.escape_surrogates(member.value)
    return None


def _after(text: str, at: int, char: str) -> int:
    """The index after blanks, `char` and blanks again, or -1."""
    at = strict_json.blank(text, at)
    return strict_json.blank(text, at + 1) if text.startswith(char, at) else -1
