"""Whatever a turn holds comes back exactly: from the codec, and from each store."""

import asyncio
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from turnloom.core.credit import Reward, RewardRule
from turnloom.core.records import Delta, Node
from turnloom.errors import StoreError
from turnloom.store import blobs, codec
from turnloom.store.contract import Limits, Repeats, SessionRow
from turnloom.store.memory import MemoryStore
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

plain = st.sampled_from(["", "verified", "unverified", "failed"])
words = st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(["\ud83d\ude00", "\x00", "\ud800", "é" * 600])
numbers = st.integers(-(2**70), 2**70)
reals = st.floats(allow_nan=False)
parts = st.one_of(
    st.builds(Text, words),
    st.builds(Reasoning, words),
    st.builds(ToolCall, words, words, words, words),
    st.builds(ToolResult, words, words, st.booleans()),
)
messages = st.builds(Message, st.sampled_from(["system", "user", "assistant", "tool"]), st.lists(parts, max_size=3).map(tuple), words)
tools = st.lists(st.builds(Tool, words, words, words, st.booleans(), words), max_size=2).map(tuple)
nodes = st.builds(Node, numbers, st.none() | numbers, st.none() | messages, tools, st.none() | words)
samplings = st.builds(
    Sampling, reals, reals, numbers, st.none() | numbers, st.lists(words, max_size=2).map(tuple), st.none() | numbers, words
)
finishes = st.builds(Finish, st.sampled_from(FinishReason), st.none() | numbers | words, words)
spans = st.lists(st.builds(VersionSpan, words, numbers, numbers), max_size=2).map(tuple)
calls = st.lists(st.builds(CallRecord, st.sampled_from(CallStatus), words, words, *[numbers] * 4), max_size=2).map(tuple)
forks = st.none() | st.builds(Fork, st.sampled_from(ForkKind), numbers, words, numbers, words, words, words)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(ids)
outputs = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32)), max_size=8)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    output = draw(outputs)
    drawn: dict[str, object] = {
        "id": "t1",
        "index": draw(numbers),
        "base": draw(st.none() | words),
        "fork": draw(forks),
        "appended": draw(token_ids),
        "prompt_len": draw(numbers),
        "prompt_crc": draw(numbers),
        "output": ids([token for token, _ in output]),
        "logprobs": floats([logprob for _, logprob in output]),
        "finish": draw(finishes),
        "outcome": draw(st.sampled_from(Outcome)),
        "sampling": draw(samplings),
        "versions": draw(spans),
        "calls": draw(calls),
        "logprob_convention": draw(words),
        "model": draw(words),
        "label": draw(words),
        "escaped": draw(numbers),
        "respelled": draw(numbers),
        "started": draw(reals),
        "ended": draw(reals),
        "error": draw(words),
        "pool": draw(words),
        "pieces": draw(st.lists(st.builds(Piece, numbers, words, words), max_size=3).map(tuple)),
        "abort": draw(plain),
        "surplus": draw(numbers),
        "cached_tokens": draw(numbers),
        "fingerprint": draw(words),
        "idempotency": draw(words),
        "choice": draw(numbers),
        "reasoning_open": draw(st.booleans()),
        "acknowledged": draw(st.booleans()),
    }
    assert drawn.keys() == {field.name for field in fields(Turn)}, "a field that is not drawn is not tried"
    return Turn(**drawn)  # type: ignore[arg-type]


deltas = st.builds(Delta, st.lists(nodes, max_size=3).map(tuple), turns())
json_values = st.recursive(
    st.none() | st.booleans() | numbers | reals | words,
    lambda v: st.lists(v, max_size=2) | st.dictionaries(words, v, max_size=2),
    max_leaves=5,
)
rows = st.builds(
    SessionRow,
    id=st.just("s1"),
    key_hash=st.just("k"),
    created=reals,
    sampling=samplings,
    limits=st.builds(Limits, *[st.none() | numbers] * 2, st.none() | reals, *[st.none() | numbers] * 2, *[st.none() | reals] * 2),
    group=words,
    rollout=words,
    labels=st.dictionaries(words, words, max_size=2),
    metadata=st.dictionaries(words, json_values, max_size=2),
    status=st.sampled_from(["open", "closed"]),
    rewards=st.lists(st.builds(Reward, reals, reals, words), max_size=3).map(tuple),
    reward_rule=st.sampled_from(get_args(RewardRule)),
    repeats=st.sampled_from(get_args(Repeats)),
    ended=words,
    reached=st.lists(words, max_size=2).map(tuple),
)


DRAWN = [(CallRecord, 7), (Fork, 7), (Reasoning, 1), (ToolCall, 4), (Message, 3), (Tool, 5), (Node, 5), (VersionSpan, 3), (Sampling, 7)]
DRAWN += [(Piece, 3), (Reward, 3), (Limits, 7), (SessionRow, 15)]


@pytest.mark.parametrize(("kind", "count"), DRAWN)
def test_every_field_of_what_a_turn_holds_is_drawn(kind, count):
    """The strategies above name their fields by place: a new one has to be added there."""
    assert len(fields(kind)) == count


@given(deltas)
def test_a_delta_survives_the_codec(delta):
    assert codec.decode_delta(codec.encode_delta(delta)) == delta


@given(rows)
def test_a_session_survives_the_codec(row):
    assert decode_session(encode_session(row)) == row


@settings(max_examples=25, deadline=None)
@given(row=rows, stored=st.lists(deltas, max_size=3))
def test_a_session_with_its_turns_survives_each_store(row, stored):
    from dataclasses import replace

    stored = [replace(delta, turn=replace(delta.turn, id=f"t{n}")) for n, delta in enumerate(stored)]

    async def check(directory: str) -> None:
        for store in (MemoryStore(), SQLiteStore(Path(directory) / "runs.db")):
            await store.open()
            await store.put_session(row)
            for delta in stored:
                await store.append("s1", delta)
            assert await store.session("s1") == row
            assert list(await store.deltas("s1")) == stored
            await store.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(check(directory))


def test_calls_and_forks_stored_without_the_later_fields_still_load():
    call = {"type": "call", "id": "c", "name": "ls", "arguments": "{}"}
    assert codec.decode_part(call) == ToolCall("c", "ls", "{}")
    assert codec.decode_fork(["resampled", 3, "why"]) == Fork(ForkKind.RESAMPLED, 3, "why")


def test_rows_of_an_earlier_version_still_load(delta):
    """They had references within reasoning, three fields of a tool, no label and no schema, and nothing of their engines."""
    outcome, abort, _, turn, *columns, _ = codec.encode_delta(delta())
    said = {"role": "assistant", "parts": [{"type": "reasoning", "text": "hm", "ref": "t0"}, {"type": "text", "text": "hi"}]}
    head = {"id": 0, "parent": None, "message": None, "tools": [["ls", "List", "{}"]], "turn": None}
    old_nodes = [head, {"id": 1, "parent": 0, "message": said, "tools": [], "turn": "t1"}]
    old_turn = blobs.unpack(turn)
    del old_turn["label"], old_turn["sampling"]["json_schema"]
    for name in ("pool", "pieces", "surplus", "cached_tokens", "fingerprint", "idempotency", "choice", "reasoning_open"):
        del old_turn[name]
    read = codec.decode_delta((outcome, abort, blobs.pack(old_nodes), blobs.pack(old_turn), *columns, None))
    assert read.nodes == (
        Node(0, None, tools=(Tool("ls", "List", "{}"),)),
        Node(1, 0, Message("assistant", (Reasoning("hm"), Text("hi"))), turn="t1"),
    )
    assert (read.turn.label, read.turn.sampling.json_schema) == ("", "")
    assert read.turn == delta().turn


@pytest.mark.parametrize("reward", [None, 0.5])
def test_a_session_of_an_earlier_version_still_loads(reward):
    """It had one reward or none, three limits, and nothing of how it ended."""
    now = SessionRow("s1", "k", 3.0, Sampling(), Limits(max_turns=2), group="g", status="closed")
    old = blobs.unpack(encode_session(now))
    for name in ("rewards", "reward_rule", "repeats", "ended", "reached"):
        del old[name]
    old["limits"] = {"max_turns": 2, "max_context": None, "turn_timeout": 600.0}
    read = decode_session(blobs.pack(old | {"reward": reward}))
    assert read.reward == reward
    assert replace(read, rewards=()) == now


def test_two_lone_surrogates_do_not_become_one_character():
    assert blobs.unpack(blobs.pack("\ud83d\ude00")) == "\ud83d\ude00" != "😀"


def test_every_bit_of_a_nan_logprob_is_kept():
    column = np.array([0x7FC00001, 0xFFC00000], dtype=np.uint32).view(np.float32)
    assert blobs.unpack_floats(blobs.pack_floats(column)).tobytes() == column.tobytes()


def test_token_columns_are_little_endian():
    assert blobs.pack_ids(ids([1, 256])) == b"\x01\x00\x00\x00\x00\x01\x00\x00"


def test_a_large_body_is_compressed_and_a_small_one_is_not():
    assert blobs.pack("a")[:1] == blobs.PLAIN
    packed = blobs.pack("a" * 10_000)
    assert packed[:1] == blobs.ZSTD
    assert len(packed) < 200


@pytest.mark.parametrize("data", [b"", b"\x07{}", b"\x00{", b"\x01not zstd", b"\x00\xff"])
def test_damaged_bodies_are_a_store_error(data):
    with pytest.raises(StoreError, match="damaged"):
        blobs.unpack(data)


@pytest.mark.parametrize(
    "change", [(0, "gone"), (2, blobs.pack([{}])), (3, blobs.pack([])), (4, b"\x00"), (5, b"\x00" * 5), (5, b"\xff" * 12), (6, None)]
)
def test_damaged_columns_are_a_store_error(change, delta):
    columns = [*codec.encode_delta(delta())[:-1], None]
    position, value = change
    columns[position] = value
    with pytest.raises(StoreError, match="damaged"):
        codec.decode_delta(tuple(columns))


@pytest.mark.parametrize("position", range(2, 7))
def test_one_bit_is_missed_in_every_column(position, delta):
    columns = list(codec.encode_delta(delta()))
    columns[position] = columns[position][:-1] + bytes([columns[position][-1] ^ 1])
    with pytest.raises(StoreError, match=r"damaged: .*checksum"):
        codec.decode_delta(tuple(columns))


def test_one_bit_is_missed_in_a_session():
    body = encode_session(SessionRow("s1", "k", 3.0, Sampling(), Limits(), rewards=(Reward(0.5),)))
    changed = body.replace(b"0.5", b"0.4")
    assert decode_session(changed).reward == 0.4
    with pytest.raises(StoreError, match=r"damaged: .*checksum"):
        decode_session(changed, blobs.crc(body))


WRONG = [
    ("index", "1"),
    ("index", True),
    ("base", 3),
    ("started", None),
    ("ended", 10**400),
    ("escaped", 0.5),
    ("versions", [["v", 0, "3"]]),
]
WRONG += [("model", ["m"]), ("calls", [["ok", "ls", "", 0, 1, None, 2]]), ("finish", ["stop", [], ""]), ("pieces", [[0, {}, ""]])]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_turn_whose_field_is_of_another_type_is_damaged(delta, field, value):
    columns = list(codec.encode_delta(delta()))
    columns[3], columns[-1] = blobs.pack(blobs.unpack(columns[3]) | {field: value}), None
    with pytest.raises(StoreError, match=f"damaged: its {field} cannot be"):
        codec.decode_delta(tuple(columns))


@pytest.mark.parametrize("field", [{"reward_rule": "first"}, {"labels": {"a": 1}}, {"limits": {"ttl": "3"}}, {"rewards": [["1", 0, ""]]}])
def test_a_session_whose_field_is_of_another_type_is_damaged(field):
    said = blobs.unpack(encode_session(SessionRow("s1", "k", 3.0, Sampling(), Limits())))
    with pytest.raises(StoreError, match=f"damaged: its {next(iter(field))} cannot be"):
        decode_session(blobs.pack(said | field))


def test_no_more_is_decompressed_than_a_body_can_have(monkeypatch):
    monkeypatch.setattr(blobs, "LARGEST", 5000)
    declared = zstandard.compress(b" " * 4999 + b"[]")
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(b"[]" + b" " * 400)
    for bomb, words in ((declared, "it has 5001 bytes"), (streamed, "does not say how long")):
        with pytest.raises(StoreError, match=words):
            blobs.unpack(blobs.ZSTD + bomb)
    assert blobs.unpack(blobs.ZSTD + zstandard.compress(b" " * 4998 + b"[]")) == []


def test_no_more_is_written_than_is_read(monkeypatch):
    monkeypatch.setattr(blobs, "LARGEST", 5000)
    assert blobs.unpack(blobs.pack("a" * 4998)) == "a" * 4998
    with pytest.raises(StoreError, match="5001 bytes as JSON, and 5000 is the most"):
        blobs.pack("a" * 4999)


def test_a_damaged_session_is_a_store_error():
    with pytest.raises(StoreError, match="damaged"):
        decode_session(blobs.pack({"id": "s1"}))
