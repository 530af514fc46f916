"""`turnloom forks` on stores that real gateways wrote, and the settings that decide where sequences go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, one_line
from tests.support.gateways import Bench, bench, follow, user
from turnloom.export.check import read_samples
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Message

THINKING = "<think>\nLet me see.\n</think>\n\nFirst."


async def two_turns(b: Bench, **change: Any) -> None:
    """A reply, then the next request with something of the reply changed."""
    asked = user("Begin.")
    first = await b.post(asked)
    body = follow(asked, first.body, "Go on.")
    for key, value in change.items():
        body["messages"][1][key] = value
    assert (await b.post(body)).status == 200
    await b.handle.finish()


def record(path: Path, *script: str, change: dict[str, Any] | None = None, kind: str = "qwen2.5", **options: Any) -> None:
    async def run() -> None:
        async with bench(script, store=path, tokenizer=qwen_tokenizer(kind), session_id="one", **options) as b:
            await two_turns(b, **(change or {}))

    asyncio.run(run())


def test_forks_names_reasons_tokens_and_both_sides(cli: Cli, recorded: Path) -> None:
    said = cli("forks", "--store", recorded)
    assert (said.code, said.err) == (0, "")
    lines = said.out.splitlines()
    assert lines[0] == "3 sessions, 6 turns, 2 forks"
    assert any(line.startswith("history_changed: 1 forks, ") for line in lines)
    example = lines.index(next(line for line in lines if line.startswith("  session alpha-two, turn 1, message 1: ")))
    assert "recorded 'Third answer." in lines[example + 1]
    assert "came 'Never said." in lines[example + 1]


def test_forks_of_one_session_as_json(cli: Cli, recorded: Path) -> None:
    found = json.loads(cli("forks", "alpha-t", "--store", recorded, "--json", "--examples", "1").out)
    assert (found["sessions"], found["turns"]) == (1, 3)
    assert set(found["reasons"]) == {"history_changed", "new_conversation"}
    changed = found["reasons"]["history_changed"]
    assert changed["count"] == 1
    assert changed["tokens"] > 0
    (example,) = changed["examples"]
    assert (example["session"], example["turn"], example["message"], example["joined_by"]) == ("alpha-two", 1, 1, "")
    assert example["token"] > 0
    nothing = json.loads(cli("forks", "alpha-one", "--store", recorded, "--json").out)
    assert nothing["reasons"] == {}


def test_a_run_is_named_by_its_folder_or_its_store(cli: Cli, recorded: Path) -> None:
    whole = cli("forks", "--store", recorded).out
    assert cli("forks", recorded.parent).out == whole
    assert cli("forks", recorded).out == whole


def test_a_store_that_is_not_there_is_one_line(cli: Cli, tmp_path: Path) -> None:
    assert "there is no store" in one_line(cli("forks", "--store", tmp_path / "no.db"))


def test_what_a_reply_says_is_shown_escaped(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    record(path, "\x1b[2JFirst.", "Second.", change={"content": "\x1b[2JOther."})
    said = cli("forks", "--store", path)
    assert "\x1b" not in said.out
    assert "history_changed: 1 forks" in said.out


def test_history_template_forks_where_a_template_drops_reasoning(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    record(path, THINKING, "Second.", kind="qwen3", history="template")
    lines = cli("forks", "--store", path).out.splitlines()
    assert any(line.startswith("rerendered: 1 forks, ") for line in lines)
    assert "    would have gone on with --history sampled" in lines
    assert any("recorded '<think>\\nLet me see." in line for line in lines)


def test_history_sampled_goes_on_there(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    record(path, THINKING, "Second.", kind="qwen3")
    assert cli("forks", "--store", path).out.splitlines() == ["1 sessions, 2 turns, 0 forks"]


def test_realign_goes_on_without_what_differs(cli: Cli, tmp_path: Path) -> None:
    path, out = tmp_path / "t.db", tmp_path / "s.jsonl"
    record(path, THINKING, "Second.", kind="qwen3", history="template", realign=50)
    assert "realigned: 1 forks, " in cli("forks", "--store", path).out
    assert cli("export", out, "--store", path).code == 0
    (sample,) = read_samples(out)
    decoded = qwen_tokenizer("qwen3").decode(sample.token_ids.tolist())
    assert "Let me see." not in decoded
    assert decoded.count("First.") == 1
    assert "replaced by realignment" in cli("show", "one", "--store", path).out
    assert cli("check", out).code == 0


def test_strict_matching_says_what_canonical_would_have_joined(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    record(path, "First. ", "Second.", change={"content": "First."}, matching="strict")
    out = cli("forks", "--store", path).out
    assert "history_changed: 1 forks" in out
    assert "    would have gone on with --matching canonical" in out


def only_roles(message: Message) -> bytes:
    """A matcher of one's own: whatever a message says, it is the one."""
    return message.role.encode()


def test_a_matcher_by_import_path(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    record(path, "First.", "Second.", change={"content": "Other."}, matching=f"{__name__}:only_roles")
    assert cli("forks", "--store", path).out.splitlines() == ["1 sessions, 2 turns, 0 forks"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--matching", "loose"], "there is no matcher 'loose'"),
        (["--matching", "nowhere.here:key"], "the matcher 'nowhere.here:key' cannot be imported"),
        (["--matching", "turnloom.types:NO_IDS"], "neither a Matcher nor a function"),
        (["--realign", "3"], "only for the history policy `template`"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(cli: Cli, tmp_path: Path, words: list[str], why: str) -> None:
    assert why in one_line(cli("serve", "--engine", "http://127.0.0.1:1", "--store", tmp_path / "t.db", *words))
    assert why in one_line(cli("run", "demo", "--engine", "http://127.0.0.1:1", "--out", tmp_path / "run", *words))


def test_export_keeps_to_a_maximum_length(cli: Cli, recorded: Path, tmp_path: Path) -> None:
    def lengths(*words: object) -> list[int]:
        out = tmp_path / "s.jsonl"
        assert cli("export", out, "alpha-one", "--store", recorded, *words).code == 0
        return [len(s.token_ids) for s in read_samples(out)]

    (whole,) = lengths()
    assert lengths("--max-tokens", whole) == [whole]
    assert lengths("--max-tokens", whole - 1) == [whole - 1]
    (first,) = lengths("--max-tokens", whole - 1, "--overlong", "turn")
    assert first < whole - 1
    assert lengths("--max-tokens", whole - 1, "--overlong", "drop") == []


def test_a_name_that_no_file_can_have_is_answered_in_one_line(cli: Cli, recorded: Path) -> None:
    assert len(one_line(cli("forks", "x" * 5000, "--store", recorded))) < 200


def test_a_folder_that_is_not_there_is_no_session(cli: Cli, recorded: Path) -> None:
    assert "there is no run at runs/nowhere" in one_line(cli("forks", "runs/nowhere", "--store", recorded))
