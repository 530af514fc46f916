"""Several gateways as one: by load, past those that are lost, and each session with the gateway that it was opened on."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.gateways import bench
from turnloom import Client, Gateway
from turnloom.errors import BadRequest, ConfigError, GatewayUnavailable, NotFound
from turnloom.rollout.spread import Spread


def ask(rollout: str) -> dict[str, object]:
    return {"id": rollout, "group": "g", "rollout": rollout, "metadata": {}}


async def test_sessions_go_where_the_fewest_are_open_and_stay_there() -> None:
    async with bench() as b, Gateway(b.engine.url, b.tokenizer) as one, Gateway(b.engine.url, b.tokenizer) as two:
        spread = Spread([one, two])
        handles = [await spread.open_session(**ask(f"r{i}")) for i in range(5)]  # type: ignore[arg-type]
        assert spread.open == (3, 2)
        assert [handle.base_url.startswith(one.url) for handle in handles] == [True, False, True, False, True]
        assert await handles[1].finish(1.0) == []
        assert await handles[1].finish(None) == [], "finished twice, counted once"
        assert spread.open == (3, 1)
        more = await asyncio.gather(*(spread.open_session(**ask(f"m{i}")) for i in range(4)))  # type: ignore[arg-type]
        assert spread.open == (4, 4)
        assert (await spread.handle("m3")).id == "m3"
        with pytest.raises(NotFound):
            await spread.handle("nobody")
        await more[0].drop()
        assert sum(spread.open) == 7
        assert {handle.id for handle in more[1:]} <= {each["id"] for g in (one, two) for each in await g.sessions()}


async def test_a_gateway_that_is_lost_is_passed_over_and_asked_again_later() -> None:
    async with bench() as b:
        async with Client("http://127.0.0.1:9", "k") as lost:
            spread = Spread([lost, b.gateway])
            handle = await spread.open_session(**ask("r"))  # type: ignore[arg-type]
            assert handle.base_url.startswith(b.gateway.url)
            assert spread.open == (0, 1)
            with pytest.raises(GatewayUnavailable, match="none of 1 gateways"):
                await Spread([lost]).open_session(**ask("r"))  # type: ignore[arg-type]
            with pytest.raises(BadRequest):
                await Spread([b.gateway]).open_session(**{**ask("r"), "id": "r"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no gateway"):
        Spread([])
