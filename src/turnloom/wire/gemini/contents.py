"""Reads `systemInstruction` and `contents` into neutral messages. Owns how a function call gets an id where the client brings none."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from turnloom.errors import BadRequest
from turnloom.types import Message, Part, Reasoning, Text, ToolCall, ToolResult
from turnloom.wire import fields
from turnloom.wire.contract import Reading
from turnloom.wire.fields import MAX_MESSAGES, MAX_PARTS
from turnloom.wire.gemini.fields import CALL_PREFIX, an_object, objects
from turnloom.wire.json import text_of
from turnloom.wire.refs import turn_in_base64

_KINDS = (
    "functionCall",
    "functionResponse",
    "inlineData",
    "fileData",
    "executableCode",
    "codeExecutionResult",
    "toolCall",
    "toolResponse",
    "text",
)
"""What a part may be; the text last, since some clients put an empty one beside the rest."""

_Placed = tuple[Mapping[str, Any], str]
"""A part, and the path to it."""


class ContentsReader:
    """One request's. It knows which calls of the reply above are unanswered, and counts what it puts placeholders for."""

    def __init__(self, reading: Reading) -> None:
        self.images = 0
        self._reading = reading
        self._unanswered = _Unanswered(())
        self._known: set[str] = set()
        """The ids of all calls so far. A response under one of them answers that call, however late it comes."""

    def system(self, value: Any) -> list[Message]:
        """A content, or a string."""
        where = "systemInstruction"
        parts = [({"text": value}, where)] if isinstance(value, str) else _parts(an_object(value, where), where)
        texts = tuple(Text(text) for text in self._texts(parts))
        return [Message("system", texts)] if texts else []

    def messages(self, value: Any) -> list[Message]:
        """The parts of model contents in a row are one reply: a client that streams may bring it back chunk by chunk."""
        contents = objects(value, "contents", MAX_MESSAGES)
        if not contents:
            raise BadRequest("contents: must be a list with at least one content")
        found: list[Message] = []
        for role, group in groupby(enumerate(contents), lambda item: _role(item[1], f"contents.{item[0]}")):
            placed = [(i, _parts(content, f"contents.{i}")) for i, content in group]
            if role == "model":
                found.append(self._reply(placed[0][0], [part for _, parts in placed for part in parts]))
            else:
                for i, parts in placed:
                    found += self._user(i, parts)
        return found

    def _reply(self, index: int, placed: list[_Placed]) -> Message:
        ref = fields.only(turn_in_base64(part.get("thoughtSignature")) for part, _ in placed)
        said = [found for part, where in placed if (found := _said(part, where)) is not None]
        parts = tuple(_joined(_with_ids(said, index, ref)))
        if len(parts) > MAX_PARTS:
            raise BadRequest(f"contents.{index}: this reply has {len(parts)} parts; at most {MAX_PARTS} are supported")
        calls = [part for part in parts if isinstance(part, ToolCall)]
        self._unanswered = _Unanswered(calls)
        self._known.update(call.id for call in calls)
        return Message("assistant", parts, ref)

    def _user(self, index: int, placed: list[_Placed]) -> Iterator[Message]:
        """A user content; each function response in it becomes a tool message of its own, in place."""
        texts: list[Part] = []
        responses = 0
        for part, where in placed:
            if _kind(part) == "functionResponse":
                if texts:
                    yield Message("user", tuple(texts))
                    texts = []
                yield Message("tool", (self._response(part, where, f"{CALL_PREFIX}{index}_r{responses:02d}"),))
                responses += 1
            else:
                texts += map(Text, self._texts([(part, where)]))
        if texts:
            yield Message("user", tuple(texts))
        elif not responses:
            raise BadRequest(f"contents.{index}.parts: a user content needs some text or a function response")

    def _texts(self, placed: Iterable[_Placed]) -> Iterator[str]:
        """The text of parts that must be text, empty ones left out."""
        for part, where in placed:
            kind = _kind(part)
            if kind == "text":
                if text := fields.string(part, "text", where):
                    yield text
            elif kind in ("inlineData", "fileData"):
                yield self._shown(part, where)
            elif kind:
                raise BadRequest(f"{where}.{kind}: is not supported here; send text or functionResponse parts")

    def _shown(self, part: Mapping[str, Any], where: str) -> str:
        """A picture or a document in words."""
        kind = _kind(part)
        blob = an_object(part.get(kind), f"{where}.{kind}")
        data, media_type = blob.get("data"), blob.get("mimeType")
        shown = fields.image(self._reading, str(media_type or "file"), data if isinstance(data, str) else "", f"{where}.{kind}")
        self.images += 1
        return shown

    def _response(self, part: Mapping[str, Any], where: str, spare_id: str) -> ToolResult:
        where = f"{where}.functionResponse"
        response = an_object(part.get("functionResponse"), where)
        name, given = fields.optional_string(response, "name", where), fields.optional_string(response, "id", where)
        text, is_error = _outcome(response.get("response"), f"{where}.response")
        pictures = self._texts((p, f"{where}.parts.{i}") for i, p in enumerate(objects(response.get("parts"), f"{where}.parts", MAX_PARTS)))
        late = given in self._known
        return ToolResult(
            self._unanswered.take(given, "" if late else name) or spare_id, "\n".join(t for t in (text, *pictures) if t), is_error
        )


class _Unanswered:
    """The calls of one reply that no response has answered yet, by id and by name. Ids may repeat."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._ids = [call.id for call in calls]
        self._left = [True] * len(calls)
        self._of_id: defaultdict[str, deque[int]] = defaultdict(deque)
        self._of_name: defaultdict[str, deque[int]] = defaultdict(deque)
        for i, call in enumerate(calls):
            self._of_id[call.id].append(i)
            self._of_name[call.name].append(i)

    def take(self, given: str, name: str) -> str:
        """The id of the call that a response answers: the call of that id, or the first of that name; else the given id.

        No call has the name "".
        """
        for places in (self._of_id.get(given), self._of_name.get(name) if name else None):
            while places:
                place = places.popleft()
                if self._left[place]:
                    self._left[place] = False
                    return self._ids[place]
        return given


def _role(content: Mapping[str, Any], where: str) -> str:
    role = content.get("role")
    if role not in (None, "", "user", "model", "function"):
        raise BadRequest(f'{where}.role: must be "user" or "model", not {fields.shown(role)}')
    return "model" if role == "model" else "user"


def _parts(content: Mapping[str, Any], where: str) -> list[_Placed]:
    return [(part, f"{where}.parts.{i}") for i, part in enumerate(objects(content.get("parts"), f"{where}.parts", MAX_PARTS))]


def _kind(part: Mapping[str, Any]) -> str:
    """ "" for a part that says nothing, such as one that carries a signature alone."""
    return next((kind for kind in _KINDS if part.get(kind) is not None), "")


def _said(part: Mapping[str, Any], where: str) -> Part | None:
    """A part of a model content; None where it says nothing."""
    kind = _kind(part)
    if kind == "functionCall":
        return _call(an_object(part["functionCall"], f"{where}.functionCall"), f"{where}.functionCall")
    if kind not in ("text", ""):
        raise BadRequest(f"{where}.{kind}: is not supported in a model content; send text or functionCall parts")
    text = fields.optional_string(part, "text", where)
    if not text:
        return None
    return Reasoning(text) if part.get("thought") is True else Text(text)


def _call(call: Mapping[str, Any], where: str) -> ToolCall:
    arguments = call.get("args")
    if arguments is not None and not isinstance(arguments, dict):
        raise BadRequest(f"{where}.args: must be an object")
    return ToolCall(fields.optional_string(call, "id", where), fields.string(call, "name", where), text_of(arguments or {}))


def _with_ids(parts: list[Part], index: int, ref: str) -> Iterator[Part]:
    """An id for each call that came without one.

    Where no call has an id and a signature names the turn, they are the ids that
    were minted for that turn's calls; else the place in the request makes them.
    """
    calls = [part for part in parts if isinstance(part, ToolCall)]
    stem = f"{CALL_PREFIX}{ref}" if ref and not any(call.id for call in calls) else f"{CALL_PREFIX}{index}_"
    number = 0
    for part in parts:
        if isinstance(part, ToolCall):
            part = part if part.id else replace(part, id=f"{stem}{number:02d}")
            number += 1
        yield part


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Neighbours of one kind are pieces of one text."""
    for kind, run in groupby(parts, type):
        if kind is Text or kind is Reasoning:
            yield kind("".join(part.text for part in run if isinstance(part, Text | Reasoning)))
        else:
            yield from run


def _outcome(response: Any, where: str) -> tuple[str, bool]:
    """(what a function gave back as text, whether it is an error).

    By Google's reference `output` holds a function's output and `error` its
    error; where neither does, the whole response is the output.
    """
    if response is None:
        return "", False
    if not isinstance(response, dict):
        raise BadRequest(f"{where}: must be an object")
    is_error = response.keys() == {"error"}
    value = response["error"] if is_error else response["output"] if response.keys() == {"output"} else response
    return value if isinstance(value, str) else text_of(value), is_error
