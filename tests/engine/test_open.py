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


@pytest.mark.parametrize(
    "given",
    [
        "http://me:SECRET@h:1?foo=1",
        "http://me:SECRET@h:1?api_key=SECRET",
        "http://me:SECRET@h:1?logprobs=none",
        "http://me:SECRET@h:1?key_env=NO_SUCH_VARIABLE",
        "http://h:1?key=SECRET",
        "ftp://me:SECRET@h",
        "me:SECRET@h:1",
        "http://me:SECRET@h:port",
        "http://me:SEC/RET:SECRET@h:1",
        "http://me:SECRET?@h:1",
        "http://me:SECRET@[h",
    ],
)
async def test_no_message_holds_a_password(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await open_engine(given)
    assert "SECRET" not in str(caught.value)
    assert "h" in str(caught.value).split(" ")[0], "but where the engine is"


@pytest.mark.parametrize(("query", "variable"), [("", "TURNLOOM_ENGINE_KEY"), ("?key_env=OTHER_KEY", "OTHER_KEY")])
async def test_a_user_and_a_key_are_one_too_many(query: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "k")
    with pytest.raises(ConfigError, match=f"'{variable}'.*give one of the two") as caught:
        await open_engine(f"sglang://me:SECRET@h:1{query}")
    assert "SECRET" not in str(caught.value)
    monkeypatch.delenv(variable)
    await (await open_engine("sglang://me:SECRET@h:1")).close()
