"""`turnloom serve` as a real process before a real engine: from its first line to SIGTERM, and past `kill -9`."""

from __future__ import annotations

import http.server
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.cli.conftest import Cli


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str
    key: str

    def get(self, path: str) -> tuple[int, bytes]:
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(self.url + path, method=method, data=None if body is None else json.dumps(body).encode())
        request.add_header("Authorization", f"Bearer {self.key if key is None else key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read()

    def open(self, **body: Any) -> dict[str, Any]:
        status, raw = self.ask("POST", "/api/v1/sessions", body)
        assert status == 201
        return json.loads(raw)

    def say(self, session: dict[str, Any], text: str) -> str:
        """One turn with the official client, pointed there by nothing but the session's `env`."""
        env = session["env"]
        client = anthropic.Anthropic(base_url=env["ANTHROPIC_BASE_URL"], api_key=env["ANTHROPIC_API_KEY"], max_retries=0)
        reply = client.messages.create(model="any", max_tokens=50, messages=[{"role": "user", "content": text}])
        return "".join(block.text for block in reply.content if block.type == "text")


@contextmanager
def serving(engine_url: str, store: Path, *options: str) -> Iterator[Served]:
    words = ["-m", "turnloom.cli.main", "serve", "--engine", engine_url, "--port", "0", "--store", str(store), *options]
    env = {k: v for k, v in os.environ.items() if k != "TURNLOOM_ADMIN_KEY"}
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            first = process.stdout.readline()
            assert first.startswith("turnloom: serving on http://127.0.0.1:"), first + process.stderr.read()
            if "--admin-key" in options:
                key = options[options.index("--admin-key") + 1]
            else:
                key = process.stdout.readline().removeprefix("turnloom: admin key ").strip()
            yield Served(process, first.split()[3].rstrip(","), key)
        finally:
            process.kill()


def test_from_the_first_line_to_sigterm(engine_url: str, tmp_path: Path, cli: Cli) -> None:
    store = tmp_path / "t.db"
    with serving(engine_url, store) as served:
        assert served.get("/healthz") == (200, b'{"ready": true}')
        assert served.ask("POST", "/api/v1/sessions", {}, key="guess")[0] == 401
        session = served.open(id="one", metadata={"task": "greet"})
        assert served.say(session, "hello") == "It is done."
        assert b'turnloom_turns_total{dialect="anthropic",outcome="delivered"} 1.0' in served.get("/metrics")[1]
        assert cli("show", "latest", "--store", store).out.startswith("session one (open): 1 turns"), "read while it is served"
        assert served.ask("POST", "/api/v1/sessions/one/finish", {"reward": 1})[0] == 200
        status, lines = served.get("/api/v1/sessions/one/samples")
        assert (status, json.loads(lines)["metadata"]["task"]) == (200, "greet")

        served.process.send_signal(signal.SIGTERM)
        out, err = served.process.communicate(timeout=60)
        assert (served.process.returncode, out, err) == (0, "turnloom: stopping\n", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.db", "t.db.lock"], "one whole file"
    assert cli("show", "one", "--store", store).out.startswith("session one (closed, reward 1): 1 turns")


@contextmanager
def collecting() -> Iterator[tuple[str, queue.SimpleQueue[bytes]]]:
    """A collector of spans: its address, and what it was sent."""
    came: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", came
        finally:
            server.shutdown()


@pytest.mark.parametrize("by", ["option", "environment"])
def test_spans_go_to_the_collector_that_is_named_and_are_there_when_it_has_stopped(
    engine_url: str, tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as (url, came):
        if by == "environment":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with serving(engine_url, tmp_path / "t.db", *(["--otel", url] if by == "option" else [])) as served:
            served.say(served.open(id="one"), "A SECRET QUESTION")
            served.process.send_signal(signal.SIGTERM)
            out, err = served.process.communicate(timeout=60)
        assert (served.process.returncode, out, err) == (0, "turnloom: stopping\n", "")
        sent = came.get(timeout=10)
    assert b"anthropic" in sent
    assert b"turnloom.session" in sent
    assert b"SECRET" not in sent


def test_kill_9_keeps_the_turn_that_the_client_got(engine_url: str, tmp_path: Path) -> None:
    store = tmp_path / "t.db"
    with serving(engine_url, store, "--admin-key", "mine") as served:
        session = served.open(id="one")
        served.say(session, "hello")
        served.process.kill()
        served.process.wait()
    with serving(engine_url, store, "--admin-key", "mine") as again:
        status, row = again.get("/api/v1/sessions/one")
        assert (status, json.loads(row)["outcomes"]) == (200, {"delivered": 1})
        moved = {"env": {**session["env"], "ANTHROPIC_BASE_URL": f"{again.url}/s/{session['key']}"}}
        again.say(moved, "hello again")
        assert json.loads(again.get("/api/v1/sessions/one")[1])["turns"] == 2


def test_an_unknown_key_opens_a_session_only_with_open_sessions(engine_url: str, tmp_path: Path) -> None:
    def stranger(served: Served) -> dict[str, Any]:
        return {"env": {"ANTHROPIC_BASE_URL": served.url, "ANTHROPIC_API_KEY": "any-key-at-all"}}

    with serving(engine_url, tmp_path / "closed.db") as served, pytest.raises(anthropic.AuthenticationError):
        served.say(stranger(served), "hello")
    with serving(engine_url, tmp_path / "open.db", "--open-sessions") as served:
        assert served.say(stranger(served), "hello")
        assert len(json.loads(served.get("/api/v1/sessions")[1])["sessions"]) == 1


def test_the_options_are_the_policy_of_a_session_that_sets_none(engine_url: str, tmp_path: Path) -> None:
    with serving(engine_url, tmp_path / "t.db", "--max-turns", "1", "--temperature", "0.5") as served:
        session = served.open(id="one")
        served.say(session, "hello")
        with pytest.raises(anthropic.RateLimitError, match="used its 1 turns"):
            served.say(session, "hello")
        assert json.loads(served.get("/api/v1/sessions/one/samples")[1])["temperature"] == 0.5
