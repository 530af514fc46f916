"""`export --skip-label`: which labels of a store's turns train."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, one_line
from tests.support.gateways import bench, user


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of one session with a turn for the task, one beside it, and one of a label of the client's own."""
    path = tmp_path_factory.mktemp("labelled") / "turnloom.db"

    async def record() -> None:
        async with bench(lambda _, i: f"Reply {i}.", store=path, session_id="labelled") as b:
            for words, label in (("Task.", ""), ("Title?", "side"), ("Grade it.", "grader")):
                await b.post(user(words), **({"x-turnloom-label": label} if label else {}))
            await b.handle.finish()

    asyncio.run(record())
    return path


SKIPS = {
    (): {"main", "grader"},
    ("",): {"main", "side", "grader"},
    ("grader",): {"main", "side"},
    ("main", "side"): {"grader"},
    ("main", "side", "grader"): set(),
}


@pytest.mark.parametrize(("skip", "trained"), SKIPS.items())
def test_export_leaves_out_the_labels_that_it_is_told(
    skip: tuple[str, ...], trained: set[str], cli: Cli, labelled: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    said = cli("export", out, "labelled", "--store", labelled, *[word for label in skip for word in ("--skip-label", label)])
    assert said.code == 0, said.err
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert {row["label"] for row in rows} == trained
    assert sum(row["weight"] for row in rows) == pytest.approx(1 if rows else 0)
    assert ("do not train" in said.err + said.out) == (len(trained) < 3)


def test_show_names_the_label_of_a_turn_and_the_reason_it_does_not_train(cli: Cli, labelled: Path) -> None:
    said = cli("show", "labelled", "--store", labelled)
    lines = said.out.splitlines()
    assert [line for line in lines if "turn 2" in line and "grader" in line]
    assert [line for line in lines if "label side" in line]


def test_a_labeler_that_is_not_there_is_one_clear_line(cli: Cli, labelled: Path) -> None:
    line = one_line(cli("serve", "--engine", "http://127.0.0.1:1", "--labeler", "magic", "--port", "0"))
    assert "there is no labeler 'magic'" in line
