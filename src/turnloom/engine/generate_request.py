"""Reads and checks the body of SGLang's `/generate`, for the embedded server. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from turnloom.engine.llamacpp import Policy
from turnloom.render.contract import Tokenizer


class InvalidRequest(Exception):
    """Answered with 400 and these words."""


@dataclass(frozen=True, slots=True)
class Params:
    policy: Policy
    max_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    seed: int | None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`logprob_start` None when no prompt logprobs are wanted."""

    rid: str
    prompt: list[int]
    params: Params
    stream: bool
    return_logprob: bool
    logprob_start: int | None


_NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "n": 1,
}
"""Parameters of SGLang's that are taken only at the value that does nothing."""

_TEXT_ONLY = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}
"""Parameters that shape `text` alone, which here always is all of it."""

_KNOWN = {"temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop", "stop_token_ids", "ignore_eos", "sampling_seed", "seed"}


def read_generate(raw: bytes, rid: str, context: int, vocab_size: int, tokenizer: Tokenizer | None) -> GenerateRequest:
    """The request; `rid` is for one that brings none. Raises InvalidRequest."""
    try:
        body = orjson.loads(raw)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object")
    prompt = _read_prompt(body, vocab_size, tokenizer)
    params = _read_params(body.get("sampling_params") or {}, tokenizer)
    if len(prompt) >= context:
        raise InvalidRequest(f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens).")
    if len(prompt) + params.max_new_tokens > context:
        total = len(prompt) + params.max_new_tokens
        raise InvalidRequest(f"Requested {total} tokens, more than the model's context length of {context} tokens.")
    start = body.get("logprob_start_len", -1)
    if not _whole(start) or start >= len(prompt):
        raise InvalidRequest(f"logprob_start_len {start!r} is not within the prompt of {len(prompt)} tokens")
    wanted = bool(body.get("return_logprob"))
    return GenerateRequest(
        rid=str(body.get("rid") or rid),
        prompt=prompt,
        params=params,
        stream=bool(body.get("stream")),
        return_logprob=wanted,
        logprob_start=start if wanted and start >= 0 else None,
    )


def _read_prompt(body: dict[str, Any], vocab_size: int, tokenizer: Tokenizer | None) -> list[int]:
    prompt = body.get("input_ids")
    if prompt is None and isinstance(body.get("text"), str):
        if tokenizer is None:
            raise InvalidRequest("this model's tokenizer cannot be rebuilt; give input_ids")
        prompt = tokenizer.encode(body["text"])
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest("input_ids must be a list of token ids, and not empty")
    for index in prompt:
        if not _whole(index) or not 0 <= index < vocab_size:
            raise InvalidRequest(f"the input id {index!r} is outside the vocabulary of {vocab_size}")
    return prompt


def _read_params(given: Any, tokenizer: Tokenizer | None) -> Params:
    if not isinstance(given, dict):
        raise InvalidRequest("sampling_params must be an object")
    for name, value in given.items():
        if name in _NEUTRAL:
            if value not in (None, _NEUTRAL[name]):
                raise InvalidRequest(f"{name} is not supported by the embedded engine")
        elif name not in _KNOWN | _TEXT_ONLY:
            raise InvalidRequest(f"Unexpected sampling parameter {name!r}")
    top_k = _number(given, "top_k", -1, lambda v: _whole(v) and (v == -1 or v >= 1))
    stop = given.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise InvalidRequest("stop must be a string or a list of strings, none empty")
    if stops and tokenizer is None:
        raise InvalidRequest("this model's tokenizer cannot be rebuilt, so stop strings cannot be found")
    stop_ids = given.get("stop_token_ids") or ()
    if not all(_whole(index) for index in stop_ids):
        raise InvalidRequest("stop_token_ids must be a list of token ids")
    seed_name = "sampling_seed" if given.get("sampling_seed") is not None else "seed"
    return Params(
        policy=Policy(
            temperature=float(_number(given, "temperature", 1.0, lambda v: v >= 0)),
            top_k=0 if top_k == -1 else int(top_k),
            top_p=float(_number(given, "top_p", 1.0, lambda v: 0 < v <= 1)),
            min_p=float(_number(given, "min_p", 0.0, lambda v: 0 <= v <= 1)),
        ),
        # SGLang's own default.
        max_new_tokens=int(_number(given, "max_new_tokens", 128, lambda v: _whole(v) and v >= 0)),
        stop=stops,
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=bool(given.get("ignore_eos")),
        seed=None if given.get(seed_name) is None else int(_number(given, seed_name, 0, _whole)),
    )


def _number(given: dict[str, Any], name: str, default: float, fits: Callable[[Any], bool]) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not fits(value):
        raise InvalidRequest(f"{name} {value!r} is out of range")
    return value


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
