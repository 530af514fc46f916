"""Checks that a file of samples keeps every law it can prove, and that an engine agrees with its logprobs.

It reads only, and it names what is wrong; it repairs nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from turnloom.engine.contract import Engine
from turnloom.errors import ConfigError, EngineProtocol, EngineRejected, PromptTooLong
from turnloom.export import laws
from turnloom.export.canonical import RowError, from_row, read_lines
from turnloom.export.parquet import read_rows
from turnloom.export.report import EngineReport, Finding, Report, SampleDifference
from turnloom.types import FloatArray, Sample

TOLERANCE = 1e-3
"""Nats. A float32 engine recomputes within 1e-4; quantised engines, and those whose batch shapes change the arithmetic, differ more."""

Rows = Iterable[tuple[int, Sample | RowError]]


def check_file(path: str | os.PathLike[str]) -> Report:
    """Check a canonical file, JSON lines or Parquet by its first bytes. A bad row is a finding.

    Raises ConfigError for a file that cannot be read at all.
    """
    report = _check(_rows(Path(path)))
    report.source = str(path)
    return report


def check_samples(samples: Iterable[Sample]) -> Report:
    """Check samples in memory; their rows count from 1."""
    return _check(enumerate(samples, 1))


def read_samples(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """The samples of a file, JSON lines or Parquet by its first bytes. Raises ConfigError at the first bad row."""
    for number, row in _rows(Path(path)):
        if isinstance(row, RowError):
            raise ConfigError(f"{path} row {number} is not a canonical sample: {row}")
        yield row


def _rows(path: Path) -> Iterator[tuple[int, Sample | RowError]]:
    for number, row in read_rows(path) if _is_parquet(path) else read_lines(path):
        if isinstance(row, RowError):
            yield number, row
            continue
        try:
            yield number, from_row(row)
        except RowError as error:
            yield number, error


def _is_parquet(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PAR1" or path.suffix == ".parquet"
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _check(rows: Rows) -> Report:
    report = Report()
    across = laws.Across()
    damaged = False
    for number, row in rows:
        report.rows += 1
        if isinstance(row, RowError):
            damaged = True
            report.add(Finding(row.law, str(row), number, position=row.position))
            continue
        report.samples += 1
        found = laws.columns(row)
        if found:
            damaged = True
        else:
            report.tokens += len(row.token_ids)
            report.sampled += int((row.turn_index >= 0).sum())
            report.trained += int((row.loss_mask == 1).sum())
            found = [*laws.one_sample(row), *across.feed(number, row)]
        distinct: dict[tuple[str, int | None], Finding] = {}
        for finding in found:
            distinct.setdefault((finding.law, finding.position), finding)
        for finding in distinct.values():
            report.add(replace(finding, row=number, session=row.session_id))
    report.sessions, report.rollouts = len(across.session_ids), len(across.rollouts)
    if damaged:
        report.unjudged["weights"] = "rows are damaged"
    else:
        for finding in across.weights():
            report.add(finding)
    return report


async def check_engine(samples: Iterable[Sample], engine: Engine, tolerance: float = TOLERANCE, *, at_once: int = 1) -> EngineReport:
    """Recompute the logprob of every trained token by prefill and compare it with the recorded one, `at_once` samples at a time.

    A sample recorded after a temperature other than 1 is not comparable, since
    the recomputed logprobs are raw: `metadata["logprob_convention"]` says which.
    Raises EngineUnavailable, EngineOverloaded or EngineProtocol.
    """
    slots = asyncio.Semaphore(at_once)

    async def compared(number: int, sample: Sample) -> SampleDifference:
        async with slots:
            return await _difference(number, sample, engine)

    differences = await asyncio.gather(*(compared(number, sample) for number, sample in enumerate(samples, 1)))
    return EngineReport(tuple(differences), tolerance)


async def _difference(row: int, sample: Sample, engine: Engine) -> SampleDifference:
    trained = int((sample.loss_mask == 1).sum())
    result = SampleDifference(row, sample.session_id, sample.sample_index, trained, 0, None, None, None)
    reason = _why_not_comparable(sample)
    if reason or not trained:
        return replace(result, reason=reason)
    recorded, recomputed, positions = [], [], []
    try:
        async for start, logprobs in _recompute(sample, engine):
            chosen = np.flatnonzero(sample.loss_mask[start : start + len(logprobs)] == 1)
            positions.append(start + chosen)
            recorded.append(sample.logprobs[start + chosen])
            recomputed.append(logprobs[chosen])
    except (EngineRejected, PromptTooLong) as error:
        return replace(result, refused=True, reason=f"the engine refused it: {error}")
    if not recorded:
        return replace(result, reason="not comparable: no trained token was sampled")
    difference = np.abs(np.concatenate(recorded, dtype=np.float64) - np.concatenate(recomputed, dtype=np.float64))
    difference[np.isnan(difference)] = np.inf
    worst = int(np.argmax(difference))
    return replace(
        result,
        compared=len(difference),
        max=float(difference[worst]),
        mean=float(difference.mean()),
        worst=int(np.concatenate(positions)[worst]),
    )


def _why_not_comparable(sample: Sample) -> str:
    if laws.columns(sample):
        return "not comparable: its columns are damaged"
    if sample.loss_mask[:1].any():
        return "not comparable: its first token trains, and nothing stands before it"
    convention = sample.metadata.get("logprob_convention")
    if convention == "raw" or sample.temperature == 1:
        return ""
    known = f"were recorded as {convention!r}" if convention else "are of an unknown convention"
    return f"not comparable: its logprobs {known} at temperature {sample.temperature:g}, and the recomputed ones are raw"


async def _recompute(sample: Sample, engine: Engine) -> AsyncIterator[tuple[int, FloatArray]]:
    """Start and recomputed logprobs of each run that trains."""
    for run in laws.runs(sample):
        trains = np.flatnonzero(sample.loss_mask[run.start : run.end] == 1)
        if trains.size:
            start, end = run.start + int(trains[0]), run.start + int(trains[-1]) + 1
            logprobs = await engine.prompt_logprobs(sample.token_ids[:end], start)
            if len(logprobs) != end - start:
                raise EngineProtocol(f"the engine returned {len(logprobs)} prompt logprobs for {end - start} tokens")
            yield start, logprobs
