"""Run as a process of its own, to be killed: several agents append turns; each one acknowledged is printed.

usage: crash_writer.py DATABASE ROUND
"""

import asyncio
import sys

from turnloom.core.records import Delta, Node
from turnloom.store.contract import Limits, SessionRow
from turnloom.store.sqlite import SQLiteStore
from turnloom.types import Finish, FinishReason, Message, Outcome, Sampling, Text, Turn, floats, ids

AGENTS = 4


def crash_delta(turn: str) -> Delta:
    """A delta whose every part follows from the turn's id, of a size that follows from it too."""
    number = int(turn.rpartition("-")[2])
    size = 1 + (number * 37) % 700
    return Delta(
        nodes=(Node(id=number, parent=None, message=Message("user", (Text(f"{turn} " * size),))),),
        turn=Turn(
            id=turn,
            index=number,
            base=None,
            fork=None,
            appended=ids(range(size)),
            prompt_len=size,
            prompt_crc=number,
            output=ids(range(size, 2 * size)),
            logprobs=floats([-number / 3] * size),
            finish=Finish(FinishReason.STOP),
            outcome=Outcome.DELIVERED,
            sampling=Sampling(),
        ),
    )


async def agent(store: SQLiteStore, name: str) -> None:
    number = 0
    while True:
        turn = f"{name}-{number}"
        await store.append("s1", crash_delta(turn))
        sys.stdout.write(turn + "\n")
        sys.stdout.flush()
        number += 1


async def main(path: str, crash_round: str) -> None:
    store = SQLiteStore(path)
    await store.open()
    await store.put_session(SessionRow("s1", "k", 1.0, Sampling(), Limits()))
    await asyncio.gather(*(agent(store, f"{crash_round}.{n}") for n in range(AGENTS)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
