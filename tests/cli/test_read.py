"""`show`, `export` and `check` on a store that a real gateway wrote."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.support.gateways import bench, user
from turnloom.export.check import read_samples
from turnloom.testing.tokenizers import qwen_directory


def test_show_draws_the_tree_and_what_trains(cli: Cli, recorded: Path) -> None:
    said = cli("show", "alpha-one", "--store", recorded)
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0] == "session alpha-one (closed, reward 1): 2 turns, 1 lineages"
    assert " * assistant First answer." in said.out
    assert "turn 1 · " in said.out
    assert "prompt (bridge +" in said.out
    assert said.out.count("   train   [") == 2


def test_show_names_forks_outcomes_and_untrained_tokens(cli: Cli, recorded: Path) -> None:
    said = cli("show", "alpha-two", "--store", recorded)
    assert "fork: history_changed at message 1" in said.out
    assert "aborted: the engine ended this reply early" in said.out
    assert "outcome aborted" in next(line for line in said.out.splitlines() if line.startswith("untrained: "))


def test_show_decodes_with_a_tokenizer(cli: Cli, recorded: Path) -> None:
    said = cli("show", "beta", "--store", recorded, "--tokenizer", qwen_directory())
    trained = next(line for line in said.out.splitlines() if line.startswith("   train "))
    assert trained.endswith("Fifth.<|im_end|>")


@pytest.mark.parametrize(("words", "found"), [("latest", "beta"), ("be", "beta"), ("alpha-t", "alpha-two"), ("alpha-one", "alpha-one")])
def test_a_session_is_found_by_the_start_of_its_id_or_as_the_latest(cli: Cli, recorded: Path, words: str, found: str) -> None:
    assert cli("show", words, "--store", recorded).out.startswith(f"session {found} (")


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.parquet"])
def test_export_writes_every_session_and_the_file_checks(cli: Cli, recorded: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    said = cli("export", out, "--store", recorded)
    assert (said.code, said.err) == (0, "")
    samples = list(read_samples(out))
    trained = sum(int(s.loss_mask.sum()) for s in samples)
    assert [s.session_id for s in samples] == ["alpha-one", "alpha-two", "alpha-two", "beta"]
    assert [s.reward for s in samples] == [1.0, 0.0, 0.0, None]
    first, second = said.out.splitlines()
    assert first == f"4 samples, {trained} trained tokens in {out}"
    assert second.endswith("sampled tokens do not train; `turnloom show SESSION` says why")

    checked = cli("check", out)
    assert (checked.code, checked.err) == (0, "")
    assert checked.out.splitlines()[-1] == "every law holds"


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        ("UPDATE deltas SET output = x'00000000' WHERE session = (SELECT number FROM sessions WHERE id = 'alpha-two')", "alpha-two"),
        ("UPDATE sessions SET body = x'01ff' WHERE id = 'beta'", "beta"),
    ],
    ids=["a turn", "a row"],
)
def test_a_damaged_session_is_left_out_and_said_and_the_others_are_exported(
    cli: Cli, recorded: Path, tmp_path: Path, damage: str, left: str
) -> None:
    store, out = tmp_path / "copy.db", tmp_path / "some.jsonl"
    with sqlite3.connect(recorded) as whole, sqlite3.connect(store) as copy:
        whole.backup(copy)
        copy.execute(damage)
        copy.commit()
    said = cli("export", out, "--store", store)
    assert said.code == 1
    assert f"session {left} " in said.out
    assert "see `turnloom fsck`" in said.out
    assert "Error:" not in said.out
    assert said.out.splitlines()[-1] == "1 damaged sessions are left out"
    assert {s.session_id for s in read_samples(out)} == {"alpha-one", "alpha-two", "beta"} - {left}
    forks = cli("forks", "--store", store)
    assert forks.code == 0
    assert "2 sessions, " in forks.out


def test_export_of_chosen_sessions(cli: Cli, recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "some.jsonl"
    cli("export", out, "latest", "alpha-o", "--store", recorded)
    assert [s.session_id for s in read_samples(out)] == ["beta", "alpha-one"]


def test_export_with_a_named_format(cli: Cli, recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.bin"
    assert cli("export", out, "--format", "parquet", "--store", recorded).code == 0
    assert out.read_bytes()[:4] == b"PAR1"


@pytest.fixture
def exported(cli: Cli, recorded: Path, tmp_path: Path) -> Path:
    out = tmp_path / "samples.jsonl"
    assert cli("export", out, "--store", recorded).code == 0
    return out


def spoil(path: Path, **changes: object) -> None:
    """Change the first row; a callable value gets the old one."""
    first, *rest = path.read_text("utf-8").splitlines()
    row = json.loads(first)
    row.update({k: v(row[k]) if callable(v) else v for k, v in changes.items()})
    path.write_text("\n".join([json.dumps(row), *rest]) + "\n", "utf-8")


def test_check_names_the_broken_law_and_ends_with_1(cli: Cli, exported: Path) -> None:
    spoil(exported, loss_mask=lambda mask: [1, *mask[1:]])
    said = cli("check", exported)
    assert said.code == 1
    assert "1 WRONG   only_sampled" in said.out
    assert "only_sampled: row 1, session alpha-one, token 0: " in said.out


def test_check_of_a_file_that_is_cut_off(cli: Cli, exported: Path) -> None:
    exported.write_bytes(exported.read_bytes()[:-30])
    said = cli("check", exported)
    assert said.code == 1
    assert "the file seems to be cut off here" in said.out


def test_check_as_json(cli: Cli, exported: Path) -> None:
    said = cli("check", exported, "--json")
    assert said.code == 0
    found = json.loads(said.out)
    assert (found["file"]["ok"], found["file"]["samples"], found["engine"]) == (True, 4, None)


def test_check_with_an_engine_compares_every_trained_token(cli: Cli, exported: Path, engine_url: str) -> None:
    said = cli("check", exported, "--engine", engine_url)
    trained = sum(int(s.loss_mask.sum()) for s in read_samples(exported))
    assert said.code == 0, said
    assert said.out.splitlines()[-1] == f"{trained} tokens, max 0.00e+00, mean 0.00e+00: within the tolerance 0.001"


def test_check_with_an_engine_finds_one_wrong_logprob(cli: Cli, exported: Path, engine_url: str) -> None:
    def deeper(column: list[float | None]) -> list[float | None]:
        at = next(i for i, value in enumerate(column) if value is not None)
        return [*column[:at], column[at] - 0.25, *column[at + 1 :]]

    spoil(exported, logprobs=deeper)
    said = cli("check", exported, "--engine", engine_url)
    assert said.code == 1
    assert "TOO FAR" in said.out
    assert "max 2.50e-01" in said.out.splitlines()[-1]
    assert cli("check", exported, "--engine", engine_url, "--tolerance", "0.3").code == 0


def test_check_does_not_ask_the_engine_about_a_damaged_file(cli: Cli, exported: Path, engine_url: str) -> None:
    spoil(exported, prompt_len=0)
    said = cli("check", exported, "--engine", engine_url)
    assert said.code == 1
    assert said.out.splitlines()[-1] == "the engine was not asked: mend the file first"


def test_check_as_json_whatever_the_file_says(cli: Cli, exported: Path) -> None:
    spoil(exported, session_id="\ud800", prompt_len=0)
    said = cli("check", exported, "--json")
    assert said.code == 1
    assert said.out.isascii()
    assert json.loads(said.out)["file"]["findings"][0]["session"] == "\ud800"


def test_check_of_a_file_without_samples_ends_with_1(cli: Cli, tmp_path: Path, engine_url: str) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    said = cli("check", empty)
    assert (said.code, said.out.splitlines()[-1]) == (1, "no samples")
    assert cli("check", empty, "--engine", engine_url).out.splitlines()[-1] == "the engine was not asked: there is nothing to ask"
    assert json.loads(cli("check", empty, "--json").out)["file"]["ok"] is False


def test_a_session_named_twice_is_exported_once(cli: Cli, recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "some.jsonl"
    cli("export", out, "latest", "beta", "--store", recorded)
    assert [s.session_id for s in read_samples(out)] == ["beta"]


async def _shared_rollout(path: Path) -> None:
    async with bench(["One.", "Two.", "Three."], store=path) as b:
        for _ in range(2):
            b.handle = await b.gateway.open_session(rollout="shared")
            assert (await b.post(user("Go."))).status == 200
            await b.handle.finish(reward=1.0)


def test_sessions_that_share_a_rollout_are_exported_with_weights_that_sum_to_one(cli: Cli, tmp_path: Path) -> None:
    path, out = tmp_path / "t.db", tmp_path / "samples.jsonl"
    asyncio.run(_shared_rollout(path))
    assert cli("export", out, "--store", path).code == 0
    assert [s.weight for s in read_samples(out) if s.rollout_id == "shared"] == [0.5, 0.5]
    assert cli("check", out).code == 0


def test_show_to_a_reader_that_leaves_ends_quietly(recorded: Path) -> None:
    words = [sys.executable, "-m", "turnloom.cli.main", "show", "alpha-one", "--store", str(recorded)]
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")
