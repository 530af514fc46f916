"""What an engine's URL means."""

from __future__ import annotations

import pytest

from turnloom.engine.open import open_engine
from turnloom.engine.sglang import SGLangEngine
from turnloom.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://host:30000/", "http://host:30000"),
        ("https://host", "https://host"),
        ("sglang://host:30000", "http://host:30000"),
    ],
)
async def test_a_server_is_reached_over_http(given: str, url: str) -> None:
    engine = await open_engine(given)
    assert isinstance(engine, SGLangEngine)
    assert engine.url == url
    await engine.close()


@pytest.mark.parametrize("given", ["", "host:30000", "ftp://host", "http://", "vllm"])
async def test_anything_else_is_said_to_be_no_engine(given: str) -> None:
    with pytest.raises(ConfigError, match="names no engine"):
        await open_engine(given)


async def test_a_missing_local_file_is_said_so() -> None:
    with pytest.raises(ConfigError, match="no model file"):
        await open_engine("local:/no/such/model.gguf")
