"""Files, paths and formats that someone else wrote: what is wrong with them is a printable line, and nothing of theirs is replaced."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.export.weave import TWO_LINEAGES, weave
from turnloom.errors import ConfigError
from turnloom.export.canonical import to_row, write_jsonl
from turnloom.export.check import check_file
from turnloom.export.registry import export
from turnloom.export.report import format_report
from turnloom.types import Sample

ROW = to_row(weave([(None, 1, 1)])[0])
BEYOND = 10**400
VALUES = [
    *(BEYOND, -BEYOND, 1e308, -1e308, 2**63, 2**31, -1, 1.5, None, True, "x", "\ud800", "a\nb"),
    *([], {}, [1], [None], [[1], [2]], [1.5, "a"], [BEYOND, 1], ["\ud800", None], {"a": 1}, {"lineage_rewards": 1, "\ud800": BEYOND}),
]


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.parametrize(
    "change", [{"reward": BEYOND}, {"temperature": -BEYOND}, {"weight": BEYOND}], ids=lambda change: next(iter(change))
)
def test_a_number_beyond_float_is_a_finding(tmp_path: Path, change: dict[str, object]) -> None:
    report = check_file(written(tmp_path / "a", ROW | change))
    assert report.violations["columns"] == 1
    assert "not a finite number" in report.findings[0].message


def test_a_logprob_beyond_float_is_a_finding_at_its_token(tmp_path: Path) -> None:
    at = next(i for i, value in enumerate(ROW["logprobs"]) if value is not None)
    logprobs = [-BEYOND if i == at else value for i, value in enumerate(ROW["logprobs"])]
    (finding,) = check_file(written(tmp_path / "a", ROW | {"logprobs": logprobs})).findings
    assert (finding.law, finding.position) == ("columns", at)


def test_weights_whose_sum_is_beyond_float_are_a_finding(tmp_path: Path) -> None:
    rows = [ROW | {"weight": 1e308, "session_id": name, "rollout_id": "r"} for name in "ab"]
    assert check_file(written(tmp_path / "a", *rows)).violations["weights"] == 1


@pytest.mark.parametrize("column", ROW)
def test_whatever_a_column_holds_the_report_is_lines_that_can_be_printed(tmp_path: Path, column: str) -> None:
    for value in VALUES:
        report = check_file(written(tmp_path / "a", ROW | {column: value}, ROW | {column: value, "sample_index": 1}))
        lines = format_report(report)
        assert all(line.isprintable() for line in lines)
        assert "\n".join(lines).encode()
        assert json.loads(json.dumps(report.to_dict()))["rows"] == 2


@pytest.mark.parametrize("name", ["a\nevery law holds", "\x1b[31m", "\x1b]0;title\x07", "\ud800", "\u202e"])
def test_a_name_in_a_file_never_moves_the_cursor_or_adds_a_line(tmp_path: Path, name: str) -> None:
    lines = format_report(
        check_file(written(tmp_path / "a", ROW | {"session_id": name, "rollout_id": name, "prompt_len": 0, "weight": 2.0}))
    )
    assert all(line.isprintable() for line in lines)
    assert "every law holds" not in lines


def test_a_file_without_samples_is_not_ok(tmp_path: Path) -> None:
    report = check_file(written(tmp_path / "a"))
    assert not report.ok
    assert format_report(report)[-1] == "no samples"


# Writing


def test_a_device_or_a_pipe_is_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path, Path("/"), Path(".")):
        with pytest.raises(ConfigError, match=r"cannot write .*it is not a file"):
            write_jsonl([], place)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "a.jsonl"
    link.symlink_to(tmp_path / "real" / "b.jsonl")
    assert write_jsonl(weave(TWO_LINEAGES), link) == 2
    assert link.is_symlink()
    assert check_file(tmp_path / "real" / "b.jsonl").ok
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["b.jsonl"]


@pytest.mark.parametrize("below", ["file/a.jsonl", "x" * 300])
def test_a_path_that_no_file_can_have_is_one_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^cannot write "):
        write_jsonl([], tmp_path / below)


# Formats that someone else wrote


def of_three(samples: Iterable[Sample], path: Path, more: object) -> int:
    return 0


def failing(samples: Iterable[Sample], path: Path) -> int:
    raise RuntimeError("first line\nsecond line")


@pytest.mark.parametrize(
    ("name", "message"), [("of_three", "failed: TypeError: .*'more'"), ("failing", "failed: RuntimeError: first line second line")]
)
def test_what_a_format_raises_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        export([], tmp_path / "a", f"{__name__}:{name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", ["raise RuntimeError('at import')", "def broken(:", "import sys; sys.exit('no')", "raise KeyError('k')"])
def test_a_module_that_fails_while_it_is_imported_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (tmp_path / "theirs_that_fails.py").write_text(body, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="export format 'theirs_that_fails:write' cannot be imported: ") as caught:
        export([], tmp_path / "a", "theirs_that_fails:write")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["..x:y", ".:y", "json:no.such"])
def test_a_path_that_is_no_import_path_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        export([], tmp_path / "a", name)
