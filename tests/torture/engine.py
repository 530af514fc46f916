"""The model of the torture, in a process that outlives every gateway: no two replies are alike, and every request is logged.

    python -m tests.torture.engine --tokenizer DIRECTORY --log FILE --seed 1

A reply has words that no other has, in pieces that the tokenizer would not choose,
at a pace of its own. What is asked to go on from the middle of a reply goes on with
it: a call is finished as it was begun, words go on with new ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.tokenizer import HFTokenizer, load_tokenizer

MARK = re.compile(r"\bask (s\d+-\d+-\d+)\b")
"""What names a request within its own last message: session, conversation, turn."""

PACES = ((1, 0.01), (2, 0.03), (4, 0.0), (3, 0.06), (100, 0.25), (100, 0.0))
"""Tokens a chunk, and seconds before each."""

WORDS = "river stone lamp över 你好 naïve under seven\n crisp {x} path/to 1234 🙂 quiet".split(" ")


def marks(text: str) -> list[str]:
    return MARK.findall(text)


class Model:
    """A script for `ScriptedEngine`."""

    def __init__(self, tokenizer: HFTokenizer, log: TextIO, seed: int) -> None:
        self.tokenizer, self.log, self.rng = tokenizer, log, random.Random(seed)
        self.end = tokenizer.control_tokens["<|im_end|>"]
        self.asked: dict[str, list[tuple[list[int], list[int]]]] = {}
        """Of each request by its mark: prompt and planned output, the latest last."""

    def __call__(self, body: dict[str, Any], index: int) -> Reply:
        prompt = list(body["input_ids"])
        text = self.tokenizer.decode(prompt)
        mark = (marks(text) or ["?"])[-1]
        first, given = self._place(mark, prompt)
        planned = self._planned(index, "<tools>" in text, given)
        self.asked.setdefault(mark, []).append((first, planned))
        entry = {"mark": mark, "rid": body["rid"], "at": time.time(), "prompt": prompt, "given": len(given), "planned": planned}
        self.log.write(json.dumps(entry) + "\n")
        self.log.flush()
        chunk, delay = self.rng.choice(PACES)
        return Reply(ids=tuple(planned[len(given) :]), end=-1, chunk=chunk, delay=delay)

    def _place(self, mark: str, prompt: list[int]) -> tuple[list[int], list[int]]:
        """The prompt that the reply began after, and what there is of it already."""
        for first, planned in reversed(self.asked.get(mark, [])):
            given = prompt[len(first) :]
            if given and prompt[: len(first)] == first and given == planned[: len(given)]:
                return first, given
        return prompt, []

    def _planned(self, index: int, tools: bool, given: list[int]) -> list[int]:
        begun = self.tokenizer.decode(given)
        if "<tool_call>" in begun or (not begun and tools and self.rng.random() < 0.5):
            return self._call(index, given)
        said = " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(1, 12)))
        return [*given, *self._pieces(f" r{index}x {said} e{index}x"), self.end]

    def _call(self, index: int, given: list[int]) -> list[int]:
        """A call as it was planned, where it was begun."""
        for planned in (planned for all_of in self.asked.values() for _, planned in reversed(all_of)):
            if given and planned[: len(given)] == given:
                return planned
        call = json.dumps({"name": "look", "arguments": {"at": f"r{index}x {self.rng.choice(WORDS)}", "n": index}}, ensure_ascii=False)
        return [*self._pieces(f"Let me see r{index}x.\n<tool_call>\n{call}\n</tool_call>"), self.end]

    def _pieces(self, text: str) -> list[int]:
        """The text's ids, cut here and there where the tokenizer would not."""
        found: list[int] = []
        for part in re.split(r"(</?tool_call>)", text):
            while part:
                size = len(part) if part.startswith(("<tool_call>", "</tool_call>")) else self.rng.randint(1, 12)
                found += self.tokenizer.encode(part[:size])
                part = part[size:]
        return found


async def serve(arguments: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(arguments.tokenizer)
    with arguments.log.open("a", encoding="utf-8") as log:
        engine = ScriptedEngine(Model(tokenizer, log, arguments.seed), tokenizer=tokenizer, model=arguments.tokenizer)
        sys.stdout.write(await engine.start() + "\n")
        sys.stdout.flush()
        while True:
            await asyncio.sleep(1)
            for kept in (engine.requests, engine.headers, engine.disconnects, engine.aborts):
                kept.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(serve(parser.parse_args()))
