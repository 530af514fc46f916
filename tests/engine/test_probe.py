"""What a probe finds: its judgement as tables, its measurements against real HTTP servers that answer from a script."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from turnloom.engine import http, probe, probe_http
from turnloom.engine.probe import open_probe, probe_engines
from turnloom.engine.probe_profile import (
    EMBEDDED,
    Difference,
    Finding,
    Profile,
    Severity,
    WorkerProfile,
    findings,
    measured_convention,
    pool_findings,
)
from turnloom.engine.sglang_stream import StreamDecoder
from turnloom.errors import ConfigError, EngineProtocol, EngineUnavailable
from turnloom.testing.scripted_engine import Fault, Reply, ScriptedEngine
from turnloom.testing.scripted_router import ScriptedRouter
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.types import AbortOutcome

CLI = Path(__file__).parents[2] / "docs" / "cli.md"
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
EXACT = Difference(1e-5, 1e-6, 48)
SOUND = Profile(
    name="http://host:1",
    asked="sglang",
    kind="sglang",
    version="0.5",
    key_needed=False,
    health=True,
    model="m",
    context_length=4096,
    vocab_size=1000,
    tokenizer_vocab=990,
    text_agrees=True,
    structured=True,
    weight_version="v1",
    sampled_version="v1",
    convention="temperature",
    measured="temperature",
    difference=EXACT,
    tokens=48,
    bursts=48,
    prompt_sent=272,
    prompt_counted=272,
    cached_tokens=271,
    end_kept=True,
    abort=AbortOutcome.VERIFIED,
    abort_seconds=0.1,
    load_readable=True,
    disconnect_stops=True,
    disconnect_seconds=0.1,
)
WORKERS = tuple(WorkerProfile(f"http://w:{n}", model="m", context_length=4096, weight_version="v1", difference=EXACT) for n in (1, 2))
ROUTED = replace(SOUND, router=True, workers=WORKERS, keys=6, keys_moved=0, places=2)


def judged(profile: Profile) -> dict[str, Severity]:
    return {finding.code: finding.severity for finding in findings(profile)}


def test_a_sound_engine_has_no_traps() -> None:
    assert findings(SOUND) == ()
    assert judged(ROUTED) == {"router_settings": NOTE}


TRAPS: list[tuple[dict[str, Any], str, Severity, str]] = [
    ({"kind": "vllm"}, "wrong_kind", ERROR, "vllm://"),
    ({"failures": (("sampling", "it broke"),)}, "failed", ERROR, "log"),
    ({"failures": (("sampling", "no answer"),), "health": False}, "failed", ERROR, "continue_generation"),
    ({"vocab_size": None}, "vocabulary_unknown", NOTE, "990"),
    ({"vocab_size": None, "tokenizer_vocab": None}, "vocabulary_unknown", WARNING, "vocab_size=N"),
    ({"vocab_size": None, "kind": "vllm", "asked": "vllm"}, "vocabulary_unknown", NOTE, "none needed"),
    ({"tokenizer_vocab": 1001}, "vocabulary_too_small", ERROR, "tokenizer"),
    ({"tokenizer_vocab": 900}, "vocabulary_apart", WARNING, "tokenizer"),
    ({"text_agrees": False}, "text_differs", ERROR, "tokenizer"),
    ({"measured": "raw"}, "convention_wrong", ERROR, "?logprobs=raw"),
    ({"measured": "neither"}, "convention_neither", ERROR, "top_p"),
    ({"measured": None}, "convention_unmeasured", NOTE, "?logprobs=raw"),
    ({"difference": Difference(3.0, 1.0, 48)}, "logprobs_foreign", ERROR, "samples would be wrong"),
    ({"difference": Difference(0.02, 0.004, 48)}, "logprobs_inexact", WARNING, "--tolerance above 0.02"),
    ({"difference": Difference(5e-4, 1e-5, 48)}, "logprobs_inexact", NOTE, "within the tolerance"),
    ({"bursts": 1}, "stream_held", WARNING, "buffering"),
    ({"cached_tokens": 0}, "cache_unused", WARNING, "--disable-radix-cache"),
    ({"cached_tokens": 0, "kind": "vllm", "asked": "vllm"}, "cache_unseen", NOTE, "--enable-prompt-tokens-details"),
    ({"end_kept": False}, "end_cut", ERROR, "keeps it"),
    ({"prompt_counted": 273}, "prompt_changed", ERROR, "BOS"),
    ({"structured": False}, "unstructured", NOTE, "--grammar-backend"),
    ({"structured": False, "version": EMBEDDED}, "unstructured", NOTE, "none here"),
    ({"load_readable": False}, "load_unreadable", WARNING, "/v1/loads"),
    ({"load_readable": False, "kind": "vllm", "asked": "vllm"}, "load_unreadable", WARNING, "--disable-log-stats"),
    ({"abort": AbortOutcome.FAILED}, "abort_failed", WARNING, "/abort_request"),
    ({"abort": AbortOutcome.UNVERIFIED}, "abort_unverified", WARNING, "no one else"),
    ({"disconnect_stops": False}, "disconnect_ignored", WARNING, "SIGTERM"),
    ({"weight_version": None, "sampled_version": None}, "version_unknown", NOTE, "weight"),
    ({"sampled_version": "v2"}, "version_contradicts", WARNING, "flush_cache"),
    ({"health": False}, "unhealthy", WARNING, "log"),
    ({"loopback": False}, "no_key", NOTE, "TURNLOOM_ENGINE_KEY"),
]
ROUTER_TRAPS: list[tuple[dict[str, Any], str, Severity, str]] = [
    ({"workers": ()}, "no_worker", ERROR, "POST /workers"),
    ({"workers": (WORKERS[0], replace(WORKERS[1], healthy=False))}, "worker_unhealthy", WARNING, "restart"),
    ({"workers": (WORKERS[0], replace(WORKERS[1], reachable=False))}, "worker_unreachable", WARNING, "reach"),
    ({"workers": (WORKERS[0], replace(WORKERS[1], difference=Difference(4, 2, 48)))}, "worker_foreign", ERROR, "same weights"),
    ({"workers": (WORKERS[0], replace(WORKERS[1], context_length=2048))}, "workers_context_length", ERROR, "alike"),
    ({"workers": (WORKERS[0], replace(WORKERS[1], weight_version="v0"))}, "workers_weight_version", WARNING, "alike"),
    ({"workers": (WORKERS[0], replace(WORKERS[1], model="n"))}, "workers_model", WARNING, "alike"),
    ({"keys_moved": 3}, "not_sticky", WARNING, "--policy manual"),
    ({"keys_moved": 1}, "key_moved", NOTE, "log"),
    ({"policy": "cache_aware"}, "not_sticky", WARNING, "--policy manual"),
    ({"places": 1}, "one_worker", WARNING, "--policy manual"),
    ({"keys_moved": None, "keys": 0, "places": 0}, "sticky_unseen", NOTE, "--policy manual"),
]


@pytest.mark.parametrize(("changes", "code", "severity", "advice"), TRAPS)
def test_each_trap_has_its_finding(changes: dict[str, Any], code: str, severity: Severity, advice: str) -> None:
    (found,) = findings(replace(SOUND, **changes))
    assert (found.code, found.severity) == (code, severity)
    assert advice in found.change


@pytest.mark.parametrize(("changes", "code", "severity", "advice"), ROUTER_TRAPS)
def test_each_trap_of_a_router_has_its_finding(changes: dict[str, Any], code: str, severity: Severity, advice: str) -> None:
    found = {finding.code: finding for finding in findings(replace(ROUTED, **changes))}
    assert set(found) == {code, "router_settings"}
    assert found[code].severity is severity
    assert advice in found[code].change


def test_a_finding_is_one_line_and_the_gravest_comes_first() -> None:
    bad = replace(SOUND, structured=False, end_kept=False, load_readable=False)
    assert [finding.severity for finding in findings(bad)] == [ERROR, WARNING, NOTE]
    all_found: list[Finding] = [f for changes, *_ in TRAPS for f in findings(replace(SOUND, **changes))]
    assert not [f for f in all_found if "\n" in f.seen + f.change]


def test_every_finding_is_named_in_the_documents() -> None:
    named = set(re.findall(r"`(\w+)`", CLI.read_text("utf-8")))
    pooled = {f"pool_{what}" for what in ("vocab_size", "convention", "model", "weight_version", "context_length", "structured", "foreign")}
    assert {code for _, code, *_ in TRAPS + ROUTER_TRAPS} | pooled | {"router_settings"} <= named


def test_a_prompt_that_was_changed_is_known_by_the_words_of_the_client() -> None:
    with pytest.raises(EngineProtocol) as caught:
        StreamDecoder(240, 8).feed(b'{"output_ids": [], "meta_info": {"prompt_tokens": 9, "completion_tokens": 0}}')
    (found,) = findings(replace(SOUND, failures=(("sampling", str(caught.value)),)))
    assert "BOS" in found.change


LOGITS = [3.0, 1.0, -0.5, 2.2]


def logprobs(temperature: float) -> list[float]:
    total = math.log(sum(math.exp(z / temperature) for z in LOGITS))
    return [z / temperature - total for z in LOGITS]


@pytest.mark.parametrize(
    ("said", "convention"),
    [
        (logprobs(1.0), "raw"),
        (logprobs(2.0), "temperature"),
        ([value + 1e-3 for value in logprobs(2.0)], "temperature"),
        ([value / 2 for value in logprobs(2.0)], "neither"),
        ([value + noise for value, noise in zip(logprobs(1.0), (0, 0.3, 0, 0), strict=True)], "neither"),
    ],
)
def test_the_convention_is_told_by_the_differences_of_tokens(said: list[float], convention: str) -> None:
    assert measured_convention(list(zip(said, logprobs(1.0), strict=True)), 2.0, 2e-3) == convention


def test_tokens_that_are_alike_tell_no_convention() -> None:
    assert measured_convention([(-1.0, -1.0)], 2.0, 2e-3) is None
    assert measured_convention([(-1.0, -1.0), (-1.001, -1.001)], 2.0, 2e-3) is None


@pytest.mark.parametrize(
    ("changes", "code", "severity"),
    [
        ({"vocab_size": None}, "pool_vocab_size", ERROR),
        ({"convention": "raw", "measured": "raw"}, "pool_convention", ERROR),
        ({"measured": None}, None, None),
        ({"context_length": 2048}, "pool_context_length", WARNING),
        ({"weight_version": "v2"}, "pool_weight_version", WARNING),
        ({"model": "other"}, "pool_model", NOTE),
        ({"structured": False}, "pool_structured", NOTE),
    ],
)
def test_engines_of_a_pool_fit_together(changes: dict[str, Any], code: str | None, severity: Severity | None) -> None:
    found = {f.code: f.severity for f in pool_findings([SOUND, replace(SOUND, name="http://host:2", **changes)], [EXACT])}
    assert found == ({} if code is None else {code: severity})


def test_engines_of_a_pool_compute_the_same_logprobs() -> None:
    (found,) = pool_findings([SOUND, SOUND, replace(SOUND, name="http://host:3")], [EXACT, Difference(5, 2, 48)])
    assert (found.code, found.severity) == ("pool_foreign", ERROR)
    assert "http://host:3" in found.seen


# Against servers


def logit(position: int, token: int, salt: int) -> float:
    return (position * 31 + token * 17 + salt * 7 * token) % 101 / 25


@cache
def toy_total(position: int, temperature: float, salt: int) -> float:
    return math.log(sum(math.exp(logit(position, token, salt) / temperature) for token in range(40, 240)))


def toy_logprob(position: int, token: int, temperature: float, salt: int) -> float:
    """Over the ids 40 to 239, after whatever came before."""
    return logit(position, token, salt) / temperature - toy_total(position, temperature, salt)


class Toy(ScriptedEngine):
    """Has logits, so that a temperature means something; caches whole prompts; knows stop tokens. `keeps_end` False cuts them off."""

    def __init__(self, *, after_temperature: bool = False, salt: int = 0, keeps_end: bool = True, chunk: int = 1, **options: Any) -> None:
        options = {"grammar_backend": "xgrammar", "vocab_size": 240, "convention": "temperature" if after_temperature else "raw"} | options
        super().__init__(self.reply, **options)
        self.after_temperature, self.salt, self.keeps_end, self.chunk = after_temperature, salt, keeps_end, chunk
        self.fault: Fault | None = None
        self.cached: set[tuple[int, ...]] = set()

    def reply(self, body: dict[str, Any], index: int) -> Reply:
        params, prompt = body["sampling_params"], tuple(body["input_ids"])
        most, temperature = params["max_new_tokens"], params["temperature"]
        tokens = [40 + (index * 7 * (temperature > 0) + place * 13) % 200 for place in range(most)]
        finish: Any = "length"
        if stop := params.get("stop_token_ids"):
            tokens, finish = tokens[: tokens.index(stop[0]) + self.keeps_end], "stop"
        scale = temperature if self.after_temperature and temperature else 1.0
        said = tuple(toy_logprob(len(prompt) + place, token, scale, self.salt) for place, token in enumerate(tokens[:48]))
        cached = len(prompt) - 1 if prompt in self.cached else 0
        self.cached.add(prompt)
        return Reply(
            ids=tuple(tokens),
            finish=finish,
            end=-1,
            logprobs=said + (-1.0,) * (most - 48),
            chunk=self.chunk,
            delay=0.003 if most > 24 else 0.0,
            cached_tokens=cached,
            fault=self.fault,
        )

    def logprob(self, sequence: Any, position: int) -> float:
        return toy_logprob(position, sequence[position], 1.0, self.salt)


async def profile_of(url: str, tokenizer: Any = None) -> Profile:
    found = await open_probe(url, tokenizer)
    try:
        return await found.run()
    finally:
        await found.close()


async def test_a_sound_server_is_measured_and_left_idle() -> None:
    async with Toy() as server:
        profile = await profile_of(server.url)
        assert server.running == 0
        assert all(set(body["input_ids"]) <= set(range(240)) for body in server.requests), "no id that a vocabulary might lack"
    assert findings(replace(profile, bursts=profile.tokens)) == ()
    assert (profile.kind, profile.router, profile.health, profile.key_needed) == ("sglang", False, True, False)
    assert (profile.convention, profile.measured, profile.style) == ("raw", "raw", "cumulative")
    assert profile.difference is not None
    assert (profile.difference.largest < 1e-6, profile.difference.tokens) == (True, 48)
    assert (profile.prompt_sent, profile.prompt_counted, profile.cached_tokens) == (272, 272, 271)
    assert (profile.end_kept, profile.abort, profile.load_readable, profile.disconnect_stops) == (True, AbortOutcome.VERIFIED, True, True)
    assert (profile.weight_version, profile.sampled_version) == ("default", "default")


@pytest.mark.parametrize("style", ["incremental", "mixed"])
async def test_the_style_of_a_stream_is_seen(style: Any) -> None:
    class Styled(Toy):
        def reply(self, body: dict[str, Any], index: int) -> Reply:
            return replace(super().reply(body, index), style=style)

    async with Styled() as server:
        assert (await profile_of(server.url)).style == style


async def test_a_convention_that_is_told_wrong_is_found_by_measuring() -> None:
    async with Toy(after_temperature=True) as server:
        profile = await profile_of(server.url)
        assert (profile.measured, judged(profile)) == ("temperature", {})
        wrong = await profile_of(server.url + "?logprobs=raw")
        assert (wrong.convention, wrong.measured) == ("raw", "temperature")
    assert judged(wrong)["convention_wrong"] is ERROR


async def trapped(server: Toy, tokenizer: Any = None) -> dict[str, Severity]:
    async with server:
        profile = await profile_of(server.url, tokenizer)
    return judged(replace(profile, bursts=profile.bursts if server.chunk > 1 else profile.tokens))


async def test_traps_of_a_server_are_found() -> None:
    assert await trapped(Toy(keeps_end=False)) == {"end_cut": ERROR}
    assert await trapped(Toy(chunk=1000)) == {"stream_held": WARNING}
    assert await trapped(Toy(loads=False)) == {"load_unreadable": WARNING}
    assert await trapped(Toy(grammar_backend="none")) == {"unstructured": NOTE}
    assert await trapped(Toy(vocab_size=None)) == {"vocabulary_unknown": WARNING}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "said", "same"),
    [
        ("one two three", "onetwo  three", True),
        ("one two three", "one tw", True),
        ("one two \ufffd three", "one two \ufffd\ufffd", True),
        ("one two \ufffd three", "one two three", True),
        ("one two \ufffd three four", "one two our", True),
        ("\ufffdone two", "one two", True),
        ("one two three", "eno owt", False),
        ("one two three", "one three", False),
        ("one two \ufffd three", "zygzwyx", False),
        ("a\ufffdb", "x", None),
        ("one", "", None),
    ],
)
def test_texts_are_compared_by_their_characters(own: str, said: str, same: bool | None) -> None:
    assert probe_http.same_text(own, said) is same
    assert probe_http.same_text(said, own) is same


async def test_a_server_that_goes_on_for_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_http, "_GONE_SECONDS", 0.3)
    assert await trapped(Toy(forgetful=True)) == {"disconnect_ignored": WARNING}


async def test_a_tokenizer_of_another_model_is_found_by_its_size_and_by_its_text() -> None:
    own = qwen_tokenizer("qwen3")
    assert await trapped(Toy(vocab_size=own.vocab_size, tokenizer=own), own) == {}

    class Backwards:
        vocab_size = own.vocab_size

        def decode(self, ids: Any) -> str:
            return own.decode(list(ids)[::-1])

    assert await trapped(Toy(vocab_size=own.vocab_size, tokenizer=own), Backwards()) == {"text_differs": ERROR}
    assert await trapped(Toy(vocab_size=own.vocab_size - 1), own) == {"vocabulary_too_small": ERROR}


@pytest.mark.parametrize("fault", [Fault.WRONG_ID, Fault.NULL_LOGPROB, Fault.HTTP_500, Fault.ABORT_503])
async def test_what_breaks_a_turn_breaks_the_probe_off_with_the_reason(fault: Fault) -> None:
    server = Toy()
    server.fault = fault
    assert await trapped(server) == {"failed": ERROR}


async def test_a_paused_server_does_not_hold_the_probe_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "STEP_SECONDS", 0.5)
    monkeypatch.setattr(http, "HEALTH_SECONDS", 0.1)
    async with Toy() as server:
        server.going.clear()
        profile = await profile_of(server.url)
        server.going.set()
        await server.wait_running(0)
    (found,) = findings(profile)
    assert (found.code, found.severity) == ("failed", ERROR)
    assert "sampling: no answer within" in found.seen
    assert "continue_generation" in found.change


@asynccontextmanager
async def serving(*routes: web.RouteDef) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _version(_: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.0"})


async def _props(_: web.Request) -> web.Response:
    return web.json_response({"default_generation_settings": {"n_ctx": 512}, "build_info": "b1"})


async def _refuse(_: web.Request) -> web.Response:
    return web.json_response({"error": "Unauthorized"}, status=401)


async def test_another_kind_of_server_than_the_url_says_is_named() -> None:
    async with serving(web.get("/version", _version)) as place:
        (found,) = findings(await profile_of(f"sglang://{place}"))
        assert (found.code, found.change) == ("wrong_kind", "write vllm://HOST:PORT")
    async with serving(web.get("/props", _props)) as place:
        (found,) = findings(await profile_of(f"vllm://{place}"))
        assert (found.code, found.change) == ("wrong_kind", "write llamacpp://HOST:PORT")


async def test_a_server_that_wants_a_key_says_so() -> None:
    async with serving(web.get("/{path:.*}", _refuse)) as place:
        with pytest.raises(ConfigError, match="TURNLOOM_ENGINE_KEY"):
            await profile_of(f"sglang://{place}")


async def test_what_does_not_answer_is_unavailable() -> None:
    async with serving() as place:
        pass
    with pytest.raises(EngineUnavailable, match="cannot reach"):
        await profile_of(f"sglang://{place}")


async def _loading(_: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "Loading model", "code": 503}}, status=503)


async def test_a_server_that_is_no_engine_and_one_that_still_loads_are_no_engines_yet() -> None:
    async with serving() as place:
        with pytest.raises(EngineUnavailable, match="not ready"):
            await profile_of(f"sglang://{place}")
    async with serving(web.get("/{path:.*}", _loading)) as place:
        report = await probe_engines([f"llamacpp://{place}"])
    assert report.unreachable == ((f"http://{place}", "Loading model"),)


async def test_a_router_without_workers_is_looked_at_all_the_same() -> None:
    async with ScriptedRouter([]) as router:
        found = judged(await profile_of(router.url))
    assert {"no_worker", "failed"} <= set(found)


class RoundRobin(ScriptedRouter):
    def _place(self, key: str, tried: int) -> str:
        return self.workers[len(self.attempts) % len(self.workers)]


async def test_a_router_s_workers_and_its_keys_are_looked_at() -> None:
    async with Toy() as left, Toy() as right, ScriptedRouter([left.url, right.url]) as router:
        profile = await profile_of(router.url)
        assert left.running == right.running == 0
    assert (profile.router, profile.keys, profile.keys_moved) == (True, 6, 0)
    assert [(worker.url, worker.reachable, worker.context_length) for worker in profile.workers] == [
        (left.url, True, 32_768),
        (right.url, True, 32_768),
    ]
    assert set(judged(profile)) - {"one_worker", "stream_held"} == {"router_settings"}


async def test_a_router_that_does_not_keep_a_key_is_found() -> None:
    async with Toy() as left, Toy() as right, RoundRobin([left.url, right.url]) as router:
        profile = await profile_of(router.url)
    assert (profile.keys_moved, profile.sticky) == (6, False)
    assert judged(profile)["not_sticky"] is WARNING


async def test_a_worker_with_other_weights_is_found() -> None:
    async with Toy() as left, Toy(salt=3, weight_version="older") as right, ScriptedRouter([left.url, right.url]) as router:
        found = judged(await profile_of(router.url))
    assert (found["worker_foreign"], found["workers_weight_version"]) == (ERROR, WARNING)


async def test_a_worker_that_cannot_be_reached_is_found() -> None:
    async with serving() as place:
        pass
    async with Toy() as left, ScriptedRouter([left.url, f"http://{place}"]) as router:
        profile = await profile_of(router.url)
    assert [worker.reachable for worker in profile.workers] == [True, False]
    assert judged(profile)["worker_unreachable"] is WARNING


async def test_engines_are_compared_on_the_tokens_of_the_first() -> None:
    async with serving() as place:
        pass
    async with Toy() as one, Toy() as same, Toy(salt=3) as other:
        report = await probe_engines([one.url, same.url, other.url, f"sglang://{place}"])
    same_found, other_found = report.differences
    assert same_found is not None
    assert other_found is not None
    assert same_found.largest < 1e-6
    assert [f.code for f in pool_findings(report.profiles, report.differences)] == ["pool_foreign"]
    ((name, why),) = report.unreachable
    assert name == f"http://{place}"
    assert "cannot reach" in why


async def test_an_id_that_another_engine_may_not_have_is_not_sent_to_it() -> None:
    async with Toy(vocab_size=240) as one, Toy(vocab_size=50, model="small") as small:
        report = await probe_engines([one.url, small.url])
        assert all(max(body["input_ids"]) < 50 for body in small.requests)
    assert report.differences == (None,)
    assert "pool_vocab_size" in {f.code for f in pool_findings(report.profiles, report.differences)}


async def test_a_probe_that_is_broken_off_leaves_nothing_running() -> None:
    async with Toy() as server:
        task = asyncio.create_task(probe_engines([server.url]))
        await server.wait_running(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.wait_running(0)
