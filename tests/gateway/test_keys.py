"""Whose request it is: each way to bring a key, on each dialect's routes; and what a stranger is told."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tests.support.gateways import Bench, bench, user
from tests.support.wires import WIRES, Wire
from turnloom.gateway.sessions import hash_key

HEADERS = {
    "bearer": lambda key: {"Authorization": f"Bearer {key}"},
    "x-api-key": lambda key: {"x-api-key": key},
    "x-goog-api-key": lambda key: {"x-goog-api-key": key},
}
PLACES = [*HEADERS, "query", "path"]
WHOLE = {name: wire for name, wire in WIRES.items() if name != "gemini array"}
COUNTS = {
    "anthropic": ("/v1/messages/count_tokens", "input_tokens"),
    "openai_responses": ("/v1/responses/input_tokens", "input_tokens"),
    "gemini": ("/v1beta/models/m:countTokens", "totalTokens"),
}


def placed(b: Bench, path: str, place: str, key: str) -> tuple[str, dict[str, str]]:
    """(address, headers) of a request to `path` with the key in that place."""
    if place == "path":
        return f"{b.gateway.url}/s/{key}{path}", {}
    if place == "query":
        return f"{b.gateway.url}{path}{'&' if '?' in path else '?'}key={key}", {}
    return b.gateway.url + path, HEADERS[place](key)


def refused(name: str, body: dict[str, Any]) -> bool:
    """Whether it is that dialect's own word for an unknown key."""
    error = body["error"]
    if name == "anthropic":
        return body["type"] == "error" and error["type"] == "authentication_error"
    if name.startswith("openai"):
        return error["type"] == "invalid_request_error" and error["code"] == "invalid_api_key" and "param" in error
    return (error["code"], error["status"]) == (401, "UNAUTHENTICATED") and error["details"][0]["reason"] == "API_KEY_INVALID"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wire", WHOLE.values(), ids=WHOLE)
async def test_a_key_opens_its_session_wherever_it_stands_and_no_other_does(wire: Wire, place: str) -> None:
    async with bench(["Yes"]) as b:
        other = await b.gateway.open_session(id="other")
        for stream in (False, True):
            for wrong in ("", "tl-guess", b.handle.key[:-1], b.handle.key + "x"):
                if wrong or place != "path":
                    url, headers = placed(b, wire.path(stream), place, wrong)
                    async with b.http.post(url, json=wire.body("hi", stream=stream), headers=headers) as answer:
                        assert answer.status == 401
                        assert refused(wire.name, await answer.json())
        assert not b.engine.requests
        url, headers = placed(b, wire.whole, place, b.handle.key)
        async with b.http.post(url, json=wire.body("hi"), headers=headers) as answer:
            assert (answer.status, wire.said(await answer.json())) == (200, "Yes")
        assert len((await b.session()).tree.turns) == 1
        assert not (await b.gateway.session(other.id)).tree.turns


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", COUNTS)
async def test_counting_needs_the_key_too(name: str, place: str) -> None:
    path, field = COUNTS[name]
    async with bench() as b:
        url, headers = placed(b, path, place, "tl-guess")
        async with b.http.post(url, json=WIRES[name].body("hi"), headers=headers) as answer:
            assert (answer.status, refused(name, await answer.json())) == (401, True)
        url, headers = placed(b, path, place, b.handle.key)
        async with b.http.post(url, json=WIRES[name].body("hi"), headers=headers) as answer:
            assert (await answer.json())[field] > 3
        assert not (await b.session()).tree.turns


async def test_the_path_counts_before_the_headers() -> None:
    """Agents send a key of their own beside the address they were given."""
    async with bench(["Yes"]) as b:
        wire = WIRES["openai_chat"]
        async with b.http.post(b.handle.base_url + wire.whole, json=wire.body("hi"), headers={"Authorization": "Bearer sk-x"}) as answer:
            assert answer.status == 200
        async with b.http.post(
            f"{b.gateway.url}/s/tl-guess{wire.whole}", json=wire.body("hi"), headers={"Authorization": f"Bearer {b.handle.key}"}
        ) as answer:
            assert answer.status == 401


MODELS: list[tuple[str, dict[str, str], str]] = [
    ("/v1/models", {"x-api-key": "KEY"}, "anthropic"),
    ("/v1/models", {"Authorization": "Bearer KEY", "anthropic-version": "2023-06-01"}, "anthropic"),
    ("/v1/models", {"Authorization": "Bearer KEY"}, "openai"),
    ("/v1/models", {"x-goog-api-key": "KEY"}, "gemini"),
    ("/v1/models?key=KEY", {}, "gemini"),
    ("/v1beta/models", {"Authorization": "Bearer KEY"}, "gemini"),
    ("/s/KEY/v1beta/models", {}, "gemini"),
    ("/s/KEY/v1/models", {}, "openai"),
]


def spelled(shape: str, body: dict[str, Any], name: str) -> bool:
    if shape == "anthropic":
        return body["type"] == "model" and body["id"] == name
    if shape == "openai":
        return body["object"] == "model" and body["id"] == name
    return bool(body["name"] == f"models/{name}")


@pytest.mark.parametrize(("path", "headers", "shape"), MODELS)
async def test_the_models_are_listed_in_each_shape(path: str, headers: dict[str, str], shape: str) -> None:
    async with bench() as b:

        async def get(path: str, key: str) -> tuple[int, Any]:
            sent = {name: value.replace("KEY", key) for name, value in headers.items()}
            async with b.http.get(b.gateway.url + path.replace("KEY", key), headers=sent) as answer:
                return answer.status, await answer.json()

        status, listed = await get(path, b.handle.key)
        assert status == 200
        (model,) = listed["models" if shape == "gemini" else "data"]
        assert spelled(shape, model, "scripted")
        one = path.replace("/models", "/models/any.name-1")
        assert spelled(shape, (await get(one, b.handle.key))[1], "any.name-1")
        for asked in (path, one):
            status, told = await get(asked, "tl-guess")
            assert (status, refused({"openai": "openai_chat"}.get(shape, shape), told)) == (401, True)


@pytest.mark.parametrize("path", ["/", "/api/hello", "/s/KEY", "/s/KEY/", "/s/KEY/api/hello"])
async def test_probes_are_answered_without_a_key(path: str) -> None:
    async with bench() as b:
        for method in ("HEAD", "GET"):
            async with b.http.request(method, b.gateway.url + path.replace("KEY", b.handle.key)) as answer:
                assert answer.status == 200
                assert b.handle.key not in await answer.text()


@pytest.mark.parametrize("base", ["", "/s/KEY"])
async def test_a_websocket_is_refused_at_once(base: str) -> None:
    """Codex asks for one first, and posts after a 426."""
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    async with bench() as b:
        url = b.gateway.url + base.replace("KEY", b.handle.key) + "/v1/responses"
        async with b.http.get(url, headers={**upgrade, "Authorization": f"Bearer {b.handle.key}"}) as answer:
            assert answer.status == 426
            assert "WebSocket" in (await answer.json())["error"]["message"]
        async with b.http.get(url) as answer:
            assert answer.status == 404


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wire", WHOLE.values(), ids=WHOLE)
async def test_no_key_is_in_a_log_line_an_error_or_a_metric(
    wire: Wire, place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnloom.gateway.output import Output

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    caplog.set_level(logging.DEBUG)
    async with bench(["Yes"] * 3) as b:
        guess = "tl-" + "g" * 43
        told = []

        async def post(path: str, key: str, body: Any) -> None:
            url, headers = placed(b, path, place, key)
            async with b.http.post(url, data=json.dumps(body), headers=headers) as answer:
                told.append((answer.status, await answer.text()))

        for key in (b.handle.key, guess):
            await post(wire.whole, key, {"messages": 5, "input": 5, "contents": 5})
            await post("/v1/nothing", key, {})
            await post(wire.stream, key, wire.body("hi", stream=True))
            with monkeypatch.context() as patched:
                patched.setattr(Output, "feed", broken)
                await post(wire.whole, key, wire.body("hi"))
        async with b.http.get(b.gateway.url + "/metrics") as answer:
            told.append((answer.status, await answer.text()))
        assert [status for status, _ in told] == [400, 404, 200, 500, 401, 404, 401, 401, 200]
        for key in (b.handle.key, guess):
            assert not [text for _, text in told if key in text]
            assert key not in caplog.text
        assert "a bug" in caplog.text, "what is looked through is not empty"


@pytest.mark.parametrize("path", ["//s/KEY/v1/messages", "/v1/s/KEY/v1/messages", "/s/KEY/v1/nothing", "/%73/KEY/v1/nothing", "/x/s/KEY"])
async def test_no_key_is_in_the_answer_to_an_address_that_is_wrong(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with bench() as b:
        async with b.http.post(b.gateway.url + path.replace("KEY", b.handle.key)) as answer:
            assert answer.status == 404
            told = await answer.text()
        assert "/s/…" in told
        assert b.handle.key not in told
        assert b.handle.key not in caplog.text


async def test_a_key_of_no_session_opens_one_of_its_own_only_where_that_is_wanted() -> None:
    async with bench(["One", "Two", "Three"], open_sessions=True) as b:
        wire = WIRES["gemini"]
        for key in ("mine", "mine", "yours"):
            async with b.http.post(b.gateway.url + wire.whole, json=wire.body(key), headers={"x-goog-api-key": key}) as answer:
                assert answer.status == 200
        async with b.http.post(b.gateway.url + wire.whole, json=wire.body("x")) as answer:
            assert answer.status == 401
        _, listed = await b.admin("GET", "/sessions")
        assert sorted(row["usage"]["turns"] for row in listed["sessions"]) == [0, 1, 2]


async def test_an_unknown_key_opens_no_session_that_has_another() -> None:
    """Its session's id can be told from the key, and anybody with the admin key may have taken it."""
    async with bench(["never"], open_sessions=True) as b:
        await b.gateway.open_session(id=hash_key("guessed")[:32])
        async with b.http.post(f"{b.gateway.url}/s/guessed/v1/messages", json=user("hi")) as answer:
            assert answer.status == 401
