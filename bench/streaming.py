"""How soon a client sees what the engine samples: gaps between pieces of text at the client, beside the engine's own.

    python bench/streaming.py [--tokens 100] [--delay 0.05]

One gateway, an engine that emits a token every `delay` seconds, and one client
after another in each dialect. What is printed is measured in this one run.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

import aiohttp

from turnloom import Gateway
from turnloom.engine.sglang import SGLangEngine
from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer

WORD = " on"

ASKS = {
    "anthropic": ("/v1/messages", {"max_tokens": 10_000, "messages": [{"role": "user", "content": "go"}], "stream": True}),
    "openai_chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "go"}], "stream": True}),
    "openai_responses": ("/v1/responses", {"input": "go", "stream": True}),
    "gemini": ("/v1beta/models/m:streamGenerateContent?alt=sse", {"contents": [{"role": "user", "parts": [{"text": "go"}]}]}),
}


@dataclass(frozen=True)
class Seen:
    first: float
    """Seconds from the request to the first text."""
    gaps: list[float]
    pieces: int


async def ask(http: aiohttp.ClientSession, url: str, body: object) -> Seen:
    began, arrivals = time.perf_counter(), []
    async with http.post(url, json=body) as answer:
        answer.raise_for_status()
        async for data in answer.content.iter_any():
            if WORD.encode() in data:
                arrivals.append(time.perf_counter())
    return Seen(arrivals[0] - began, [b - a for a, b in pairwise(arrivals)], len(arrivals))


async def main(tokens: int, delay: float) -> None:
    tokenizer = qwen_tokenizer("qwen2.5")
    (word,) = tokenizer.encode(WORD)
    reply = Reply(ids=(word,) * tokens, chunk=1, delay=delay)
    print(f"an engine that emits {tokens} tokens, one every {delay * 1000:.0f} ms")
    print(f"{'dialect':<18}{'pieces':>7}{'first text':>12}{'mean gap':>10}{'longest gap':>13}")
    async with (
        ScriptedEngine(lambda *_: reply, tokenizer=tokenizer) as engine,
        Gateway(SGLangEngine(engine.url), tokenizer) as gateway,
        aiohttp.ClientSession() as http,
    ):
        for dialect, (path, body) in ASKS.items():
            session = await gateway.open_session()
            seen = await ask(http, session.base_url + path, body)
            mean, longest = sum(seen.gaps) / len(seen.gaps), max(seen.gaps)
            print(f"{dialect:<18}{seen.pieces:>7}{seen.first * 1000:>9.0f} ms{mean * 1000:>7.0f} ms{longest * 1000:>10.0f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0.05)
    given = parser.parse_args()
    asyncio.run(main(given.tokens, given.delay))
