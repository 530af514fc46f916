"""What docs/security.md says is what the tests hold: every attack is listed with its answer, every limit with its value."""

from __future__ import annotations

import re
from dataclasses import fields

from tests.security.document import HERE, PAGE, attacks, files, table, written
from turnloom.gateway.request_limits import DEFAULT_LIMITS

TEXT = PAGE.read_text("utf-8")


def test_every_attack_is_listed_with_its_answer() -> None:
    """After a change of a docstring: `python -m tests.security.document`."""
    assert written(TEXT) == table()
    assert sum(len(attacks(path)) for path in files()) > 40


def test_no_file_of_attacks_is_left_out() -> None:
    assert {path.name for path in HERE.glob("test_attacks_*.py")} == {path.name for path in files()}


def test_every_limit_is_listed_with_its_value() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", TEXT, re.M))
    assert rows.keys() == {each.name for each in fields(DEFAULT_LIMITS)}
    units = {"KiB": 2**10, "MiB": 2**20, "s": 1}
    for name, told in rows.items():
        number, _, unit = told.strip().replace(",", "").partition(" ")
        assert float(number) * units.get(unit, 1) == getattr(DEFAULT_LIMITS, name), name
