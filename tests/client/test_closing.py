"""Clients that are closed while they are used, used when closed, and entered again: nothing hangs, each error says what to do."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.support.gateways import ADMIN, bench
from turnloom import BlockingClient, Client, Gateway
from turnloom.errors import ConfigError, GatewayUnavailable

PATIENCE = 30.0
"""Seconds after which something that waits for ever is known to."""


@asynccontextmanager
async def server(answer: web.Response | None) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """One that answers everything alike, or with None never; and whether it was asked."""
    asked = asyncio.Event()

    async def handle(_: web.Request) -> web.StreamResponse:
        asked.set()
        if answer is None:
            await asyncio.Event().wait()
        assert answer is not None
        return web.Response(body=answer.body, content_type=answer.content_type, status=answer.status)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


async def test_a_call_of_another_thread_ends_when_the_client_is_closed() -> None:
    async with server(None) as (url, asked):
        client = BlockingClient(url, ADMIN)
        await asyncio.to_thread(client.__enter__)
        ended: list[BaseException | None] = []

        def call() -> None:
            try:
                client.store_stats()
            except BaseException as error:  # noqa: BLE001
                ended.append(error)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        await asked.wait()
        await asyncio.to_thread(client.__exit__, None, None, None)
        await asyncio.to_thread(thread.join, PATIENCE)
        assert not thread.is_alive()
        (error,) = ended
        assert isinstance(error, ConfigError | GatewayUnavailable), error


async def test_a_call_ends_when_its_client_is_stopped() -> None:
    async with server(None) as (url, asked):
        client = await Client(url, ADMIN).start()
        calling = asyncio.create_task(client.store_stats())
        await asked.wait()
        await client.stop()
        with pytest.raises((ConfigError, GatewayUnavailable)):
            await asyncio.wait_for(calling, PATIENCE)


async def test_a_client_that_was_left_says_so_and_can_be_entered_again() -> None:
    async with bench() as b:

        def use() -> None:
            client = BlockingClient(b.gateway.url, ADMIN)
            with client:
                session = client.open_session()
                with pytest.raises(ConfigError, match="started already"), client:
                    pass
                assert client.store_stats()["sessions"]["open"] == 2
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for late in (session.status, client.store_stats):
                    with pytest.raises(ConfigError, match="not started"):
                        late()
            with client:
                assert client.handle(session.id).id == session.id

        await asyncio.to_thread(use)
        client = await Client(b.gateway.url, ADMIN).start()
        with pytest.raises(ConfigError, match="started already"):
            await client.start()
        await client.stop()
        with pytest.raises(ConfigError, match="not started"):
            await client.store_stats()
        await client.start()
        await client.stop()


async def test_a_gateway_in_the_background_can_be_entered_again() -> None:
    async with bench() as b:
        background = Gateway.background(b.engine.url, b.tokenizer)

        def use() -> None:
            for _ in range(2):
                with background:
                    assert background.open_session().status()["status"] == "open"

        await asyncio.to_thread(use)


STRANGE = {
    "a page": web.Response(text="<html>", content_type="text/html"),
    "nothing": web.Response(body=b"", content_type="application/json"),
    "null": web.Response(body=b"null", content_type="application/json"),
    "no JSON": web.Response(body=b"{", content_type="application/json"),
    "a list": web.Response(body=b"[1]", content_type="application/json"),
    "another object": web.Response(body=b"{}", content_type="application/json"),
    "an empty page": web.Response(body=b"", content_type="text/html"),
}


@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE)
async def test_what_is_no_gateway_is_told_as_that(answer: web.Response) -> None:
    async with server(answer) as (url, _), Client(url, ADMIN) as client:
        for call in (client.open_session, client.sessions, client.store_stats, client.engines, client.pause, lambda: client.handle("x")):
            with pytest.raises(GatewayUnavailable, match="address of a gateway"):
                await call()  # type: ignore[operator]


async def test_samples_of_what_is_no_gateway_are_not_none() -> None:
    from turnloom.client.remote import RemoteSession

    async with server(web.Response(body=b"", content_type="text/html")) as (url, _), Client(url, ADMIN) as client:
        with pytest.raises(GatewayUnavailable, match="address of a gateway"):
            await RemoteSession(client._http, "x").samples()


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        Client("http://127.0.0.1:1", "two\nlines")
