"""The scripted engine beside its replies: pauses, weights, loads and deaths, as a real server has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.scripted_router import ScriptedRouter

STALLED = Reply(ids=(7, 8), chunk=1, fault=Fault.STALL)
SLOW = Reply(ids=tuple(range(100)), finish="length", chunk=1, delay=0.005)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def generate(http: aiohttp.ClientSession, url: str, rid: str = "r", **more: Any) -> list[dict[str, Any]]:
    async with http.post(f"{url}/generate", json={"rid": rid, "input_ids": [1, 2], "stream": True, **more}) as response:
        text = await response.text()
    return [orjson.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line and not line.endswith("[DONE]")]


async def tell(http: aiohttp.ClientSession, url: str, path: str, **body: Any) -> int:
    async with http.post(url + path, json=body) as answer:
        return answer.status


async def load(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(f"{url}/v1/loads") as answer:
        return int((await answer.json())["loads"][0]["num_running_reqs"])


async def test_what_comes_in_a_pause_is_in_no_load_and_no_abort_reaches_it(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([SLOW]) as engine:
        assert await tell(http, engine.url, "/pause_generation", mode="abort") == 200
        task = asyncio.create_task(generate(http, engine.url))
        await engine.wait_running(1)
        assert await load(http, engine.url) == 0
        await tell(http, engine.url, "/abort_request", rid="r")
        await tell(http, engine.url, "/continue_generation")
        assert len((await task)[-1]["output_ids"]) == 100


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_an_abort_in_a_pause_shows_when_the_pause_is_over(http: aiohttp.ClientSession, mode: str) -> None:
    async with ScriptedEngine([SLOW]) as engine:
        task = asyncio.create_task(generate(http, engine.url))
        await engine.wait_running(1)
        await tell(http, engine.url, "/pause_generation", mode=mode)
        await tell(http, engine.url, "/abort_request", rid="r")
        assert await load(http, engine.url) == 1
        assert not task.done()
        await tell(http, engine.url, "/continue_generation")
        assert (await task)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_weight_update_waits_for_what_runs_or_aborts_it(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([SLOW, SLOW]) as engine:
        first = asyncio.create_task(generate(http, engine.url))
        await engine.wait_running(1)
        await tell(http, engine.url, "/update_weights_from_disk", weight_version="w1")
        assert (await first)[-1]["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 100}]
        second = asyncio.create_task(generate(http, engine.url))
        await engine.wait_running(1)
        await tell(http, engine.url, "/update_weights_from_disk", weight_version="w2", abort_all_requests=True)
        assert (await second)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert (engine.weights, engine.weight_version) == ("w2", "w2")


async def test_weights_updated_in_place_change_but_are_not_named(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([SLOW]) as engine:
        task = asyncio.create_task(generate(http, engine.url))
        await engine.wait_running(1)
        await tell(http, engine.url, "/pause_generation", mode="in_place")
        assert await tell(http, engine.url, "/update_weights_from_disk", weight_version="w1") == 400
        assert (engine.weights, engine.weight_version) == ("w1", "default")
        assert await tell(http, engine.url, "/update_weights_from_disk", weight_version="w1", flush_cache=False) == 200
        await tell(http, engine.url, "/continue_generation")
        assert (await task)[-1]["meta_info"]["weight_versions"][-1]["version"] == "w1"


async def test_a_forgetful_server_goes_on_for_a_client_that_has_gone(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([SLOW], forgetful=True) as engine:
        task = asyncio.create_task(generate(http, engine.url))
        await engine.wait_running(1)
        task.cancel()
        while not engine.disconnects:
            await asyncio.sleep(0.001)
        assert await tell(http, engine.url, "/abort_request", rid="r") == 200
        assert await load(http, engine.url) == 1
        await engine.wait_running(0)


async def test_an_abort_of_a_live_id_takes_every_id_that_begins_with_it(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([STALLED] * 3) as engine:
        tasks = [asyncio.create_task(generate(http, engine.url, rid)) for rid in ("ab", "abc", "b")]
        await engine.wait_running(3)
        await tell(http, engine.url, "/abort_request", rid="a")
        assert engine.running == 3
        await tell(http, engine.url, "/abort_request", rid="ab")
        await engine.wait_running(1)
        assert not tasks[2].done()
        engine.release()
        await asyncio.gather(*tasks)


async def test_a_killed_server_comes_back_where_it_was(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([STALLED, Reply(ids=(5,), finish="length")]) as engine:
        task = asyncio.create_task(generate(http, engine.url))
        await engine.wait_running(1)
        await engine.kill()
        with pytest.raises(aiohttp.ClientError):
            await task
        assert engine.running == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await generate(http, engine.url)
        url = engine.url
        assert await engine.start() == url
        assert (await generate(http, url))[-1]["output_ids"] == [5]


async def test_a_live_id_is_refused_within_the_stream(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([STALLED]) as engine:
        task = asyncio.create_task(generate(http, engine.url))
        await engine.wait_running(1)
        (refused,) = await generate(http, engine.url)
        assert (refused["error"]["message"], refused["error"]["code"]) == ("Duplicate request ID detected: r", 400)
        assert engine.running == 1
        engine.release()
        await task


async def test_a_router_keeps_its_keys_and_passes_only_what_it_knows(http: aiohttp.ClientSession) -> None:
    def script(*_: Any) -> Reply:
        return Reply(ids=(5,), finish="length")

    async with ScriptedEngine(script) as one, ScriptedEngine(script) as two, ScriptedRouter([one.url, two.url]) as router:
        for number in range(6):
            async with http.post(
                f"{router.url}/generate",
                json={"rid": f"r{number}", "input_ids": [1], "stream": True, "return_routed_experts": True, "lora_path": "x"},
                headers={"X-SMG-Routing-Key": f"k{number % 2}"},
            ) as answer:
                assert answer.status == 200
        assert [[body["rid"] for body in worker.requests] for worker in (one, two)] == [["r0", "r2", "r4"], ["r1", "r3", "r5"]]
        assert {name for body in one.requests for name in body} == {"rid", "input_ids", "stream"}
        assert await tell(http, router.url, "/abort_request", rid="r0") == 404
