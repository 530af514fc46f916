"""What was found out about an engine, and what of it is a trap. Pure: nothing here asks an engine.

`findings` judges one engine's profile, `pool_findings` several that are to take turns in one output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from turnloom.types import AbortOutcome

EXACT = 1e-4
FINE = 1e-3
"""Nats between a logprob as sampled and as recomputed: float32 engines stay below the first, `turnloom check` asks for the second."""

FOREIGN = 0.1
"""A mean difference in nats that no arithmetic explains: half-precision engines stay at some hundredths."""

Kind = Literal["sglang", "vllm", "llamacpp"]

EMBEDDED = "embedded"
"""In place of a version: Turnloom's own server, which speaks as SGLang does."""

SOFTWARE: dict[Kind, str] = {"sglang": "SGLang", "vllm": "vLLM", "llamacpp": "llama.cpp"}


class Severity(StrEnum):
    """An error makes samples wrong or a turn fail; a warning costs time, or leaves something unproven."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    code: str
    severity: Severity
    seen: str
    change: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Between logprobs as sampled and as recomputed by prefill, in nats, over `tokens` tokens."""

    largest: float
    mean: float
    tokens: int


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """A worker behind a router. `healthy` is the router's word, the rest what the worker itself answers."""

    url: str
    healthy: bool = True
    reachable: bool = True
    model: str = ""
    context_length: int | None = None
    weight_version: str | None = None
    difference: Difference | None = None
    """Of the tokens that were sampled through the router, when this worker computes them."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine. What is None was not measured, or could not be."""

    name: str
    asked: Kind
    """What the URL says that it is."""
    kind: Kind | None = None
    """What it answers as."""
    version: str = ""
    router: bool = False
    workers: tuple[WorkerProfile, ...] = ()
    policy: str | None = None
    key_needed: bool | None = None
    loopback: bool = True
    health: bool | None = None

    model: str = ""
    context_length: int = 0
    vocab_size: int | None = None
    vocab_from: Literal["engine", "url"] = "engine"
    tokenizer_vocab: int | None = None
    text_agrees: bool | None = None
    """Whether the engine's text of the ids it sampled is the tokenizer's."""
    structured: bool = False
    weight_version: str | None = None
    sampled_version: str | None = None
    """What the engine names with its tokens."""

    convention: str = ""
    """What its logprobs are taken for."""
    measured: Literal["raw", "temperature", "neither"] | None = None
    difference: Difference | None = None
    tokens: int = 0
    bursts: int = 0
    """In how many arrivals, a millisecond apart at least, those `tokens` came."""
    style: str = ""
    prompt_sent: int = 0
    prompt_counted: int | None = None
    cached_tokens: int | None = None
    """Of `prompt_sent`, when the same prompt was sent again."""
    end_kept: bool | None = None
    abort: AbortOutcome | None = None
    abort_seconds: float | None = None
    load_readable: bool | None = None
    disconnect_stops: bool | None = None
    disconnect_seconds: float | None = None
    keys: int = 0
    """Routing keys that were tried, each with several prompts."""
    keys_moved: int | None = None
    """How many of them came to more than one worker."""
    places: int = 0
    """On how many workers they came, all together."""
    first_token_seconds: float | None = None
    tokens_per_second: float | None = None
    failures: tuple[tuple[str, str], ...] = ()
    """What was being measured, and the engine's words."""

    @property
    def sticky(self) -> bool | None:
        """Whether one routing key leads to one worker, whatever the prompt. A key may move when a worker does not answer in time."""
        return None if self.keys_moved is None else 3 * self.keys_moved <= self.keys


def measured_convention(
    pairs: Sequence[tuple[float, float]], temperature: float, slack: float
) -> Literal["raw", "temperature", "neither"] | None:
    """Which convention the logprobs of different tokens at one place fit: (as sampled at `temperature`, recomputed at 1).

    With logits z, logprobs after temperature T are z/T - logsumexp(z/T): the difference of two tokens' is that of their raw
    ones over T. None where the tokens are too alike to tell the two apart. `slack` is how exact the engine is, in nats.
    """
    if len(pairs) < 2:
        return None
    (first, first_raw), *others = pairs
    spread = max(abs(raw - first_raw) for _, raw in others)
    if spread * abs(1 - 1 / temperature) <= 4 * slack:
        return None
    if all(abs(said - raw) <= slack for said, raw in pairs):
        return "raw"
    if all(abs((said - first) - (raw - first_raw) / temperature) <= 2 * slack for said, raw in others):
        return "temperature"
    return "neither"


def findings(profile: Profile) -> tuple[Finding, ...]:
    """The traps of one engine, the gravest first."""
    if profile.kind is not None and profile.kind != profile.asked:
        seen = f"{SOFTWARE[profile.kind]} answers where the URL says {SOFTWARE[profile.asked]}"
        return (Finding("wrong_kind", Severity.ERROR, seen, f"write {profile.kind}://HOST:PORT"),)
    parts = (_failures, _vocabulary, _logprobs, _stream, _tokens, _stops, _versions, _router, _server)
    found = [finding for part in parts for finding in part(profile)]
    return tuple(sorted(found, key=lambda finding: list(Severity).index(finding.severity)))


def _failures(p: Profile) -> Iterator[Finding]:
    for step, words in p.failures:
        if "prompt of" in words and "were sent" in words:
            change = "the server must take ids as they are: nothing added, nothing cut (no BOS of its own, no truncation)"
        elif p.health is False:
            change = "it is not healthy: see its log; a paused one goes on after POST /continue_generation (SGLang) or /resume (vLLM)"
        else:
            change = "a turn would meet the same: see the server's log, or ask another version of it"
        yield Finding("failed", Severity.ERROR, f"{step}: {words}", change)


def _vocabulary(p: Profile) -> Iterator[Finding]:
    size, own = p.vocab_size, p.tokenizer_vocab
    if size is None and p.kind == "sglang":
        seen = "it does not say its vocabulary size, and an id beyond it kills the server"
        if own is None:
            yield Finding(
                "vocabulary_unknown", Severity.WARNING, seen, "add ?vocab_size=N to the URL, and give --tokenizer here to compare"
            )
        else:
            change = (
                f"be sure that the tokenizer's {own} ids are this model's, or add ?vocab_size=N to the URL: nothing else holds one back"
            )
            yield Finding("vocabulary_unknown", Severity.NOTE, seen, change)
    elif size is None:
        change = "none needed: it refuses an id beyond it; ?vocab_size=N in the URL has it refused before it is sent"
        yield Finding("vocabulary_unknown", Severity.NOTE, "it does not say its vocabulary size", change)
    if size is not None and own is not None and own > size:
        seen = f"the tokenizer has {own} ids, the engine {size}"
        yield Finding("vocabulary_too_small", Severity.ERROR, seen, "take the tokenizer of the model that the engine serves")
    elif size is not None and own is not None and size > own * 1.05:
        seen = f"the engine has {size} ids, the tokenizer {own}: more than padding explains"
        yield Finding("vocabulary_apart", Severity.WARNING, seen, "take the tokenizer of the model that the engine serves")
    if p.text_agrees is False:
        seen = "the engine's text of the ids that it sampled is not the tokenizer's"
        yield Finding("text_differs", Severity.ERROR, seen, "take the tokenizer of the model that the engine serves")


def _logprobs(p: Profile) -> Iterator[Finding]:
    words = {"raw": "raw, before temperature", "temperature": "after temperature"}
    if p.measured == "neither":
        seen = "logprobs at temperature 2 fit neither raw logits nor logits after temperature"
        change = "turn off what else changes them (penalties, top_p, top_k, speculative sampling, top-k logprobs) at the server"
        yield Finding("convention_neither", Severity.ERROR, seen, change)
    elif p.measured is not None and p.measured != p.convention:
        seen = f"logprobs are {words[p.measured]}, and taken to be {words.get(p.convention, p.convention)}"
        yield Finding("convention_wrong", Severity.ERROR, seen, f"add ?logprobs={p.measured} to the URL")
    elif p.measured is None and p.difference is not None:
        seen = f"which logprobs it gives could not be measured; they are taken to be {words.get(p.convention, p.convention)}"
        yield Finding("convention_unmeasured", Severity.NOTE, seen, "set ?logprobs=raw or ?logprobs=temperature if you know better")
    if p.difference is None:
        return
    seen = f"logprobs recomputed by prefill differ by {p.difference.largest:.1e} at most, {p.difference.mean:.1e} in the mean"
    if p.difference.mean > FOREIGN:
        change = (
            "they are not those of the ids: samples would be wrong; update the server, or turn off what samples otherwise than it scores"
        )
        yield Finding("logprobs_foreign", Severity.ERROR, seen, change)
    elif p.difference.largest > FINE:
        change = (
            f"give `turnloom check --engine` a --tolerance above {p.difference.largest:.1g}, or serve in float32 where it must be exact"
        )
        yield Finding("logprobs_inexact", Severity.WARNING, seen, change)
    elif p.difference.largest > EXACT:
        yield Finding("logprobs_inexact", Severity.NOTE, seen, "none needed: within the tolerance of `turnloom check --engine`")


def _stream(p: Profile) -> Iterator[Finding]:
    if p.tokens >= 8 and p.bursts <= 2:
        seen = f"{p.tokens} tokens came in {p.bursts} arrivals: something holds the stream back"
        change = "let the server send every token (SGLang: --stream-interval 1) and turn off buffering in proxies before it"
        yield Finding("stream_held", Severity.WARNING, seen, change)
    if p.cached_tokens == 0 and p.prompt_sent and not (p.router and p.sticky is False):
        seen = f"a prompt of {p.prompt_sent} tokens that was sent again found nothing in the prefix cache"
        if p.kind == "vllm":
            change = "start it with --enable-prompt-tokens-details to see the figure, and without --no-enable-prefix-caching"
            yield Finding("cache_unseen", Severity.NOTE, seen, change)
        else:
            change = "start it without --disable-radix-cache: every turn encodes its whole history again"
            yield Finding("cache_unused", Severity.WARNING, seen, change)


def _tokens(p: Profile) -> Iterator[Finding]:
    if p.end_kept is False:
        seen = "the token that ended a reply is not among its ids"
        yield Finding("end_cut", Severity.ERROR, seen, "use a version that keeps it: the next turn's prompt would lack it")
    if p.prompt_counted is not None and p.prompt_counted != p.prompt_sent:
        seen = f"{p.prompt_sent} prompt ids were sent and {p.prompt_counted} counted"
        change = "the server must take ids as they are: nothing added, nothing cut (no BOS of its own, no truncation)"
        yield Finding("prompt_changed", Severity.ERROR, seen, change)
    if not p.structured and p.context_length:
        change = "start SGLang with --grammar-backend xgrammar; without, a client that asks for a JSON schema gets a 400"
        if p.kind == "llamacpp" or p.version == EMBEDDED:
            change = "none here: a client that asks for a JSON schema gets a 400; route such requests to another pool"
        yield Finding("unstructured", Severity.NOTE, "it cannot hold a reply to a JSON schema", change)


def _stops(p: Profile) -> Iterator[Finding]:
    if p.load_readable is False:
        change = {
            "sglang": "use a version with /v1/loads, and let this machine reach every worker",
            "vllm": "start it without --disable-log-stats",
            "llamacpp": "start it with --slots",
            None: "let the server say how many requests run",
        }[p.kind]
        yield Finding(
            "load_unreadable", Severity.WARNING, "the load cannot be read, so an abort is proven by the stream's end alone", change
        )
    if p.abort is AbortOutcome.FAILED:
        seen = "an abort reached no server: what a client leaves goes on decoding"
        yield Finding("abort_failed", Severity.WARNING, seen, "let this machine reach every worker's /abort_request")
    elif p.abort is AbortOutcome.UNVERIFIED:
        seen = "an abort could not be shown to have worked"
        yield Finding(
            "abort_unverified", Severity.WARNING, seen, "probe while no one else uses the engine; see the server's log for the request"
        )
    if p.disconnect_stops is False:
        seen = "a request whose client had gone without an abort went on decoding"
        change = (
            "stop Turnloom by SIGTERM, not SIGKILL, so that it aborts first; update the server, and look for a proxy that keeps connections"
        )
        yield Finding("disconnect_ignored", Severity.WARNING, seen, change)


def _versions(p: Profile) -> Iterator[Finding]:
    if p.context_length and p.weight_version is None and p.sampled_version is None:
        change = (
            "set VLLM_SERVER_DEV_MODE=1 for vLLM"
            if p.kind == "vllm"
            else "a server with weight versions is needed where weights are updated"
        )
        yield Finding("version_unknown", Severity.NOTE, "it names no weight version, so samples carry none", change)
    elif p.sampled_version is not None and p.weight_version is not None and p.sampled_version != p.weight_version:
        seen = f"it says that its weights are {p.weight_version!r}, its tokens that {p.sampled_version!r} sampled them"
        change = "update them again, with flush_cache false or all requests aborted: an update can fail after the weights are in"
        yield Finding("version_contradicts", Severity.WARNING, seen, change)


def _router(p: Profile) -> Iterator[Finding]:
    if not p.router:
        return
    if not any(worker.healthy for worker in p.workers):
        yield Finding("no_worker", Severity.ERROR, "the router knows no healthy worker", 'start one, or add it: POST /workers {"url": …}')
    for worker in p.workers:
        if not worker.healthy:
            yield Finding(
                "worker_unhealthy", Severity.WARNING, f"the router calls {worker.url} unhealthy", "restart it, or DELETE it from the router"
            )
        elif not worker.reachable:
            seen = f"{worker.url} cannot be reached from here: aborts and loads go to workers, not through the router"
            yield Finding("worker_unreachable", Severity.WARNING, seen, "give the router workers' URLs that this machine can reach")
        elif worker.difference is not None and worker.difference.mean > FOREIGN:
            seen = f"{worker.url} computes other logprobs for tokens sampled here (mean difference {worker.difference.mean:.1e})"
            yield Finding(
                "worker_foreign", Severity.ERROR, seen, "give every worker the same weights: one of them is another model or not updated"
            )
    known = [worker for worker in p.workers if worker.reachable]
    for code, values in (
        ("model", {worker.model for worker in known if worker.model}),
        ("context_length", {worker.context_length for worker in known if worker.context_length}),
        ("weight_version", {worker.weight_version for worker in known if worker.weight_version}),
    ):
        if len(values) > 1:
            said = ", ".join(sorted(map(str, values)))
            severity = Severity.ERROR if code == "context_length" else Severity.WARNING
            yield Finding(
                f"workers_{code}", severity, f"the workers differ in {code.replace('_', ' ')}: {said}", "start or update all of them alike"
            )
    yield from _placing(p)


def _placing(p: Profile) -> Iterator[Finding]:
    manual = "start the router with --policy manual: it keeps an X-SMG-Routing-Key on one worker"
    if p.policy not in (None, "manual") or p.sticky is False:
        what = (
            f"its policy is {p.policy}"
            if p.policy not in (None, "manual")
            else f"{p.keys_moved} of {p.keys} routing keys came to several workers"
        )
        yield Finding("not_sticky", Severity.WARNING, f"{what}: a session's turns find no cache where they land", manual)
    elif p.keys_moved:
        seen = f"{p.keys_moved} of {p.keys} routing keys moved to another worker between two requests"
        yield Finding("key_moved", Severity.NOTE, seen, "see the router's log for a worker that it took for dead or overloaded meanwhile")
    elif p.places == 1 and p.keys > 1 and sum(worker.healthy for worker in p.workers) > 1:
        yield Finding("one_worker", Severity.WARNING, f"{p.keys} routing keys all came to one worker, the others are idle", manual)
    elif p.keys_moved is None and len(p.workers) > 1:
        yield Finding("sticky_unseen", Severity.NOTE, "whether a routing key leads to one worker could not be seen", manual)
    seen = (
        "a router tells neither its retries (5 by default, with one request id) nor its health checks (60 s apart, 3 must fail, by default)"
    )
    change = "have it leave a dead worker soon: --health-check-interval-secs 2 --health-failure-threshold 1 --cb-failure-threshold 1"
    yield Finding("router_settings", Severity.NOTE, seen, change)


def _server(p: Profile) -> Iterator[Finding]:
    if p.health is False and not p.failures:
        seen = "/health does not answer well, though it samples: a router or a supervisor would take it for dead"
        yield Finding("unhealthy", Severity.WARNING, seen, "see the server's log")
    if p.key_needed is False and not p.loopback:
        seen = "it needs no key: whoever reaches it can sample from it, pause it and change its weights"
        yield Finding(
            "no_key", Severity.NOTE, seen, "keep it in a network of its own, or start it with --api-key and set TURNLOOM_ENGINE_KEY"
        )


def pool_findings(profiles: Sequence[Profile], differences: Sequence[Difference | None] = ()) -> tuple[Finding, ...]:
    """Whether engines can take turns in one output.

    `differences` are, for each but the first, of tokens that the first sampled, when this one computes them.
    """
    found: list[Finding] = []
    apart = "give each model a pool of its own (--engine NAME=URL)"
    for code, severity, change, values in (
        ("vocab_size", Severity.ERROR, apart, {p.vocab_size for p in profiles}),
        (
            "convention",
            Severity.ERROR,
            "set ?logprobs= where it is wrong, or start them alike",
            {p.measured or p.convention for p in profiles},
        ),
        ("model", Severity.NOTE, "be sure that these are names of one model", {p.model for p in profiles}),
        (
            "weight_version",
            Severity.WARNING,
            "update all of them: tokens of one turn would come of several versions",
            {p.weight_version for p in profiles},
        ),
        ("context_length", Severity.WARNING, "start them alike: the least counts for all", {p.context_length for p in profiles}),
        ("structured", Severity.NOTE, "start them alike: what one cannot do, the pool cannot", {p.structured for p in profiles}),
    ):
        if len(values) > 1:
            said = ", ".join(sorted("unknown" if value is None else str(value) for value in values))
            found.append(Finding(f"pool_{code}", severity, f"they differ in {code.replace('_', ' ')}: {said}", change))
    for profile, difference in zip(profiles[1:], differences, strict=False):
        if difference is not None and difference.mean > FOREIGN:
            seen = f"{profile.name} computes other logprobs for the tokens of {profiles[0].name} (mean difference {difference.mean:.1e})"
            found.append(Finding("pool_foreign", Severity.ERROR, seen, f"they have other weights: {apart}, or update them"))
    return tuple(sorted(found, key=lambda finding: list(Severity).index(finding.severity)))
