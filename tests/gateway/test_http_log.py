"""What the HTTP server logs of itself: a client that leaves is no error of the gateway's."""

from __future__ import annotations

import contextlib
import logging

import aiohttp
import pytest

from tests.support.gateways import bench, user
from turnloom.gateway.respond import Choice


@pytest.mark.parametrize("left", [ConnectionResetError, BrokenPipeError])
async def test_a_client_that_is_gone_when_it_is_written_to_is_no_error(
    left: type[ConnectionError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(self: Choice, event: object) -> None:
        raise left("Cannot write to closing transport")

    monkeypatch.setattr(Choice, "event", gone)
    caplog.set_level(logging.INFO)
    async with bench(["hello"]) as b:
        with contextlib.suppress(aiohttp.ClientError):  # what it is told does not matter: it is gone
            await b.http.post(b.handle.base_url + "/v1/messages", json=user("hi", stream=True))
    assert [record.message for record in caplog.records if "client left" in record.message] == ["client left: POST /s/…/v1/messages"]
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info] == []
