"""Opens the engine that a URL names."""

from __future__ import annotations

from turnloom.engine.contract import Engine
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import ConfigError


async def open_engine(url: str, *, vocab_size: int | None = None, context_length: int | None = None, api_key: str | None = None) -> Engine:
    """An SGLang server or router (`http://…`, `https://…`, `sglang://HOST:PORT`), or the embedded engine.

    `local:` and `local:smollm2` start the small model that is fetched once;
    `local:/path/model.gguf` starts that file. Closing the engine stops what was
    started. Raises ConfigError for anything else.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "local":
        from turnloom.engine.local import start_local

        return await start_local(rest or "smollm2")
    if scheme == "sglang":
        url, scheme = f"http:{rest}", "http"
    if scheme not in ("http", "https") or not rest.strip("/"):
        raise ConfigError(f"{url!r} names no engine; give http://HOST:PORT of an SGLang server or router, or local:")
    return SGLangEngine(url, vocab_size=vocab_size, context_length=context_length, api_key=api_key)
