"""`kill -9` at a random moment: every turn that was acknowledged is there, and whole."""

import random
import subprocess
import sys
from pathlib import Path

from tests.store.crash_writer import crash_delta
from turnloom.store.sqlite import SQLiteStore

WRITER = Path(__file__).with_name("crash_writer.py")
ROUNDS = 5


def run_and_kill(path: Path, crash_round: int, acknowledgements: int) -> list[str]:
    """The ids that the writer printed before it was killed, a moment after `acknowledgements` of them."""
    command = [sys.executable, str(WRITER), str(path), str(crash_round)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(acknowledgements)]
        child.kill()
        lines += child.stdout.readlines()
    return [line.strip() for line in lines if line.endswith("\n")]


async def read_turns(path: Path, *, read_only: bool) -> list[object]:
    store = SQLiteStore(path, read_only=read_only)
    await store.open()
    deltas = list(await store.deltas("s1"))
    await store.close()
    return deltas


async def test_every_acknowledged_turn_survives_kill_9(path):
    chance = random.Random(20)
    acknowledged: list[str] = []
    for crash_round in range(ROUNDS):
        acknowledged += run_and_kill(path, crash_round, chance.randrange(1, 60))
        for read_only in (True, False):
            deltas = await read_turns(path, read_only=read_only)
            stored = [delta.turn.id for delta in deltas]
            assert set(acknowledged) <= set(stored)
            assert len(set(stored)) == len(stored)
            for delta in deltas:
                assert delta == crash_delta(delta.turn.id)
    assert len(acknowledged) >= ROUNDS
