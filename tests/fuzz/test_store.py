"""A short run over what a store holds, and that it would find something: `python -m tests.fuzz.store --count 50000` is a long one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import store
from tests.fuzz.readers import Escaped, Tally
from tests.fuzz.store import DELTAS, RECORDS, ROW, STORED, Files, look_once, read_once, run
from turnloom.store import codec, fsck
from turnloom.store.contract import SessionRow
from turnloom.store.rows import decode_session, encode_session


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(st.randoms(use_true_random=False))
def test_a_record_is_read_or_is_a_store_error(rng: Random) -> None:
    """As hypothesis chooses, which also makes what it finds small."""
    read_once(rng)


def test_every_kind_of_record_is_refused_sometimes_and_read_sometimes() -> None:
    tally = Tally()
    run(1600, 11, tally, files=160)
    assert {*RECORDS, "file, its rows", "file, its bytes"} == tally.outcomes.keys()
    for target, found in tally.outcomes.items():
        assert found.total() > found["accepted"] > 0, target


def test_what_it_starts_from_is_right(tmp_path: Path) -> None:
    assert decode_session(encode_session(ROW)) == ROW
    assert [codec.decode_delta(columns) for columns in STORED] == list(DELTAS)
    files = Files(tmp_path)
    files.put(files.whole)
    report = fsck.check(files.path)
    assert (report.problems, report.sessions, report.turns) == ([], 2, 4)
    assert files.looked_at() == "accepted"


def test_what_becomes_of_a_file_does_not_depend_on_the_one_before(tmp_path: Path) -> None:
    """So that a number which fails in a long run fails alone."""
    for folder in ("one", "after another"):
        (tmp_path / folder).mkdir()
    alone, after = Files(tmp_path / "one"), Files(tmp_path / "after another")
    after.whole = alone.whole
    left = 0
    for number in range(1440, 1470):
        left += after.path.with_name("damaged.db-wal").exists()
        for name in alone.path.parent.glob("damaged.db*"):
            name.unlink()
        assert look_once(alone, Random(f"11 store {number}")) == look_once(after, Random(f"11 store {number}")), number
    assert left, "some leave their log behind"


BUGS: dict[str, Any] = {"a TypeError": TypeError("a bug"), "a KeyError": KeyError("x"), "a UnicodeError": UnicodeError("x")}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_bug_in_a_decoder_would_be_found(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise bug

    monkeypatch.setattr(codec, "decode_nodes", broken)
    with pytest.raises(Escaped, match="seed 3, number"):
        run(100, 3, Tally(), files=0)


def test_a_decoder_that_changes_what_it_reads_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(raw: bytes) -> SessionRow:
        row = decode_session(raw)
        return replace(row, status=row.status + "!")

    monkeypatch.setattr(store, "decode_session", later)
    with pytest.raises(Escaped, match="stored as something else"):
        run(200, 3, Tally(), files=0)


def test_a_bug_in_fsck_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise IndexError

    monkeypatch.setattr(fsck, "prompt_crc", broken)
    with pytest.raises(Escaped, match="seed 3, number"):
        run(60, 3, Tally(), files=60)
