"""Bytes on a socket, and what comes back: for what no HTTP client would send."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.gateways import ADMIN, Bench

AS_ADMIN = f"Authorization: Bearer {ADMIN}\r\n".encode()
ASK = b'{"model":"m","max_tokens":10,"messages":[{"role":"user","content":"hi"}]}'


@dataclass(frozen=True)
class Told:
    """One response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def post(path: str, body: bytes = ASK, *lines: bytes, framing: bytes | None = None) -> bytes:
    """A request; `lines` stand among its headers, `framing` in the place of its length."""
    framing = b"Content-Length: %d" % len(body) if framing is None else framing
    head = b"\r\n".join([b"POST " + path.encode() + b" HTTP/1.1", b"Host: gateway", *lines, framing])
    return head + b"\r\n\r\n" + body


def get(path: bytes, *lines: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"Host: gateway", b"Connection: close", *lines]) + b"\r\n\r\n"


async def exchange(b: Bench, sent: bytes, *, first: bool = False) -> list[Told]:
    """All that is answered to these bytes until the gateway closes the connection, or only the first response."""
    host, port = b.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        async with asyncio.timeout(30):
            if not first:
                raw = await reader.read()
            else:
                raw = await reader.readuntil(b"\r\n\r\n")
                raw += await reader.readexactly(int(re.search(rb"content-length: (\d+)", raw, re.I)[1]))  # type: ignore[index]
    finally:
        writer.close()
    return list(responses(raw))


def responses(raw: bytes) -> Iterator[Told]:
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        assert lines[0].startswith("HTTP/"), raw[:300]
        body, raw = raw[: int(headers["content-length"])], raw[int(headers["content-length"]) :]
        yield Told(int(lines[0].split()[1]), headers, body)


async def turns(b: Bench, session_id: str) -> int:
    return len((await b.gateway.session(session_id)).tree.turns)
