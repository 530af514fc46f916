"""One sample as one canonical row, and rows as JSON lines. It decides nothing about training.

A row is a JSON object. Per token, all of one length N:

    token_ids       int, 0 to 2**31 - 1
    loss_mask       0 or 1
    logprobs        number, or null where not sampled
    turn_index      int, -1 where not sampled
    weight_version  string or null

and for the sample: `prompt_len` (the index of the first sampled token, or N),
`temperature`, `session_id`, `rollout_id`, `group_id`, `lineage_id`, `label`,
`sample_index`, `weight`, `reward` (number or null), `outcome`, `finish_reason`,
`statuses` (object of counts) and `metadata` (object).

A logprob is written as the shortest decimal of the float64 that equals the
float32 held, so reading it as either gives the very same value.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import orjson

from turnloom.errors import ConfigError, TurnloomError
from turnloom.export.files import atomic
from turnloom.types import Sample

PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "turn_index", "weight_version")
STRINGS = ("session_id", "rollout_id", "group_id", "lineage_id", "label", "outcome", "finish_reason")
NUMBERS = ("temperature", "weight")
COUNTS = ("prompt_len", "sample_index")
OBJECTS = ("statuses", "metadata")
COLUMNS = frozenset((*PER_TOKEN, *STRINGS, *NUMBERS, *COUNTS, *OBJECTS, "reward"))

INT32_MAX = 2**31 - 1


class RowError(ValueError):
    """A row that is no canonical sample: the law it breaks, and the token position where there is one."""

    def __init__(self, law: str, message: str, position: int | None = None) -> None:
        super().__init__(message)
        self.law = law
        self.position = position


# Samples to rows


def to_row(sample: Sample) -> dict[str, Any]:
    """The row as JSON values; a copy, so that changing it leaves the sample alone.

    Raises TurnloomError for a sample that no file could carry truly: columns of
    several lengths, a trained token without a finite logprob, a NaN reward.
    """
    refuse_unless_whole(sample)
    return {
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "logprobs": _nullable(sample.logprobs),
        "turn_index": sample.turn_index.tolist(),
        "weight_version": list(sample.weight_version),
        "prompt_len": sample.prompt_len,
        "temperature": sample.temperature,
        "session_id": sample.session_id,
        "rollout_id": sample.rollout_id,
        "group_id": sample.group_id,
        "lineage_id": sample.lineage_id,
        "label": sample.label,
        "sample_index": sample.sample_index,
        "weight": sample.weight,
        "reward": sample.reward,
        "outcome": sample.outcome,
        "finish_reason": sample.finish_reason,
        "statuses": dict(sample.statuses),
        "metadata": copy.deepcopy(sample.metadata),
    }


def refuse_unless_whole(sample: Sample) -> None:
    """Raises TurnloomError as `to_row` says."""
    name = f"sample {sample.sample_index} of session {sample.session_id}"
    lengths = {column: len(getattr(sample, column)) for column in PER_TOKEN}
    if len(set(lengths.values())) > 1:
        raise TurnloomError(f"{name} has columns of different lengths: {lengths}; it is not exported")
    lost = np.flatnonzero((sample.loss_mask != 0) & ~np.isfinite(sample.logprobs))
    if lost.size:
        raise TurnloomError(f"{name} trains on token {int(lost[0])} without a finite logprob; it is not exported")
    for column in ("temperature", "weight", "reward"):
        value = getattr(sample, column)
        if value is not None and not math.isfinite(value):
            raise TurnloomError(f"{name} has {column} {value}, which no file carries; it is not exported")


def _nullable(logprobs: npt.NDArray[np.float32]) -> list[float | None]:
    known = np.isfinite(logprobs)
    values: list[float | None] = logprobs.tolist()
    for position in np.flatnonzero(~known).tolist():
        values[position] = None
    return values


def to_line(sample: Sample) -> bytes:
    """The row as one line of JSON, without its newline. Raises TurnloomError as `to_row`, and for metadata that is not JSON."""
    row = to_row(sample)
    to_json(row["metadata"])  # orjson writes NaN as null; this refuses it
    try:
        return orjson.dumps(row)
    except TypeError:  # a lone surrogate or a very large integer: JSON can say it, orjson cannot
        return to_json(row).encode("ascii")


def to_json(value: Any) -> str:
    """JSON text in ASCII. Raises TurnloomError for what is not JSON, NaN included."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise TurnloomError(f"a sample's metadata cannot be written as JSON: {error}") from error


# Rows to samples


def from_row(row: Mapping[str, Any]) -> Sample:
    """The sample of a row; per-token columns may be lists or arrays. Unknown keys are ignored.

    Raises RowError for a missing column, a wrong type, a value out of range, or unequal lengths.
    """
    missing = sorted(COLUMNS - row.keys())
    if missing:
        raise RowError("columns", f"missing {', '.join(missing)}")
    lengths = {name: len(_sequence(row, name)) for name in PER_TOKEN}
    if len(set(lengths.values())) > 1:
        raise RowError("columns", "per-token columns differ in length: " + ", ".join(f"{k} {n}" for k, n in lengths.items()))
    scalars: dict[str, Any] = {name: _typed(row, name, str) for name in STRINGS}
    scalars |= {name: _number(row, name) for name in NUMBERS}
    scalars |= {name: _typed(row, name, int) for name in COUNTS}
    scalars |= {name: dict(_typed(row, name, dict)) for name in OBJECTS}
    return Sample(
        token_ids=_integers(row, "token_ids", np.dtype(np.int32), 0, INT32_MAX, "ids"),
        loss_mask=_integers(row, "loss_mask", np.dtype(np.uint8), 0, 1, "mask"),
        logprobs=_logprobs(row),
        turn_index=_integers(row, "turn_index", np.dtype(np.int32), -1, INT32_MAX, "turns"),
        weight_version=_versions(row),
        reward=None if row["reward"] is None else _number(row, "reward"),
        **scalars,
    )


def _wrong(name: str, value: object, expected: str, law: str = "columns", position: int | None = None) -> NoReturn:
    raise RowError(law, f"{name} holds {value!r:.40}, not {expected}", position)


def _sequence(row: Mapping[str, Any], name: str) -> Any:
    value = row[name]
    if not isinstance(value, list | np.ndarray):
        _wrong(name, value, "a list")
    return value


def _integers(row: Mapping[str, Any], name: str, dtype: np.dtype[Any], low: int, high: int, law: str) -> npt.NDArray[Any]:
    values = row[name]
    if isinstance(values, list):
        for position, value in enumerate(values) if set(map(type, values)) - {int} else ():
            if type(value) is not int:
                _wrong(name, value, "an integer", "columns", position)
        if values and (min(values) < low or max(values) > high):
            position = next(i for i, value in enumerate(values) if not low <= value <= high)
            _wrong(name, values[position], f"between {low} and {high}", law, position)
        array = np.array(values, dtype=dtype)
    else:
        if values.dtype.kind not in "iu":
            raise RowError("columns", f"{name} holds {values.dtype} values or nulls, not integers")
        outside = np.flatnonzero((values < low) | (values > high))
        if outside.size:
            position = int(outside[0])
            _wrong(name, int(values[position]), f"between {low} and {high}", law, position)
        array = values.astype(dtype)
    array.flags.writeable = False
    return array


def _logprobs(row: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    values = row["logprobs"]
    if isinstance(values, list):
        for position, value in enumerate(values) if set(map(type, values)) - {int, float, type(None)} else ():
            if type(value) not in (int, float, type(None)):
                _wrong("logprobs", value, "a number or null", "columns", position)
        try:
            values = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
        except OverflowError:
            position = next(i for i, value in enumerate(values) if type(value) is int and abs(value) > sys.float_info.max)
            _wrong("logprobs", values[position], "a number that a float can hold", "columns", position)
    elif values.dtype.kind != "f":
        raise RowError("columns", f"logprobs holds {values.dtype} values, not numbers")
    with np.errstate(over="ignore"):
        array: npt.NDArray[np.float32] = values.astype(np.float32)
    array.flags.writeable = False
    return array


def _versions(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    for position, value in enumerate(row["weight_version"]):
        if value is not None and type(value) is not str:
            _wrong("weight_version", value, "a string or null", "columns", position)
    return tuple(row["weight_version"])


def _typed(row: Mapping[str, Any], name: str, kind: type) -> Any:
    value = row[name]
    if type(value) is not kind:
        _wrong(name, value, {str: "a string", int: "an integer", dict: "an object"}[kind])
    return value


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row[name]
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        _wrong(name, value, "a finite number")
    return float(value)


# JSON lines


def write_jsonl(samples: Iterable[Sample], path: Path) -> int:
    """Write one row a line, atomically; returns how many. Raises ConfigError or, as `to_row`, TurnloomError."""
    count = 0
    with atomic(path) as file:
        for sample in samples:
            file.write(to_line(sample) + b"\n")
            count += 1
    return count


def read_jsonl(path: Path) -> Iterator[Sample]:
    """The samples of a file, one at a time. Raises ConfigError at the first line that is not a canonical row."""
    for number, row in read_lines(path):
        try:
            yield from_row(row if isinstance(row, dict) else _raise(row))
        except RowError as error:
            raise ConfigError(f"{path} line {number} is not a canonical sample: {error}") from error


def from_line(line: bytes) -> Sample:
    """The sample of one line. Raises RowError."""
    row = _parse_line(line)
    return from_row(row if isinstance(row, dict) else _raise(row))


def _raise(error: RowError) -> NoReturn:
    raise error


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | RowError]]:
    """Each line that is not blank, by its 1-based number: its object, or why it cannot be read."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parse_line(line)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _parse_line(line: bytes) -> dict[str, Any] | RowError:
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith(b"\n") else "; the file seems to be cut off here"
        return RowError("readable", f"not JSON: {error}{cut}")
    return row if isinstance(row, dict) else RowError("readable", "not a JSON object")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
