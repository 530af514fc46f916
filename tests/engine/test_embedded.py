"""The embedded engine itself: a real model, a real server, the one client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from turnloom.engine.contract import AbortOutcome, Chunk
from turnloom.engine.local import start_local
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import ConfigError, EngineRejected, EngineUnavailable
from turnloom.testing.tokenizers import smollm2_tokenizer
from turnloom.tokenizer import HFTokenizer
from turnloom.types import FinishReason, IntArray, Sampling, ids

pytestmark = pytest.mark.engine

END = 2
PATIENCE = 60.0
"""Seconds after which a test that waits for something says that it never came."""


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return smollm2_tokenizer()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "turnloom.engine.embedded", "--port", "0", "--with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.fixture
async def engine(url: str) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(url)
    yield engine
    await engine.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture(scope="module")
def prompt(tokenizer: HFTokenizer) -> IntArray:
    return ids(tokenizer.encode(tokenizer.apply_template([{"role": "user", "content": "Tell me a story."}], None, generation_prompt=True)))


@pytest.fixture(scope="module")
def broken_prompt(tokenizer: HFTokenizer) -> IntArray:
    """A prompt that the model continues with tokens which are parts of characters."""
    return ids(tokenizer.encode("🏴‍☠️ 𝔘 你好 🏴‍☠️ 𝔘 你好 🏴‍☠️ 𝔘 你"))


async def sample(engine: SGLangEngine, prompt: IntArray, sampling: Sampling, rid: str) -> tuple[IntArray, Any, Chunk]:
    chunks = [chunk async for chunk in engine.sample(prompt, sampling, rid=rid)]
    return np.concatenate([c.ids for c in chunks]), np.concatenate([c.logprobs for c in chunks]), chunks[-1]


async def running(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(f"{url}/v1/loads") as response:
        (rank,) = (await response.json())["loads"]
        return int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.02)


def body(prompt: IntArray, **more: Any) -> dict[str, Any]:
    return {"input_ids": prompt.tolist(), "return_logprob": True, "sampling_params": {"max_new_tokens": 8}, **more}


async def test_capabilities(engine: SGLangEngine) -> None:
    found = await engine.capabilities()
    assert (found.context_length, found.vocab_size, found.logprob_convention, found.weight_version) == (8192, 49152, "raw", "default")
    assert found.tokenizer is not None
    assert found.tokenizer.endswith(".gguf")
    assert await engine.health()


async def test_a_seed_gives_the_same_tokens_streamed_or_not(
    engine: SGLangEngine, http: aiohttp.ClientSession, url: str, prompt: IntArray
) -> None:
    tokens, logprobs, _ = await sample(engine, prompt, Sampling(seed=7, max_tokens=8), "seed-streamed")
    params = {"max_new_tokens": 8, "sampling_seed": 7}
    async with http.post(f"{url}/generate", json=body(prompt, sampling_params=params)) as response:
        answer = await response.json()
    assert answer["output_ids"] == tokens.tolist()
    values = [[value, token] for value, token, _ in answer["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose([value for value, _ in values], logprobs, atol=1e-3)
    assert [token for _, token in values] == tokens.tolist()
    other, _, _ = await sample(engine, prompt, Sampling(seed=8, max_tokens=8), "seed-other")
    assert other.tolist() != tokens.tolist()


async def test_a_seed_continues_where_an_interrupted_generation_stopped(engine: SGLangEngine, prompt: IntArray) -> None:
    whole, _, _ = await sample(engine, prompt, Sampling(seed=7, max_tokens=8), "whole")
    half = ids(np.concatenate([prompt, whole[:4]]))
    rest, _, _ = await sample(engine, half, Sampling(seed=7, max_tokens=4), "rest")
    assert rest.tolist() == whole[4:].tolist()


async def test_the_sampled_end_token_is_there_with_its_logprob(engine: SGLangEngine, tokenizer: HFTokenizer) -> None:
    said = "<|im_start|>user\nSay just: hi<|im_end|>\n<|im_start|>assistant\nI'm here to help you. What's on your mind?"
    prompt = ids(tokenizer.encode(said))
    tokens, logprobs, last = await sample(engine, prompt, Sampling(temperature=0.0, max_tokens=5), "end")
    assert tokens.tolist() == [END]
    assert last.finish is not None
    assert (last.finish.reason, last.finish.matched) == (FinishReason.STOP, END)
    expected = await engine.prompt_logprobs(ids([*prompt.tolist(), END]), len(prompt))
    np.testing.assert_allclose(logprobs, expected, atol=1e-3)
    assert logprobs[0] < 0


async def test_prefill_recomputes_what_was_sampled(engine: SGLangEngine, prompt: IntArray) -> None:
    tokens, logprobs, last = await sample(engine, prompt, Sampling(seed=1, max_tokens=12), "prefill")
    assert len(tokens) == len(logprobs) == 12
    assert last.finish is not None
    assert last.finish.reason is FinishReason.LENGTH
    found = await engine.prompt_logprobs(ids(np.concatenate([prompt, tokens])), len(prompt))
    np.testing.assert_allclose(found, logprobs, atol=1e-3)


async def test_tokens_that_are_parts_of_characters_are_not_lost(
    engine: SGLangEngine, tokenizer: HFTokenizer, broken_prompt: IntArray
) -> None:
    tokens, logprobs, _ = await sample(engine, broken_prompt, Sampling(temperature=0.0, max_tokens=12), "parts")
    assert any("\ufffd" in tokenizer.decode([token]) for token in tokens.tolist())
    assert len(tokens) == len(logprobs) == 12
    found = await engine.prompt_logprobs(ids(np.concatenate([broken_prompt, tokens])), len(broken_prompt))
    np.testing.assert_allclose(found, logprobs, atol=1e-3)


async def test_logprobs_are_raw_at_any_temperature(engine: SGLangEngine, prompt: IntArray) -> None:
    tokens, logprobs, _ = await sample(engine, prompt, Sampling(temperature=0.5, top_p=0.9, top_k=40, seed=2, max_tokens=6), "raw")
    found = await engine.prompt_logprobs(ids(np.concatenate([prompt, tokens])), len(prompt))
    np.testing.assert_allclose(found, logprobs, atol=1e-3)


async def test_prefill_scores_a_whole_sequence_from_its_second_token(engine: SGLangEngine, prompt: IntArray) -> None:
    found = await engine.prompt_logprobs(prompt[:6], 1)
    assert found.shape == (5,)
    assert (found < 0).all()
    np.testing.assert_allclose(await engine.prompt_logprobs(prompt[:6], 4), found[3:], atol=1e-3)


async def test_a_stop_string_ends_with_the_token_that_completes_it(engine: SGLangEngine, tokenizer: HFTokenizer, prompt: IntArray) -> None:
    free, _, _ = await sample(engine, prompt, Sampling(temperature=0.0, max_tokens=8), "free")
    text = tokenizer.decode(free.tolist())
    stop = text[len(text) // 2 - 2 : len(text) // 2 + 2]
    tokens, logprobs, last = await sample(engine, prompt, Sampling(temperature=0.0, max_tokens=8, stop=("\x00", stop)), "stop")
    assert last.finish is not None
    assert (last.finish.reason, last.finish.matched) == (FinishReason.STOP, stop)
    assert tokens.tolist() == free[: len(tokens)].tolist()
    assert stop in tokenizer.decode(tokens.tolist())
    assert stop not in tokenizer.decode(tokens[:-1].tolist())
    assert len(logprobs) == len(tokens)


async def test_ignore_eos_goes_on_without_banning_the_end_token(http: aiohttp.ClientSession, url: str, tokenizer: HFTokenizer) -> None:
    prompt = ids(tokenizer.encode("<|im_start|>assistant\nI'm here to help you. What's on your mind?"))
    params = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    async with http.post(f"{url}/generate", json=body(prompt, sampling_params=params)) as response:
        answer = await response.json()
    assert answer["output_ids"][0] == END
    assert len(answer["output_ids"]) == 3
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


async def test_an_abort_ends_the_request_with_the_tokens_so_far(
    engine: SGLangEngine, http: aiohttp.ClientSession, url: str, prompt: IntArray
) -> None:
    got: list[Chunk] = []
    async for chunk in engine.sample(prompt, Sampling(seed=1, max_tokens=5000), rid="aborted"):
        got.append(chunk)
        if len(got) == 3:
            assert await engine.abort("aborted") is AbortOutcome.VERIFIED
    assert got[-1].finish is not None
    assert got[-1].finish.reason is FinishReason.ABORT
    assert sum(len(chunk.ids) for chunk in got) >= 3
    assert await running(http, url) == 0


async def test_a_consumer_that_leaves_stops_decoding(engine: SGLangEngine, http: aiohttp.ClientSession, url: str, prompt: IntArray) -> None:
    async with contextlib.aclosing(engine.sample(prompt, Sampling(max_tokens=5000), rid="left")) as stream:  # type: ignore[type-var]
        await anext(stream)
        assert await running(http, url) == 1

    async def idle() -> bool:
        return await running(http, url) == 0

    await until(idle)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_stops_decoding(http: aiohttp.ClientSession, url: str, prompt: IntArray, stream: bool) -> None:
    asked = body(prompt, stream=stream, sampling_params={"max_new_tokens": 5000, "ignore_eos": True})

    async def ask() -> None:
        async with http.post(f"{url}/generate", json=asked) as response:
            await response.read()

    task = asyncio.create_task(ask())

    async def busy() -> bool:
        return await running(http, url) == 1

    async def idle() -> bool:
        return await running(http, url) == 0

    await until(busy)
    task.cancel()
    await until(idle)


async def test_an_abort_reaches_a_request_that_still_reads_its_prompt(http: aiohttp.ClientSession, url: str) -> None:
    long = ids([1 + (index * 37) % 40_000 for index in range(6000)])
    task = asyncio.create_task(http.post(f"{url}/generate", json=body(long, rid="reading", stream=True)))

    async def busy() -> bool:
        return await running(http, url) == 1

    await until(busy)
    await http.post(f"{url}/abort_request", json={"rid": "reading"})
    async with asyncio.timeout(PATIENCE):
        text = await (await task).text()
    assert '"type":"abort"' in text
    assert '"output_ids":[]' in text


async def test_three_requests_share_two_slots(engine: SGLangEngine, prompt: IntArray, broken_prompt: IntArray) -> None:
    asked = [(prompt, 1), (broken_prompt, 2), (prompt[:10], 3)]
    results = await asyncio.gather(*(sample(engine, p, Sampling(seed=s, max_tokens=6), f"shared-{s}") for p, s in asked))
    for (start, _), (tokens, logprobs, _) in zip(asked, results, strict=True):
        found = await engine.prompt_logprobs(ids(np.concatenate([start, tokens])), len(start))
        np.testing.assert_allclose(found, logprobs, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": []}, "empty"),
        ({"input_ids": [49152]}, "49152"),
        ({"input_ids": [-1]}, "-1"),
        ({"input_ids": [1.5]}, "1.5"),
        ({"input_ids": [[1, 2]]}, "[1, 2]"),
        ({"input_ids": [1] * 8192}, "(8192 tokens) is longer than the model's context length (8192 tokens)"),
        ({"sampling_params": {"max_new_tokens": 8192}}, "8192"),
        ({"sampling_params": {"temprature": 1}}, "temprature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"n": 2}}, "n is not supported"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"logprob_start_len": 3}, "logprob_start_len"),
    ],
)
async def test_a_bad_request_is_a_400_that_says_why(http: aiohttp.ClientSession, url: str, change: dict[str, Any], words: str) -> None:
    async with http.post(f"{url}/generate", json=body(ids([1, 2, 3])) | change) as response:
        assert response.status == 400
        assert words in (await response.json())["error"]["message"]


async def test_a_live_request_id_is_refused_a_second_time(engine: SGLangEngine, prompt: IntArray) -> None:
    async with contextlib.aclosing(engine.sample(prompt, Sampling(max_tokens=500), rid="twice")) as stream:  # type: ignore[type-var]
        await anext(stream)
        with pytest.raises(EngineRejected, match="twice"):
            await sample(engine, prompt, Sampling(max_tokens=1), "twice")


async def test_start_local_streams_increments_and_closing_ends_the_process(prompt: IntArray) -> None:
    engine = await start_local(incremental=True)
    try:
        tokens, logprobs, _ = await sample(engine, prompt, Sampling(seed=3, max_tokens=4), "local")
        assert len(tokens) == len(logprobs) == 4
    finally:
        await engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


async def test_the_server_ends_with_the_process_that_started_it() -> None:
    script = (
        "import asyncio, os\n"
        "from turnloom.engine.local import start_local\n"
        "async def main():\n"
        "    print((await start_local()).pid, flush=True)\n"
        "    os._exit(0)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    out, _ = await parent.communicate()

    async def gone() -> bool:
        try:
            os.kill(int(out), 0)
        except ProcessLookupError:
            return True
        return False

    await until(gone)


async def test_a_model_that_cannot_be_loaded_is_said_so(tmp_path: Any) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(EngineUnavailable, match="broken"):
        await start_local(broken)
    with pytest.raises(ConfigError, match="no model file"):
        await start_local(tmp_path / "missing.gguf")


async def test_a_long_prompt_is_recomputed_as_it_was_sampled(engine: SGLangEngine) -> None:
    """Longer than a batch, where llama.cpp's arithmetic depends on how the sequence was cut."""
    long = ids(np.random.default_rng(5).integers(20, 40_000, 600))
    tokens: list[int] = []
    sampled: list[float] = []
    async for chunk in engine.sample(long, Sampling(max_tokens=12), rid="a" * 32):
        tokens += chunk.ids.tolist()
        sampled += chunk.logprobs.tolist()
    found = await engine.prompt_logprobs(ids([*long.tolist(), *tokens]), len(long))
    np.testing.assert_allclose(found, sampled, atol=1e-3)
