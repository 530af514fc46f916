"""Every record that a store holds, made odd: its words, its bytes, and the file around it.

What is read is a record, which is stored and read again as it is, or is a StoreError; nothing else ever leaves.

    python -m tests.fuzz.store --count 50000
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import logging
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from tests.fuzz.mutate import ODD, broken, mutated
from tests.fuzz.readers import LONGEST, Escaped, Tally
from turnloom.core.credit import Reward
from turnloom.core.records import Delta, Node
from turnloom.core.unroll import prompt_crc
from turnloom.errors import StoreError
from turnloom.store import blobs, codec, fsck, schema
from turnloom.store.contract import Limits, SessionRow
from turnloom.store.rows import decode_session, encode_session
from turnloom.store.sqlite import SQLiteStore
from turnloom.types import (
    CallRecord,
    CallStatus,
    Finish,
    FinishReason,
    Fork,
    ForkKind,
    Message,
    Outcome,
    Piece,
    Reasoning,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    VersionSpan,
    floats,
    ids,
)

# --- what it starts from ---

ROW = SessionRow(
    "s1",
    "0" * 64,
    1.5,
    Sampling(0.7, 0.9, 20, 64, ("\n\n",), 7, "{}"),
    Limits(3, 4096, 60.0, 1000, 10_000, 3600.0, 60.0),
    group="g",
    rollout="r",
    labels={"kind": "train"},
    metadata={"task": {"id": 4, "tags": ["a", None, 0.1], "text": "é" * 300}},
    rewards=(Reward(0.25, 2.0), Reward(1.0, 3.0, "t1")),
    ended="ttl",
    reached=("max_turns",),
)
PROMPT, MORE = ids(range(100)), ids(range(7))
FIRST = Turn(
    "t1",
    0,
    None,
    Fork(ForkKind.NEW_CONVERSATION, 0, "nothing begins like it", 3, "a", "b", "history=sampled"),
    PROMPT,
    100,
    prompt_crc(PROMPT),
    ids(range(40)),
    floats([-0.5] * 40),
    Finish(FinishReason.STOP, 2, "eos"),
    Outcome.DELIVERED,
    ROW.sampling,
    (VersionSpan("1", 0, 20), VersionSpan("2", 20, 40)),
    (CallRecord(CallStatus.OK, "ls", "<tool_call>", 0, 30, 1, 12),),
    label="main",
    started=2.0,
    ended=3.0,
    pieces=(Piece(0, "http://e"), Piece(20, "http://f", "cut")),
)
SECOND = replace(
    FIRST, id="t2", index=1, base="t1", appended=MORE, prompt_len=147, prompt_crc=prompt_crc(ids([*PROMPT, *FIRST.output, *MORE]))
)
REPLY = Message("assistant", (Reasoning("hm"), Text("I look"), ToolCall("c1", "ls", '{"a":1}', "0")), "t1")
DELTAS = (
    Delta(
        (
            Node(0, None, tools=(Tool("ls", "lists " * 200, '{"type":"object"}', False, "fs"),)),
            Node(1, 0, Message("user", (Text("hi"),))),
            Node(2, 1, REPLY, turn="t1"),
        ),
        FIRST,
    ),
    Delta(
        (Node(3, 2, Message("tool", (ToolResult("c1", "a.txt"),))), Node(4, 3, Message("assistant", (Text("one"),)), turn="t2")),
        SECOND,
    ),
)
STORED = [codec.encode_delta(delta) for delta in DELTAS]
NODES, BODY = 2, 3
"""Where a delta's columns hold packed words."""
WORDS = [blobs.unpack(encode_session(ROW)), *(blobs.unpack(columns[at]) for columns in STORED for at in (NODES, BODY))]


# --- how it is made odd ---


def packed(rng: Random, words: Any) -> bytes:
    """Words made odd, or the bytes of right ones."""
    if rng.random() < 0.6:
        return blobs.pack(mutated(rng, words, WORDS))
    raw = blobs.pack(words)
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randrange(40))
        case 1:
            return blobs.ZSTD + broken(rng, zstandard.compress(blobs.pack(words)[1:]))
        case 2:
            return bytes([rng.randrange(256)]) + raw[1:]
        case 3:
            return blobs.ZSTD + _bomb(rng)
        case _:
            return broken(rng, raw)


def _bomb(rng: Random) -> bytes:
    """A frame that declares more than it has, or more than there may be, or nothing."""
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(70_000)))
    frame[4] = rng.choice((0xA0, 0xE0, frame[4], rng.randrange(256)))
    frame[5:13] = rng.choice(((2**62).to_bytes(8, "little"), (blobs.LARGEST + 1).to_bytes(8, "little"), rng.randbytes(8)))
    return bytes(frame)


def column(rng: Random, raw: bytes) -> bytes:
    return rng.choice((broken(rng, raw), rng.randbytes(rng.randrange(60)), b"", raw + b"\x00" * rng.randrange(9)))


def delta_columns(rng: Random, stored: codec.DeltaColumns) -> codec.DeltaColumns:
    """A stored turn with one to three of its columns odd; mostly without the checksum that would tell at once."""
    columns: list[Any] = list(stored)
    for at in rng.choices(range(8), k=rng.choice((1, 1, 2, 3))):
        if isinstance(columns[at], bytes):
            columns[at] = packed(rng, blobs.unpack(STORED[0][at])) if at in (NODES, BODY) else column(rng, columns[at])
        else:
            columns[at] = rng.choice([*Outcome, *(odd for odd in ODD if isinstance(odd, str | int | None))])
    if rng.random() < 0.9:
        columns[8] = None
    return tuple(columns)  # type: ignore[return-value]


# --- records ---


def read_session(rng: Random) -> bytes:
    return encode_session(decode_session(packed(rng, WORDS[0])))


def read_nodes(rng: Random) -> bytes:
    return codec.encode_nodes(codec.decode_nodes(packed(rng, rng.choice(WORDS[1::2]))))


def read_delta(rng: Random) -> tuple[Any, ...]:
    return codec.encode_delta(codec.decode_delta(delta_columns(rng, rng.choice(STORED))))


def read_words(rng: Random) -> bytes:
    return blobs.pack(blobs.unpack(packed(rng, rng.choice(WORDS))))


def read_tokens(rng: Random) -> tuple[bytes, bytes]:
    raw = column(rng, STORED[0][rng.randrange(4, 7)])  # type: ignore[arg-type]
    found = blobs.pack_floats(blobs.unpack_floats(raw)), blobs.pack_ids(blobs.unpack_ids(raw))
    assert found == (raw, raw), "a column is its bytes"
    return found


AGAIN: dict[str, Callable[[Any], Any]] = {
    "session": lambda raw: encode_session(decode_session(raw)),
    "nodes": lambda raw: codec.encode_nodes(codec.decode_nodes(raw)),
    "delta": lambda columns: codec.encode_delta(codec.decode_delta(columns)),
    "words": lambda raw: blobs.pack(blobs.unpack(raw)),
}
RECORDS: dict[str, Callable[[Random], Any]] = {
    "session": read_session,
    "nodes": read_nodes,
    "delta": read_delta,
    "words": read_words,
    "tokens": read_tokens,
}


# --- files ---


RECOUNT = f"""UPDATE sessions SET (tokens, bytes) =
    (SELECT sum(length(output)) / 4, sum({schema.SIZE}) FROM deltas WHERE session = sessions.number)"""


class Files:
    """A whole store in a folder of its own, copies of which are damaged."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "damaged.db"
        asyncio.run(_write(folder / "whole.db"))
        self.whole = (folder / "whole.db").read_bytes()

    def rows(self, rng: Random) -> str:
        """Rows in which columns are odd."""
        self.put(self.whole)
        connection = sqlite3.connect(self.path)
        number = rng.choice((1, 2))
        columns = delta_columns(rng, STORED[number - 1] if rng.random() < 0.8 else rng.choice(STORED))
        said = "outcome = ?, abort = ?, nodes = ?, body = ?, appended = ?, output = ?, logprobs = ?, acknowledged = ?, crc = ?"
        try:
            connection.execute(f"UPDATE deltas SET {said} WHERE number = ?", (*columns, number))
            if rng.random() < 0.8:  # or the counts alone would tell of most
                connection.execute(RECOUNT)
            if rng.random() < 0.3:
                connection.execute("UPDATE sessions SET body = ?, crc = NULL WHERE number = 1", (packed(rng, WORDS[0]),))
            connection.commit()
        except (sqlite3.Error, UnicodeEncodeError, OverflowError):
            return "not a row"
        finally:
            connection.close()
        return self.looked_at()

    def bytes(self, rng: Random) -> str:
        """Bytes of the file are others, or are missing."""
        data = bytearray(self.whole)
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.choice((1, 3, 20, 300)) if data else 0):
            at = rng.randrange(len(data))
            data[at : at + rng.choice((1, 1, 4))] = rng.randbytes(1)
        self.put(data)
        return self.looked_at()

    def put(self, data: bytes | bytearray) -> None:
        """The file, alone: SQLite would read a log that the last one left beside it as this one's."""
        for end in ("-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)
        self.path.write_bytes(data)

    def looked_at(self) -> str:
        try:
            found = len(fsck.check(self.path).problems)
        except StoreError as error:
            return _short(error)
        told = asyncio.run(_all_of(self.path))
        return "accepted" if not found else f"found{', and read' if not told else ''}"


async def _write(path: Path) -> None:
    store = SQLiteStore(path)
    await store.open()
    for row in (ROW, replace(ROW, id="s2", key_hash="k2")):
        await store.put_session(row)
        for delta in DELTAS:
            await store.append(row.id, delta)
    store.begin("s2", "t9", 1.0)
    await store.close()


async def _all_of(path: Path) -> int:
    """How much of the file cannot be read or written, where all of it is asked for."""
    store, failed = SQLiteStore(path), 0
    try:
        await store.open()
    except StoreError as error:
        _short(error)
        return 1
    added = replace(DELTAS[0], turn=replace(FIRST, id="new"))
    asked: Sequence[Callable[[], Any]] = (
        lambda: store.sessions(),
        lambda: store.expired(1e9),
        lambda: store.stats(),
        *(lambda name=name: store.session(name) for name in ("s1", "s2")),  # type: ignore[misc]
        *(lambda name=name: store.deltas(name) for name in ("s1", "s2")),  # type: ignore[misc]
        *(lambda name=name: store.usage(name) for name in ("s1", "s2")),  # type: ignore[misc]
        lambda: store.append("s2", added),
        lambda: store.replace("s1", FIRST, REPLY),
        lambda: store.put_session(ROW),
        lambda: store.drop("s1"),
    )
    try:
        for work in asked:
            try:
                await work()
            except StoreError as error:
                _short(error)
                failed += 1
    finally:
        await store.close()
    return failed


def _short(error: StoreError) -> str:
    if len(str(error)) > LONGEST:
        raise Escaped(f"a message of {len(str(error))} characters: {str(error)[:300]}")
    return "StoreError"


# --- many ---


def read_once(rng: Random) -> tuple[str, str]:
    """(target, what became of it). Raises Escaped."""
    target = rng.choice(list(RECORDS))
    try:
        written = RECORDS[target](rng)
        if target in AGAIN and AGAIN[target](copy.copy(written)) != written:
            raise Escaped(f"{target}: what was read is stored as something else")
    except StoreError as error:
        return target, _short(error)
    except Escaped:
        raise
    except Exception as error:
        raise Escaped(f"{target}: {error!r}") from error
    return target, "accepted"


def look_once(files: Files, rng: Random) -> tuple[str, str]:
    """The same of a whole file. Raises Escaped."""
    target = rng.choice(("rows", "bytes"))
    try:
        return f"file, its {target}", getattr(files, target)(rng)
    except Escaped:
        raise
    except Exception as error:
        raise Escaped(f"file, its {target}: {error!r}") from error


def run(count: int, seed: int, tally: Tally, *, files: int) -> None:
    """Records, of which each has its own chance so that one can be tried alone, then whole files."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Files(Path(folder))
        for number in range(count):
            rng, started = Random(f"{seed} store {number}"), time.perf_counter()
            try:
                target, outcome = read_once(rng) if number < count - files else look_once(whole, rng)
            except Exception as error:
                raise Escaped(f"seed {seed}, number {number}: {error}") from error
            tally.add(target, outcome, time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="inputs; one in twenty-five of them is a whole file")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    logging.getLogger("turnloom").setLevel(logging.CRITICAL)
    tally = Tally()
    run(asked.count, asked.seed, tally, files=asked.count // 25)
    print(tally.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
