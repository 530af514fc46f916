"""Attacks on the framing of requests and on headers. Of each test's docstring the first paragraph is the attack, the second the answer."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from tests.security.support import AS_ADMIN, ASK, exchange, get, post, turns
from tests.support.dialects import ALL, Spoken, error_of
from tests.support.gateways import Bench, bench
from turnloom.gateway.request_limits import RequestLimits

every_dialect = pytest.mark.parametrize("spoken", ALL.values(), ids=ALL)

CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(ASK), ASK)
LENGTH = b"Content-Length: %d" % len(ASK)
TE = b"Transfer-Encoding: "

FRAMINGS = {
    "a length and chunks": LENGTH + b"\r\n" + TE + b"chunked",
    "chunks and a length": TE + b"chunked\r\n" + LENGTH,
    "two lengths": LENGTH + b"\r\nContent-Length: 4",
    "a length twice": LENGTH + b"\r\n" + LENGTH,
    "a list of lengths": LENGTH + b", 4",
    "a length with a sign": LENGTH.replace(b": ", b": +"),
    "a length below zero": b"Content-Length: -1",
    "a length in hexadecimal": b"Content-Length: 0x10",
    "a length beyond 64 bits": b"Content-Length: 99999999999999999999999",
    "chunks misspelled": TE + b"xchunked",
    "chunks, then plain": TE + b"chunked, identity",
    "plain, then chunks": TE + b"identity, chunked",
    "packed, then chunks": TE + b"gzip, chunked",
    "chunks twice": TE + b"chunked\r\n" + TE + b"chunked",
    "a blank before the colon": b"Transfer-Encoding : chunked",
    "a control character": TE + b"\x0bchunked",
    "a folded line": b"Transfer-Encoding:\r\n chunked",
}


async def nothing_happened(b: Bench) -> None:
    assert not b.engine.requests
    assert await turns(b, b.handle.id) == 0
    assert (await b.admin("GET", f"/sessions/{b.handle.id}"))[0] == 200, "it was not dropped"


@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS)
async def test_a_request_inside_a_request(framing: bytes) -> None:
    """A body is framed twice, or in a way that a proxy and we may read differently, and a second request is hidden in it.

    What could be read in two ways is refused with a 400 and the connection closed: neither request is done.
    """
    async with bench(lambda *_: "Yes") as b:
        hidden = get(f"/api/v1/sessions/{b.handle.id}".encode(), AS_ADMIN[:-2], method=b"DELETE")
        for body in (CHUNKED, CHUNKED + hidden, ASK + hidden, b"0\r\n\r\n" + hidden):
            told = await exchange(b, post(f"/s/{b.handle.key}/v1/messages", body, framing=framing))
            assert [each.status for each in told] == [400]
        await nothing_happened(b)


BROKEN_CHUNKS = {
    "no size": b"\r\n" + ASK,
    "no number": b"xyz\r\n" + ASK,
    "0x before it": b"0x" + CHUNKED,
    "a sign": b"-1\r\n" + ASK,
    "beyond 64 bits": b"ffffffffffffffff1\r\n" + ASK,
    "a bare line feed": CHUNKED.replace(b"\r\n", b"\n"),
    "more than it says": b"2\r\n" + ASK + b"\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("chunks", BROKEN_CHUNKS.values(), ids=BROKEN_CHUNKS)
async def test_a_request_after_a_broken_body(chunks: bytes) -> None:
    """The chunks of a body are broken, and another request follows on the connection.

    Where the broken body ends is not known, so the connection closes: what follows is never read as a request.
    """
    async with bench(lambda *_: "Yes") as b:
        after = get(f"/api/v1/sessions/{b.handle.id}".encode(), AS_ADMIN[:-2], method=b"DELETE")
        told = await exchange(b, post(f"/s/{b.handle.key}/v1/messages", chunks + after, framing=TE + b"chunked"))
        assert [each.status for each in told] == [400]
        await nothing_happened(b)


async def test_requests_in_a_row() -> None:
    """Several requests come at once on one connection: a body that is no JSON, another session's, one without a key, a good one.

    Each is answered by itself and in order; a key of one says nothing of the next.
    """
    async with bench(lambda *_: "Yes") as b:
        other = await b.gateway.open_session()
        mine, theirs = f"/s/{b.handle.key}/v1/messages", f"/s/{other.key}/v1/messages"
        sent = post(mine, b"{") + post(theirs) + post("/v1/messages") + post(mine, ASK, b"Connection: close")
        assert [each.status for each in await exchange(b, sent)] == [400, 200, 401, 200]
        assert (await turns(b, b.handle.id), await turns(b, other.id)) == (1, 1)


NO_HTTP = {
    "a folded header": [b"X-A: b\r\n c"],
    "a folded key": [b"Authorization: Bearer\r\n KEY"],
    "a bare carriage return": [b"X-A: b\rX-B: KEY"],
    "NUL": [b"X-A: KEY\x00"],
    "a blank before the colon": [b"x-api-key : KEY"],
    "a line without a colon": [b"KEY"],
    "two hosts": [b"Host: KEY"],
    "a very long header": [b"X-A: KEY" + b"x" * 70_000],
    "very many headers": [b"X-A: KEY"] * 300,
}


@pytest.mark.parametrize("lines", NO_HTTP.values(), ids=NO_HTTP)
async def test_headers_that_are_none(lines: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    """Header lines are folded, cut by a bare carriage return, hold NUL, or are far too long or many; a key stands among them.

    400 and the connection closes; neither the answer nor the log repeats what was sent.
    """
    caplog.set_level(logging.DEBUG)
    async with bench(lambda *_: "Yes") as b:
        key = b.handle.key.encode()
        (told,) = await exchange(b, post(f"/s/{b.handle.key}/v1/messages", ASK, *(line.replace(b"KEY", key) for line in lines)))
        assert told.status == 400
        assert len(told.body) < 100
        assert key not in told.body
        assert b.handle.key not in caplog.text
        assert caplog.records, "that there was one is logged"
        await nothing_happened(b)


@pytest.mark.parametrize("expected", ["200-ok", "100-continue, x", "\xff\xfe", "x" * 9000])
async def test_an_expectation_that_nobody_has(expected: str) -> None:
    """A request expects something unknown, in bytes that are no text.

    417, without a word of it; nothing is logged as an error of ours.
    """
    async with bench(lambda *_: "Yes") as b:
        line = b"Expect: " + expected.encode("latin-1")
        (told,) = await exchange(b, post(f"/s/{b.handle.key}/v1/messages", ASK, line, b"Connection: close"))
        assert (told.status, told.body) == (417, b"Expect: only 100-continue is known here\n")
        await nothing_happened(b)


INJECTED = "m\r\nX-Evil: 1\r\n\r\n<script>"


@every_dialect
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_header_inside_a_value(spoken: Spoken, stream: bool) -> None:
    """The model's name, an idempotency key, a tool's name hold line ends and a header, to have it in the response.

    What a client sends is never a response header; the headers are the gateway's own, and names come back in JSON.
    """
    async with bench(lambda *_: "Yes") as b:
        path, body = spoken.ask("hi", stream=stream, model=INJECTED, user=INJECTED, metadata={"user_id": INJECTED})
        path = path.replace("models/m", "models/m%0dX-Evil:%201%0d%3Cscript%3E")
        headers = {"Idempotency-Key": "a%0d%0aX-Evil: 1", "x-stainless-retry-count": "0"}
        async with b.http.post(b.handle.base_url + path, data=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert "X-Evil" not in answer.headers
            known = (
                "request-id x-request-id content-type content-length transfer-encoding date server cache-control x-accel-buffering".split()
            )
            assert {name.lower() for name in answer.headers} <= set(known)
            assert not [value for value in answer.headers.values() if "Evil" in value]


@every_dialect
async def test_a_page_of_another_origin(spoken: Spoken) -> None:
    """A web page asks, from a browser on the operator's machine: with a preflight, and with a plain POST.

    OPTIONS is a 404 and no answer has an Access-Control header, so that no page may read one; without a key nothing is done.
    """
    async with bench(lambda *_: "Yes") as b:
        origin = {"Origin": "https://evil.example"}
        path, body = spoken.ask("hi")
        for url in (b.gateway.url + path, b.handle.base_url + path, f"{b.gateway.url}/api/v1/sessions"):
            async with b.http.options(url, headers={**origin, "Access-Control-Request-Method": "POST"}) as answer:
                assert answer.status == 404
                assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        for path_, status in ((b.gateway.url + path, 401), (f"{b.gateway.url}/api/v1/sessions", 401), (b.handle.base_url + path, 200)):
            async with b.http.post(path_, data=body, headers={**origin, "Content-Type": "text/plain"}) as answer:
                assert answer.status == status
                assert not [name for name in answer.headers if name.lower().startswith(("access-control", "set-cookie"))]


@every_dialect
async def test_many_headers_and_long_ones(spoken: Spoken) -> None:
    """A request brings more headers than the limit, or more bytes in them.

    400 in the dialect's shape, naming the limit; nothing else is read.
    """
    limits = RequestLimits(headers=20, header_bytes=4000)
    async with bench(lambda *_: "Yes", request_limits=limits) as b:
        path, body = spoken.ask("hi")
        for headers, words in (({f"x-{n}": "y" for n in range(21)}, "at most 20"), ({"x-a": "y" * 4000}, "at most 4000")):
            async with b.http.post(b.handle.base_url + path, data=body, headers=headers) as answer:
                assert words in error_of(spoken, 400, await answer.read())
        async with b.http.post(b.handle.base_url + path, data=body, headers={"x-a": "y" * 3000}) as answer:
            assert answer.status == 200
        assert await turns(b, b.handle.id) == 1


@every_dialect
async def test_a_body_that_trickles(spoken: Spoken) -> None:
    """A client sends a body byte by byte, or says how long it is and never sends it, to hold a connection and memory for ever.

    400 in the dialect's shape when its time is up, naming the limit, and the connection closes.
    """
    async with bench(lambda *_: "Yes", request_limits=RequestLimits(body_seconds=0.2)) as b:
        path, body = spoken.ask("hi")
        for sent in (0, 1, len(body) - 1):
            raw = post(f"/s/{b.handle.key}{path}", body)
            (told,) = await exchange(b, raw[: len(raw) - len(body) + sent])
            assert "did not come within 0.2 s" in error_of(spoken, told.status, told.body)
            assert told.status == 400
        await nothing_happened(b)


async def test_headers_that_trickle() -> None:
    """A client opens connections and never ends its headers, or never begins.

    A connection on which no request has come whole within the idle time closes.
    """
    async with bench(request_limits=RequestLimits(idle_seconds=0.2)) as b:
        for sent in (b"", b"POST /v1/mess", b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-A: "):
            assert await exchange(b, sent) == []


async def test_a_protocol_that_is_not_spoken() -> None:
    """A request asks to go on in another protocol: HTTP/2 in plain text, a WebSocket on a route of turns.

    It is answered as the HTTP/1.1 request it is; nothing after it is taken for another protocol.
    """
    async with bench(lambda *_: "Yes", request_limits=RequestLimits(idle_seconds=1)) as b:
        for line in (b"Connection: Upgrade\r\nUpgrade: h2c", b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"):
            raw = post(f"/s/{b.handle.key}/v1/messages", ASK, line) + post(f"/s/{b.handle.key}/v1/messages", b"{", b"Connection: close")
            first, *rest = [each.status for each in await exchange(b, raw)]
            assert (first, {*rest} <= {400}) == (200, True)
        told = await exchange(b, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert [each.status for each in told] == [400]


async def test_a_log_line_of_the_clients(caplog: pytest.LogCaptureFixture) -> None:
    """What is logged of a request, a tool's name or a path, holds line ends and looks like a line of the log.

    What a client wrote stands in a log line as one escaped word.
    """
    caplog.set_level(logging.DEBUG)
    async with bench(lambda *_: "Yes") as b:
        forged = "x\nERROR turnloom.gateway session stolen\x1b[2J"
        body = json.loads(ASK) | {"tools": [{"type": "web_search", "name": forged}]}
        assert (await b.post(body)).status == 200
        async with b.http.post(b.handle.base_url + "/v1/none%0aERROR%20forged", data=b"{}") as answer:
            assert answer.status == 404
        await asyncio.sleep(0)
        ours = [record.getMessage() for record in caplog.records if record.name.startswith("turnloom")]
        assert any("session stolen" in line for line in ours), "that it was declined is logged"
        assert not [line for line in ours if "\n" in line or "\x1b" in line]
