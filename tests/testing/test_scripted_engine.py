"""The scripted engine says what its script says, in SGLang's shapes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine, logprob_at
from turnloom.testing.tokenizers import qwen_tokenizer


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def generate(http: aiohttp.ClientSession, engine: ScriptedEngine, **more: Any) -> list[dict[str, Any]]:
    body = {"rid": "r", "input_ids": [1, 2], "stream": True, "return_logprob": True} | more
    async with http.post(f"{engine.url}/generate", json=body) as response:
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [orjson.loads(line) for line in lines]


async def test_text_is_encoded_and_ended(http: aiohttp.ClientSession) -> None:
    tokenizer = qwen_tokenizer()
    async with ScriptedEngine(["hello there"], tokenizer=tokenizer, end_id=151_645) as engine:
        (*_, last) = await generate(http, engine)
    assert last["output_ids"] == [*tokenizer.encode("hello there"), 151_645]
    assert last["text"] == "hello there<|im_end|>"
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": 151_645}
    assert [t[1] for t in last["meta_info"]["output_token_logprobs"]] == last["output_ids"]


@pytest.mark.parametrize(
    ("style", "ids", "values"), [("cumulative", [2, 3], [2, 3]), ("incremental", [2, 1], [2, 1]), ("mixed", [2, 1], [2, 3])]
)
async def test_styles(http: aiohttp.ClientSession, style: Any, ids: list[int], values: list[int]) -> None:
    async with ScriptedEngine([Reply(ids=(7, 8, 9), finish="length", style=style, chunk=2)]) as engine:
        chunks = await generate(http, engine)
    assert [len(chunk["output_ids"]) for chunk in chunks] == ids
    assert [len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks] == values


async def test_the_request_limits_the_reply(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([Reply(ids=(7, 8, 9), end=5)]) as engine:
        (last,) = await generate(http, engine, sampling_params={"max_new_tokens": 2})
    assert last["output_ids"] == [7, 8]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


async def test_a_function_scripts_by_request_and_requests_are_kept(http: aiohttp.ClientSession) -> None:
    def script(body: dict[str, Any], index: int) -> Reply:
        return Reply(ids=(body["input_ids"][-1], index), finish="length")

    async with ScriptedEngine(script) as engine:
        first, second = await generate(http, engine), await generate(http, engine, input_ids=[9])
        assert [body["input_ids"] for body in engine.requests] == [[1, 2], [9]]
    assert (first[-1]["output_ids"], second[-1]["output_ids"]) == ([2, 0], [9, 1])


async def test_prefill_agrees_with_what_was_said(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([Reply(ids=(7, 8), finish="length", logprobs=(-1.0, -2.0)), Reply(ids=(7, 8), finish="length")]) as engine:
        await generate(http, engine)
        (made_up,) = await generate(http, engine, input_ids=[5])
        body = {"input_ids": [1, 2, 7, 8], "logprob_start_len": 1, "stream": False}
        async with http.post(f"{engine.url}/generate", json=body) as response:
            said = (await response.json())["meta_info"]["input_token_logprobs"]
        async with http.post(f"{engine.url}/generate", json=body | {"input_ids": [5, 7, 8], "logprob_start_len": 0}) as response:
            again = (await response.json())["meta_info"]["input_token_logprobs"]
    assert said == [[None, 2, None], [-1.0, 7, None], [-2.0, 8, None]]
    assert again[1:] == made_up["meta_info"]["output_token_logprobs"]
    assert again[1][0] == logprob_at(1, 7)


async def test_an_abort_ends_a_stalled_reply(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([Reply(ids=(7, 8), fault=Fault.STALL)]) as engine:
        task = asyncio.create_task(generate(http, engine))
        await engine.wait_running(1)
        await http.post(f"{engine.url}/abort_request", json={"rid": "other"})
        assert engine.running == 1
        await http.post(f"{engine.url}/abort_request", json={"rid": "r"})
        chunks = await task
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert engine.running == 0
        assert engine.aborts == [{"rid": "other"}, {"rid": "r"}]


async def test_a_client_that_leaves_is_noticed(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine([Reply(ids=(7, 8), chunk=1, fault=Fault.STALL)]) as engine:
        task = asyncio.create_task(generate(http, engine))
        await engine.wait_running(1)
        task.cancel()
        await engine.wait_running(0)
        assert engine.disconnects == ["r"]


async def test_a_script_that_is_over_is_a_500(http: aiohttp.ClientSession) -> None:
    async with ScriptedEngine() as engine, http.post(f"{engine.url}/generate", json={"input_ids": [1]}) as response:
        assert response.status == 500


def test_it_runs_as_a_program(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"ids": [4, 5], "end": 6, "versions": [["v1", 0, 3]]}, {"ids": [7], "finish": "length"}]))
    command = [sys.executable, "-m", "turnloom.testing.scripted_engine", "--script", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        found = []
        for _ in range(3):
            request = urllib.request.Request(f"{url}/generate", b'{"input_ids":[1]}', {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as response:
                found.append(json.loads(response.read())["output_ids"])
        server.terminate()
    assert found == [[4, 5, 6], [7], [4, 5, 6]]
