"""What a scripted engine says: a reply's tokens, its faults, and the payloads that carry them. No IO."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import orjson

from turnloom.render.contract import Tokenizer


class Fault(StrEnum):
    """What goes wrong with one reply. The first group answers no stream at all."""

    HTTP_400 = "http_400"
    HTTP_429 = "http_429"
    HTTP_500 = "http_500"
    HTTP_503 = "http_503"
    HANG = "hang"
    """No answer, until aborted or released."""
    RESET = "reset"
    """The connection is closed before the response starts."""

    STALL = "stall"
    """Half the tokens, then nothing, until aborted or released."""
    CUT = "cut"
    """Half the tokens, then the connection is closed."""
    ERROR_EVENT = "error_event"
    """Half the tokens, then an `error` event."""
    NO_FINISH = "no_finish"
    """All the tokens and `[DONE]`, but no finish reason."""
    GARBAGE = "garbage"
    """Half the tokens, then a line that is not JSON."""
    MISSING_LOGPROB = "missing_logprob"
    NULL_LOGPROB = "null_logprob"
    WRONG_ID = "wrong_id"
    """One logprob triple names another token."""
    REWRITTEN = "rewritten"
    """A later cumulative chunk changes an earlier token."""
    ID_OUTSIDE = "id_outside"
    """One id is outside the vocabulary."""
    ABORT = "abort"
    """Half the tokens, then an abort with HTTP 200."""
    ABORT_COLLAPSED = "abort_collapsed"
    """The same, but the last chunk's `output_ids` hold only the last token."""
    ABORT_400 = "abort_400"
    """The same, with a status code of 400 in the finish reason."""
    ABORT_503 = "abort_503"
    DUPLICATE_FINAL = "duplicate_final"
    """The last chunk comes twice."""
    MORE_AFTER_FINAL = "more_after_final"
    """After the last chunk another one, with a token more."""
    ABORT_QUEUED = "abort_queued"
    """An abort before anything was sampled, as one in the waiting queue ends."""
    SHORT_EXPERTS = "short_experts"
    """The routed experts are those of a token less."""


REFUSALS = {Fault.HTTP_400: 400, Fault.HTTP_429: 429, Fault.HTTP_500: 500, Fault.HTTP_503: 503}
_ABORTS = {Fault.ABORT: None, Fault.ABORT_COLLAPSED: None, Fault.ABORT_400: 400, Fault.ABORT_503: 503}
Style = Literal["cumulative", "incremental", "mixed"]

_HALF = {Fault.STALL, Fault.CUT, Fault.ERROR_EVENT, Fault.GARBAGE, *_ABORTS}


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted answer: `ids`, or `text` to be encoded, then the `end` token (None: the engine's own; -1: no end token).

    With `finish` "stop" the last token counts as the stop that matched, unless
    `matched` says otherwise. More tokens than the request allows are cut to a
    "length" finish. `style` says whether ids and logprobs come cumulative
    (SGLang's default), incremental, or mixed (ids incremental, logprobs cumulative);
    of several, each is for one chunk and the last for the rest.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    end: int | None = None
    finish: Literal["stop", "length", "abort"] = "stop"
    matched: int | str | None = None
    logprobs: tuple[float, ...] | None = None
    past: tuple[int, ...] = ()
    """Sampled after the stop that `finish` names."""
    style: Style | tuple[Style, ...] = "cumulative"
    chunk: int = 4
    """Tokens a chunk."""
    delay: float = 0.0
    """Seconds before each chunk."""
    fault: Fault | None = None
    retry_after: str = ""
    """The `Retry-After` header of a refusal."""
    versions: tuple[tuple[str, int, int], ...] = ()
    """Which weights sample which tokens, whatever the server has then."""
    claimed: str = ""
    """The version that every chunk names, whatever is true."""
    cached_tokens: int = 0


def logprob_at(position: int, token_id: int) -> float:
    """A made-up logprob in (-1, 0), exact in float32, for `token_id` at `position` of the whole sequence."""
    return -((position * 31 + token_id * 17) % 1023 + 1) / 1024


def experts_at(position: int, token_id: int, width: int) -> list[int]:
    """Made-up experts [width] that read `token_id` at `position` of the whole sequence."""
    return [(position * 7 + token_id * 3 + k) % 128 for k in range(width)]


class Traits(Protocol):
    """What a reply needs to know of its engine."""

    tokenizer: Tokenizer | None
    end_id: int | None
    vocab_size: int
    weight_version: str


class Extras(Protocol):
    """What it need not know: the weights that sample, and how they and the experts are told."""

    weights: str
    lists_versions: bool
    experts: int
    experts_from_start: bool


@dataclass(frozen=True, slots=True)
class _None:
    weights: str = ""
    lists_versions: bool = False
    experts: int = 0
    experts_from_start: bool = False


_NONE = _None()


class Output:
    """The tokens of one reply to one request, and the payloads that carry them. `engine` is what the server says of itself."""

    def __init__(self, engine: Traits, reply: Reply, prompt: list[int], body: dict[str, Any], extras: Extras | None = None) -> None:
        self.extras = extras or _NONE
        self.engine, self.reply, self.prompt, self.rid, self.body = engine, reply, prompt, body.get("rid"), body
        ids = list(reply.ids)
        if reply.text:
            if engine.tokenizer is None:
                raise ValueError("a reply of text needs the scripted engine's tokenizer")
            ids += engine.tokenizer.encode(reply.text)
        end = engine.end_id if reply.end is None and not reply.ids else reply.end
        if reply.finish == "stop" and end is not None and end >= 0:
            ids.append(end)
        limit = (body.get("sampling_params") or {}).get("max_new_tokens")
        self.finish: dict[str, Any] = {"type": reply.finish}
        if limit is not None and len(ids) > limit:
            ids, self.finish = ids[:limit], {"type": "length"}
        self.stop = ids[-1] if ids else None
        if self.finish["type"] == "stop":
            ids += reply.past
        self.ids = ids
        self.told = 0
        """Tokens whose payloads are out."""
        self.sent = 0
        """Payloads that are out."""
        self.spans: list[tuple[str, int, int]] = []
        if reply.logprobs is None:
            self.logprobs: list[float | None] = [logprob_at(len(prompt) + i, token) for i, token in enumerate(ids)]
        else:
            self.logprobs = list(reply.logprobs[: len(ids)])
        self._finish_details()

    def _finish_details(self) -> None:
        kind = self.finish["type"]
        if kind == "stop":
            self.finish["matched"] = self.reply.matched if self.reply.matched is not None else self.stop
        elif kind == "length":
            self.finish["length"] = len(self.ids)
        else:
            self.finish.update(message="Aborted", status_code=None, err_type=None)

    async def events(self, aborted: asyncio.Event, going: asyncio.Event | None = None) -> AsyncIterator[bytes]:
        """The payloads, from where an earlier reader left off; silent while `going` is cleared, aborted or not."""
        fault, going = self.reply.fault, going or _open()
        if fault is Fault.ABORT_QUEUED:
            yield orjson.dumps(self._never_ran())
            return
        total = len(self.ids) // 2 if fault in _HALF else len(self.ids)
        while self.told < total and not await self._pause(aborted, going):
            start, upto = self.told, min(self.told + max(1, self.reply.chunk), total)
            last = upto == len(self.ids) and fault is not Fault.NO_FINISH
            self.sample(start, upto)
            self.told = upto
            yield self._dump(self.payload(start, upto, last=last), start)
        if aborted.is_set() and fault is not Fault.STALL and self.told < total:
            yield self._dump(self._aborted(None), self.told)
            return
        async for data in self._ending(aborted, going):
            yield data

    async def _ending(self, aborted: asyncio.Event, going: asyncio.Event) -> AsyncIterator[bytes]:
        fault, told = self.reply.fault, self.told
        if fault is Fault.STALL:
            await aborted.wait()
            await going.wait()
            yield self._dump(self._aborted(None), told)
        elif fault in _ABORTS:
            yield self._dump(self._aborted(_ABORTS[fault]), told)
        elif fault is Fault.ERROR_EVENT:
            yield orjson.dumps({"error": {"message": "scripted error"}})
        elif fault is Fault.GARBAGE:
            yield b'{"text": "'
        elif fault is Fault.MORE_AFTER_FINAL:
            self.ids.append(self.ids[-1])
            self.logprobs.append(self.logprobs[-1])
            self.sample(told, told + 1)
            yield self._dump(self.payload(told, told + 1, last=True), told)
        elif fault is Fault.DUPLICATE_FINAL or not self.ids:
            yield self._dump(self.payload(told, told, last=True), told)

    async def _pause(self, aborted: asyncio.Event, going: asyncio.Event) -> bool:
        """Wait the delay of a chunk; true when the request was aborted meanwhile."""
        if self.reply.delay and not aborted.is_set():
            waiter = asyncio.ensure_future(aborted.wait())
            try:
                await asyncio.wait([waiter], timeout=self.reply.delay)
            finally:
                waiter.cancel()
        else:
            await asyncio.sleep(0)
        await going.wait()
        return aborted.is_set()

    def sample(self, start: int, upto: int) -> None:
        """Tokens [start, upto) come into being now, by the weights that the server has."""
        before = self.spans[-1] if self.spans else None
        if before is not None and before[0] == self.extras.weights:
            start = self.spans.pop()[1]
        self.spans.append((self.extras.weights, start, upto))

    def payload(self, start: int, upto: int, *, last: bool) -> dict[str, Any]:
        """The JSON of tokens [start, upto) in the reply's style."""
        style = self._style(start)
        ids = self.ids[0 if style == "cumulative" else start : upto]
        begin = start if style == "incremental" else 0
        triples = [[value, token, None] for value, token in zip(self.logprobs[begin:upto], self.ids[begin:upto], strict=True)]
        own = [version for version, begun, end in self.reply.versions if begun < upto <= end]
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish if last else None,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": upto,
            "cached_tokens": self.reply.cached_tokens,
            "weight_version": self.reply.claimed or (own[0] if own else self.engine.weight_version),
            "output_token_logprobs": triples,
        }
        if last and (self.reply.versions or self.extras.lists_versions):
            spans = self.reply.versions or self.spans
            meta["weight_versions"] = [{"version": v, "start": a, "end": min(b, upto)} for v, a, b in spans if a < upto]
        if last and self.extras.experts and self.body.get("return_routed_experts"):
            meta["routed_experts"] = self._experts(upto)
        tokenizer = self.engine.tokenizer
        return {"text": tokenizer.decode(ids) if tokenizer else "", "output_ids": ids, "meta_info": meta}

    def _style(self, start: int) -> Style:
        styles: Sequence[Style] = (self.reply.style,) if isinstance(self.reply.style, str) else self.reply.style
        return styles[min(start // max(1, self.reply.chunk), len(styles) - 1)]

    def _experts(self, upto: int) -> str:
        """Of every token that was read, from where the request says: the last one sampled was not."""
        read = [*self.prompt, *self.ids[:upto]][:-1]
        start = 0 if self.extras.experts_from_start else int(self.body.get("routed_experts_start_len") or 0)
        rows = [experts_at(position, read[position], self.extras.experts) for position in range(start, len(read))]
        if self.reply.fault is Fault.SHORT_EXPERTS:
            rows = rows[1:]
        return base64.b64encode(np.array(rows, dtype="<i4").tobytes()).decode()

    def _never_ran(self) -> dict[str, Any]:
        finish = {"type": "abort", "message": "Abort in waiting queue"}
        meta: dict[str, Any] = {"id": self.rid, "finish_reason": finish, "completion_tokens": 0, "output_token_logprobs": []}
        return {"text": "", "output_ids": [], "meta_info": meta}

    def _aborted(self, status: int | None) -> dict[str, Any]:
        sent = self.told
        payload = self.payload(sent, sent, last=True)
        kind = "BadRequestError" if status == 400 else None
        payload["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted", "status_code": status, "err_type": kind}
        if self.reply.fault is Fault.ABORT_COLLAPSED:
            payload["output_ids"] = self.ids[max(0, sent - 1) : sent]
        return payload

    def _dump(self, payload: dict[str, Any], start: int) -> bytes:
        """The payload, spoiled as the fault says."""
        fault, triples, ids = self.reply.fault, payload["meta_info"]["output_token_logprobs"], payload["output_ids"]
        if fault is Fault.MISSING_LOGPROB and triples:
            triples.pop()
        elif fault is Fault.NULL_LOGPROB and triples:
            triples[-1][0] = None
        elif fault is Fault.WRONG_ID and triples:
            triples[-1][1] += 1
        elif fault is Fault.REWRITTEN and start and ids:
            ids[0] += 1
            triples[0][1] += 1
        elif fault is Fault.ID_OUTSIDE and ids:
            ids[-1] = triples[-1][1] = self.engine.vocab_size
        return orjson.dumps(payload)


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def read_script(path: Path) -> list[Reply]:
    """The replies of a JSON list of texts, or of objects with Reply's fields."""
    replies = []
    for item in json.loads(path.read_text("utf-8")):
        fields: dict[str, Any] = {"text": item} if isinstance(item, str) else dict(item)
        for name in ("ids", "logprobs", "past", "style"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        fields["versions"] = tuple((version, start, end) for version, start, end in fields.get("versions", ()))
        replies.append(Reply(**fields))
    return replies
