"""What `turnloom serve` is told of limits reaches every session that sets none of its own."""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import pytest

from tests.cli.test_serve import serving


def test_each_option_is_a_limit(engine_url: str, tmp_path: Path) -> None:
    options = ("--max-session-tokens", "2", "--max-sessions", "3", "--loaded-sessions", "1", "--loaded-seconds", "0.5")
    with serving(engine_url, tmp_path / "t.db", *options) as served:
        first, second = served.open(id="first"), served.open(id="second")
        served.say(first, "hello")
        served.say(second, "hello")
        with pytest.raises(anthropic.RateLimitError, match="used its 2 sampled tokens"):
            served.say(first, "more")
        served.open(id="third")
        status, raw = served.ask("POST", "/api/v1/sessions", {"id": "fourth"})
        assert (status, "3 open sessions, as many as it may" in json.loads(raw)["error"]["message"]) == (429, True)
        counted = served.get("/metrics")[1].decode()
        assert "turnloom_sessions_loaded 1.0" in counted
        assert 'turnloom_limits_reached_total{limit="max_tokens"} 1.0' in counted


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--max-session-bytes", "1", "bytes of the store, and it may use 1"),
        ("--session-ttl", "0.001", "its time was up 0.001 s after it was opened"),
        ("--idle-timeout", "0.001", "it had no turn for 0.001 s"),
    ],
)
def test_each_other_option_is_one_too(option: str, value: str, told: str, engine_url: str, tmp_path: Path) -> None:
    with serving(engine_url, tmp_path / "t.db", option, value) as served:
        session = served.open()

        def twice() -> None:
            for _ in range(2):
                served.say(session, "hello")

        with pytest.raises(anthropic.APIStatusError, match=told):
            twice()
