"""The admin API keeps to its document: what that allows is answered in its shape, what it forbids is refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.support.dialects import DOCUMENT
from tests.support.gateways import ADMIN, Bench, bench, follow, user

CALLS = [
    (path, method, operation)
    for path, held in DOCUMENT["paths"].items()
    if path.startswith("/api/v1/")
    for method, operation in held.items()
]
ADMIN_API = schemathesis.openapi.from_dict({**DOCUMENT, "paths": {path: DOCUMENT["paths"][path] for path, _, _ in CALLS}})

BEYOND = re.compile(r"metadata|labels|is taken|another session has it|has no turn|surrogate|together beyond|no pool|JSON")
"""What no schema says: integers within 64 bits, what a session has, what reward is too many."""


class Wire:
    """A gateway on a loop of its own that runs only while something is asked. `mine` always has two turns."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._bench = bench(lambda body, index: f"Answer {index}", session_id="mine")
        self.bench: Bench = self.runner.run(self._bench.__aenter__())
        self.runner.run(self._talk())

    async def _talk(self) -> None:
        first = await self.bench.post(user("a"))
        await self.bench.post(follow(user("a"), first.body, "b"))
        await self.bench.post(user("other", system="x"))

    def ask(self, method: str, path: str, *, key: str = ADMIN, data: bytes | None = None, query: Any = None) -> tuple[int, str, bytes]:
        return self.runner.run(self._ask(method, path, key, data, query))

    async def _ask(self, method: str, path: str, key: str, data: bytes | None, query: Any) -> tuple[int, str, bytes]:
        url, head = self.bench.gateway.url + path, {"Authorization": f"Bearer {key}"}
        async with asyncio.timeout(20), self.bench.http.request(method, url, data=data, params=query, headers=head) as got:
            return got.status, got.content_type, await got.read()

    def close(self) -> None:
        self.runner.run(self._bench.__aexit__(None, None, None))
        self.runner.close()


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    held = Wire()
    yield held
    held.close()


def conforms(operation: dict[str, Any], status: int, content_type: str, raw: bytes) -> None:
    """The status is documented, and so is the type of the answer; JSON fits its schema."""
    response = operation["responses"][str(status)]
    if "content" not in response:
        assert raw == b""
        return
    schema = response["content"][content_type]["schema"]
    if content_type == "application/json":
        whole = {**schema, "components": DOCUMENT["components"]}
        jsonschema_rs.validator_for(whole).validate(json.loads(raw))


def query_of(case: Any) -> list[tuple[str, str]]:
    found = case.query if isinstance(case.query, dict) else {}
    return [(name, str(each)) for name, held in found.items() for each in (held if isinstance(held, list) else [held])]


def sent_by(case: Any) -> bytes:
    if isinstance(case.body, bytes):
        return case.body
    return b"" if type(case.body).__name__ == "NotSet" else json.dumps(case.body).encode()


def fits(accepts: Any, sent: bytes) -> bool:
    try:
        return bool(accepts.is_valid(json.loads(sent)))
    except ValueError:
        return False


RUN = settings(
    max_examples=25, deadline=None, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize(("path", "method", "operation"), CALLS, ids=[c[2]["operationId"] for c in CALLS])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
def test_every_call_keeps_to_its_document(path: str, method: str, operation: dict[str, Any], mode: GenerationMode, wire: Wire) -> None:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if mode is GenerationMode.NEGATIVE and body is None and len(operation["parameters"]) == path.count("{"):
        pytest.skip("it takes nothing that could be wrong")
    accepts = jsonschema_rs.validator_for({**body, "components": DOCUMENT["components"]}) if body is not None else None

    @RUN
    @given(st.data())
    def run(data: st.DataObject) -> None:
        case = data.draw(ADMIN_API[path][method.upper()].as_strategy(generation_mode=mode, path_parameters={"id": "mine"}, headers={}))
        sent = sent_by(case) if body is not None else b""
        name = "gone" if method == "delete" else "mine"
        status, kind, raw = wire.ask(method, path.replace("{id}", name), data=sent or None, query=query_of(case))
        conforms(operation, status, kind, raw)
        if accepts is None:
            return
        allowed = not sent or fits(accepts, sent)
        if allowed and not (not sent and operation["requestBody"]["required"]):
            assert status < 300 or BEYOND.search(raw.decode()), (sent, raw)
        else:
            assert status == 400, (sent, raw)

    run()


@pytest.mark.parametrize(("path", "method", "operation"), CALLS, ids=[c[2]["operationId"] for c in CALLS])
def test_every_call_is_locked_and_knows_what_is_not_there(path: str, method: str, operation: dict[str, Any], wire: Wire) -> None:
    status, kind, raw = wire.ask(method, path.replace("{id}", "mine"), key="guess")
    assert status == 401
    conforms(operation, status, kind, raw)
    assert operation["security"] == [{"adminKey": []}]
    if "{id}" in path:
        data = b'{"value": 1}' if path.endswith("reward") else None
        status, kind, raw = wire.ask(method, path.replace("{id}", "nobody"), data=data)
        assert status == 404
        conforms(operation, status, kind, raw)
