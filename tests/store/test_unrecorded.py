"""What no store took is in no sample and counted, in every dialect; what another process writes opens when that has ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.store.conftest import make_delta, make_row
from tests.support.gateways import Bench, bench
from tests.support.wires import WIRES, Wire
from turnloom.errors import StoreError
from turnloom.store.sqlite import SQLiteStore

LONG = "seven eight nine " * 1500
"""More ids than there is room for on the last pages of a small file."""


def pages(store: SQLiteStore, most: int | None) -> None:
    """Let the file have `most` pages more than it has; None is as many as it likes."""
    assert store._writer is not None
    connection = store._writer.connection
    (now,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count={2**30 if most is None else now + most}")


async def turns_in(b: Bench) -> tuple[int, int]:
    """How many turns the session's tree has over HTTP, and how many samples it gives."""
    status, tree = await b.admin("GET", f"/sessions/{b.handle.id}/tree")
    assert status == 200
    status, raw = await b.admin("GET", f"/sessions/{b.handle.id}/samples")
    assert status == 200
    return len(tree["turns"]), len(raw.splitlines())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_a_turn_that_could_not_be_stored_is_in_no_sample_and_counted(tmp_path: Path, wire: Wire, stream: bool) -> None:
    store = SQLiteStore(tmp_path / "runs.db")

    async def ask() -> None:
        async with b.http.post(b.handle.base_url + wire.path(stream), json=wire.body(LONG, stream=stream)) as answer:
            await answer.read()

    async with bench(lambda *_: "One two three.", store=store) as b:
        pages(store, 0)
        await ask()
        assert await turns_in(b) == (0, 0)
        pages(store, None)
        await ask()
        assert await turns_in(b) == (1, 1)
        async with b.http.get(f"{b.gateway.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    dialect = wire.name.split()[0]
    assert f'turnloom_turns_total{{dialect="{dialect}",outcome="unrecorded"}} 1.0' in lines
    assert f'turnloom_turns_total{{dialect="{dialect}",outcome="delivered"}} 1.0' in lines


WRITES = """
import asyncio, sys
from turnloom.store.sqlite import SQLiteStore

async def main(path):
    store = SQLiteStore(path)
    await store.open()
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main(sys.argv[1]))
"""


@contextmanager
def written_by_another(path: Path) -> Iterator[int]:
    """Another process, of this id, has the store open for writing; it is killed in the end."""
    with subprocess.Popen([sys.executable, "-c", WRITES, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        try:
            yield other.pid
        finally:
            other.kill()


async def test_a_store_that_another_process_writes_names_it_and_opens_when_it_was_killed(path: Path) -> None:
    store = SQLiteStore(path)
    with written_by_another(path) as process:
        with pytest.raises(StoreError, match=f"being written by process {process}; stop it, or give another --store"):
            await store.open()
    await store.open()
    await store.put_session(make_row())
    await store.append("s1", make_delta("t1"))
    await store.close()
