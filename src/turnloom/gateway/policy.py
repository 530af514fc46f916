"""What a gateway does with the history that an agent sends back: when it is the recorded one, and which tokens go on from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turnloom.core.match import CANONICAL, STRICT, Matcher
from turnloom.errors import ConfigError
from turnloom.imports import load_object

MATCHERS = {"canonical": CANONICAL, "strict": STRICT}


@dataclass(frozen=True, slots=True)
class History:
    """`sampled` appends to the ids that are held; `template` renders every request whole and goes on as far as the ids agree.

    `realign`: under `template`, how many sampled ids at the end of the last reply
    may give way to what the template writes in their place. They do not train
    there. Raises ConfigError for a policy that there is not.
    """

    policy: Literal["sampled", "template"] = "sampled"
    realign: int = 0

    def __post_init__(self) -> None:
        if self.policy not in ("sampled", "template"):
            raise ConfigError(f"there is no history policy {self.policy!r}; there are: sampled, template")
        if self.realign < 0 or (self.realign and self.policy != "template"):
            raise ConfigError("realign is a number of tokens, and only for the history policy `template`")


SAMPLED = History()


def load_matcher(named: str | Matcher) -> Matcher:
    """`canonical`, `strict`, or the Matcher or key function at `package.module:name`. Raises ConfigError."""
    if isinstance(named, Matcher):
        return named
    if named in MATCHERS:
        return MATCHERS[named]
    if ":" not in named:
        raise ConfigError(f"there is no matcher {named!r}; there are: {', '.join(MATCHERS)}, or package.module:name")
    found = load_object(named, "the matcher")
    if isinstance(found, Matcher):
        return found
    if not callable(found):
        raise ConfigError(f"the matcher {named!r} is neither a Matcher nor a function that gives a message's key")
    return Matcher(found)
