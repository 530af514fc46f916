"""`turnloom engine` as a real process with the real model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from turnloom.engine.models import find_model

pytestmark = pytest.mark.engine


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read() or b"null")


def test_the_engine_serves_until_sigterm() -> None:
    find_model("smollm2")  # fetched here, so that the process has nothing to say of it
    words = ["-m", "turnloom.cli.main", "engine", "smollm2", "--port", "0", "--parallel", "1"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            first = process.stdout.readline()
            assert first.startswith("turnloom: smollm2 on http://127.0.0.1:"), process.stderr.read()
            url = first.split()[-1]
            assert ask(f"{url}/model_info")["logprob_convention"] == "raw"
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}, "return_logprob": True}
            reply = ask(f"{url}/generate", body)
            assert len(reply["output_ids"]) == 2
            assert [row[1] for row in reply["meta_info"]["output_token_logprobs"]] == reply["output_ids"]
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=60) == ("turnloom: stopping\n", "")
            assert process.returncode == 0
        finally:
            process.kill()
