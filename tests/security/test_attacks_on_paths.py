"""Attacks by the address of a request. Of each test's docstring the first paragraph is the attack, the second the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.security.support import AS_ADMIN, ASK, exchange, get, post, turns
from tests.support.dialects import ALL, Spoken
from tests.support.gateways import bench

every_dialect = pytest.mark.parametrize("spoken", ALL.values(), ids=ALL)

OUT = [
    "/s/KEY/../../api/v1/sessions",
    "/s/KEY/../api/v1/sessions",
    "/s/KEY/./../../api/v1/sessions",
    "/s/KEY/%2e%2e/%2e%2e/api/v1/sessions",
    "/s/KEY/..%2f..%2fapi%2fv1%2fsessions",
    "/s/KEY%2f..%2f..%2fapi%2fv1%2fsessions",
    "/s/KEY%252f..%252f..%252fapi/v1/sessions",
    "/s/KEY/..;/..;/api/v1/sessions",
    "/s/KEY;/api/v1/sessions",
    "/s/KEY\\..\\..\\api\\v1\\sessions",
    "/s/KEY/..%5c..%5capi/v1/sessions",
    "/s/KEY/%c0%ae%c0%ae/%c0%ae%c0%ae/api/v1/sessions",
    "/s/KEY/..%c0%af..%c0%afapi/v1/sessions",
    "/s/KEY/\u2025/\u2025/api/v1/sessions",
    "/s/KEY/..\uff0f..\uff0fapi\uff0fv1\uff0fsessions",
    "/s/KEY//api/v1/sessions",
    "/s/KEY/api/v1/sessions",
    "/s/KEY%00/../../api/v1/sessions",
    "/s/KEY/v1/messages/../../../../api/v1/sessions",
    "/s/KEY/v1beta/models/../../../../api/v1/sessions",
    "//api/v1/sessions",
    "/./api/v1/sessions",
    "/API/v1/sessions",
    "/api/v1//sessions",
    "/api%2fv1%2fsessions",
    "/api/v1/sessions/",
    "/api/v1/sessions;x",
    "/api/v1/sessions%00",
    "/api/v1/sessions/..",
]


@pytest.mark.parametrize("path", OUT)
async def test_a_path_that_leads_out_of_the_session(path: str) -> None:
    """A path under a session's key leads out of it to the admin API: with `..`, encoded once or twice, with `//`, `;`, NUL, other slashes.

    No part of a path is ever resolved or decoded twice: none of these is a route of the admin API, even for who has the admin key.
    """
    async with bench() as b:
        asked = path.replace("KEY", b.handle.key).encode()
        for sent in (get(asked, AS_ADMIN[:-2]), post(asked.decode(), b"{}", AS_ADMIN[:-2], b"Connection: close")):
            (told,) = await exchange(b, sent)
            assert told.status in (400, 401, 404) or told.body.startswith((b"turnloom", b'{"name":"models/..')), told
            assert b'"sessions"' not in told.body
            assert b.handle.id.encode() not in told.body
        assert len((await b.admin("GET", "/sessions"))[1]["sessions"]) == 1


ODD_KEYS = ["", "%00", "%20", ".", "..", "%2e", "%2f", "%252f", ";", "%ff", "%ed%a0%80", "é", "%E2%88%95", "*", "{key}", "-1", "k" * 600]


@every_dialect
@pytest.mark.parametrize("key", [*ODD_KEYS, "KEY%00", "KEY%20", "KEY;", "KEY/", "KEY%2f", "KEY%", "%4bEY"])
async def test_a_path_with_another_key(spoken: Spoken, key: str) -> None:
    """The key in the path is empty, very long, encoded, or the right one with a NUL, a blank, a slash or a semicolon after it.

    No key but the session's own opens it: 401, or 404 where it is no path of ours. What a percent sign encodes is decoded once.
    """
    async with bench(lambda *_: "Yes") as b:
        asked = key.replace("KEY", b.handle.key).replace("%4bEY", b.handle.key[:-1] + f"%{ord(b.handle.key[-1]):02x}")
        (told,) = await exchange(b, post(f"/s/{asked}{spoken.path}", spoken.ask("hi")[1], b"Connection: close"))
        if key == "%4bEY":
            assert told.status == 200, "the same key, its last letter encoded"
        else:
            assert told.status in (401, 404, 400), told
            assert await turns(b, b.handle.id) == 0
            assert b.handle.key.encode() not in told.body


ODD_IDS = ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%00", "ID%00", "ID%2f", "ID%20", "ID;", "'%20or%201=1", "*", "%25", "x" * 5000]


@pytest.mark.parametrize("bad", ODD_IDS)
@pytest.mark.parametrize("call", ["", "/tree", "/samples", "/finish", "/reward"])
async def test_an_id_that_is_a_path(bad: str, call: str, tmp_path: Path) -> None:
    """The operator's client is made to ask for a session by an id that is a path, holds a NUL, or is SQL.

    An id is looked up as it is and is never a path or a part of a statement: 404 in the admin API's shape; no session changes.
    """
    async with bench(store=tmp_path / "s.db") as b:
        path = f"/api/v1/sessions/{bad.replace('ID', b.handle.id)}{call}"
        body = b'{"value": 1}' if call == "/reward" else b"{}"
        method = b"POST" if call in ("/finish", "/reward") else b"GET"
        sent = get(path.encode(), AS_ADMIN[:-2]) if method == b"GET" else post(path, body, AS_ADMIN[:-2], b"Connection: close")
        (told,) = await exchange(b, sent)
        assert told.status == 404, told
        assert told.json["error"]["type"] == "NotFound"
        if not call:
            (told,) = await exchange(b, get(path.encode(), AS_ADMIN[:-2], method=b"DELETE"))
            assert told.status == 404
        row = (await b.session()).row
        assert (row.status, row.reward) == ("open", None)
        assert {each.name.split("-")[0] for each in tmp_path.iterdir()} <= {"s.db", "s.db.lock"}


@pytest.mark.parametrize("bad", ["", ".hidden/..", "a/b", "a b", "a\u0000", "a\n", "é", "../x", "x" * 129, "'; drop table sessions; --"])
async def test_an_id_that_is_chosen_badly(bad: str) -> None:
    """A session is opened under an id that is a path, empty, very long, or holds a line's end.

    An id is 1 to 128 letters, digits, dots, dashes and underscores; all else is a 400 that names the field.
    """
    async with bench() as b:
        status, told = await b.admin("POST", "/sessions", {"id": bad})
        assert (status, told["error"]["type"]) == (400, "BadRequest")
        assert told["error"]["message"].startswith("id: ")


@every_dialect
async def test_one_sessions_path_below_anothers(spoken: Spoken) -> None:
    """A path names two sessions: `/s/A/s/B/v1/…`.

    404: there is no session below a session.
    """
    async with bench(lambda *_: "Yes") as b:
        other = await b.gateway.open_session()
        path, body = spoken.ask("hi")
        async with b.http.post(f"{b.handle.base_url}/s/{other.key}{path}", data=body) as answer:
            assert answer.status == 404
            assert other.key not in await answer.text()
        assert (await turns(b, b.handle.id), await turns(b, other.id)) == (0, 0)


async def test_a_model_that_is_a_path() -> None:
    """Gemini's path names the model, and the name holds `..`, slashes, or another session's path.

    It is a name and nothing else: the turn is made in the session of the key before it.
    """
    async with bench(lambda *_: "Yes") as b:
        other = await b.gateway.open_session()
        body = ALL["gemini"].ask("hi")[1]
        for n, model in enumerate(
            ("../../../api/v1/sessions", f"..%2f..%2fs%2f{other.key}", "a/b/c", f"../../{other.key}/m", "%00", "m:x")
        ):
            sent = post(f"/s/{b.handle.key}/v1beta/models/{model}:generateContent", body[:-1] + b', "x": %d}' % n, b"Connection: close")
            (told,) = await exchange(b, sent)
            assert told.status == 200, told
            assert await turns(b, b.handle.id) == n + 1
        assert await turns(b, other.id) == 0


@pytest.mark.parametrize("header", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "_method"])
async def test_a_method_in_a_header(header: str) -> None:
    """A GET or a POST asks in a header, or in the query, to be taken for a DELETE.

    The method is the request line's; the header is read past.
    """
    async with bench() as b:
        line = f"{header}: DELETE".encode()
        (told,) = await exchange(b, get(f"/api/v1/sessions/{b.handle.id}?_method=DELETE".encode(), AS_ADMIN[:-2], line))
        assert (told.status, told.json["id"]) == (200, b.handle.id)
        (told,) = await exchange(b, post(f"/api/v1/sessions/{b.handle.id}", b"{}", AS_ADMIN[:-2], line, b"Connection: close"))
        assert told.status == 404
        assert (await b.admin("GET", f"/sessions/{b.handle.id}"))[0] == 200


@pytest.mark.parametrize("header", ["X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Prefix", "X-Forwarded-Path", "X-Forwarded-Uri"])
async def test_a_path_in_a_header(header: str) -> None:
    """A request asks in a header to be taken for one of another path.

    The path is the request line's; the header is read past.
    """
    async with bench() as b:
        (told,) = await exchange(b, get(b"/api/hello", AS_ADMIN[:-2], f"{header}: /api/v1/sessions".encode()))
        assert (told.status, told.body) == (200, b"turnloom\n")


async def test_an_address_of_another_host() -> None:
    """The request line holds a whole address, of another host.

    Its path is taken as any other, and nothing is sent to that host: this is no proxy. The admin API needs its key there too.
    """
    async with bench(lambda *_: "Yes") as b:
        (told,) = await exchange(b, post(f"http://other.invalid/s/{b.handle.key}/v1/messages", ASK, b"Connection: close"))
        assert told.status == 200
        (told,) = await exchange(b, get(b"http://other.invalid/api/v1/sessions"))
        assert told.status == 401
        (told,) = await exchange(b, get(b"other.invalid:443", method=b"CONNECT"))
        assert told.status in (400, 404)


HOSTS = ["e.example/x", "a b", 'x"y', "x'y", "$(id)", "a;b", "a,b", "user@h", "h:port", "h:1:2", "[::1", "\x7f", "é", "h/../x", "`id`"]


@pytest.mark.parametrize("host", HOSTS)
async def test_a_host_that_is_none(host: str) -> None:
    """A session is opened with a Host header that is no host: a path, a shell's words. Its urls go into an agent's environment.

    400, and no session is opened.
    """
    async with bench() as b:
        sent = post("/api/v1/sessions", b"{}", AS_ADMIN[:-2], b"Connection: close").replace(b"Host: gateway", f"Host: {host}".encode())
        (told,) = await exchange(b, sent)
        assert told.status == 400, told
        assert len((await b.admin("GET", "/sessions"))[1]["sessions"]) == 1


async def test_a_host_of_somebody_else() -> None:
    """A session is opened with the Host header of another machine, or with `X-Forwarded-Host`.

    The urls hold the host that the operator's own request names, since that is how it reached the gateway; forwarded headers are read past.
    """
    async with bench() as b:
        for host, seen in ((b"gw.example:8000", "gw.example:8000"), (b"[::1]:9", "[::1]:9")):
            lines = (AS_ADMIN[:-2], b"Connection: close", b"X-Forwarded-Host: evil.example", b"Forwarded: host=evil.example;proto=https")
            (told,) = await exchange(b, post("/api/v1/sessions", b"{}", *lines).replace(b"Host: gateway", b"Host: " + host))
            opened = told.json
            assert opened["urls"]["anthropic"] == f"http://{seen}/s/{opened['key']}"
            assert "evil" not in json.dumps(opened)
