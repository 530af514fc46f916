"""Decodes vLLM's streams, of `/inference/v1/generate` and of `/v1/completions`. Pure: payloads in, `Chunk`s out; never touches a socket.

Both give deltas, one choice a payload: `token_ids`, and logprobs that name their
ids (`content[].token_id`, or `tokens[]` as `token_id:N`). With
`continuous_usage_stats` each payload also counts the prompt's and all output
tokens, so that a payload that was lost, repeated or cumulative contradicts the
count. A last payload without a choice has the usage in full, after the one with
the finish reason. Nothing that contradicts itself, or counts another prompt than
the one that was sent, becomes a token.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NoReturn

import orjson

from turnloom.counters import swallowed
from turnloom.engine.answers import check_prompt_tokens, read_spans
from turnloom.engine.contract import LOGPROB_SLACK, Chunk
from turnloom.engine.http import error_for_status
from turnloom.engine.prompts import INT32_END
from turnloom.errors import EngineProtocol, EngineRejected
from turnloom.types import NO_FLOATS, NO_IDS, Finish, FinishReason, IntArray, floats, ids

log = logging.getLogger("turnloom.engine")

NO_LOGPROB = -9999.0
"""What vLLM writes for a logprob that it does not have, or that is NaN or minus infinity."""

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class StreamDecoder:
    """Fed one payload after another, gives the new tokens of each.

    `vocab_size` None checks ids against int32 only; `prompt` None takes what the server says of the prompt unread.
    """

    def __init__(self, vocab_size: int | None = None, prompt: IntArray | None = None) -> None:
        self._id_end = vocab_size if vocab_size is not None else INT32_END
        self._prompt = prompt
        self._last = b""
        self._dropped = False
        self.count = 0
        self.finished = False
        self.cached_tokens = 0
        """Prompt tokens that were in the cache: known after the last chunk, where the server tells (`--enable-prompt-tokens-details`)."""

    def feed(self, data: bytes) -> Chunk | None:
        """The new tokens of one payload; None for the last one again, or where there is no choice in it.

        Raises EngineProtocol when it is not JSON or contradicts itself or what
        came before; EngineRejected, EngineOverloaded or EngineUnavailable when it says so.
        """
        try:
            payload = orjson.loads(data)
        except ValueError as error:
            raise EngineProtocol(f"the engine sent a line that is not JSON: {data[:80]!r}") from error
        if not isinstance(payload, dict):
            raise EngineProtocol("the engine sent a payload that is no object")
        if payload.get("error") is not None or payload.get("object") == "error":
            _raise_error_event(payload.get("error") or payload)
        choices, usage = payload.get("choices"), payload.get("usage")
        if choices == []:
            self._check_usage(usage, self.count)
            return None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict) or choices[0].get("index", 0) != 0:
            raise EngineProtocol("the engine sent a payload that is not one choice")
        if self.finished:
            if data != self._last and (choices[0].get("token_ids") or choices[0].get("finish_reason") is None):
                raise EngineProtocol("the engine went on after the last chunk")
            return None
        self._last = data
        return self._read(payload, choices[0], usage)

    def _read(self, payload: dict[str, Any], choice: dict[str, Any], usage: Any) -> Chunk:
        reason = choice.get("finish_reason")
        if reason is not None and reason not in _FINISHES:
            raise EngineProtocol(f"the engine finished with {reason!r}, which is not known")
        try:
            self._check_prompt(choice.get("prompt_token_ids") or payload.get("prompt_token_ids"))
            new_ids, new_logprobs = self._new_tokens(choice)
            self._check_usage(usage, self.count + len(new_ids))
        except EngineProtocol as error:
            # The tokens that came before an abort stand.
            if reason != "abort":
                raise
            swallowed(
                log,
                "engine.last_chunk",
                "the last chunk of an aborted request is not usable, its tokens are dropped: %s",
                error,
                level=logging.INFO,
            )
            new_ids, new_logprobs, self._dropped = [], [], True
        finish = None if reason is None else _read_finish(reason, choice.get("stop_reason"), new_ids)
        total = self.count + len(new_ids)
        spans = () if finish is None else read_spans(choice.get("weight_versions") or (), total)
        self.count, self.finished = total, finish is not None
        return Chunk(
            ids=ids(new_ids) if new_ids else NO_IDS,
            logprobs=floats(new_logprobs) if new_logprobs else NO_FLOATS,
            finish=finish,
            versions=spans,
        )

    def _new_tokens(self, choice: dict[str, Any]) -> tuple[list[int], list[float]]:
        new = choice.get("token_ids")
        if not isinstance(new, list):
            raise EngineProtocol("the engine sent a choice without token_ids")
        pairs = _read_logprobs(choice.get("logprobs")) if new else []
        if len(pairs) != len(new):
            raise EngineProtocol(f"the engine sent {len(pairs)} logprobs for {len(new)} tokens")
        return new, [self._check(token, named, value) for token, (named, value) in zip(new, pairs, strict=True)]

    def _check(self, token: Any, named: Any, value: Any) -> float:
        """The logprob of one token whose id and whose logprob's id agree."""
        if not isinstance(token, int) or not 0 <= token < self._id_end:
            raise EngineProtocol(f"the engine sent {token!r}, which is no token id")
        if named != token:
            raise EngineProtocol(f"the engine's logprob is for {named!r} and its token is {token}")
        return sound_logprob(token, value)

    def _check_prompt(self, said: Any) -> None:
        if self._prompt is not None and said and said != self._prompt.tolist():
            raise EngineProtocol("the engine saw another prompt than the one that was sent")

    def _check_usage(self, usage: Any, count: int) -> None:
        """The server's own counts, where it gives them: of the prompt, and of all output tokens so far."""
        if not isinstance(usage, dict):
            return
        if self._prompt is not None:
            check_prompt_tokens(usage, len(self._prompt))
        total = usage.get("completion_tokens")
        if total is not None and total != count and not self._dropped:
            raise EngineProtocol(f"the engine counts {total!r} output tokens where it sent {count}")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.cached_tokens = cached if isinstance(cached, int) else self.cached_tokens


def sound_logprob(token: int, value: Any) -> float:
    """`value`, when it can be the logprob of a sampled token. Raises EngineProtocol."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise EngineProtocol(f"the engine's logprob for token {token} is {value!r}")
    if value > LOGPROB_SLACK:
        raise EngineProtocol(f"the engine's logprob for token {token} is {value!r}, which is above 0")
    if value <= NO_LOGPROB:
        raise EngineProtocol(f"the engine has no logprob for token {token}: it says {value!r}")
    return float(value)


def _read_logprobs(said: Any) -> list[tuple[Any, Any]]:
    """The id and logprob of each new token, in either route's form."""
    try:
        if "content" in said:
            return [(e["token_id"] if "token_id" in e else _id_of(e["token"]), e["logprob"]) for e in said["content"] or ()]
        return [(_id_of(word), value) for word, value in zip(said["tokens"], said["token_logprobs"], strict=True)]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise EngineProtocol(f"the engine's logprobs cannot be read: {str(said)[:200]}") from error


def _id_of(word: Any) -> int:
    """N of `token_id:N`: the spelling of a token would not tell which one it is."""
    name, _, number = word.partition(":")
    if name != "token_id":
        raise ValueError(f"{word!r} names no id")
    return int(number)


def _read_finish(reason: str, matched: Any, last: list[int]) -> Finish:
    """`stop_reason` is the stop token or stop string; null at the model's own end token, which is then the last id."""
    if reason == "abort":
        return Finish(FinishReason.ABORT, message="the engine aborted the request")
    if isinstance(matched, int) and last and last[-1] != matched:
        raise EngineProtocol(f"the engine stopped at token {matched}, and the last one that it sent is {last[-1]}")
    return Finish(_FINISHES[reason], matched=matched if reason == "stop" and isinstance(matched, int | str) else None)


def _raise_error_event(error: Any) -> NoReturn:
    """What ends a stream where vLLM finds a request invalid, or fails, after the stream began: `{message, type, code}`."""
    if isinstance(error, dict):
        code = error.get("code")
        raise error_for_status(code if isinstance(code, int) else 400, str(error.get("message") or error))
    raise EngineRejected(str(error))
