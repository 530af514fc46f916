"""The checker: valid samples pass, and each corruption is named by the law it breaks."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.export.weave import TWO_LINEAGES, specs, weave
from turnloom.errors import ConfigError
from turnloom.export.canonical import to_row, write_jsonl
from turnloom.export.check import check_file, check_samples, read_samples
from turnloom.export.parquet import write_parquet
from turnloom.export.report import LAWS, SHOWN, Report, format_report

Rows = list[dict[str, Any]]


def check_rows(rows: Rows) -> Report:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return check_file(path)


def broken(report: Report) -> set[str]:
    return {law for law, count in report.violations.items() if count}


def put(row: int, column: str, position: int, value: Any) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[row][column][position] = value

    return change


def set_to(row: int, column: str, value: Any) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[row][column] = value

    return change


def shift_mask(rows: Rows) -> None:
    rows[0]["loss_mask"] = [0, *rows[0]["loss_mask"][:-1]]


def swap_turns(rows: Rows) -> None:
    rows[0]["turn_index"] = [{1: 2, 2: 1}.get(turn, turn) for turn in rows[0]["turn_index"]]


def shorten_shared_turn(rows: Rows) -> None:
    """Row 2 lost the second token of the shared turn."""
    for column in ("token_ids", "loss_mask", "logprobs", "turn_index", "weight_version"):
        del rows[1][column][4]


CORRUPTIONS = {
    "shifted mask": (shift_mask, "only_sampled", 1, 5),
    "trained prompt token": (put(0, "loss_mask", 0, 1), "only_sampled", 1, 0),
    "dropped logprob": (put(0, "logprobs", 8, None), "only_sampled", 1, 8),
    "dropped logprob in context": (put(1, "logprobs", 3, None), "logprobs", 2, 3),
    "invented logprob": (put(0, "logprobs", 6, 0.0), "logprobs", 1, 6),
    "positive logprob": (put(0, "logprobs", 12, 0.01), "logprobs", 1, 12),
    "another logprob in a shared turn": (put(1, "logprobs", 4, -0.9), "logprobs", 2, 4),
    "wrong id in the shared prompt": (put(1, "token_ids", 1, 77), "prefix", 2, 1),
    "wrong id in the shared turn": (put(1, "token_ids", 4, 77), "prefix", 2, 4),
    "shorter shared turn": (shorten_shared_turn, "prefix", 2, 4),
    "trained twice": (put(1, "loss_mask", 4, 1), "once", 2, 4),
    "broken turn": (put(0, "turn_index", 8, 5), "turns", 1, 9),
    "turns out of order": (swap_turns, "turns", 1, 11),
    "turn index below -1": (put(0, "turn_index", 0, -2), "turns", 1, 0),
    "prompt_len off": (set_to(0, "prompt_len", 4), "prompt_len", 1, 3),
    "negative id": (put(0, "token_ids", 2, -1), "ids", 1, 2),
    "huge id": (put(0, "token_ids", 2, 2**31), "ids", 1, 2),
    "fractional id": (put(0, "token_ids", 2, 1.5), "columns", 1, 2),
    "boolean mask": (put(0, "loss_mask", 4, True), "columns", 1, 4),
    "mask of 2": (put(0, "loss_mask", 4, 2), "mask", 1, 4),
    "short column": (set_to(0, "loss_mask", [0, 1]), "columns", 1, None),
    "column of text": (put(0, "logprobs", 4, "-0.5"), "columns", 1, 4),
    "column that is no list": (set_to(0, "logprobs", None), "columns", 1, None),
    "missing column": (lambda rows: rows[0].pop("turn_index"), "columns", 1, None),
    "number as session": (set_to(0, "session_id", 4), "columns", 1, None),
    "unequal weights": (set_to(0, "weight", 0.75), "weights", 1, None),
    "negative weight": (lambda rows: (set_to(0, "weight", -1.0)(rows), set_to(1, "weight", 2.0)(rows)), "weights", 1, None),
    "lost row": (lambda rows: rows.pop(0), "weights", 1, None),
    "another reward": (set_to(1, "reward", 0.0), "rewards", 2, None),
    "no reward": (set_to(1, "reward", None), "rewards", 2, None),
    "sample index twice": (set_to(1, "sample_index", 0), "sample_index", 2, None),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_named_by_its_law_alone(name):
    change, law, row, position = CORRUPTIONS[name]
    rows = [to_row(sample) for sample in weave(TWO_LINEAGES)]
    assert check_rows(rows).ok
    change(rows)
    report = check_rows(rows)
    assert broken(report) == {law}
    assert [(f.row, f.position) for f in report.findings] == [(row, position)]
    assert not report.ok


def test_every_law_but_readable_has_a_corruption():
    assert {law for _, law, _, _ in CORRUPTIONS.values()} == set(LAWS) - {"readable"}


def test_the_figures_count_what_there_is():
    report = check_samples(weave(TWO_LINEAGES) + weave([(None, 2, 5)], "s2"))
    figures = (report.rows, report.samples, report.tokens, report.sampled, report.trained, report.sessions, report.rollouts)
    assert figures == (3, 3, 13 + 11 + 7, 7 + 4 + 5, 9 + 5, 2, 2)
    assert report.ok


@settings(max_examples=60, deadline=None)
@given(st.lists(specs(), max_size=3))
def test_valid_samples_pass_in_memory_and_in_both_files(sessions):
    samples = [sample for n, session in enumerate(sessions) for sample in weave(session, f"s{n}")]
    before = copy.deepcopy(samples)
    with tempfile.TemporaryDirectory() as directory:
        write_jsonl(samples, Path(directory) / "a")
        write_parquet(samples, Path(directory) / "b")
        reports = [check_samples(samples), check_file(Path(directory) / "a"), check_file(Path(directory) / "b")]
        assert list(read_samples(Path(directory) / "a")) == list(read_samples(Path(directory) / "b")) == samples
    for report in reports:
        assert report.ok is bool(samples), format_report(report)
        assert report.samples == len(samples)
    assert samples == before


@settings(max_examples=150, deadline=None)
@given(specs(), st.data())
def test_any_single_corruption_is_caught(session, data):
    rows = [to_row(sample) for sample in weave(session)]
    row = data.draw(st.sampled_from(rows))
    sampled = [at for at, turn in enumerate(row["turn_index"]) if turn >= 0]
    given_ = [at for at, turn in enumerate(row["turn_index"]) if turn < 0]
    trained = [at for at in sampled if row["loss_mask"][at]]
    copied = [at for at in sampled if not row["loss_mask"][at]]
    choices = [
        ("logprobs", trained, None),
        ("logprobs", sampled, 0.5),
        ("logprobs", given_, -0.5),
        ("loss_mask", given_, 1),
        ("loss_mask", copied, 1),
        ("logprobs", copied, -7.0),
        ("token_ids", range(copied[-1] + 1) if copied else (), 999),
        ("turn_index", trained, -1),
        ("turn_index", given_[-1:] if len(given_) < len(row["turn_index"]) else (), 7),
        ("token_ids", sampled, -5),
    ]
    column, positions, value = data.draw(st.sampled_from([choice for choice in choices if len(choice[1])]))
    row[column][data.draw(st.sampled_from(list(positions)))] = value
    assert not check_rows(rows).ok


def test_context_without_any_logprobs_is_allowed():
    """A turn whose logprobs are missing does not train, and what follows it may."""
    rows = [to_row(sample) for sample in weave([(None, 2, 2), (0, 1, 2)])]
    for at in (2, 3):
        rows[0]["logprobs"][at], rows[0]["loss_mask"][at] = None, 0
    assert check_rows(rows).ok


def test_rewards_may_differ_between_lineages_where_they_are_per_lineage():
    rows = [to_row(sample) for sample in weave(TWO_LINEAGES, lineage_rewards=True)]
    rows[1]["reward"] = 0.0
    assert check_rows(rows).ok
    rows[1]["lineage_id"] = rows[0]["lineage_id"]
    assert broken(check_rows(rows)) == {"rewards"}


def test_a_rollout_without_an_id_is_its_session():
    rows = [{**to_row(s), "rollout_id": ""} for s in weave(TWO_LINEAGES) + weave(TWO_LINEAGES, "s2", reward=0.0)]
    assert check_rows(rows).ok


def test_a_logprob_just_above_zero_is_rounding():
    (sample,) = weave([(None, 1, 1)])
    for value, ok in [(1e-6, True), (1e-4, False)]:
        logprobs = np.array([np.nan, value], dtype=np.float32)
        assert check_samples([replace(sample, logprobs=logprobs)]).ok is ok


def test_samples_in_memory_are_checked_for_their_columns_too():
    (sample,) = weave([(None, 1, 2)])
    for change, law in [
        ({"loss_mask": sample.loss_mask[:2]}, "columns"),
        ({"loss_mask": sample.loss_mask * 3}, "mask"),
        ({"token_ids": sample.token_ids - 2}, "ids"),
        ({"logprobs": sample.token_ids}, "columns"),
    ]:
        assert broken(check_samples([replace(sample, **change)])) == {law}


def test_a_file_cut_off_in_a_line_is_a_finding(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(weave(TWO_LINEAGES), path)
    path.write_bytes(path.read_bytes()[:-40])
    report = check_file(path)
    assert broken(report) == {"readable"}
    assert report.findings[0].row == 2
    assert "cut off" in report.findings[0].message
    assert report.unjudged == {"weights": "rows are damaged"}
    assert report.samples == 1


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"\xff\xfe\n", b"NaN\n", b'{"a": NaN}\n', b"[" * 100_000 + b"\n"])
def test_a_line_that_is_no_row_is_a_finding(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line)
    assert broken(check_file(path)) <= {"readable", "columns"}
    assert not check_file(path).ok
    with pytest.raises(ConfigError, match="row 1 is not a canonical sample"):
        list(read_samples(path))


def test_parquet_with_other_columns_is_a_finding(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [to_row(sample) for sample in weave([(None, 1, 1)])]
    path = tmp_path / "a.parquet"
    wrong = [
        {"prompt": ["hello"]},
        {name: [row[name] for row in rows] for name in rows[0] if name not in ("metadata", "statuses", "logprobs")},
        {**{name: [row[name] for row in rows] for name in rows[0]}, "statuses": ["{"], "metadata": ["{}"]},
        {**{name: [row[name] for row in rows] for name in rows[0]}, "token_ids": [[1, None]], "statuses": ["{}"], "metadata": ["{}"]},
        {**{name: [row[name] for row in rows] for name in rows[0]}, "token_ids": [None], "statuses": ["{}"], "metadata": ["{}"]},
    ]
    for columns in wrong:
        pq.write_table(pa.table(columns), path)
        assert broken(check_file(path)) == {"columns"}


@pytest.mark.parametrize("size", [4, 100, -30])
def test_damaged_parquet_is_one_clear_line(tmp_path, size):
    path = tmp_path / "a.parquet"
    write_parquet(weave(TWO_LINEAGES), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match="is it whole") as caught:
        check_file(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_a_config_error(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            check_file(path)


def test_many_findings_are_counted_and_some_are_shown():
    (sample,) = weave([(None, 1, 1)])
    report = check_samples([replace(sample, session_id=f"s{n}", rollout_id="", prompt_len=0) for n in range(SHOWN + 5)])
    assert report.violations["prompt_len"] == SHOWN + 5
    assert len(report.findings) == SHOWN
    lines = format_report(report)
    assert "  and 5 more" in lines
    assert lines[-1] == f"{SHOWN + 5} violations"


def test_a_report_is_readable_and_is_json():
    rows = [to_row(sample) for sample in weave(TWO_LINEAGES)]
    rows[1]["token_ids"][1] = 77
    report = check_rows(rows)
    lines = format_report(report)
    assert "2 samples, 24 tokens, 11 sampled, 9 trained, 1 sessions, 1 rollouts" in lines[0]
    assert "  prefix: row 2, session s1, token 1: shares turn 0 with row 1 but differs from it before that turn's end" in lines
    assert any(line.split()[:3] == ["1", "WRONG", "prefix"] for line in lines)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["ok"] is False
    assert found["violations"]["prefix"] == 1
    assert found["findings"][0]["position"] == 1
    assert format_report(check_samples(weave(TWO_LINEAGES)))[-1] == "every law holds"
