"""A remote gateway that is lost, comes back, or is none; and rollouts against one."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.client.conftest import side
from tests.support.gateways import ADMIN, bench, user
from turnloom import BlockingClient, Client, Gateway
from turnloom.client import BlockingGatewayClient, GatewayClient
from turnloom.client.http import refused
from turnloom.core.unroll import Longest
from turnloom.errors import BadRequest, ConfigError, GatewayUnavailable, LimitReached, NotFound, StoreError, TurnloomError, Unauthorized
from turnloom.harness import load_harness
from turnloom.rollout import RolloutSettings, RolloutStatus, demo_task, run_rollouts
from turnloom.rollout.contract import Gateway as RolloutGateway
from turnloom.sandbox import LocalSandbox


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnloom.client.http.PAUSE_SECONDS", 0.01)


Loses = Callable[[int, bytes], str]
"""What becomes of the nth request, by its head: "" nothing, `before` it is lost on its way, `after` its answer is."""


@asynccontextmanager
async def proxy(url: str, loses: Loses) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A wire to the gateway that breaks as told: its URL, and the request lines that came."""
    host, port = url.removeprefix("http://").split(":")
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            came.append(head.split(b"\r\n")[0])
            fate = loses(len(came), head)
            if fate != "before":
                theirs, ours = await asyncio.open_connection(host, int(port))
                ours.write(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + body)
                answer = await theirs.read()
                ours.close()
                writer.write(answer if not fate else answer[: len(answer) // 2] if fate == "middle" else b"")
                await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", came
    finally:
        server.close()


@pytest.mark.parametrize("fate", ["before", "after", "middle"])
async def test_opening_that_is_lost_on_its_way_opens_one_session(fate: str) -> None:
    async with bench(["One"]) as b:
        async with proxy(b.gateway.url, lambda n, head: fate if n < 3 else "") as (url, came), Client(url, ADMIN) as client:
            session = await client.open_session()
            assert len(came) == 3
            assert {each["id"] for each in await client.sessions()} == {b.handle.id, session.id}
        async with b.http.post(f"{b.gateway.url}/s/{session.key}/v1/messages", json=user("a")) as answer:
            assert answer.status == 200


async def test_a_reward_whose_answer_is_lost_is_not_given_twice() -> None:
    async with bench(session_reward_rule="sum") as b:

        def loses(n: int, head: bytes) -> str:
            return "after" if b"/reward" in head or b"/finish" in head else ""

        async with proxy(b.gateway.url, loses) as (url, came), Client(url, ADMIN) as client:
            session = await client.handle(b.handle.id)
            with pytest.raises(GatewayUnavailable):
                await session.reward(1.0)
            with pytest.raises(GatewayUnavailable):
                await session.finish(1.0)
            assert (await session.status())["reward"] == 2.0
            assert [line.split()[0] for line in came].count(b"POST") == 2


@pytest.mark.parametrize("fate", ["before", "after"])
async def test_what_may_be_asked_twice_is(fate: str) -> None:
    async with bench(["One"]) as b:
        await b.post(user("a"))
        lost: set[bytes] = set()

        def loses(n: int, head: bytes) -> str:
            line = head.split(b"\r\n")[0]
            return "" if line in lost else lost.add(line) or fate

        async with proxy(b.gateway.url, loses) as (url, _), Client(url, ADMIN) as client:
            session = await client.handle(b.handle.id)
            assert await session.samples() == await b.handle.samples()
            assert len(await session.finish()) == 1
            await session.drop()
            with pytest.raises(NotFound):
                await session.drop()


async def test_a_gateway_that_is_not_there_is_one_clear_error() -> None:
    async with Client("http://127.0.0.1:1", ADMIN) as client:
        with pytest.raises(GatewayUnavailable, match=r"http://127\.0\.0\.1:1/api/v1 did not answer GET /store"):
            await client.store_stats()
    with pytest.raises(GatewayUnavailable), BlockingClient("http://127.0.0.1:1", ADMIN) as blocking:
        blocking.open_session()
    with pytest.raises(ConfigError, match="http://"):
        Client("127.0.0.1:8600", ADMIN)
    with pytest.raises(ConfigError, match="not started"):
        await Client("http://127.0.0.1:1", ADMIN).store_stats()


async def test_the_wrong_key_and_the_gateways_limit_raise_what_they_are() -> None:
    async with side("remote, async", max_sessions=1) as one:
        async with Client(one.url, "guess") as stranger:
            with pytest.raises(Unauthorized):
                await stranger.sessions()
        await one.client.open_session()
        with pytest.raises(LimitReached, match="as many as it may"):
            await one.client.open_session()


def test_an_error_of_the_gateway_is_the_same_class_here() -> None:
    told = refused(500, b'{"error": {"type": "StoreError", "message": "the disk is full"}}')
    assert (type(told), str(told)) == (StoreError, "the disk is full")
    assert type(refused(500, b'{"error": {"type": "annotations", "message": "x"}}')) is TurnloomError
    assert isinstance(refused(502, b"<html>"), GatewayUnavailable)
    assert isinstance(refused(502, b"[1]"), GatewayUnavailable)


async def test_every_client_is_what_the_contracts_say(tmp_path: Path) -> None:
    gateway, client = Gateway("http://127.0.0.1:1"), Client("http://127.0.0.1:1", "k")
    each: tuple[GatewayClient, GatewayClient] = (gateway, client)
    others: tuple[BlockingGatewayClient, BlockingGatewayClient] = (Gateway.background(), BlockingClient("http://127.0.0.1:1", "k"))
    rollouts: tuple[RolloutGateway, RolloutGateway] = (gateway, client)
    for contract, made in ((GatewayClient, each), (BlockingGatewayClient, others), (RolloutGateway, rollouts)):
        names = [name for name in vars(contract) if not name.startswith("_")]
        assert names
        assert all(callable(getattr(one, name)) for one in made for name in names)


AGENT = """
import json, os, urllib.request
body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "fix it"}]}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), {"x-api-key": os.environ["ANTHROPIC_API_KEY"]})).read()
text = open("stats.py").read()
open("stats.py", "w").write(text.replace(" (len(values) + 1)", " len(values)"))
"""


async def test_rollouts_run_against_a_remote_gateway(tmp_path: Path) -> None:
    async with side("remote, async") as one:
        agent = load_harness("command", argv=[sys.executable, "-c", AGENT])
        settings = RolloutSettings(sandbox=lambda needs: LocalSandbox(parent=tmp_path, grace=0.5))
        (result,) = await run_rollouts(one.client, demo_task(), agent, settings=settings)
        assert (result.status, result.error, result.turns) == (RolloutStatus.GRADED, "", 1)
        (sample,) = result.samples
        assert (sample.reward, sample.rollout_id, sample.metadata["agent"]) == (1.0, result.rollout_id, "command")
        (listed,) = await one.client.sessions()
        assert (listed["id"], listed["status"], listed["reward"]) == (result.session_id, "closed", 1.0)


async def test_an_interrupted_stream_of_samples_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway fails in the middle: the connection is cut, and nobody takes the beginning for the whole."""
    from turnloom.export import canonical
    from turnloom.gateway import admin_sessions

    monkeypatch.setattr(admin_sessions, "PIECE", 1)
    left = [1]

    def to_line(sample: object) -> bytes:
        if not left:
            raise TurnloomError("the second is broken")
        left.pop()
        return canonical.to_line(sample)  # type: ignore[arg-type]

    monkeypatch.setattr(admin_sessions, "to_line", to_line)
    async with bench(["One", "Two"]) as b:
        await b.post(user("a"))
        await b.post(user("b"))
        head = {"Authorization": f"Bearer {ADMIN}"}
        with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
            async with b.http.get(f"{b.gateway.url}/api/v1/sessions/{b.handle.id}/samples", headers=head) as answer:
                await answer.read()


@pytest.mark.parametrize("kind", ["in process, async", "remote, async"])
async def test_samples_are_as_long_and_of_what_the_gateway_was_told(kind: str) -> None:
    async with side(kind, longest=Longest(40), skip_labels=("aside",)) as one:
        session = await one.client.open_session()
        await one.talk(session, "a", "b")
        (sample,) = await session.samples()
        assert len(sample.token_ids) <= 40, "of 44"


async def test_nothing_leaves_that_is_no_json_or_no_whole_number() -> None:
    """Refused before anything is sent: there is nobody to send it to."""
    async with Client("http://127.0.0.1:1", ADMIN) as client:
        for value in (math.nan, math.inf, -math.inf, {1}, b"x"):
            with pytest.raises(BadRequest, match="cannot be sent as JSON"):
                await client._http.read("POST", "/pause", {"seconds": value})
        for wrong in (True, 5.0, math.nan, "5", 10**5000):
            with pytest.raises(BadRequest, match="limit: must be a whole number"):
                await client.sessions(limit=wrong)  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match="a string, not a int"):
            await client.handle(5)  # type: ignore[arg-type]


def test_a_lone_surrogate_is_read_as_it_was_written() -> None:
    told = refused(400, rb'{"error": {"type": "BadRequest", "message": "\ud800"}}')
    assert (type(told), str(told)) == (BadRequest, "\ud800")
