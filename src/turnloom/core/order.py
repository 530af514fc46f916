"""Which call each tool result answers, and the order in which results stand: that of the calls.

A client may send the results of parallel calls in any order, echo the calls in
another one, and rename them. Templates without call ids tell results apart by
their order alone, so those that directly follow a reply are put into the order of its calls.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from turnloom.core.match import call_key
from turnloom.types import Message, ToolCall, ToolResult

NO_CALL = -1
"""The place of what answers no call of the reply above it."""

Slot = tuple[int, int]
"""Which message stands somewhere, and the place among the reply's calls of the call that it answers."""


def same_calls(recorded: Message, came: Message) -> list[int | None]:
    """Per call that came back, the place of the recorded one that it is; None where more came back than there are.

    Calls are the same by id and words, then by words among those whose ids nobody names, then by id, then by their place.
    """
    our_calls, their_calls = recorded.calls, came.calls
    ours, theirs = [c.id for c in our_calls], [c.id for c in their_calls]
    places = {call_id: place for place, call_id in enumerate(ours)}
    named = set(theirs)
    if len(places) == len(ours) == len(theirs) and places.keys() == named:
        return [places[call_id] for call_id in theirs]
    if len(ours) == len(theirs) == 1:
        return [0]
    said, echoed = [call_key(c) for c in our_calls], [call_key(c) for c in their_calls]
    ways: tuple[tuple[Sequence[Hashable], Sequence[Hashable]], ...] = (
        (list(zip(ours, said, strict=True)), list(zip(theirs, echoed, strict=True))),
        (
            [None if i in named else words for i, words in zip(ours, said, strict=True)],
            [None if i in places else words for i, words in zip(theirs, echoed, strict=True)],
        ),
        (ours, theirs),
        ([True] * len(ours), [True] * len(theirs)),
    )
    found: list[int | None] = [None] * len(theirs)
    for recorded_as, came_as in ways:
        _pair(recorded_as, came_as, found)
    return found


def _pair(recorded_as: Sequence[Hashable], came_as: Sequence[Hashable], found: list[int | None]) -> None:
    """Gives each call that has no place yet the first free place with the same key. None is no key."""
    taken = set(found)
    free: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for place, key in enumerate(recorded_as):
        if key is not None and place not in taken:
            free[key].append(place)
    for i, key in enumerate(came_as):
        if found[i] is None and (places := free.get(key)):
            found[i] = places.popleft()


def slots(recorded: Message | None, came: Message | None, following: Sequence[Message]) -> list[Slot]:
    """What stands where after a reply, up to the next one. `recorded` is the reply as it stands there, `came` as the client sent it.

    The results that directly follow it are in the order of the recorded calls, those that answer none of them last.
    """
    if recorded is None or came is None or all(m.role != "tool" for m in following):
        return [(i, NO_CALL) for i in range(len(following))]
    answered = Answered(recorded, came)
    places = [answered.place(m) for m in following]
    last = len(places) + len(recorded.calls)
    run = next((i for i, m in enumerate(following) if m.role != "tool"), len(following))
    order = sorted(range(run), key=lambda i: places[i] if places[i] != NO_CALL else last)
    return [(i, places[i]) for i in (*order, *range(run, len(following)))]


def replies(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """[start, end) of what follows each reply, up to the next one. The first, before any reply, starts at 0."""
    start = 0
    for i, message in enumerate(messages):
        if message.role == "assistant":
            yield start, i
            start = i + 1
    yield start, len(messages)


def arranged(came: Sequence[Message], recorded: Sequence[Message]) -> list[Slot]:
    """Which of the messages that came stands where, given the reply that stands for each that came."""
    found: list[Slot] = []
    for start, end in replies(came):
        above = (recorded[start - 1], came[start - 1]) if start else (None, None)
        found += [(start + i, place) for i, place in slots(above[0], above[1], came[start:end])]
        if end < len(came):
            found.append((end, NO_CALL))
    return found


def as_recorded(came: Sequence[Message], recorded: Sequence[Message]) -> list[Message]:
    """The messages with the recorded replies in place of those that came, and results in order under the recorded ids.

    A result under an id that only an earlier reply had answers that reply's call.
    """
    earlier: dict[str, str] = {}
    messages: list[Message] = []
    calls: tuple[ToolCall, ...] = ()
    for i, place in arranged(came, recorded):
        message = came[i]
        if message.role == "assistant":
            reply = recorded[i]
            calls = reply.calls
            named = zip(message.calls, same_calls(reply, message), strict=True)
            earlier.update({call.id: calls[j].id for call, j in named if j is not None})
            messages.append(reply)
        elif message.role == "tool":
            messages.append(_answering(message, calls[place].id if place != NO_CALL else None, earlier))
        else:
            messages.append(message)
    return messages


def _answering(message: Message, call_id: str | None, earlier: dict[str, str]) -> Message:
    parts = tuple(
        replace(p, call_id=call_id if call_id is not None else earlier.get(p.call_id, p.call_id)) if isinstance(p, ToolResult) else p
        for p in message.parts
    )
    return message if parts == message.parts else replace(message, parts=parts)


class Answered:
    """The calls that the results after one reply answer, asked for one result after another."""

    def __init__(self, recorded: Message, came: Message) -> None:
        self._places: dict[str, deque[int]] = {}
        for call, place in zip(came.calls, same_calls(recorded, came), strict=True):
            if place is not None:
                self._places.setdefault(call.id, deque()).append(place)
        # Some clients lose the ids of the calls and keep those of the results.
        for place, call in enumerate(recorded.calls):
            self._places.setdefault(call.id, deque((place,)))

    def place(self, message: Message) -> int:
        part = next((p for p in message.parts if isinstance(p, ToolResult)), None)
        places = self._places.get(part.call_id) if part is not None and message.role == "tool" else None
        if not places:
            return NO_CALL
        # Several calls under one id are answered in their order.
        return places.popleft() if len(places) > 1 else places[0]
