"""When an echoed message is the one on record: two messages match when a matcher gives them one key.

Clients echo an assistant message in many spellings. The canonical matcher
compares its words and its calls: edge whitespace, reasoning, blank text, the
ids and the order of calls, key order and JSON spelling of arguments do not
count; changed words do. Every other message is the client's own and compared
by its exact text, a tool result also by the call that it answers (`placed`).
The strict matcher compares everything that came.

A matcher decides only whether a history goes on. The tokens that it goes on
from are always the recorded ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from turnloom.types import Message, Part, Reasoning, Request, Text, Tool, ToolCall, ToolResult

_EXACT_FLOAT = 2**53
"""Beyond this a JavaScript client cannot hold every integer, so it echoes the nearest double."""

_UNPARSED = "__unparsedToolInput"
"""The one key under which Claude Code echoes arguments that it could not parse, as the text they came in."""

MessageKey = Callable[[Message], bytes]


@dataclass(frozen=True, slots=True)
class Matcher:
    """Messages with equal `key` are the same message. A key is pure and its values are hashable.

    `minted_ids`: where no key is equal, the ids minted for a reply's calls and the
    references in its opaque fields may vouch for what a client respelled; the beginning of a reply that
    was cut off may stand for it; and several texts of one reply may come back
    as one, since some dialects have room for one only.
    """

    key: MessageKey
    minted_ids: bool = True


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """The keys of a request's tools and of each of its messages: one pass over its text.

    `calls` are digests of each call's words, for messages with several.
    `canonical` are the messages' keys under the canonical matcher, empty where it is the matcher.
    """

    tools: bytes
    messages: tuple[bytes, ...]
    calls: tuple[tuple[bytes, ...], ...]
    canonical: tuple[bytes, ...] = ()

    def permuted(self, order: Sequence[int]) -> RequestKeys:
        """The keys of the same messages in another order, and of no others."""

        def pick(column: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(column[i] for i in order) if column else ()

        return RequestKeys(self.tools, pick(self.messages), pick(self.calls), pick(self.canonical))


def message_key(message: Message) -> bytes:
    """The canonical key: a 16-byte digest."""
    if message.role == "assistant":
        return _digest(["assistant", visible_text(message), *sorted(map(call_key, message.calls))])
    errors = any(p.is_error for p in message.parts if isinstance(p, ToolResult))
    return _digest([message.role, message.text, "error" if errors else ""])


def strict_key(message: Message) -> bytes:
    """The strict key: a 16-byte digest of all parts in their order.

    Only the JSON spacing and escapes of arguments do not count, since several
    dialects carry them as a value. A message's `ref` is our own mark.
    """
    return _digest([message.role, *(field for part in message.parts for field in _exact(part))])


CANONICAL = Matcher(message_key)
STRICT = Matcher(strict_key, minted_ids=False)


def request_keys(request: Request, matcher: Matcher = CANONICAL) -> RequestKeys:
    messages = request.messages
    keys, calls = tuple(map(matcher.key, messages)), tuple(map(several_calls, messages))
    return RequestKeys(tools_key(request.tools), keys, calls, () if matcher == CANONICAL else tuple(map(message_key, messages)))


def several_calls(message: Message) -> tuple[bytes, ...]:
    """A digest of each call's words, where there are several: one call needs none to be told from others."""
    calls = message.calls
    return tuple(_digest([call_key(c)]) for c in calls) if len(calls) > 1 else ()


def placed(key: bytes, place: int) -> bytes:
    """The key of a tool result that answers the call at this place of the reply above it."""
    return key + place.to_bytes(4, "little", signed=True)


def echo_keys(message: Message, matcher: Matcher) -> tuple[bytes, ...]:
    """The keys under which a reply may come back, its own first."""
    return tuple(dict.fromkeys(matcher.key(spelling) for spelling in _spellings(message, matcher)))


def same_words(recorded: Message, came: Message) -> bool:
    """Whether the visible text is the recorded reply's, in any of the ways a dialect joins it."""
    return visible_text(came) in _texts(recorded)


def resembles(recorded: Message, came: Message) -> bool:
    """Whether `came` may be `recorded` as a client spelled it anew: the same tools called in the same order, and the same
    words but for their spacing, or beside calls none at all.

    Only for a message that names the reply it is; opencode names a call that it could not read `invalid`. A call under
    another id than the one minted for it must have most of its values still.
    """
    pairs = zip(recorded.calls, came.calls, strict=False)
    if len(recorded.calls) != len(came.calls) or not all(_respelled(ours, theirs) for ours, theirs in pairs):
        return False
    words = visible_text(came).split()
    return words in [text.split() for text in _texts(recorded)] or (not words and bool(recorded.calls))


def _respelled(recorded: ToolCall, came: ToolCall) -> bool:
    if came.name not in (recorded.name, "invalid"):
        return False
    if came.id == recorded.id:
        return True
    ours, theirs = _values(recorded.arguments), _values(came.arguments)
    return 2 * sum((ours & theirs).values()) >= sum(ours.values())


def _values(arguments: str) -> Counter[str]:
    """Every value of a call's arguments as trimmed text; arguments that are not JSON are one value."""
    found: Counter[str] = Counter()
    try:
        left = [json.loads(canonical_arguments(arguments))]
    except (ValueError, RecursionError):
        return Counter([arguments.strip()])
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            left += value.values() if isinstance(value, dict) else value
        else:
            found[str(value).strip()] += 1
    return found


def begins(recorded: Message, came: Message) -> bool:
    """Whether `came` is what a client had of `recorded` when it was cut off: all its calls, and its words at least up to the last.

    A recorded call that did not come back was never seen, and nobody will answer it.
    """
    calls, known = [call_key(c) for c in came.calls], [call_key(c) for c in recorded.calls]
    words = visible_text(came)
    if calls != known or not (words or calls):
        return False
    ends = [i for i, part in enumerate(recorded.parts, 1) if isinstance(part, ToolCall)]
    before = Message(recorded.role, recorded.parts[: ends[len(calls) - 1]] if calls else ())
    return any(whole.startswith(words) and words.startswith(least) for whole, least in zip(_texts(recorded), _texts(before), strict=True))


def _texts(message: Message) -> tuple[str, str, str]:
    """The visible text with its parts trimmed, joined, and joined by lines."""
    texts = [p.text for p in message.parts if isinstance(p, Text)]
    return visible_text(message), "".join(texts).strip(), "\n".join(texts).strip()


def _spellings(message: Message, matcher: Matcher) -> list[Message]:
    """The message, and where it has several texts the same with them joined."""
    texts = [p.text for p in message.parts if isinstance(p, Text)]
    if len(texts) < 2 or not matcher.minted_ids:
        return [message]
    rest = tuple(p for p in message.parts if not isinstance(p, Text))
    return [message, *(Message(message.role, (Text(glue.join(texts)), *rest)) for glue in ("", "\n"))]


def visible_text(message: Message) -> str:
    """A reply's words without what clients drop: edge whitespace, blank blocks, reasoning."""
    texts = (p.text.strip() for p in message.parts if isinstance(p, Text))
    return "\n".join(t for t in texts if t)


def call_key(call: ToolCall) -> str:
    """A call without its id."""
    return json.dumps([call.name, canonical_arguments(call.arguments)])


def tools_key(tools: Sequence[Tool]) -> bytes:
    """A 16-byte digest of the tools as they are rendered: names, descriptions, schemas, order."""
    return _digest([field for t in tools for field in (t.name, t.description, t.parameters)])


def canonical_arguments(arguments: str) -> str:
    """One spelling for all JSON spellings of one value; nothing is no arguments; text that is not JSON stays as it is."""
    try:
        value = json.loads(arguments.strip() or "{}")
        if isinstance(value, dict) and value.keys() == {_UNPARSED} and isinstance(value[_UNPARSED], str):
            return canonical_arguments(value[_UNPARSED])
        return json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError, OverflowError):
        return arguments


def _canonical(value: object) -> object:
    """Lone surrogates as U+FFFD and integral floats as integers: what comes back through other languages' JSON."""
    if isinstance(value, dict):
        return {str(_canonical(k)): _canonical(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, bool) or value is None:
        return value
    assert isinstance(value, int | float)
    if isinstance(value, int) and abs(value) > _EXACT_FLOAT:
        value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _exact(part: Part) -> list[str]:
    match part:
        case Text(text):
            return ["text", text]
        case Reasoning(text):
            return ["reasoning", text]
        case ToolCall(call_id, name, arguments):
            return ["call", call_id, name, _ordered(arguments)]
        case ToolResult(call_id, text, is_error):
            return ["result", call_id, text, "error" if is_error else ""]


def _ordered(arguments: str) -> str:
    """One spelling for all JSON spellings of one ordered value, repeated keys kept; text that is not JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments, object_pairs_hook=lambda pairs: {"": pairs}))
    except (ValueError, RecursionError, OverflowError):
        return arguments


def _digest(fields: Sequence[str]) -> bytes:
    state = blake2b(digest_size=16)
    for field in fields:
        raw = field.encode("utf-8", "surrogatepass")
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.digest()


def vouches(recorded: Message, came: Message) -> bool:
    """Whether the ids of all calls are those minted for `recorded`, under their names, with the same words.

    opencode renames a call that it could not read to `invalid` and keeps its id.
    """
    minted, echoed = {c.id: c.name for c in recorded.calls}, {c.id: c.name for c in came.calls}
    if minted.keys() != echoed.keys() or len(came.calls) != len(recorded.calls) or len(minted) != len(recorded.calls):
        return False
    return same_words(recorded, came) and all(echoed[i] in (name, "invalid") for i, name in minted.items())
