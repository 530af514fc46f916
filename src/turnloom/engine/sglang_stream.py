"""Decodes SGLang's `/generate` stream. Pure: bytes or parsed payloads in, `Chunk`s out; never touches a socket.

Servers differ in what a chunk carries. `output_ids` and the logprob triples
`[logprob, id, text]` are each cumulative or incremental, on their own, and some
versions mix the two. `meta_info.completion_tokens` says how many tokens there
are in all, so each list is read by its length: as long as the total, it is
cumulative; as long as what is new, it is incremental; anything else contradicts
the count. Nothing that contradicts itself, or counts another prompt than the one
that was sent, becomes a token.
"""

from __future__ import annotations

import base64
import logging
import math
from typing import Any, NoReturn

import numpy as np
import orjson

from turnloom.counters import swallowed
from turnloom.engine.answers import check_prompt_tokens, read_spans
from turnloom.engine.contract import LOGPROB_SLACK, Chunk
from turnloom.engine.http import error_for_status
from turnloom.engine.prompts import INT32_END
from turnloom.errors import EngineProtocol, EngineRejected
from turnloom.types import NO_FLOATS, NO_IDS, Finish, FinishReason, IntArray, VersionSpan, floats, ids

log = logging.getLogger("turnloom.engine")

ROUTED_EXPERTS = "routed_experts"

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class StreamDecoder:
    """Fed one payload after another, gives the new tokens of each.

    `vocab_size` None checks ids against int32 only; `prompt_len` None takes the server's count of prompt tokens unread.
    `experts` is how many experts are chosen per token, over all layers, 0 where none are asked for.
    """

    def __init__(self, vocab_size: int | None = None, prompt_len: int | None = None, experts: int = 0) -> None:
        self._id_end = vocab_size if vocab_size is not None else INT32_END
        self._prompt_len = prompt_len
        self._experts = experts
        self._ids: list[int] = []
        self._spans: list[VersionSpan] = []
        self.finished = False

    @property
    def count(self) -> int:
        """Output tokens so far."""
        return len(self._ids)

    def feed(self, data: bytes) -> Chunk | None:
        """The new tokens of one payload; None for a repetition of the last one.

        Raises EngineProtocol when it is not JSON or contradicts itself or what
        came before; EngineRejected, EngineOverloaded or EngineUnavailable when it says so.
        """
        try:
            payload = orjson.loads(data)
        except ValueError as error:
            raise EngineProtocol(f"the engine sent a line that is not JSON: {data[:80]!r}") from error
        if isinstance(payload, dict) and "error" in payload:
            _raise_error_event(payload["error"])
        meta = payload.get("meta_info") if isinstance(payload, dict) else None
        if not isinstance(meta, dict):
            raise EngineProtocol("the engine sent a payload without meta_info")
        reason = meta.get("finish_reason")
        if self.finished:
            if reason is None or not self._repeats(payload, meta):
                raise EngineProtocol("the engine went on after the last chunk")
            return None
        finish = None if reason is None else _read_finish(reason)
        new_ids, new_logprobs = self._read_tokens(payload, meta, finish)
        spans = self._read_versions(meta, len(new_ids), last=finish is not None)
        arrays = {} if finish is None else self._read_arrays(meta, self.count + len(new_ids), finish)
        self._ids += new_ids
        self.finished = finish is not None
        cached = meta.get("cached_tokens")
        return Chunk(
            ids=ids(new_ids) if new_ids else NO_IDS,
            logprobs=floats(new_logprobs) if new_logprobs else NO_FLOATS,
            finish=finish,
            versions=spans,
            cached_tokens=cached if isinstance(cached, int) else 0,
            version=None if meta.get("weight_version") is None else str(meta["weight_version"]),
            arrays=arrays,
        )

    def _repeats(self, payload: dict[str, Any], meta: dict[str, Any]) -> bool:
        again = payload.get("output_ids") or []
        told = isinstance(again, list) and again == self._ids[self.count - len(again) :]
        return told and meta.get("completion_tokens", self.count) == self.count

    def _read_tokens(self, payload: dict[str, Any], meta: dict[str, Any], finish: Finish | None) -> tuple[list[int], list[float]]:
        try:
            return self._new_tokens(payload, meta)
        except EngineProtocol as error:
            # An aborted request's last chunk may hold only its last token, or nothing at all. What came before stands.
            if finish is None or finish.reason is not FinishReason.ABORT:
                raise
            swallowed(
                log,
                "engine.last_chunk",
                "the last chunk of an aborted request is not usable, its tokens are dropped: %s",
                error,
                level=logging.INFO,
            )
            return [], []

    def _new_tokens(self, payload: dict[str, Any], meta: dict[str, Any]) -> tuple[list[int], list[float]]:
        if self._prompt_len is not None:
            check_prompt_tokens(meta, self._prompt_len)
        held = self.count
        total, output, triples = meta.get("completion_tokens"), payload.get("output_ids"), meta.get("output_token_logprobs")
        if type(total) is not int or not isinstance(output, list):
            raise EngineProtocol("the engine sent a payload without completion_tokens or output_ids")
        if total < held:
            raise EngineProtocol(f"the engine took tokens back: {held} before, {total} now")
        if triples is None and total == held:
            triples = []
        if not isinstance(triples, list):
            raise EngineProtocol("the engine sent tokens without logprobs")
        new = _tail("output_ids", output, held, total)
        if len(output) > len(new) and output[:held] != self._ids:
            raise EngineProtocol("the engine changed tokens it had sent")
        logprobs: list[float] = []
        for token, triple in zip(new, _tail("logprobs", triples, held, total), strict=True):
            logprobs.append(self._check(token, triple))
        return new, logprobs

    def _check(self, token: Any, triple: Any) -> float:
        """The logprob of one token whose id and triple agree."""
        if type(token) is not int or not 0 <= token < self._id_end:
            raise EngineProtocol(f"the engine sent {token!r}, which is no token id")
        if not isinstance(triple, list) or len(triple) < 2 or triple[1] != token:
            raise EngineProtocol(f"the engine's logprob {triple!r} is not for its token {token}")
        value = triple[0]
        if type(value) not in (int, float) or not math.isfinite(value):
            raise EngineProtocol(f"the engine's logprob for token {token} is {value!r}")
        if value > LOGPROB_SLACK:
            raise EngineProtocol(f"the engine's logprob for token {token} is {value!r}, which is above 0")
        return float(value)

    def _read_arrays(self, meta: dict[str, Any], count: int, finish: Finish) -> dict[str, IntArray]:
        """What comes with the last payload, for all `count` output tokens at once."""
        if not self._experts or meta.get("routed_experts") is None:
            return {}
        try:
            return {ROUTED_EXPERTS: read_experts(meta["routed_experts"], count, self._experts, self._prompt_len or 1)}
        except EngineProtocol as error:
            if finish.reason is not FinishReason.ABORT:
                raise
            swallowed(
                log, "engine.last_chunk", "the last chunk of an aborted request gives no usable experts: %s", error, level=logging.INFO
            )
            return {}

    def _read_versions(self, meta: dict[str, Any], new: int, *, last: bool) -> tuple[VersionSpan, ...]:
        """The spans over all tokens, on the last payload: those that it lists, else those that the payloads named one by one.

        A payload's `weight_version` is that of the tokens that are new in it: an update in mid-stream changes it.
        """
        count, version, listed = self.count + new, meta.get("weight_version"), meta.get("weight_versions")
        if last and listed:
            return read_spans(listed, count)
        if version is not None and new:
            name, start = str(version), self.count
            if self._spans and self._spans[-1].version == name and self._spans[-1].end == start:
                start = self._spans.pop().start
            self._spans.append(VersionSpan(name, start, count))
        return tuple(self._spans) if last else ()


def read_experts(said: Any, count: int, width: int, prompt_len: int = 1) -> IntArray:
    """Experts [count, width] int32 from base64: row i is the forward pass that sampled output token i.

    `width` is layers times experts per token; 0 takes what there is. SGLang has a row for each token that
    was read, so none for the last one sampled, beginning with the prompt's last token where it was
    asked to (`routed_experts_start_len`) and with the prompt's first where it knows no such request.
    Raises EngineProtocol for any other length.
    """
    try:
        flat = np.frombuffer(base64.b64decode(said, validate=True), dtype="<i4")
    except (TypeError, ValueError) as error:
        raise EngineProtocol("the engine's routed_experts are not base64 of int32") from error
    rows = prompt_len + count - 1
    if not width and count:
        width = len(flat) // count
    if len(flat) not in (count * width, rows * width):
        raise EngineProtocol(f"the engine sent {len(flat)} routed_experts for {count} tokens of {width}")
    return flat[len(flat) - count * width :].astype(np.int32).reshape(count, width)


def _tail(what: str, values: list[Any], held: int, total: int) -> list[Any]:
    """The new entries of a list that is cumulative or incremental."""
    if len(values) == total:
        return values[held:]
    if len(values) == total - held:
        return values
    raise EngineProtocol(f"the engine sent {len(values)} {what} where {total} tokens are sampled and {held} were known")


def _read_finish(reason: Any) -> Finish:
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind == "abort":
        message = str(reason.get("message") or "the engine aborted the request")
        status = reason.get("status_code")
        if isinstance(status, int) and status >= 400:
            raise error_for_status(status, message)
        return Finish(FinishReason.ABORT, message=message)
    if kind not in _FINISHES:
        raise EngineProtocol(f"the engine finished with {kind!r}, which is not known")
    matched = reason.get("matched")
    return Finish(_FINISHES[kind], matched=matched if isinstance(matched, int | str) else None)


def _raise_error_event(error: Any) -> NoReturn:
    """An `error` event: SGLang sends one for a request it finds invalid after the stream began, without a status."""
    if isinstance(error, dict):
        status = next((error[key] for key in ("status_code", "code") if isinstance(error.get(key), int)), 400)
        raise error_for_status(status, str(error.get("message") or error))
    raise EngineRejected(str(error))
