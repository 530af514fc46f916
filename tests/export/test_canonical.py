"""Canonical rows: what is written is read back equal, in JSON lines and in Parquet, and a file is whole or absent."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.export.weave import TWO_LINEAGES, weave
from turnloom.errors import ConfigError, TurnloomError
from turnloom.export import parquet
from turnloom.export.canonical import COLUMNS, from_row, read_jsonl, to_line, to_row, write_jsonl
from turnloom.export.parquet import read_parquet, write_parquet
from turnloom.export.registry import FORMATS, export, load_format
from turnloom.types import Sample, floats, ids

texts = st.text(max_size=8)
reals = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | reals | texts,
    lambda v: st.lists(v, max_size=2) | st.dictionaries(texts, v, max_size=2),
    max_leaves=4,
)
tokens = st.tuples(
    st.integers(0, 2**31 - 1),
    st.integers(0, 1),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.integers(-1, 2**31 - 1),
    st.none() | texts,
    st.booleans(),
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    drawn = draw(st.lists(tokens, max_size=6))
    columns = list(zip(*drawn, strict=True)) or [()] * 6
    mask = np.array(columns[1], dtype=np.uint8)
    known = [logprob if trains or has else np.nan for logprob, trains, has in zip(columns[2], columns[1], columns[5], strict=True)]
    return Sample(
        token_ids=ids(columns[0]),
        loss_mask=mask,
        logprobs=floats(known),
        turn_index=np.array(columns[3], dtype=np.int32),
        weight_version=tuple(columns[4]),
        prompt_len=draw(st.integers(0, 2**31 - 1)),
        temperature=draw(reals),
        session_id=draw(texts),
        rollout_id=draw(texts),
        group_id=draw(texts),
        lineage_id=draw(texts),
        label=draw(texts),
        sample_index=draw(st.integers(0, 2**62)),
        weight=draw(reals),
        reward=draw(st.none() | reals),
        outcome=draw(texts),
        finish_reason=draw(texts),
        statuses=draw(st.dictionaries(texts, st.integers(0, 9), max_size=2)),
        metadata=draw(st.dictionaries(texts, json_values, max_size=2)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(samples(), max_size=3))
def test_samples_survive_both_files_and_are_not_changed(written):
    before = copy.deepcopy(written)
    with tempfile.TemporaryDirectory() as directory:
        lines, table = Path(directory) / "a.jsonl", Path(directory) / "a.parquet"
        assert write_jsonl(written, lines) == len(written)
        assert write_parquet(written, table) == len(written)
        assert list(read_jsonl(lines)) == written
        assert list(read_parquet(table)) == written
    assert written == before


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_logprob_reads_back_as_the_same_float32_and_the_same_float64(value):
    sample = replace(weave([(None, 1, 1)])[0], logprobs=floats([np.nan, value]))
    read = json.loads(to_line(sample))["logprobs"]
    assert read == [None, float(np.float32(value))]
    assert from_row({**to_row(sample), "logprobs": read}).logprobs[1] == np.float32(value)


def test_a_row_has_exactly_the_documented_columns():
    (sample,) = weave([(None, 2, 2)], label="x")
    row = to_row(sample)
    assert set(row) == COLUMNS
    assert row["token_ids"] == [0, 1, 2, 3]
    assert row["loss_mask"] == [0, 0, 1, 1]
    assert row["logprobs"][:2] == [None, None]
    assert row["turn_index"] == [-1, -1, 0, 0]
    assert row["weight_version"] == [None, None, "v0", "v0"]
    assert row["prompt_len"] == 2


def test_changing_a_row_leaves_its_sample_alone():
    (sample,) = weave([(None, 1, 1)], nested={"a": [1]})
    before = copy.deepcopy(sample)
    row = to_row(sample)
    row["token_ids"][0] = 7
    row["statuses"]["turns"] = 7
    row["metadata"]["nested"]["a"].append(7)
    assert sample == before


def test_a_lone_surrogate_is_written_as_ascii_json(tmp_path):
    (sample,) = weave([(None, 1, 1)], note="\ud800", big=2**70)
    line = to_line(sample)
    assert line.isascii()
    assert from_row(json.loads(line)) == sample
    write_parquet([sample], tmp_path / "a.parquet")
    assert list(read_parquet(tmp_path / "a.parquet")) == [sample]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.array([0], np.uint8)}, "different lengths"),
        ({"logprobs": floats([np.nan, -np.inf])}, "trains on token 1 without a finite logprob"),
        ({"logprobs": floats([np.nan, np.nan])}, "trains on token 1 without a finite logprob"),
        ({"reward": float("nan")}, "reward nan"),
        ({"weight": float("inf")}, "weight inf"),
        ({"metadata": {"x": float("nan")}}, "JSON"),
        ({"metadata": {"x": object()}}, "JSON"),
    ],
)
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_what_no_file_could_carry_truly_is_refused_and_no_file_appears(tmp_path, write, change, message):
    (sample,) = weave([(None, 1, 1)])
    with pytest.raises(TurnloomError, match=message):
        write([sample, replace(sample, **change)], tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_failed_export_leaves_the_earlier_file(tmp_path, write):
    path = tmp_path / "out"
    path.write_text("earlier")

    def broken():
        yield weave([(None, 1, 1)])[0]
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError):
        write(broken(), path)
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_path_that_cannot_be_written_is_a_config_error(tmp_path, write):
    for path in (tmp_path / "nowhere" / "out", tmp_path):
        with pytest.raises(ConfigError, match="cannot write"):
            write(weave([(None, 1, 1)]), path)


def test_parquet_has_the_documented_schema_and_nulls(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(weave([(None, 1, 1)]), path)
    with pq.ParquetFile(path) as file:
        assert file.schema_arrow.equals(parquet.SCHEMA, check_metadata=False)
        assert file.schema_arrow.metadata[b"turnloom.format"] == b"canonical"
        row = file.read().to_pylist()[0]
    assert row["logprobs"][0] is None
    assert row["weight_version"] == [None, "v0"]
    assert json.loads(row["statuses"]) == {"turns": 1}


def test_parquet_is_written_in_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "GROUP_TOKENS", 10)
    path = tmp_path / "a.parquet"
    written = [sample for n in range(9) for sample in weave([(None, 2, 2)], f"s{n}")]
    write_parquet(iter(written), path)
    with pq.ParquetFile(path) as file:
        assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [3, 3, 3]
    assert list(read_parquet(path)) == written


def test_a_bad_row_stops_a_reader_with_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(weave(TWO_LINEAGES), path)
    with open(path, "a") as file:
        file.write('{"token_ids": [1]}\n')
    with pytest.raises(ConfigError, match="line 3 is not a canonical sample: missing finish_reason"):
        list(read_jsonl(path))
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_jsonl(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match="as Parquet"):
        list(read_parquet(path))


@pytest.mark.parametrize("name", FORMATS)
def test_every_named_format_writes(tmp_path, name):
    assert export(weave(TWO_LINEAGES), tmp_path / "out", name) == 2
    assert (tmp_path / "out").stat().st_size > 0


def count_only(samples, path):
    path.write_text("counted")
    return len(list(samples))


def test_a_format_can_be_any_importable_function(tmp_path):
    assert export(weave(TWO_LINEAGES), tmp_path / "out", "tests.export.test_canonical:count_only") == 2
    assert (tmp_path / "out").read_text() == "counted"


@pytest.mark.parametrize("name", ["csv", "json:", ":dumps", "no.such.module:x", "json:no_such", ".relative:x", "json:__name__"])
def test_a_format_that_leads_nowhere_is_a_config_error(name):
    with pytest.raises(ConfigError, match="export format"):
        load_format(name)
