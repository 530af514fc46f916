"""Canonical rows in Parquet.

The Arrow schema, columns as in `canonical`:

    token_ids       list<int32>
    loss_mask       list<uint8>
    logprobs        list<float32>, null elements where not sampled (never NaN)
    turn_index      list<int32>
    weight_version  list<string>, null elements; dictionary-encoded in the file
    prompt_len int32; sample_index int64; temperature, weight, reward float64 (only reward may be null)
    session_id, rollout_id, group_id, lineage_id, label, outcome, finish_reason  string
    statuses, metadata  string, each the JSON text of an object

Schema metadata `turnloom.format` is "canonical", `turnloom.version` "1".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from turnloom.errors import ConfigError, TurnloomError
from turnloom.export.canonical import OBJECTS, PER_TOKEN, STRINGS, RowError, from_row, to_json, to_row
from turnloom.export.files import atomic
from turnloom.types import Sample

GROUP_TOKENS = 1 << 20
"""A row group ends at the first sample that brings it to so many tokens."""

BATCH_ROWS = 16


def _list(kind: Any, *, nullable: bool = False) -> Any:
    return pa.list_(pa.field("element", kind, nullable=nullable))


SCHEMA = pa.schema(
    [
        pa.field("token_ids", _list(pa.int32()), nullable=False),
        pa.field("loss_mask", _list(pa.uint8()), nullable=False),
        pa.field("logprobs", _list(pa.float32(), nullable=True), nullable=False),
        pa.field("turn_index", _list(pa.int32()), nullable=False),
        pa.field("weight_version", _list(pa.string(), nullable=True), nullable=False),
        pa.field("prompt_len", pa.int32(), nullable=False),
        pa.field("sample_index", pa.int64(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("reward", pa.float64(), nullable=True),
        *(pa.field(name, pa.string(), nullable=False) for name in (*STRINGS, *OBJECTS)),
    ],
    metadata={"turnloom.format": "canonical", "turnloom.version": "1"},
)


def write_parquet(samples: Iterable[Sample], path: Path) -> int:
    """Write rows atomically, a row group at a time; returns how many. Raises ConfigError or, as `to_row`, TurnloomError."""
    count = 0
    with atomic(path) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for group in _groups(samples):
            rows = [{**row, **{name: to_json(row[name]) for name in OBJECTS}} for row in map(to_row, group)]
            try:
                writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
            except (pa.ArrowException, ValueError, OverflowError) as error:
                raise TurnloomError(f"samples cannot be written to {path}: {error}") from error
            count += len(group)
    return count


def _groups(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        group.append(sample)
        tokens += len(sample.token_ids)
        if tokens >= GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def read_parquet(path: Path) -> Iterator[Sample]:
    """The samples of a file, streamed. Raises ConfigError where it is not Parquet, or at the first row that is not canonical."""
    for number, row in read_rows(path):
        try:
            yield from_row(row)
        except RowError as error:
            raise ConfigError(f"{path} row {number} is not a canonical sample: {error}") from error


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row by its 1-based number, per-token columns as arrays. Raises ConfigError for a file that is not whole Parquet."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for row in _rows(batch):
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"cannot read {path} as Parquet after row {number}: {str(error).splitlines()[0]}; is it whole?") from error


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    columns = {name: _column(name, batch.column(name)) for name in batch.schema.names}
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _column(name: str, column: Any) -> list[Any]:
    """The column's values by row: arrays for numbers per token, objects for JSON text, else Python values."""
    if name in OBJECTS:
        return [_object(text) for text in column.to_pylist()]
    if name not in PER_TOKEN or not pa.types.is_list(column.type):
        return column.to_pylist()  # type: ignore[no-any-return]
    flat = column.flatten()
    values = _strings(flat) if name == "weight_version" else flat.to_numpy(zero_copy_only=False)
    rows, start = [], 0
    for length in column.value_lengths().to_pylist():
        rows.append(None if length is None else values[start : start + length])
        start += length or 0
    return rows


def _strings(flat: Any) -> list[Any]:
    """As to_pylist, but a string that repeats is made once."""
    encoded = flat if pa.types.is_dictionary(flat.type) else flat.dictionary_encode()
    names = np.array([*encoded.dictionary.to_pylist(), None], dtype=object)
    taken: list[Any] = names[encoded.indices.fill_null(len(names) - 1).to_numpy(zero_copy_only=False)].tolist()
    return taken


def _object(text: object) -> object:
    """The object that `text` spells; anything else as it is, for `from_row` to refuse."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text
