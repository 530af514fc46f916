"""What clients do to a reply before they send it back, and replies to do it to."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from turnloom.types import Message, Part, Reasoning, Text, ToolCall

Echo = Callable[[Message, random.Random], Message]


def each(change: Callable[[Part, random.Random], Part | None]) -> Echo:
    """A change of every part; None leaves it out."""

    def echo(message: Message, rng: random.Random) -> Message:
        return Message(message.role, tuple(p for part in message.parts if (p := change(part, rng)) is not None))

    return echo


def text(change: Callable[[str], str | None]) -> Echo:
    def one(part: Part, rng: random.Random) -> Part | None:
        if not isinstance(part, Text):
            return part
        return None if (changed := change(part.text)) is None else Text(changed)

    return each(one)


def calls(change: Callable[[ToolCall, random.Random], ToolCall]) -> Echo:
    return each(lambda part, rng: change(part, rng) if isinstance(part, ToolCall) else part)


def reasoning(change: Callable[[Reasoning], Reasoning | None]) -> Echo:
    return each(lambda part, rng: change(part) if isinstance(part, Reasoning) else part)


def arguments(spell: Callable[[object, random.Random], str]) -> Echo:
    return calls(lambda c, rng: replace(c, arguments=spell(json.loads(c.arguments), rng)))


def shuffled(value: dict, rng: random.Random) -> str:
    return json.dumps(dict(rng.sample(sorted(value.items()), len(value))))


def joined(glue: str) -> Echo:
    """One string for all texts, before the calls: what a chat completion has room for."""

    def echo(message: Message, rng: random.Random) -> Message:
        words = glue.join(p.text for p in message.parts if isinstance(p, Text))
        return Message("assistant", (Text(words), *(p for p in message.parts if not isinstance(p, Text))))

    return echo


def swapped(message: Message, rng: random.Random) -> Message:
    """Parallel calls in another order."""
    found = rng.sample(message.calls, len(message.calls))
    return Message("assistant", tuple(found.pop() if isinstance(p, ToolCall) else p for p in message.parts))


ECHOES: dict[str, Echo] = {
    "faithful": lambda message, rng: message,
    "reasoning dropped": reasoning(lambda r: None),
    "reasoning trimmed": reasoning(lambda r: Reasoning(r.text.strip())),
    "arguments reordered": arguments(shuffled),
    "arguments respaced": arguments(lambda v, rng: json.dumps(v, indent=2, ensure_ascii=rng.random() < 0.5)),
    "arguments unparsed": arguments(lambda v, rng: json.dumps({"__unparsedToolInput": json.dumps(v, indent=1)})),
    "blank text dropped": text(lambda t: t if t.strip() else None),
    "blank text as an empty string": text(lambda t: t if t.strip() else ""),
    "text trimmed": text(str.strip),
    "an empty block added": lambda message, rng: Message("assistant", (*message.parts, Text(""))),
    "texts joined": joined(""),
    "texts joined by lines": joined("\n"),
    "ids lost": calls(lambda c, rng: replace(c, id="")),
    "ids invented": calls(lambda c, rng: replace(c, id=f"toolu_{rng.random()}", written="")),
    "calls swapped": swapped,
}
ONLY_BY_IDS: dict[str, Echo] = {
    "no arguments": arguments(lambda v, rng: "{}"),
    "defaults filled in": arguments(lambda v, rng: json.dumps({**v, "all": False})),
    "renamed to invalid": calls(lambda c, rng: replace(c, name="invalid", arguments=json.dumps({"tool": c.name}))),
}

words = st.text(st.sampled_from('ab é\n"{}世🙂'), max_size=6) | st.sampled_from(["", " \n", "I list", "two  words"])
values = st.dictionaries(words, words | st.integers(-(2**53), 2**53) | st.booleans() | st.none() | st.lists(words, max_size=2), max_size=3)
parts = st.one_of(
    words.map(Text),
    words.map(Reasoning),
    st.builds(lambda name, v: ToolCall("", name, json.dumps(v)), st.sampled_from(["ls", "cat"]), values),
)


def minted(found: list[Part]) -> Message:
    return Message("assistant", tuple(replace(p, id=f"call_t0{i:02d}") if isinstance(p, ToolCall) else p for i, p in enumerate(found)))


replies = st.lists(parts, min_size=1, max_size=5).map(minted)


def other_word(message: Message, rng: random.Random) -> Message | None:
    """One word more in a text, a call's name or an argument."""
    found = [i for i, p in enumerate(message.parts) if isinstance(p, ToolCall) or (isinstance(p, Text) and p.text.strip())]
    if not found:
        return None
    at = rng.choice(found)
    part = message.parts[at]
    if isinstance(part, Text):
        changed: Part = Text(rng.choice([part.text.rstrip() + " x", "x " + part.text, part.text.strip() + "x"]))
    elif isinstance(part, ToolCall) and rng.random() < 0.5:
        changed = replace(part, name=part.name + "x", id="")
    else:
        assert isinstance(part, ToolCall)
        changed = replace(part, arguments=json.dumps({**json.loads(part.arguments), "x": 1}), id="")
    return Message("assistant", (*message.parts[:at], changed, *message.parts[at + 1 :]))
