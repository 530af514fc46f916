"""llama.cpp in this process through `xllamacpp`. Owns the model; `llama_completion` asks it, `llama_slots` shares it out. Knows no SGLang.

`xllamacpp` has no call for decoding as such, only llama.cpp's own HTTP server,
so that is run on a private port with a key of its own and asked for one token a
request. Its prefix cache makes that as fast as a stream of many (measured on
SmolLM2-135M with two free processors: 55 to 75 tokens/s either way).
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from turnloom.engine.http import EngineHTTP
from turnloom.engine.llama_completion import Completions, Policy, Step
from turnloom.engine.llama_slots import Slots
from turnloom.errors import ConfigError
from turnloom.gguf import read_metadata

__all__ = ["LlamaCpp", "Policy", "Slots", "Step", "default_threads", "require_xllamacpp"]


_PATIENCE = 3600.0
"""Seconds for one answer of a server in this process: it is slow, but never lost."""


class LlamaCpp:
    """A loaded model. `context` is the tokens one sequence may hold; `vocab_size` one more than the largest id."""

    def __init__(self, path: Path, *, parallel: int = 2, threads: int | None = None) -> None:
        """Loads the model, which takes about a second. Raises ConfigError without xllamacpp or a usable file."""
        require_xllamacpp()
        import xllamacpp

        pairs = read_metadata(path)
        self.path = path
        self.context = int(pairs.get(f"{pairs.get('general.architecture')}.context_length", 2048))
        self.vocab_size = len(pairs["tokenizer.ggml.tokens"])
        key = secrets.token_hex(16)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel = parallel
        params.n_ctx = self.context * parallel
        params.kv_unified = False
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.api_keys = [key]
        params.cpuparams.n_threads = threads or default_threads()
        # Small batches, so that a long prompt holds up neither an abort nor the other sequences for long.
        params.n_batch = params.n_ubatch = 256
        params.warmup = False
        params.verbosity = -1
        try:
            self._server = xllamacpp.Server(params)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"llama.cpp cannot load {path}: {error}") from error
        self._http = EngineHTTP(str(self._server.listening_address), api_key=key, idle_timeout=_PATIENCE)
        end = int(pairs.get("tokenizer.ggml.eos_token_id", 0))
        self._completions = Completions(self._http, vocab_size=self.vocab_size, certain=end, patience=_PATIENCE)

    async def close(self) -> None:
        await self._http.close()

    async def prefill(self, slot: int, ids: Sequence[int]) -> int:
        """Evaluate `ids` but the last into a slot's cache; the number that was there already. Stops when cancelled."""
        return await self._completions.prefill(slot, ids)

    async def step(self, slot: int, ids: Sequence[int], policy: Policy, seed: int) -> Step:
        """Sample the token after `ids`. The draw depends on `seed` and the position alone."""
        steps, _ = await self._completions.sample(slot, ids, policy, seed)
        return steps[0]

    async def logprob(self, slot: int, ids: Sequence[int], token: int) -> float:
        """The logprob of `token` after `ids`."""
        return await self._completions.logprob(slot, ids, token)


def default_threads() -> int:
    """Half the processors. llama.cpp's threads wait for each other at every layer, so one that must share its
    processor (with the gateway, an agent, a test) slows all: on two busy ones, one thread decodes 4 times as fast as two."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


def require_xllamacpp() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError("the embedded engine needs xllamacpp: pip install 'turnloom[local]'")
