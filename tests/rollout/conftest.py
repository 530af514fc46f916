"""A counting gateway, and settings whose sandboxes are in a folder of the test's own that must be empty in the end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.rollouts import CountingGateway, counting_gateway
from turnloom.rollout import RolloutSettings
from turnloom.sandbox import LocalSandbox


@pytest.fixture
async def gateway() -> AsyncIterator[CountingGateway]:
    async with counting_gateway() as gateway:
        yield gateway


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[Path]:
    """Where sandboxes are made; empty again when the test is over."""
    place = tmp_path / "sandboxes"
    place.mkdir()
    yield place
    assert os.listdir(place) == []


@pytest.fixture
def settings(boxes: Path) -> RolloutSettings:
    return RolloutSettings(sandbox=lambda needs: LocalSandbox(parent=boxes, grace=0.5), pause=0.01)
