"""The bubblewrap sandbox: the shared contract, and what it keeps in."""

from __future__ import annotations

import shutil

import pytest

from turnloom.sandbox.bubblewrap import BubblewrapBackend
from turnloom.sandbox.conformance import CHECKS
from turnloom.sandbox.contract import Needs

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="THERE IS NO bwrap HERE: nothing of the bubblewrap sandbox is tested")


@pytest.fixture
async def sandbox(tmp_path):
    sandbox = BubblewrapBackend(parent=tmp_path, grace=0.5).make(Needs())
    await sandbox.start()
    yield sandbox
    await sandbox.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_contract(check, sandbox):
    await check(sandbox)
