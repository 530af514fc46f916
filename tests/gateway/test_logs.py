"""Log lines: what each carries, that machines can read every one of them, and that no key stands in any."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import warnings
from typing import Any
from urllib.parse import quote, quote_plus

import aiohttp
import pytest
from yarl import URL

from tests.support.gateways import bench, follow, user
from tests.support.logs import written
from tests.support.wires import WIRES
from turnloom.gateway import logs
from turnloom.gateway.logs import ACCESS, FIELDS, InTurn, JSONFormatter, TextFormatter, masked
from turnloom.gateway.metrics import Metrics
from turnloom.gateway.observe import Observer, in_session
from turnloom.testing.scripted_engine import Fault, Reply

log = logging.getLogger("turnloom.tests")

OURS = "tl-" + "aB3_-" * 8 + "xyz"
"""As long as keys of our own making are."""


def test_a_key_of_our_own_is_as_long_as_the_one_here() -> None:
    from turnloom.gateway.sessions import new_key

    assert len(new_key()) == len(OURS)


async def test_lines_carry_the_turn_they_are_written_in_and_so_do_those_of_its_tasks() -> None:
    observer = Observer(Metrics())

    async def beside() -> None:
        log.warning("in a task")
        await asyncio.to_thread(log.warning, "in a thread")

    with written() as lines:
        log.warning("before")
        in_session("s0")
        log.warning("in a session")
        with observer.turn(dialect="anthropic", session="s1", turn_id="t1"):
            log.warning("within")
            await asyncio.create_task(beside())
        log.warning("after")
    seen = [(line["message"], line["session"], line["turn"]) for line in lines.of("turnloom.tests")]
    assert seen == [
        ("before", "", ""),
        ("in a session", "s0", ""),
        ("within", "s1", "t1"),
        ("in a task", "s1", "t1"),
        ("in a thread", "s1", "t1"),
        ("after", "s0", ""),
    ]
    assert "WARNING within session=s1 turn=t1\n" in lines.text
    assert "WARNING before\n" in lines.text


async def test_two_turns_at_once_keep_their_own_ids() -> None:
    observer, together = Observer(Metrics()), asyncio.Barrier(2)

    async def one(name: str) -> None:
        with observer.turn(dialect="anthropic", session=f"s{name}", turn_id=f"t{name}"):
            await together.wait()
            log.warning(name)
            await together.wait()

    with written() as lines:
        await asyncio.gather(one("1"), one("2"))
    assert sorted((li["message"], li["session"], li["turn"]) for li in lines.of("turnloom.tests")) == [("1", "s1", "t1"), ("2", "s2", "t2")]


def test_a_line_for_machines_is_one_object_whatever_is_said() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JSONFormatter())
    handler.addFilter(InTurn())
    record = log.makeRecord(log.name, logging.ERROR, "f", 1, 'a\nb"\x1b[31m\ud800 %s', (f"/s/{OURS}",), None, extra={FIELDS: {"n": 3}})
    handler.handle(record)
    try:
        raise ValueError(f'it was http://h/s/{OURS}/v1/messages?key=ab"c&x=1\n')
    except ValueError:
        handler.handle(log.makeRecord(log.name, logging.ERROR, "f", 1, "failed", (), sys.exc_info()))
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == 'a\nb"\x1b[31m\ud800 /s/…'
    assert {"n": 3, "level": "error", "logger": "turnloom.tests", "session": "", "turn": ""}.items() <= first.items()
    assert first["ts"].endswith("+00:00")
    assert second["exception"] == "ValueError"
    assert second["traceback"].startswith("Traceback")
    assert OURS not in stream.getvalue()
    assert "key=…" in second["traceback"]


def test_a_line_for_people_shows_control_characters_escaped_and_keeps_the_lines_of_a_traceback() -> None:
    try:
        raise ValueError("bad\x1b[2J")
    except ValueError:
        record = log.makeRecord(log.name, logging.ERROR, "f", 1, "a\nb\x1b", (), sys.exc_info())
    told = TextFormatter().format(record)
    assert "\x1b" not in told
    assert "a\\nb\\x1b" in told
    assert told.splitlines()[1].startswith("Traceback")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("POST /s/my-own-key/v1/messages", "POST /s/…/v1/messages"),
        ("http://h:1/s/k?x=1", "http://h:1/s/…?x=1"),
        ("/v1beta/models/m:generateContent?alt=sse&key=abc&x=1", "/v1beta/models/m:generateContent?alt=sse&key=…&x=1"),
        (f"the key {OURS}, and more", "the key tl-…, and more"),
        (f"'{OURS}'", "'tl-…'"),
        (f"{OURS}{OURS}", "tl-…tl-…"),
        (f"web_search\\n{OURS}", "web_search\\ntl-…"),
        (f"%20{OURS}%22", "%20tl-…%22"),
        ("nothing of the kind: /sessions/one, monkey=1", "nothing of the kind: /sessions/one, monkey=1"),
    ],
)
def test_keys_are_masked(said: str, shown: str) -> None:
    assert masked(said) == shown


def test_what_another_program_set_up_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    root, theirs = logging.getLogger(), logging.NullHandler()
    monkeypatch.setattr(root, "handlers", [theirs])
    level = root.level
    logs.configure("json", logging.DEBUG)
    assert root.handlers == [theirs]
    assert root.level == level


def test_the_second_time_counts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    logs.configure()
    logs.configure("json", logging.INFO)
    log.info("once")
    assert json.loads(capsys.readouterr().err)["message"] == "once"
    logging.captureWarnings(False)


def test_what_libraries_write_by_themselves_are_lines_like_all_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, library = logging.getLogger(), logging.getLogger("turnloom_tests_library")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    try:
        logs.configure("json")
        logs.adopt(library.name)
        library.warning("a word")
        warnings.warn("another", stacklevel=1)
    finally:
        logging.captureWarnings(False)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == [library.name, "py.warnings"]


def test_nothing_is_adopted_where_another_program_set_up_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    library = logging.getLogger("turnloom_tests_other_library")
    library.addHandler(logging.NullHandler())
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    logs.adopt(library.name)
    assert library.handlers


async def test_the_end_of_each_turn_is_one_line() -> None:
    with written() as lines:
        async with bench(["First.", Reply("cut short here", fault=Fault.ABORT)], session_id="one") as b:
            asked = user("A SECRET QUESTION")
            first = await b.post(asked)
            refused = await b.post(follow(asked, first.body, "more"))
            assert (first.status, refused.status) == (200, 529)
        one, two = lines.of("turnloom.turn")
    assert {
        "session": "one",
        "turn": first.headers["x-request-id"].removeprefix("req_"),
        "level": "info",
        "outcome": "delivered",
        "dialect": "anthropic",
        "answer": "new",
        "bridged_tokens": 0,
        "fork": "",
        "error": "",
    }.items() <= one.items()
    assert one["sampled_tokens"] > 1 < one["prompt_tokens"]
    assert one["seconds"] >= 0
    assert {"session": "one", "outcome": "aborted", "error": "EngineAborted"}.items() <= two.items()
    assert two["bridged_tokens"] > 0
    assert "outcome=delivered dialect=anthropic" in lines.text
    assert "SECRET" not in lines.raw
    assert "First." not in lines.raw


@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
async def test_the_access_log_is_off_unless_asked_for_and_shows_no_key(on: bool) -> None:
    with written() as lines:
        async with bench(["Yes", "Yes"], **({"access_log": True} if on else {})) as b:
            reply = await b.post(user("hi"))
            gemini = f"{b.gateway.url}/v1beta/models/m:generateContent?key={b.handle.key}"
            async with b.http.post(gemini, json=WIRES["gemini"].body("hi")) as answer:
                assert answer.status == 200
            key, session = b.handle.key, b.handle.id
        found = lines.of(ACCESS.name)
    if not on:
        assert not found
        return
    assert [(line["method"], line["path"], line["status"]) for line in found] == [
        ("POST", "/s/…/v1/messages", 200),
        ("POST", "/v1beta/models/m:generateContent?key=…", 200),
    ]
    assert found[0]["turn"] == reply.headers["x-request-id"].removeprefix("req_")
    assert [line["session"] for line in found] == [session, session]
    assert found[0]["bytes"] > 0
    assert key not in lines.raw


@pytest.mark.parametrize("open_sessions", [False, True], ids=["ours", "of their own"])
async def test_no_spelling_of_a_key_in_an_address_gets_into_the_access_log(open_sessions: bool) -> None:
    with written() as lines:
        async with bench(lambda *_: "Yes", access_log=True, open_sessions=open_sessions) as b:
            key = "it's-my-own key" if open_sessions else b.handle.key
            spelled = [quote(key), "".join(f"%{ord(c):02X}" for c in key)]
            for each in spelled:
                paths = (f"/%73/{each}/v1/messages", f"/s/{each}/v1/messages", f"/s%2F{each}/v1/messages", f"/v1/messages?k%65y={each}")
                for path in (*paths, f"/v1/messages?api_key=%22{each}%22", f"/v1/messages?token=Bearer%20{each}", f"/v1/models/%20{each}"):
                    async with b.http.post(URL(b.gateway.url + path, encoded=True), json=user("hi")):
                        pass
    parts = [line for line in lines.raw.splitlines() if "token=" not in line and "api_key=" not in line and "/v1/models" not in line]
    assert len(lines.of(ACCESS.name)) == 14
    for told in [*spelled, key, quote_plus(key)]:
        assert told not in ("\n".join(parts) if open_sessions else lines.raw)


async def test_no_key_is_in_the_log_whatever_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even before lines are masked: in the path, in a header or the query, through errors of every kind."""
    faults = [
        Reply("one two three four", fault=fault) for fault in (Fault.HTTP_400, Fault.HTTP_503, Fault.CUT, Fault.NULL_LOGPROB, Fault.ABORT)
    ]
    foreign = "k" * 40
    statuses: list[int] = []
    with written() as lines:
        async with bench([*faults, "Yes", "Yes", Reply("one two three", chunk=1, fault=Fault.STALL)], access_log=True) as b:
            key = b.handle.key
            places: list[tuple[str, dict[str, str]]] = [
                (f"/s/{key}PATH", {}),
                ("PATH", {"Authorization": f"Bearer {key}"}),
                ("PATH", {"x-api-key": key}),
                ("PATH", {"x-goog-api-key": key}),
                (f"PATH?key={key}", {}),
                (f"/s/{foreign}PATH", {}),
                (f"PATH?key={foreign}", {}),
            ]

            async def send(method: str, place: tuple[str, dict[str, str]], path: str, data: bytes, **more: str) -> None:
                async with b.http.request(
                    method, b.gateway.url + place[0].replace("PATH", path), data=data, headers={**place[1], **more}
                ) as got:
                    await got.read()
                    statuses.append(got.status)

            body = json.dumps(user("hi")).encode()
            for place in places:
                await send("POST", place, "/v1/messages", b"{")
                await send("POST", place, "/v1/messages", json.dumps({"model": key, "messages": key}).encode())
                await send("POST", place, "/v1/messages", b"no gzip", **{"Content-Encoding": "gzip"})
                await send("POST", place, "/v1/nothing", body)
                await send("PUT", place, "/v1/messages", body)
                await send("POST", place, "/v1beta/models/m:nothing", body)
                await send("GET", place, "/v1/responses", b"")
                await send("POST", place, "/api/v1/sessions", body)
                await send("GET", place, f"/api/v1/sessions/{key}", b"")
            for _ in faults:
                await send("POST", places[0], "/v1/messages", body)
            with monkeypatch.context() as patched:
                patched.setattr("turnloom.gateway.app.intent_of", _broken)
                for place in places[:5]:
                    await send("POST", place, "/v1/messages", body)
                patched.undo()
                patched.setattr("turnloom.gateway.output.Output.feed", _broken)
                await send("POST", places[0], "/v1/messages", body)
                (bug,) = [line for line in lines.of("turnloom.gateway") if line["turn"]]
                assert (bug["message"], bug["exception"]) == ("unexpected error on POST /s/…/v1/messages", "ZeroDivisionError")
                assert bug["session"] == b.handle.id
            await _leave(b.http, b.handle.base_url)
            await _speak_no_http(b.gateway.url, f"GET /s/{key}/v1/models HTTP/1.1\r\nX-Api-Key: {key}\r\n: \x00\r\n\r\n")
            await b.handle.finish()
            await send("POST", places[0], "/v1/messages", body)
    assert {400, 401, 404, 500, 503, 529} <= set(statuses)
    assert "a bug" in lines.raw
    assert "Traceback" in lines.raw
    assert "no HTTP" in lines.raw
    for secret in (key, foreign):
        assert secret not in lines.raw
        assert secret not in lines.text


def _broken(*_: Any) -> Any:
    raise ZeroDivisionError("a bug")


async def _leave(http: aiohttp.ClientSession, base: str) -> None:
    """In the middle of a stream."""
    answer = await http.post(f"{base}/v1/messages", json=user("hi", stream=True))
    await answer.content.readany()
    answer.close()


async def _speak_no_http(url: str, said: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said.encode())
    await reader.read()
    writer.close()
