"""Every reader of a request, fed valid requests made odd: pure, and through a whole gateway on a socket.

What is read is a request, or is refused with an error that says so in the caller's shape; nothing else ever leaves.

    python -m tests.fuzz.readers --count 60000
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import logging
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import zstandard
from pydantic import ValidationError

from tests.fuzz.bodies import DIALECTS, OPEN
from tests.fuzz.mutate import CONTROL, KEYS, ODD, WORDS, broken, mutated, spelled
from tests.support.dialects import ALL, error_of
from tests.support.gateways import ADMIN, Bench, bench
from turnloom.errors import TurnloomError
from turnloom.gateway.admin import FinishBody, OpenBody, RewardBody
from turnloom.gateway.admin_engines import PauseBody, ResumeBody
from turnloom.gateway.answer import identified
from turnloom.gateway.labels import labelled
from turnloom.gateway.request_limits import DEFAULT_LIMITS
from turnloom.gateway.routes import make_dialects
from turnloom.testing.scripted_engine import ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import Request
from turnloom.wire.contract import COUNT, DEFAULT_READING, Envelope, Reading
from turnloom.wire.labels import recognise
from turnloom.wire.shape import check_shape

READINGS = [make_dialects(DEFAULT_READING), make_dialects(Reading(images="placeholder"))]
EVERY = [*DIALECTS.values(), OPEN]
HEADERS = """
accept user-agent x-turnloom-label x-turnloom-resample idempotency-key x-stainless-retry-count x-codex-turn-metadata
anthropic-beta anthropic-version x-claude-code-agent-id x-parent-session-id x-forwarded-host x-http-method-override origin
content-type expect traceparent
""".split()
AGENTS = ("claude-cli/2.1", "GeminiCLI/1", "opencode/1", "QwenCode/1", "codex_cli_rs/1", "")
ADMIN_BODIES: dict[str, tuple[str, Any]] = {
    "open": ("/sessions", OPEN),
    "reward": ("/sessions/ID/reward", {"value": 0.5}),
    "finish": ("/sessions/ID/finish", {"reward": 1.0}),
    "pause": ("/pause", {"mode": "keep", "seconds": 0.0, "pool": "policy", "engines": False}),
    "resume": ("/resume", {"pool": "policy", "engines": False}),
}
ADMIN_MODELS = {"open": OpenBody, "reward": RewardBody, "finish": FinishBody, "pause": PauseBody, "resume": ResumeBody}
COUNTED = {
    "anthropic": "/v1/messages/count_tokens",
    "openai_responses": "/v1/responses/input_tokens",
    "gemini": "/v1beta/models/m:countTokens",
}


LONGEST = 1500
"""Characters of an error's message, however long what it is about."""


class Escaped(AssertionError):
    """Something other than a request or a refusal came out."""


@dataclass
class Tally:
    """By target: how many inputs, and what became of them."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, target: str, outcome: str, seconds: float) -> None:
        self.outcomes[target][outcome] += 1
        self.seconds[target] += seconds  # type: ignore[assignment]

    def table(self) -> str:
        lines = [f"{'target':<34}{'inputs':>8}{'accepted':>10}{'seconds':>9}  refused"]
        for target, found in sorted(self.outcomes.items()):
            refused = ", ".join(f"{name} {count}" for name, count in found.most_common() if name != "accepted")
            lines.append(f"{target:<34}{found.total():>8}{found['accepted']:>10}{self.seconds[target]:>9.1f}  {refused}")
        whole = sum(self.outcomes.values(), Counter[str]())
        lines.append(f"{'all':<34}{whole.total():>8}{whole['accepted']:>10}{sum(self.seconds.values()):>9.1f}")
        return "\n".join(lines)


# --- what is sent ---


def headers(rng: Random) -> dict[str, str]:
    """Some of those that are read, with values as agents send them and with others."""
    found = {"user-agent": rng.choice(AGENTS)}
    for name in rng.sample(HEADERS, rng.choice((0, 0, 1, 2, 4))):
        value = str(rng.choice((*ODD, *WORDS, "text/event-stream", "side", "1", '{"request_kind":"compaction"}', "[" * 5000)))
        raw = value.encode("utf-8", "replace") if rng.random() < 0.9 else rng.randbytes(8)
        found[name] = _one_line(raw.decode("utf-8", "surrogateescape"))
    return found


def envelope(rng: Random, name: str, *, counting: bool) -> Envelope:
    verb = COUNT if counting else rng.choice(("generateContent", "streamGenerateContent")) if name == "gemini" else ""
    query = {"alt": rng.choice(("sse", "json", ""))} if rng.random() < 0.3 else {}
    return Envelope(headers(rng), query, rng.choice(("m", "models/m", "", "x" * 300)) if name == "gemini" else "", verb)


def body(rng: Random, start: Any) -> bytes:
    return spelled(rng, mutated(rng, start, EVERY))


# --- pure ---


def read_once(rng: Random) -> tuple[str, str]:
    """(target, what became of it). Raises Escaped."""
    if rng.random() < 0.1:
        return admin_once(rng)
    name = rng.choice(list(DIALECTS))
    counting = name in COUNTED and rng.random() < 0.2
    raw, around, dialects = body(rng, DIALECTS[name]), envelope(rng, name, counting=counting), rng.choice(READINGS)
    dialect = getattr(dialects, name)
    target = f"{name}, counted" if counting else name
    try:
        check_shape(raw, depth=DEFAULT_LIMITS.depth, values=DEFAULT_LIMITS.values)
        request = dialect.read(raw, around)
        request = identified(labelled(recognise, name, around, request), name, around, raw)
    except TurnloomError as error:
        if error.status >= 500:
            raise Escaped(f"{target}: {error!r} of {raw[:2000]!r} with {around}") from error
        told = dialect.error(error)
        if len(error_of(ALL[name], told.status, told.body)) > LONGEST:
            raise Escaped(f"{target}: a message of {len(told.body)} bytes: {told.body[:500]!r}") from error
        return target, type(error).__name__
    except Exception as error:
        raise Escaped(f"{target}: {error!r} of {raw[:2000]!r} with {around}") from error
    if not isinstance(request, Request):
        raise Escaped(f"{target}: {request!r}")
    return target, "accepted"


def admin_once(rng: Random) -> tuple[str, str]:
    name = rng.choice(list(ADMIN_BODIES))
    raw = body(rng, ADMIN_BODIES[name][1])
    try:
        check_shape(raw, depth=DEFAULT_LIMITS.depth, values=DEFAULT_LIMITS.values)
        ADMIN_MODELS[name].model_validate_json(raw)
    except (TurnloomError, ValidationError) as error:
        return f"admin {name}", type(error).__name__
    except Exception as error:
        raise Escaped(f"admin {name}: {error!r} of {raw[:2000]!r}") from error
    return f"admin {name}", "accepted"


# --- through a gateway ---

ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "br": bytes,
    "gzip, gzip": gzip.compress,
}


class Client:
    """Sends raw requests to one gateway, a session of it after the other."""

    def __init__(self, b: Bench) -> None:
        self._b = b
        self._key, self._id, self._left = b.handle.key, b.handle.id, 40

    async def once(self, rng: Random) -> tuple[str, str]:
        """(target, what became of it). Raises Escaped."""
        await self._session()
        chosen = rng.random()
        if chosen < 0.1:
            return await self._admin(rng)
        name = rng.choice(list(DIALECTS))
        if name in COUNTED and rng.random() < 0.2:
            path, target = COUNTED[name], f"{name}, counted"
        else:
            path, target = (ALL[name].stream if rng.random() < 0.3 else ALL[name].path), name
        given, raw = headers(rng), body(rng, DIALECTS[name])
        if chosen < 0.2:
            target, (given, raw) = "encodings", _encoded(rng, given, raw)
        head = _head(f"/s/{self._key}{path}", given, raw)
        if chosen > 0.9:
            target, head = "headers", _broken_head(rng, head)
        try:
            status, kind, answer = await self._send(head + raw)
        except ConnectionResetError:
            if target != "headers":
                raise
            return "gateway: headers", "no HTTP"  # it was answered before it was read to its end, and the answer was lost
        return f"gateway: {target}", _judged(name, status, kind, answer, plain=target == "headers")

    async def _session(self) -> None:
        if not self._left:
            await self._b.admin("DELETE", f"/sessions/{self._id}")
            handle = await self._b.gateway.open_session()
            self._key, self._id, self._left = handle.key, handle.id, 40
        self._left -= 1

    async def _admin(self, rng: Random) -> tuple[str, str]:
        name = rng.choice(list(ADMIN_BODIES))
        path, start = ADMIN_BODIES[name]
        raw = body(rng, start)
        given = {**headers(rng), "authorization": f"Bearer {ADMIN}"}
        status, _, answer = await self._send(_head(f"/api/v1{path}".replace("ID", self._id), given, raw) + raw)
        if name == "pause":
            whole = b'{"engines": true}'
            await self._send(_head("/api/v1/resume", {"authorization": f"Bearer {ADMIN}"}, whole) + whole)
        if name == "finish":
            self._left = 0
        if status == 417:
            return f"gateway: admin {name}", "no HTTP"
        told = json.loads(answer)
        if status >= 400 and (status >= 500 or not 5 < len(told["error"]["message"]) <= LONGEST):
            raise Escaped(f"admin {name}: {status} {answer[:500]!r} of {raw[:2000]!r}")
        return f"gateway: admin {name}", "accepted" if status < 400 else told["error"]["type"]

    async def _send(self, raw: bytes) -> tuple[int, str, bytes]:
        host, port = self._b.gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(raw)
            async with asyncio.timeout(60):
                answer = await reader.read()
        except TimeoutError as error:
            raise Escaped(f"no answer to {raw[:3000]!r}") from error
        finally:
            writer.close()
        return _parsed(answer, raw)


def _head(path: str, given: dict[str, str], raw: bytes) -> bytes:
    lines = {"host": "x", "connection": "close", "content-length": str(len(raw)), **given}
    spelled_lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{spelled_lines}\r\n".encode("utf-8", "surrogateescape")


def _one_line(value: str) -> str:
    """Without what no header may hold."""
    return "".join(c for c in value if c >= " " and c != "\x7f")


def _broken_head(rng: Random, head: bytes) -> bytes:
    """Header lines in other bytes; the length stays, so that what is left of them is the body."""
    name = rng.choice((*HEADERS, *KEYS, "authorization", "x-api-key", "x-goog-api-key", "content-encoding")).encode()
    value = rng.choice((CONTROL.encode(), b"\x80\xff", b"Bearer", b"Bearer  x", b"Bearer \xff", b"", b"a" * 70_000, b"tl-" + b"x" * 600))
    line = name + b": " + value + b"\r\n"
    match rng.randrange(4):
        case 0:
            return head.replace(b"\r\n", b"\r\n" + line, 1)
        case 1:
            return head.replace(b"\r\n", b"\r\n" + line * rng.choice((2, 140, 300)), 1)
        case 2:
            return head.replace(b"\r\n", b"\r\n" + broken(rng, line), 1)
        case _:
            return head.replace(b"/s/", rng.choice((b"/s/%2e%2e/", b"/s//", b"/s/\xc3\xa9", b"/s/%00", b"/s/%ff", b"//s/")), 1)


def _encoded(rng: Random, given: dict[str, str], raw: bytes) -> tuple[dict[str, str], bytes]:
    named = rng.choice(list(ENCODINGS))
    packed = ENCODINGS[named](raw)
    return {**given, "content-encoding": named}, packed if rng.random() < 0.5 else broken(rng, packed)


def _parsed(answer: bytes, sent: bytes) -> tuple[int, str, bytes]:
    """(status, content type, body) of a response after which the connection closed."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, rest = rest.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1."):
        raise Escaped(f"no HTTP came back: {answer[:200]!r} for {sent[:3000]!r}")
    lines = head.decode("latin-1").lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    if fields.get("transfer-encoding") == "chunked":
        rest, chunked = b"", rest
        while chunked:
            size, _, chunked = chunked.partition(b"\r\n")
            rest, chunked = rest + chunked[: int(size, 16)], chunked[int(size, 16) + 2 :]
    return int(lines[0].split()[1]), fields.get("content-type", ""), rest


def _judged(name: str, status: int, kind: str, answer: bytes, *, plain: bool) -> str:
    """What became of it, in a word. `plain`: what is no HTTP may be refused in plain text, as an `Expect` that is none is."""
    if status == 200:
        if "event-stream" in kind:
            if not answer.startswith((b"data: ", b"event: ", b":", b"\n")):
                raise Escaped(f"{name}: {answer[:500]!r}")
        else:
            json.loads(answer)
        return "accepted"
    if kind.startswith("text/plain") and (status == 417 or (plain and status == 400)):
        return "no HTTP"
    if status >= 500:
        raise Escaped(f"{name}: {status} {answer[:500]!r}")
    if plain:
        json.loads(answer)
    elif len(error_of(ALL[name], status, answer)) > LONGEST:
        raise Escaped(f"{name}: a message of {len(answer)} bytes: {answer[:500]!r}")
    return str(status)


# --- many ---


async def through_a_gateway(count: int, seed: int, tally: Tally) -> None:
    tokenizer = qwen_tokenizer("qwen2.5")
    engine = ScriptedEngine(lambda *_: "Yes", tokenizer=tokenizer, end_id=tokenizer.control_tokens["<|im_end|>"])
    async with bench(engine=engine, tokenizer=tokenizer, images="placeholder") as b:
        client = Client(b)
        for number in range(count):
            started = time.perf_counter()
            try:
                target, outcome = await client.once(Random(f"{seed} gateway {number}"))
            except Exception as error:
                raise Escaped(f"seed {seed}, number {number}: {error}") from error
            tally.add(target, outcome, time.perf_counter() - started)


def pure(count: int, seed: int, tally: Tally) -> None:
    for number in range(count):
        started = time.perf_counter()
        try:
            target, outcome = read_once(Random(f"{seed} pure {number}"))
        except Exception as error:
            raise Escaped(f"seed {seed}, number {number}: {error}") from error
        tally.add(target, outcome, time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="inputs; a third of them go through a whole gateway")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    logging.getLogger("turnloom").setLevel(logging.CRITICAL)
    tally = Tally()
    pure(asked.count - asked.count // 3, asked.seed, tally)
    asyncio.run(through_a_gateway(asked.count // 3, asked.seed, tally))
    print(tally.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
