"""The samples of a run's graded rollouts, from the gateway's store into files. It holds no more than one rollout's at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from turnloom.core.credit import weigh
from turnloom.errors import ConfigError, NotFound
from turnloom.export.canonical import read_jsonl, to_line
from turnloom.export.files import atomic
from turnloom.export.registry import export
from turnloom.rollout.contract import Gateway
from turnloom.rollout.folder import RunFolder

ENDINGS = {"canonical": "jsonl", "jsonl": "jsonl", "parquet": "parquet"}


async def write_samples(gateway: Gateway, folder: RunFolder, formats: Sequence[str]) -> list[Path]:
    """One file for each format, in their order; the canonical one is always written, and first.

    Those of rollouts without a reward stay in the store. Raises ConfigError.
    """
    canonical = folder.path / "samples.jsonl"
    graded = folder.graded
    with atomic(canonical) as file:
        for row in folder.rows:
            if row["rollout_id"] not in graded:
                continue
            try:
                samples = await (await gateway.handle(row["session_id"])).samples()
            except NotFound as error:
                told = f"{folder.store} does not hold the session of {row['rollout_id']}, which was graded; begin anew with another --out"
                raise ConfigError(told) from error
            for sample in weigh(samples):
                file.write(to_line(sample) + b"\n")
    paths = [canonical]
    for name in formats:
        path = folder.path / f"samples.{ENDINGS.get(name) or name.rpartition(':')[2].lower()}"
        if path != canonical:
            await asyncio.to_thread(export, read_jsonl(canonical), path, name)
            paths.append(path)
    return paths
