"""Records as bytes and back, losslessly. Pure: no IO, no clock, and never pickle.

Everything but token columns is JSON; `blobs` says how both are spelled.

Decoders raise StoreError for bytes that no encoder here wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from turnloom.core.records import Delta, Node
from turnloom.errors import StoreError
from turnloom.store.blobs import (
    Json,
    check_column,
    check_crc,
    check_ids,
    crc,
    damaged,
    pack,
    pack_floats,
    pack_ids,
    unpack,
    unpack_floats,
    unpack_ids,
)
from turnloom.store.typed import check_types
from turnloom.types import (
    CallRecord,
    CallStatus,
    Finish,
    FinishReason,
    FloatArray,
    Fork,
    ForkKind,
    IntArray,
    Message,
    Outcome,
    Part,
    Piece,
    Reasoning,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    VersionSpan,
)

# Messages and tools


def encode_message(message: Message) -> Json:
    return {"role": message.role, "parts": [encode_part(part) for part in message.parts], "ref": message.ref}


def decode_message(data: Json) -> Message:
    return Message(data["role"], tuple(decode_part(part) for part in data["parts"]), data.get("ref", ""))


def encode_part(part: Part) -> Json:
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Reasoning(text):
            return {"type": "reasoning", "text": text}
        case ToolCall(id, name, arguments, written):
            return {"type": "call", "id": id, "name": name, "arguments": arguments, "written": written}
        case ToolResult(call_id, text, is_error):
            return {"type": "result", "call_id": call_id, "text": text, "is_error": is_error}


def decode_part(data: Json) -> Part:
    match data["type"]:
        case "text":
            return Text(data["text"])
        case "reasoning":
            return Reasoning(data["text"])
        case "call":
            return ToolCall(data["id"], data["name"], data["arguments"], data.get("written", ""))
        case "result":
            return ToolResult(data["call_id"], data["text"], data["is_error"])
        case unknown:
            raise ValueError(f"unknown part {unknown!r}")


def encode_tool(tool: Tool) -> Json:
    return [tool.name, tool.description, tool.parameters, tool.freeform, tool.namespace]


def decode_tool(data: Json) -> Tool:
    """Stores written earlier hold the first three fields only."""
    return Tool(*data)


# Nodes


def encode_node(node: Node) -> Json:
    return {
        "id": node.id,
        "parent": node.parent,
        "message": None if node.message is None else encode_message(node.message),
        "tools": [encode_tool(tool) for tool in node.tools],
        "turn": node.turn,
    }


def decode_node(data: Json) -> Node:
    return Node(
        id=data["id"],
        parent=data["parent"],
        message=None if data["message"] is None else decode_message(data["message"]),
        tools=tuple(decode_tool(tool) for tool in data["tools"]),
        turn=data["turn"],
    )


def encode_nodes(nodes: Sequence[Node]) -> bytes:
    return pack([encode_node(node) for node in nodes])


def decode_nodes(data: bytes) -> tuple[Node, ...]:
    try:
        nodes = tuple(decode_node(node) for node in unpack(data))
        for node in nodes:
            check_types(node)
        return nodes
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged("turn's messages are", error) from error


def replied(nodes: Sequence[Node], turn_id: str, reply: Message) -> tuple[Node, ...]:
    """The nodes of a delta with another reply of its turn. Raises StoreError where none is the turn's."""
    found = tuple(replace(node, message=reply) if node.turn == turn_id else node for node in nodes)
    if not any(node.turn == turn_id for node in nodes):
        raise StoreError(f"turn {turn_id} has no reply on record")
    return found


# Turns


def encode_fork(fork: Fork) -> Json:
    return [fork.kind, fork.message_index, fork.detail, fork.token_index, fork.recorded, fork.came, fork.joined_by]


def decode_fork(data: Json) -> Fork:
    """Stores written earlier hold the first three fields only."""
    kind, message_index, detail, *compared = data
    token_index, recorded, came, joined_by = compared or (-1, "", "", "")
    return Fork(ForkKind(kind), message_index, detail, token_index, recorded, came, joined_by)


def encode_finish(finish: Finish) -> Json:
    return [finish.reason, finish.matched, finish.message]


def decode_finish(data: Json) -> Finish:
    reason, matched, message = data
    return Finish(FinishReason(reason), matched, message)


def encode_sampling(sampling: Sampling) -> Json:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "seed": sampling.seed,
        "json_schema": sampling.json_schema,
    }


def decode_sampling(data: Json) -> Sampling:
    return Sampling(
        temperature=data["temperature"],
        top_p=data["top_p"],
        top_k=data["top_k"],
        max_tokens=data["max_tokens"],
        stop=tuple(data["stop"]),
        seed=data["seed"],
        json_schema=data.get("json_schema", ""),
    )


def encode_versions(versions: Sequence[VersionSpan]) -> Json:
    return [[span.version, span.start, span.end] for span in versions]


def decode_versions(data: Json) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version, start, end) for version, start, end in data)


_CALL_FIELDS = ("name", "raw", "start", "end", "first_token", "end_token")
"""Rows of an earlier version have no tokens."""


def encode_calls(calls: Sequence[CallRecord]) -> Json:
    return [[call.status, *(getattr(call, name) for name in _CALL_FIELDS)] for call in calls]


def decode_calls(data: Json) -> tuple[CallRecord, ...]:
    return tuple(CallRecord(CallStatus(status), *fields) for status, *fields in data)


Amended = tuple[str, str, int]
"""outcome, abort, acknowledged: what comes to be known of a turn after it was stored."""


def encode_turn(turn: Turn) -> Json:
    """Everything but the token columns, and what can be amended (outcome, abort, acknowledged), which is stored beside it."""
    return {
        "id": turn.id,
        "index": turn.index,
        "base": turn.base,
        "fork": None if turn.fork is None else encode_fork(turn.fork),
        "prompt_len": turn.prompt_len,
        "prompt_crc": turn.prompt_crc,
        "finish": encode_finish(turn.finish),
        "sampling": encode_sampling(turn.sampling),
        "versions": encode_versions(turn.versions),
        "calls": encode_calls(turn.calls),
        "logprob_convention": turn.logprob_convention,
        "model": turn.model,
        "label": turn.label,
        "escaped": turn.escaped,
        "respelled": turn.respelled,
        "started": turn.started,
        "ended": turn.ended,
        "error": turn.error,
        "pool": turn.pool,
        "pieces": [[piece.start, piece.engine, piece.why] for piece in turn.pieces],
        "surplus": turn.surplus,
        "cached_tokens": turn.cached_tokens,
        "fingerprint": turn.fingerprint,
        "idempotency": turn.idempotency,
        "choice": turn.choice,
        "reasoning_open": turn.reasoning_open,
    }


def decode_turn(data: Json, columns: Amended, appended: IntArray, output: IntArray, logprobs: FloatArray) -> Turn:
    """Fields that stores written earlier do not hold have their defaults."""
    outcome, abort, acknowledged = columns
    return Turn(
        id=data["id"],
        index=data["index"],
        base=data["base"],
        fork=None if data["fork"] is None else decode_fork(data["fork"]),
        appended=appended,
        prompt_len=data["prompt_len"],
        prompt_crc=data["prompt_crc"],
        output=output,
        logprobs=logprobs,
        finish=decode_finish(data["finish"]),
        outcome=Outcome(outcome),
        sampling=decode_sampling(data["sampling"]),
        versions=decode_versions(data["versions"]),
        calls=decode_calls(data["calls"]),
        logprob_convention=data["logprob_convention"],
        model=data["model"],
        label=data.get("label", ""),
        escaped=data["escaped"],
        respelled=data["respelled"],
        started=data["started"],
        ended=data["ended"],
        error=data["error"],
        pool=data.get("pool", ""),
        pieces=tuple(Piece(*fields) for fields in data.get("pieces", ())),
        abort=abort,
        surplus=data.get("surplus", 0),
        cached_tokens=data.get("cached_tokens", 0),
        fingerprint=data.get("fingerprint", ""),
        idempotency=data.get("idempotency", ""),
        choice=data.get("choice", 0),
        reasoning_open=data.get("reasoning_open", False),
        acknowledged=bool(acknowledged),
    )


# Deltas


DeltaColumns = tuple[str, str, bytes, bytes, bytes, bytes, bytes, int, int | None]
"""outcome, abort, nodes, turn, appended, output, logprobs, acknowledged, and the CRC of the bytes: one stored delta."""


def check_delta(delta: Delta) -> None:
    """Raises StoreError for token columns that could not be read back equal, or that do not fit together."""
    turn = delta.turn
    check_ids(turn.appended)
    check_ids(turn.output)
    check_column(turn.logprobs, np.dtype(np.float32))
    if len(turn.output) != len(turn.logprobs):
        raise StoreError(f"turn {turn.id}: {len(turn.output)} sampled ids but {len(turn.logprobs)} logprobs")


def encode_delta(delta: Delta) -> DeltaColumns:
    """Raises StoreError as `check_delta` and `pack` do."""
    turn = delta.turn
    check_delta(delta)
    written = (
        encode_nodes(delta.nodes),
        pack(encode_turn(turn)),
        pack_ids(turn.appended),
        pack_ids(turn.output),
        pack_floats(turn.logprobs),
    )
    return (str(turn.outcome), turn.abort, *written, int(turn.acknowledged), crc(*written))


def decode_delta(columns: DeltaColumns) -> Delta:
    """Raises StoreError."""
    outcome, abort, *written, acknowledged, known = columns
    nodes, turn, appended, output, logprobs = written
    amended = (outcome, abort, acknowledged)
    try:
        check_crc(known, *written)
        decoded = decode_turn(unpack(turn), amended, unpack_ids(appended), unpack_ids(output), unpack_floats(logprobs))
        check_types(decoded)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged("turn is", error) from error
    return Delta(decode_nodes(nodes), decoded)
