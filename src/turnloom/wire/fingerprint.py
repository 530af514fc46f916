"""What makes two requests the same: the dialect, what the path names, and the body but for how the reply is to be written."""

from __future__ import annotations

from hashlib import sha256

import orjson

from turnloom.wire.contract import Envelope

_MANNER = ("stream", "stream_options")
"""A client whose stream broke may ask for the same reply in one piece."""

_STREAMED = {"streamGenerateContent": "generateContent"}


def fingerprint(dialect: str, envelope: Envelope, body: bytes, *also: str) -> str:
    """Hex SHA-256; equal for equal requests, however their JSON is spelled. `also` is what else decides the reply."""
    verb = _STREAMED.get(envelope.verb, envelope.verb)
    try:
        value = orjson.loads(body)
        if isinstance(value, dict):
            for name in _MANNER:
                value.pop(name, None)
        body = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        pass  # What this reader cannot hold, other readers may: then the bytes themselves are what is compared.
    parts = (dialect, envelope.model, verb, *also)
    return sha256(b"\0".join([*(part.encode("utf-8", "surrogatepass") for part in parts), body])).hexdigest()
