"""Attacks on keys. Of each test's docstring the first paragraph is the attack, the second the answer."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.security.support import exchange, post, turns
from tests.support.dialects import ALL, Spoken, error_of
from tests.support.gateways import ADMIN, bench
from turnloom.engine.sglang import SGLangEngine
from turnloom.gateway import auth
from turnloom.gateway.api import Gateway
from turnloom.gateway.request_limits import RequestLimits
from turnloom.gateway.sessions import hash_key, new_key
from turnloom.store.memory import MemoryStore
from turnloom.testing.scripted_engine import Reply

every_dialect = pytest.mark.parametrize("spoken", ALL.values(), ids=ALL)

ADMIN_CALLS = [
    ("GET", "/sessions"),
    ("POST", "/sessions"),
    ("GET", "/sessions/ID"),
    ("DELETE", "/sessions/ID"),
    ("GET", "/sessions/ID/tree"),
    ("GET", "/sessions/ID/samples"),
    ("POST", "/sessions/ID/reward"),
    ("POST", "/sessions/ID/finish"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/engines"),
]


@every_dialect
async def test_another_sessions_key_beside_the_paths(spoken: Spoken) -> None:
    """The path holds one session's key, and a header, the query or the body another session's.

    The path's key decides, since agents send keys of their own beside the address they were given; the other session gets nothing.
    """
    async with bench(lambda *_: "Yes") as b:
        other = await b.gateway.open_session()
        path, body = spoken.ask("hi")
        _, named = spoken.ask("hi", key=other.key, session_id=other.id, api_key=other.key)
        for place in ("authorization", "x-api-key", "x-goog-api-key"):
            value = f"Bearer {other.key}" if place == "authorization" else other.key
            async with b.http.post(b.handle.base_url + path, data=body, headers={place: value}) as answer:
                assert answer.status == 200
        async with b.http.post(f"{b.handle.base_url}{path}?key={other.key}", data=named) as answer:
            assert answer.status == 200
        assert await turns(b, b.handle.id) >= 2
        assert await turns(b, other.id) == 0


@every_dialect
@pytest.mark.parametrize("place", ["Authorization", "x-api-key", "x-goog-api-key", "query"])
async def test_two_keys_in_one_place(spoken: Spoken, place: str) -> None:
    """One header, or the query, is sent twice with two different keys: a proxy may have checked the one and we might take the other.

    Where that place is the one that decides, it is refused with a 400, whichever of them opens a session; the same key twice is one key.
    """
    async with bench(lambda *_: "Yes") as b:
        path, body = spoken.ask("hi")
        for keys, status in (((b.handle.key, "other"), 400), (("other", b.handle.key), 400), ((b.handle.key, b.handle.key), 200)):
            if place == "query":
                sent = post(path + f"?key={keys[0]}&key={keys[1]}", body, b"Connection: close")
            else:
                scheme = "Bearer " if place == "Authorization" else ""
                lines = [f"{place}: {scheme}{key}".encode() for key in keys]
                sent = post(path, body, b"Connection: close", *lines)
            (told,) = await exchange(b, sent)
            assert told.status == status, told.body
            if status == 400:
                shape = ALL["gemini"] if place in ("query", "x-goog-api-key") and spoken.name == "gemini" else spoken
                assert "each with another value" in error_of(shape, 400, told.body)
                assert b.handle.key.encode() not in told.body
        assert await turns(b, b.handle.id) == 1


@pytest.mark.parametrize(("method", "path"), ADMIN_CALLS)
async def test_a_sessions_key_on_the_admin_api(method: str, path: str) -> None:
    """An agent calls the admin API with its session's key, wherever it can put it.

    Every call is a 401 and does nothing.
    """
    async with bench() as b:
        key, url = b.handle.key, f"{b.gateway.url}/api/v1{path.replace('ID', b.handle.id)}"
        places: list[dict[str, str]] = [{"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}, {}]
        for headers in places:
            async with b.http.request(
                method, f"{url}?key={key}", headers=headers, json={"value": 1.0} if "reward" in path else {}
            ) as answer:
                assert answer.status == 401
                assert (await answer.json())["error"]["type"] == "Unauthorized"
        assert (await b.session()).row.status == "open"
        assert len((await b.admin("GET", "/sessions"))[1]["sessions"]) == 1


@pytest.mark.parametrize(
    "line",
    [
        f"x-api-key: {ADMIN}",
        f"Authorization: Basic {base64.b64encode(ADMIN.encode()).decode()}",
        f"Authorization: {ADMIN}",
        f"Authorization: Bearer {ADMIN}x",
        f"Authorization: Bearer {ADMIN[:-1]}",
        f"Authorization: Bearer {ADMIN.upper()}",
        f"Authorization: Bearer {ADMIN}, Bearer {ADMIN}",
        "Authorization: Bearer",
        "Authorization: Bearer \xff\xfe",
        f"Proxy-Authorization: Bearer {ADMIN}",
        f"Cookie: key={ADMIN}",
    ],
)
async def test_nearly_the_admin_key(line: str) -> None:
    """The admin API is called with the admin key in another place or spelling, with part of it, or with bytes that are no text.

    Only `Authorization: Bearer ADMIN_KEY` opens it; all else is a 401.
    """
    async with bench() as b:
        (told,) = await exchange(b, post("/api/v1/sessions?key=" + ADMIN, b"{}", b"Connection: close", line.encode("latin-1")))
        assert told.status == 401
        assert len((await b.admin("GET", "/sessions"))[1]["sessions"]) == 1


async def test_no_admin_key_is_set() -> None:
    """The operator gave no admin key, and somebody sends an empty one.

    Without an admin key the admin API is locked: nothing opens it.
    """
    async with bench() as b, Gateway(SGLangEngine(b.engine.url), b.tokenizer) as locked:
        for value in ("Bearer ", "Bearer", "", "Bearer None", f"Bearer {ADMIN}"):
            async with b.http.get(f"{locked.url}/api/v1/sessions", headers={"Authorization": value}) as answer:
                assert answer.status == 401


@every_dialect
async def test_the_admin_key_as_a_sessions(spoken: Spoken) -> None:
    """The admin key is used where a session's key belongs.

    It opens no session: 401.
    """
    async with bench(lambda *_: "Yes") as b:
        path, body = spoken.ask("hi")
        for url, headers in ((f"{b.gateway.url}/s/{ADMIN}{path}", {}), (b.gateway.url + path, {"Authorization": f"Bearer {ADMIN}"})):
            async with b.http.post(url, data=body, headers=headers) as answer:
                error_of(spoken, 401, await answer.read())
        assert not b.engine.requests


@every_dialect
async def test_what_is_not_the_key(spoken: Spoken) -> None:
    """A guess: the session's id, the stored hash of its key (from a stolen database), a part of the key, other letters, more letters.

    401 for each, in the dialect's shape, without the guess in it.
    """
    async with bench(lambda *_: "Yes") as b:
        key, path, body = b.handle.key, *spoken.ask("hi")
        for guess in (b.handle.id, hash_key(key), key[:-1], key[1:], key.upper(), key + "=", key + "x" * 4000, f" {key} x"):
            async with b.http.post(b.gateway.url + path, data=body, headers={"x-api-key": guess}) as answer:
                told = error_of(spoken, answer.status, await answer.read())
            assert answer.status == 401, guess
            assert guess not in told
        assert not b.engine.requests


@every_dialect
async def test_a_key_without_end(spoken: Spoken) -> None:
    """Where unknown keys open sessions (`--open-sessions`), a key of thousands of characters is sent, or a control character.

    A key has at most 512 characters, else it is a 401 and opens nothing; a shorter one is only ever hashed.
    """
    async with bench(lambda *_: "Yes", open_sessions=True) as b:
        path, body = spoken.ask("hi")
        for key, status in (("k" * 513, 401), ("k" * 60_000, 401), ("k" * 512, 200), ("../k\t", 200)):
            async with b.http.post(b.gateway.url + path, data=body, headers={"x-api-key": key}) as answer:
                assert answer.status == status
        assert len((await b.admin("GET", "/sessions"))[1]["sessions"]) == 3


async def test_a_key_after_its_session() -> None:
    """An agent goes on with its key after its session was finished, and after it was dropped.

    A finished session makes no new turn (503), a dropped one's key is unknown (401); both are said in the dialect's shape.
    """
    async with bench(lambda *_: "Yes") as b:
        await b.handle.finish()
        assert (await b.post(json.loads(ALL["anthropic"].ask("hi")[1]))).status == 503
        assert (await b.admin("DELETE", f"/sessions/{b.handle.id}"))[0] == 204
        assert (await b.post(json.loads(ALL["anthropic"].ask("hi")[1]))).status == 401
        assert not b.engine.requests


async def test_a_key_is_guessed() -> None:
    """Keys are guessed, many or cleverly.

    A key is 256 bits of the operating system's randomness; no two are alike, and no part of a session's id or of another key is in it.
    """
    made = [new_key() for _ in range(2000)]
    raw = [base64.urlsafe_b64decode(key.removeprefix("tl-") + "=") for key in made]
    assert {len(each) for each in raw} == {32}
    assert len(set(raw)) == len(raw)
    for place in range(32):
        assert len({each[place] for each in raw}) > 200, "every byte of it varies"


async def test_time_tells_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are timed, to learn a key byte by byte.

    The admin key is compared whole in constant time, and a session is looked up by the SHA-256 of its key, so that how far a
    guess was right changes nothing that could be timed.
    """
    compared: list[tuple[bytes, bytes]] = []
    asked: list[str] = []
    real = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    class Store(MemoryStore):
        async def session_by_key(self, key_hash: str) -> Any:
            asked.append(key_hash)
            return await super().session_by_key(key_hash)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    async with bench(store=Store()) as b:
        await b.admin("GET", "/sessions", key="guess")
        assert (b"guess", ADMIN.encode()) in compared
        async with b.http.get(b.gateway.url + "/v1/models", headers={"x-api-key": "tl-guess"}) as answer:
            assert answer.status == 401
        assert asked == [hash_key("tl-guess")]


async def test_a_key_in_the_files_of_the_store(tmp_path: Path) -> None:
    """The store's files are read: the database, its write-ahead log, what a crash left behind.

    They hold the SHA-256 of each key and no key. A key that an agent writes into a prompt is a message like any other: it is stored,
    and shown to the operator.
    """
    where = tmp_path / "sessions.db"
    async with bench(lambda *_: "Yes", store=where) as b:
        for spoken in ALL.values():
            path, body = spoken.ask("hi")
            key = b.handle.key
            for url, headers in (
                (b.handle.base_url + path, {"Authorization": f"Bearer {key}"}),
                (b.gateway.url + path, {"x-api-key": key, "Idempotency-Key": "k" + spoken.name}),
            ):
                async with b.http.post(url, data=body, headers=headers) as answer:
                    assert answer.status == 200
        await b.admin("POST", f"/sessions/{b.handle.id}/reward", {"value": 1.0})
        held = b"".join(each.read_bytes() for each in tmp_path.iterdir())
        assert any(each.name.endswith("-wal") for each in tmp_path.iterdir())
        assert hash_key(b.handle.key).encode() in held
        assert b.handle.key.encode() not in held
        assert b.handle.key.removeprefix("tl-").encode() not in held
    assert b.handle.key.encode() not in b"".join(each.read_bytes() for each in tmp_path.iterdir())


@every_dialect
async def test_a_key_in_what_is_told(spoken: Spoken, caplog: pytest.LogCaptureFixture) -> None:
    """A key is looked for in all that is told: status, tree, samples, the list of sessions, metrics, the OpenAPI document, logs, errors.

    It is in none of them; the answer to its opening is the only place of ours that ever holds it; messages hold what agents write.
    """
    caplog.set_level(logging.DEBUG)
    async with bench(lambda *_: "Yes") as b:
        path, body = spoken.ask("hi")
        told = [json.dumps((await b.admin("POST", "/sessions", {"metadata": {"m": 1}}))[1])]
        opened = json.loads(told.pop())
        key, where = opened["key"], f"/sessions/{opened['id']}"
        for url in (f"{b.gateway.url}/s/{key}{path}", f"{b.gateway.url}/s/{key}/nowhere", f"{b.gateway.url}/s/{key}{path}/x"):
            async with b.http.post(url, data=body, headers={"x-api-key": key}) as answer:
                told.append(await answer.text())
        for call in (where, where + "/tree", where + "/samples", "/sessions", "/engines"):
            told.append(str((await b.admin("GET", call))[1]))
        told.append(str((await b.admin("POST", where + "/finish", {"reward": 1.0}))[1]))
        for open_path in ("/metrics", "/healthz", "/openapi.json", f"/s/{key}"):
            async with b.http.get(b.gateway.url + open_path) as answer:
                told.append(await answer.text())
        assert "Yes" in told[0]
        assert all(told)
        assert not [text for text in (*told, caplog.text) if key in text]


@every_dialect
async def test_one_key_floods(spoken: Spoken) -> None:
    """One agent opens very many requests at once, to use up the gateway for all.

    What goes beyond the limit of requests with one key at once is a 429 that names the limit; other sessions are answered.
    """
    limits = RequestLimits(at_once=2)
    async with bench(lambda *_: Reply("Yes", delay=0.05), request_limits=limits) as b:
        other = await b.gateway.open_session()

        async def ask(base: str, text: str) -> tuple[int, bytes]:
            path, body = spoken.ask(text)
            async with b.http.post(base + path, data=body) as answer:
                return answer.status, await answer.read()

        held = [asyncio.create_task(ask(b.handle.base_url, f"hold {n}")) for n in range(2)]
        await b.engine.wait_running(2)
        status, raw = await ask(b.handle.base_url, "one more")
        assert "at most 2 are at once" in error_of(spoken, 429, raw)
        assert status == 429
        assert (await ask(other.base_url, "me"))[0] == 200
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        assert (await ask(b.handle.base_url, "again"))[0] == 200
