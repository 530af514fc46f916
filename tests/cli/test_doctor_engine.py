"""`turnloom doctor --engine` as a person meets it. What a probe measures: `tests/engine/test_probe.py`; real ones: `tests/engines`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, one_line
from turnloom.testing.tokenizers import qwen_directory

REPLIES = [{"ids": [50 + n], "end": -1, "finish": "length"} for n in range(40)]
"""Other tokens each time, so that logprobs at one place can be compared."""


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scripted engine in a process of its own."""
    script = tmp_path_factory.mktemp("engine") / "replies.json"
    script.write_text(json.dumps(REPLIES), "utf-8")
    words = ["-m", "turnloom.testing.scripted_engine", "--script", str(script)]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def test_an_engine_s_profile_is_printed_with_what_to_change(cli: Cli, varied: str) -> None:
    said = cli("doctor", "--engine", varied)
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0] == f"{varied}: SGLang scripted"
    assert "  logprobs            before temperature (measured)" in lines
    assert "  context             32768" in lines
    assert [line for line in lines if line.startswith("  note     it cannot hold a reply to a JSON schema -> ")]
    assert not [line for line in lines if line.startswith("  error")]


def test_a_trap_that_makes_samples_wrong_ends_with_1(cli: Cli, varied: str) -> None:
    said = cli("doctor", "--engine", f"{varied}?logprobs=temperature", "--json")
    found = json.loads(said.out)
    (engine,) = found["engines"]
    assert (said.code, found["ok"], found["pool"], found["template"]) == (1, False, None, None)
    assert (engine["name"], engine["kind"], engine["measured"]) == (varied, "sglang", "raw")
    first = engine["findings"][0]
    assert (first["code"], first["severity"], first["change"]) == ("convention_wrong", "error", "add ?logprobs=raw to the URL")


def test_a_tokenizer_and_an_engine_are_looked_at_together(cli: Cli, engine_url: str) -> None:
    words = ("doctor", "--engine", engine_url, "--tokenizer", qwen_directory())
    said = cli(*words)
    assert said.code == 0, said
    assert "  bridge user         yes\n" in said.out
    assert "  text                the tokenizer's\n" in said.out
    found = json.loads(cli(*words, "--json").out)
    (engine,) = found["engines"]
    assert found["template"]["bridges"]["user"] == "yes"
    assert engine["tokenizer_vocab"] == found["template"]["vocab_size"]


def test_a_tokenizer_that_the_engine_is_too_small_for_ends_with_1(cli: Cli, engine_url: str) -> None:
    said = cli("doctor", "--engine", f"{engine_url}?vocab_size=1000", "--tokenizer", qwen_directory())
    assert said.code == 1
    assert "  error    the tokenizer has " in said.out


def test_several_engines_are_looked_at_as_a_pool(cli: Cli, varied: str, engine_url: str) -> None:
    said = cli("doctor", "--engine", f"{varied},{engine_url}?context_length=4096")
    pool = said.out.partition("2 engines as one pool\n")[2]
    assert said.code == 0, said
    assert "they differ in context length: 32768, 4096" in pool
    assert "they differ in model: " in pool


def test_an_engine_that_does_not_answer_is_one_line(cli: Cli) -> None:
    assert "cannot reach http://127.0.0.1:9" in one_line(cli("doctor", "--engine", "http://127.0.0.1:9"))


def test_of_several_the_ones_that_answer_are_shown_and_the_code_is_2(cli: Cli, varied: str) -> None:
    said = cli("doctor", "--engine", f"{varied},http://127.0.0.1:9")
    assert said.code == 2
    assert said.out.splitlines()[0] == f"{varied}: SGLang scripted"
    assert said.out.splitlines()[-1].startswith("http://127.0.0.1:9: does not answer: ")


def test_an_engine_of_no_known_form_and_nothing_at_all_are_one_line(cli: Cli, tmp_path: Path) -> None:
    assert "names no engine" in one_line(cli("doctor", "--engine", "ftp://host"))
    assert "give --tokenizer, --engine, or both" in one_line(cli("doctor"))
