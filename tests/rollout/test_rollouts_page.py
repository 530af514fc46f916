"""docs/rollouts.md names every cause, every file of a run's folder, and every setting of slime's."""

from __future__ import annotations

import re
from pathlib import Path

from turnloom.integrations.slime import Settings
from turnloom.rollout import Cause
from turnloom.rollout.folder import LOGS, RESULTS, SETTINGS, STORE, SUMMARY

PAGE = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text("utf-8")
FIRST_CELLS = set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\|([^|]+)\|", PAGE, re.M))))


def test_every_cause_has_its_row() -> None:
    assert {str(cause) for cause in Cause} <= FIRST_CELLS


def test_every_file_of_a_folder_has_its_row() -> None:
    assert {SETTINGS, RESULTS, SUMMARY, STORE, f"{LOGS}/ROLLOUT/", "run.lock", "samples.jsonl"} <= FIRST_CELLS


def test_every_setting_of_slimes_has_its_row() -> None:
    assert set(Settings.model_fields) <= FIRST_CELLS
