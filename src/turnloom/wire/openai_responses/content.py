"""Reads the content of items: strings, or lists of text, images and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnloom.errors import BadRequest
from turnloom.types import Text
from turnloom.wire import fields
from turnloom.wire.contract import Reading
from turnloom.wire.fields import MAX_PARTS, string

_TEXTS = ("input_text", "output_text", "text")
_ATTACHED = {"input_image": "image_url", "input_file": "file_data"}


class Content:
    """One request's. `images` counts the images and files that a placeholder stands for."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.images = 0

    def user(self, content: Any, where: str) -> tuple[Text, ...]:
        texts = self.texts(content, where)
        if not any(t.text for t in texts):
            raise BadRequest(f"{where}: a user message needs some text")
        return texts

    def assistant(self, content: Any, where: str) -> tuple[Text, ...]:
        """What a reply said, without pieces that say nothing; a refusal is said too."""
        if isinstance(content, str):
            return (Text(content),) if content else ()
        said = (_said(part, f"{where}.{i}") for i, part in enumerate(_parts(content, where)))
        return tuple(text for text in said if text.text)

    def output(self, content: Any, where: str) -> str:
        """What a tool answered, as one text."""
        return "\n".join(t.text for t in self.texts(content, where))

    def texts(self, content: Any, where: str) -> tuple[Text, ...]:
        if isinstance(content, str):
            return (Text(content),)
        return tuple(self._text(part, f"{where}.{i}") for i, part in enumerate(_parts(content, where)))

    def _text(self, part: Mapping[str, Any], where: str) -> Text:
        kind = part.get("type")
        if kind in _TEXTS:
            return Text(string(part, "text", where))
        if not isinstance(kind, str) or kind not in _ATTACHED:
            raise BadRequest(f"{where}.type: {fields.shown(kind)} is not supported here; send input_text parts")
        media_type, data = _attached(part.get(_ATTACHED[kind]), kind)
        shown = fields.image(self._reading, media_type, data, where)
        self.images += 1
        return Text(shown)


def _said(part: Mapping[str, Any], where: str) -> Text:
    kind = part.get("type")
    if kind == "refusal":
        return Text(string(part, "refusal", where))
    if kind not in _TEXTS:
        raise BadRequest(f"{where}.type: {fields.shown(kind)} is not supported in an assistant message")
    return Text(string(part, "text", where))


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise BadRequest(f"{where}: must be a string or a list of content parts")
    return fields.at_most(MAX_PARTS, content, where)


def _attached(value: Any, kind: str) -> tuple[str, str]:
    """(media type, base64 data or "") of a data URL; what came by another address or by a file's id has no data here."""
    head, comma, data = value.partition(",") if isinstance(value, str) else ("", "", "")
    plain = kind.removeprefix("input_")
    if not comma or not head.startswith("data:"):
        return plain, value if kind == "input_file" and isinstance(value, str) else ""
    media_type, _, encoding = head.removeprefix("data:").partition(";")
    return media_type or plain, data if encoding.endswith("base64") else ""
