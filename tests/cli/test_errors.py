"""What cannot be done is one line on standard error that says what to do, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli, one_line
from turnloom.cli import demo
from turnloom.store.lock import held

NOWHERE = "http://127.0.0.1:9"
"""The discard port, on which nothing listens."""


def test_a_missing_store(cli: Cli, tmp_path: Path) -> None:
    missing = tmp_path / "none.db"
    for words in (("show", "latest"), ("export", tmp_path / "x.jsonl")):
        assert one_line(cli(*words, "--store", missing)) == f"there is no store at {missing}; name it with --store FILE"
    assert not missing.exists()


def test_a_folder_is_no_store(cli: Cli, tmp_path: Path) -> None:
    assert "there is no store at" in one_line(cli("show", "latest", "--store", tmp_path))


def test_a_file_that_is_no_store(cli: Cli, tmp_path: Path) -> None:
    other = tmp_path / "notes.db"
    other.write_text("my notes", "utf-8")
    assert "it is not a Turnloom store" in one_line(cli("show", "latest", "--store", other))
    assert other.read_text("utf-8") == "my notes"


def test_an_unknown_session_names_the_known_ones(cli: Cli, recorded: Path) -> None:
    said = one_line(cli("show", "gamma", "--store", recorded))
    assert said == "no sessions start with 'gamma'; the newest are: beta, alpha-two, alpha-one"


def test_an_ambiguous_prefix_names_those_that_match(cli: Cli, recorded: Path) -> None:
    said = one_line(cli("show", "alpha", "--store", recorded))
    assert said == "2 sessions start with 'alpha'; say more of the id: alpha-two, alpha-one"


def test_an_ending_that_names_no_format(cli: Cli, recorded: Path, tmp_path: Path) -> None:
    said = one_line(cli("export", tmp_path / "samples.csv", "--store", recorded))
    assert said.endswith("ends in neither .jsonl nor .parquet; name a format with --format")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format(cli: Cli, recorded: Path, tmp_path: Path) -> None:
    assert "no export format 'csv'; use one of" in one_line(cli("export", tmp_path / "x", "--format", "csv", "--store", recorded))


def test_a_folder_that_is_not_there(cli: Cli, recorded: Path, tmp_path: Path) -> None:
    assert "none" in one_line(cli("export", tmp_path / "none" / "x.jsonl", "--store", recorded))


def test_a_missing_file_of_samples(cli: Cli, tmp_path: Path) -> None:
    assert one_line(cli("check", tmp_path / "x.jsonl")).startswith("cannot read ")


@pytest.mark.parametrize("url", ["ftp://host", "host:30000", "http://"])
def test_a_url_that_names_no_engine(cli: Cli, url: str) -> None:
    assert "names no engine; give sglang://HOST:PORT" in one_line(cli("serve", "--engine", url))


def test_an_engine_that_does_not_answer(cli: Cli, tmp_path: Path) -> None:
    store = tmp_path / "t.db"
    said = one_line(cli("serve", "--engine", NOWHERE, "--store", store))
    assert said.startswith(NOWHERE)
    assert said.endswith("start the engine, or correct --engine")
    assert not store.exists()


def test_an_unknown_agent(cli: Cli, tmp_path: Path) -> None:
    for words in (("demo", "--agent", "nobody"), ("run", "demo", "--agent", "nobody")):
        said = one_line(cli(*words, "--out", tmp_path / "out"))
        assert said.startswith("there is no agent 'nobody': use one of sdk-agent, claude-code, pi, ")
    assert not (tmp_path / "out").exists()


def test_the_command_agent_without_its_command(cli: Cli, tmp_path: Path) -> None:
    assert "needs its command as a list of words" in one_line(cli("run", "demo", "--agent", "command", "--out", tmp_path / "out"))


def test_a_task_that_is_not_there(cli: Cli, tmp_path: Path) -> None:
    assert one_line(cli("run", tmp_path)) == f"there is no task.toml or task.json in {tmp_path}"


@pytest.mark.parametrize("words", [("run", "demo"), ("demo",)])
@pytest.mark.parametrize("below", ["file", "file/deeper", "x" * 300])
def test_an_out_that_cannot_be_a_folder(cli: Cli, tmp_path: Path, words: tuple[str, ...], below: str) -> None:
    (tmp_path / "file").touch()
    assert one_line(cli(*words, "--out", tmp_path / below)).endswith("; choose another --out")


@pytest.mark.parametrize("words", [("run", "demo"), ("demo",)])
def test_an_out_where_nothing_can_be_made(cli: Cli, words: tuple[str, ...]) -> None:
    assert "/proc/turnloom" in one_line(cli(*words, "--out", "/proc/turnloom"))


def test_an_agent_without_its_node_is_said_before_anything_starts(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "out"
    for words in (("demo",), ("run", "demo")):
        assert "claude-code needs Node.js" in one_line(cli(*words, "--agent", "claude-code", "--out", out))
    assert not out.exists()


def test_a_second_demo_leaves_a_running_one_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / demo.MARK).touch()
    kept = {name: name.encode() for name in demo.FILES}
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    with held(tmp_path / "turnloom.db"):
        assert "is being written by process" in one_line(cli("demo", "--out", tmp_path))
    assert {name: (tmp_path / name).read_bytes() for name in demo.FILES} == kept


def test_a_new_demo_takes_the_place_of_one_that_ended(tmp_path: Path) -> None:
    (tmp_path / demo.MARK).touch()
    for name in (*demo.FILES, "mine.txt"):
        (tmp_path / name).touch()
    assert demo._fresh_store(tmp_path) == tmp_path / "turnloom.db"
    assert {p.name for p in tmp_path.iterdir()} == {demo.MARK, "mine.txt", "turnloom.db.lock"}


@pytest.mark.parametrize("words", [("run", "demo"), ("demo",)])
def test_a_run_never_writes_over_an_earlier_one(cli: Cli, recorded: Path, words: tuple[str, ...]) -> None:
    before = recorded.read_bytes()
    assert "choose another --out, or remove it" in one_line(cli(*words, "--out", recorded.parent))
    assert recorded.read_bytes() == before


def test_a_port_that_is_taken(cli: Cli, engine_url: str, tmp_path: Path) -> None:
    port = engine_url.rpartition(":")[2]
    said = one_line(cli("serve", "--engine", engine_url, "--port", port, "--store", tmp_path / "t.db"))
    assert said.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert said.endswith("choose another --port")


def test_a_store_that_another_gateway_writes(cli: Cli, recorded: Path, engine_url: str, tmp_path: Path) -> None:
    from turnloom.store.sqlite import SQLiteStore

    path = tmp_path / "t.db"
    held = SQLiteStore(path)
    import asyncio

    with asyncio.Runner() as runner:
        runner.run(held.open())
        try:
            assert "is being written by process" in one_line(cli("serve", "--engine", engine_url, "--port", "0", "--store", path))
        finally:
            runner.run(held.close())


def test_a_host_that_others_reach_needs_an_admin_key_of_its_own(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNLOOM_ADMIN_KEY", raising=False)
    said = one_line(cli("serve", "--engine", NOWHERE, "--host", "0.0.0.0"))
    assert said == "serving on 0.0.0.0 needs an admin key of your own: set --admin-key or TURNLOOM_ADMIN_KEY"
    assert "start the engine" in one_line(cli("serve", "--engine", NOWHERE, "--host", "0.0.0.0", "--admin-key", "mine"))
    monkeypatch.setenv("TURNLOOM_ADMIN_KEY", "mine")
    assert "start the engine" in one_line(cli("serve", "--engine", NOWHERE, "--host", "0.0.0.0"))


def test_an_unknown_tokenizer_and_an_unknown_tool_format(cli: Cli, engine_url: str, tmp_path: Path) -> None:
    words = ("serve", "--engine", engine_url, "--port", "0", "--store", tmp_path / "t.db")
    assert one_line(cli(*words, "--tokenizer", tmp_path / "none")) == f"there is no tokenizer at {tmp_path / 'none'}"
    assert "no output format is called 'toml': use auto" in one_line(cli(*words, "--tool-format", "toml"))
    assert "the output format '..x:y' cannot be imported" in one_line(cli(*words, "--tool-format", "..x:y"))


def test_a_model_file_that_is_not_there(cli: Cli) -> None:
    assert one_line(cli("engine", "none.gguf")) == "there is no model file none.gguf; give a .gguf file or one of: smollm2"


@pytest.mark.parametrize(
    "words",
    [
        ("frob",),
        ("show",),
        ("demo", "-n", "0"),
        ("serve",),
        ("serve", "--engine", NOWHERE, "--port", "65536"),
        ("serve", "--engine", NOWHERE, "--temperature", "-1"),
        ("serve", "--engine", NOWHERE, "--top-p", "1.5"),
        ("engine", "--port", "99999"),
        ("engine", "--parallel", "0"),
    ],
)
def test_a_wrong_command_line_says_how_it_is_used(cli: Cli, words: tuple[str, ...]) -> None:
    said = cli(*words)
    assert (said.code, said.out) == (2, "")
    assert "Usage: turnloom" in said.err
    assert "Traceback" not in said.err
