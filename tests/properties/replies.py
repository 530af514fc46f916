"""What a model says, spelled as its template spells it: words, reasoning, calls, and the same gone wrong.

A reply is what the template writes for it, less the prompt before it, cut where
its own words end. Nothing here knows any template's spelling.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tests.properties.subjects import Subject
from turnloom.errors import RenderError
from turnloom.types import Message, Reasoning, Text, Tool, ToolCall

WORDS = "the a file README.md fix test 你好 世界 naïve 🙂 def main(): return 42 <b> {x} \n\n   indented \t émigré 1234567 --".split(" ")
PLAIN = "the a file README.md fix test 你好 世界 naïve 🙂 def main(): return 42 émigré 1234567 path/to indentation".split(" ")
"""Words that no template trims and every one spells as they are."""

POOL = 24
"""Replies of each kind that are kept for a template."""

TOOLS = (
    Tool("read_file", "Read a file", '{"type": "object", "properties": {"path": {"type": "string"}}}'),
    Tool("bash", "Run", '{"type": "object", "properties": {"n": {"type": "integer"}, "cmd": {"type": "string"}}}'),
)

END = "zzz"
"""The last word of a reply that is being cut out."""


@dataclass(frozen=True, slots=True)
class Said:
    """`end` is the id that the template ends it with, None where it writes none; `after` what it writes behind that."""

    text: str
    end: int | None = None
    after: str = ""


def words(rng: random.Random, control: Sequence[str] = (), chance: float = 0.1) -> str:
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 8))) or "w"
    return text + (" " + rng.choice(control) + "x" if control and rng.random() < chance else "")


def plain_words(rng: random.Random) -> str:
    return " ".join(rng.choice(PLAIN) for _ in range(rng.randint(1, 10)))


class Replies:
    """Draws replies of one template. The pool is the same in every process."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        ends = subject.renderer.end_ids | subject.tokenizer.eos_ids
        self.ends = sorted(ends)
        self.control = sorted(subject.tokenizer.control_tokens)
        self.any_control = re.compile("|".join(map(re.escape, sorted(self.control, key=len, reverse=True))) or "(?!)")
        closing = [*self.ends, *([subject.tokenizer.control_tokens["<|end|>"]] if subject.harmony else [])]
        spelled = [subject.tokenizer.decode([token]) for token in closing]
        self._ids = dict(zip(spelled, closing, strict=True))
        self._any_end = re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))) or "(?!)")

    def draw(self, rng: random.Random) -> Said:
        kind = rng.choices(["words", "template", "damaged"], [45, 40, 15])[0]
        if kind == "words" or not self._pool:
            return Said(words(rng, self.control))
        said = rng.choice(self._pool)
        return Said(_damaged(rng, said.text), said.end, said.after) if kind == "damaged" else said

    @cached_property
    def _pool(self) -> list[Said]:
        rng = random.Random(0)
        kinds: list[Callable[[str], Message]] = [
            lambda w: Message("assistant", (Text(w),)),
            lambda w: Message("assistant", (Reasoning(words(rng)), Text(w))),
            lambda w: Message("assistant", (_call(rng, w, 0),)),
            lambda w: Message("assistant", (Text(words(rng)), _call(rng, w, 0))),
            lambda w: Message("assistant", (Reasoning(words(rng)), _call(rng, words(rng), 0), _call(rng, w, 1))),
        ]
        found = []
        for kind in kinds:
            for _ in range(POOL):
                said = self._spelled(kind(f"{words(rng, self.control, 0.03)} {END}"))
                found += [said] if said else []
        return found

    def _spelled(self, reply: Message) -> Said | None:
        user = Message("user", (Text("."),))
        try:
            prompt, closed = self._subject.closed([user, reply], TOOLS)
        except RenderError:
            return None
        return self.cut(closed[_shared(prompt, closed) :])

    def cut(self, text: str) -> Said | None:
        """The reply at the front of a text, up to the token that ends it after its last word."""
        at = text.rfind(END)
        if at < 0:
            return None
        at += len(END)
        found = self._any_end.search(text, at)
        if found is None:
            return Said(text.rstrip().replace(f" {END}", ""))
        return Said(text[: found.start()].replace(f" {END}", ""), self._ids[found.group()], text[found.end() :])


def _call(rng: random.Random, last: str, number: int) -> ToolCall:
    arguments = {"n": rng.randint(0, 9), "cmd": last}
    return ToolCall(f"call0000{number}", "bash", json.dumps(arguments, ensure_ascii=rng.random() < 0.5))


def _damaged(rng: random.Random, text: str) -> str:
    at = rng.randint(0, len(text))
    length = rng.randint(1, 12)
    return rng.choice([text[:at], text[:at] + text[at + length :], text[: at + length] + text[at:], text + text[at:]])


def _shared(prompt: str, closed: str) -> int:
    """Where the reply starts: after the prompt, or where a template that rewrites it departs."""
    return next((i for i, (a, b) in enumerate(zip(prompt, closed, strict=False)) if a != b), min(len(prompt), len(closed)))
