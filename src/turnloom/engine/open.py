"""Opens the engine that a URL names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from turnloom.engine.contract import Engine
from turnloom.engine.llama_server import LlamaServerEngine
from turnloom.engine.sglang import SGLangEngine
from turnloom.engine.vllm import VLLMEngine
from turnloom.errors import ConfigError

KEY_VARIABLE = "TURNLOOM_ENGINE_KEY"
"""The environment variable with the key that engines ask for, where the URL names no other."""

FORMS = "sglang://HOST:PORT, vllm://HOST:PORT, llamacpp://HOST:PORT, or local:MODEL"

_CLIENTS: dict[str, Callable[..., Engine]] = {
    "http": SGLangEngine,
    "https": SGLangEngine,
    "sglang": SGLangEngine,
    "vllm": VLLMEngine,
    "llamacpp": LlamaServerEngine,
}


async def open_engine(url: str) -> Engine:
    """One server. Raises ConfigError for a URL that names none.

    `sglang://HOST:PORT` (an SGLang server or its router; `http://` and `https://`
    mean the same), `vllm://HOST:PORT`, `llamacpp://HOST:PORT`; with `+https` after
    the first word where the server speaks TLS. `local:` and `local:smollm2` start
    the small model that is fetched once, `local:/path/model.gguf` that file:
    closing the engine stops what was started.

    The query sets what a server does not say: `context_length`, `vocab_size`,
    `logprobs` (`raw` or `temperature`), `idle_timeout` in seconds, and `key_env`,
    the environment variable that holds its API key.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "local":
        from turnloom.engine.local import start_local

        return await start_local(rest or "smollm2")
    none = ConfigError(f"{_shown(url)!r} names no engine; give {FORMS}")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        # Its words have the URL in them.
        raise none from None
    kind, _, transport = parts.scheme.partition("+")
    if kind not in _CLIENTS or transport not in ("", "https") or not parts.hostname:
        raise none
    secure = "https" in (kind, transport)
    base = urlunsplit(("https" if secure else "http", parts.netloc, parts.path, "", ""))
    options, key_name = _options(_shown(url), parts.query)
    if parts.username is not None and options["api_key"]:
        raise ConfigError(f"{_shown(url)!r} has a user in it, and the environment a key for it, {key_name!r}: give one of the two")
    return _CLIENTS[kind](base, **options)


def _shown(url: str) -> str:
    """Of any words at all: without what is before an @, and without the query."""
    scheme, slashes, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    return f"{scheme}{slashes}{rest.rpartition('@')[2].partition('?')[0]}"


def _options(url: str, query: str) -> tuple[dict[str, Any], str]:
    """What a client is made with, and the name of the variable that its key is from."""
    key_name = KEY_VARIABLE
    options: dict[str, Any] = {"api_key": os.environ.get(KEY_VARIABLE) or None}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in ("context_length", "vocab_size") and value.isdecimal() and int(value) > 1:
            options[name] = int(value)
        elif name == "logprobs" and value in ("raw", "temperature"):
            options["logprob_convention"] = value
        elif name == "idle_timeout" and value.isdecimal() and int(value) > 0:
            options[name] = float(value)
        elif name == "key_env" and os.environ.get(value):
            key_name, options["api_key"] = value, os.environ[value]
        elif name == "key_env":
            raise ConfigError(f"{url!r}: the environment has no {value!r}, which is to hold the engine's key")
        else:
            # An unknown one's value may be a key that was given in the wrong place.
            said = f"{name}={value}" if name in ("context_length", "vocab_size", "logprobs", "idle_timeout") else name
            raise ConfigError(
                f"{url!r}: {said} is no option of an engine; there are context_length=N, vocab_size=N, "
                "logprobs=raw|temperature, idle_timeout=SECONDS, key_env=NAME"
            )
    return options, key_name
