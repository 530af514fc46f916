"""How often a real model leaves the tokenizer's own segmentation: replies of the embedded model, encoded anew.

    python -m tests.properties.sampled --replies 48

The engine is quantised and its arithmetic depends on how requests are batched,
so the figure moves a little from run to run.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass

from turnloom.engine.models import find_model
from turnloom.engine.open import open_engine
from turnloom.render.template import ChatTemplateRenderer
from turnloom.tokenizer import load_tokenizer
from turnloom.types import Message, Sampling, Text

MODEL = "smollm2"
LONGEST = 100
ASKED = (
    "Write a Python function that parses a CSV line.",
    "Explain what a mutex is.",
    "List five files of a web project and what they hold.",
    "Translate to French: the cat sleeps on the red chair.",
    "Write a JSON object describing a person.",
    "Tell a short story about a lighthouse keeper.",
    "Give the shell commands to find large files.",
    "What is 37 times 12? Show the steps.",
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """`drifting` of `replies` with `tokens` ids in all are not the ids of their own text."""

    replies: int
    drifting: int
    tokens: int

    def __str__(self) -> str:
        return (
            f"Of {self.replies} replies that SmolLM2-135M sampled at temperature 1, {self.tokens / self.replies:.0f} tokens each, "
            f"{self.drifting} ({self.drifting / self.replies:.0%}) have other ids than their text encoded anew."
        )


async def measure(replies: int) -> Sampled:
    """Sample so many replies, one after another."""
    tokenizer = load_tokenizer(find_model(MODEL))
    renderer = ChatTemplateRenderer(tokenizer)
    engine = await open_engine(f"local:{MODEL}")
    drifting = tokens = 0
    try:
        for i in range(replies):
            prompt = renderer.render([Message("user", (Text(ASKED[i % len(ASKED)]),))], []).ids
            sampled: list[int] = []
            async for chunk in engine.sample(prompt, Sampling(temperature=1.0, max_tokens=LONGEST, seed=i), rid=f"{i:032x}"):
                sampled += chunk.ids.tolist()
            words = [token for token in sampled if token not in renderer.end_ids]
            tokens += len(words)
            drifting += tokenizer.encode_plain(tokenizer.decode(words)) != words
    finally:
        await engine.close()
    return Sampled(replies, drifting, tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replies", type=int, default=48)
    print(asyncio.run(measure(parser.parse_args().replies)))
