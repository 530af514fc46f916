"""The examples as a newcomer runs them, on the embedded engine and its real model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*words: str, cwd: Path) -> str:
    ended = subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_hello_gateway_prints_its_samples(tmp_path: Path) -> None:
    out = run(str(EXAMPLES / "hello_gateway.py"), cwd=tmp_path)
    assert out.count("user:      ") == out.count("assistant: ") == 2
    found = re.findall(r"^sample: (\d+) tokens, (\d+) trained, prompt of (\d+), reward 1\.0$", out, re.M)
    assert len(found) == 1, "the second turn is bridged, so two turns are one sample"
    tokens, trained, prompt = map(int, found[0])
    assert 0 < trained < tokens - prompt, "both replies train, and the second question between them does not"


def test_sdk_agent_prints_its_samples(tmp_path: Path) -> None:
    out = run(str(EXAMPLES / "sdk_agent.py"), "Say hello.", cwd=tmp_path)
    assert re.search(r"^sample 0: \d+ tokens, [1-9]\d* trained, \{", out, re.M)


def test_the_front_door_is_a_file_of_at_most_forty_lines() -> None:
    assert len((EXAMPLES / "hello_gateway.py").read_text("utf-8").splitlines()) <= 40
