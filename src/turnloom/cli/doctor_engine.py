"""`turnloom doctor --engine`: what engines are and do, and what to change about it, for a person and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from turnloom.cli.common import run_async
from turnloom.engine.probe import Report, probe_engines
from turnloom.engine.probe_profile import SOFTWARE, Finding, Profile, Severity, findings, pool_findings
from turnloom.errors import EngineUnavailable
from turnloom.render.contract import Tokenizer

_CONVENTIONS = {"raw": "before temperature", "temperature": "after temperature", "neither": "neither raw nor after temperature"}


def examine(engine: str, tokenizer: Tokenizer | None) -> Report:
    """Of the engines that `engine` names, with commas between them. Raises EngineUnavailable where none answers."""
    report = run_async(probe_engines([url.strip() for url in engine.split(",")], tokenizer))
    if not report.profiles:
        raise EngineUnavailable("; ".join(why for _, why in report.unreachable))
    return report


def exit_code(report: Report) -> int:
    """2 where one does not answer, 1 where a turn would fail or a sample be wrong."""
    return 2 if report.unreachable else int(any(finding.severity is Severity.ERROR for finding in _all(report)))


def described(report: Report) -> dict[str, Any]:
    """The report as JSON has it."""
    return {
        "engines": [{**asdict(profile), "findings": [asdict(f) for f in findings(profile)]} for profile in report.profiles],
        "pool": [asdict(finding) for finding in _pool(report)] if len(report.profiles) > 1 else None,
        "unreachable": [{"name": name, "why": why} for name, why in report.unreachable],
        "ok": exit_code(report) == 0,
    }


def lines(report: Report) -> list[str]:
    """The report for a person."""
    found: list[str] = []
    for profile in report.profiles:
        found += [_head(profile), *(f"  {name:<18}  {value}" for name, value in _figures(profile))]
        found += _told(findings(profile), profile.name)
    if len(report.profiles) > 1:
        found += [f"{len(report.profiles)} engines as one pool", *_told(_pool(report), "the pool")]
    return found + [f"{name}: does not answer: {why}" for name, why in report.unreachable]


def _all(report: Report) -> Iterator[Finding]:
    for profile in report.profiles:
        yield from findings(profile)
    yield from _pool(report)


def _pool(report: Report) -> tuple[Finding, ...]:
    return pool_findings(report.profiles, report.differences)


def _told(found: Sequence[Finding], what: str) -> list[str]:
    if not found:
        return [f"  nothing to change about {what}"]
    return [f"  {finding.severity.value:<8} {finding.seen} -> {finding.change}" for finding in found]


def _head(p: Profile) -> str:
    software = SOFTWARE[p.kind] if p.kind is not None else "an engine of no known kind"
    if p.router:
        return f"{p.name}: a router of {software}, {sum(w.healthy for w in p.workers)} of {len(p.workers)} workers healthy"
    return f"{p.name}: {software} {p.version}".rstrip()


def _figures(p: Profile) -> Iterator[tuple[str, str]]:
    for worker in p.workers:
        known = [worker.model, f"context {worker.context_length}" if worker.context_length else "", worker.weight_version or ""]
        yield "worker", f"{worker.url}: {', '.join(filter(None, known)) or 'not asked'}{'' if worker.healthy else ', unhealthy'}"
    if not p.context_length:
        return
    yield "model", p.model
    yield "context", str(p.context_length)
    yield "vocabulary", "not said" if p.vocab_size is None else f"{p.vocab_size}{' (by the URL)' if p.vocab_from == 'url' else ''}"
    how = "not measured" if p.measured is None else "measured" if p.measured == p.convention else f"measured: {_CONVENTIONS[p.measured]}"
    yield "logprobs", f"{_CONVENTIONS.get(p.convention, p.convention)} ({how})"
    if p.difference is not None:
        yield "recomputed", f"max {p.difference.largest:.1e}, mean {p.difference.mean:.1e} over {p.difference.tokens} tokens"
    if p.tokens:
        yield "stream", f"{p.tokens} tokens in {p.bursts} arrivals{', ' + p.style if p.style else ''}"
    if p.first_token_seconds is not None:
        speed = f", then {p.tokens_per_second:.0f} tokens/s" if p.tokens_per_second else ""
        yield "first token", f"after {p.first_token_seconds:.2f} s{speed}"
    if p.cached_tokens is not None:
        yield "prefix cache", f"{p.cached_tokens} of {p.prompt_sent} tokens of a prompt sent again"
    if p.prompt_counted is not None:
        yield "prompt", f"{p.prompt_counted} tokens counted of {p.prompt_sent} sent"
    yield "end token", {True: "kept in the ids", False: "cut off the ids", None: "not measured"}[p.end_kept]
    if p.text_agrees is not None:
        yield "text", "the tokenizer's" if p.text_agrees else "not the tokenizer's"
    yield "abort", "not measured" if p.abort is None else f"{p.abort.value} after {p.abort_seconds or 0:.2f} s"
    left = {True: f"stops the work after {p.disconnect_seconds or 0:.2f} s", False: "does not stop the work", None: "not measured"}
    yield "disconnect", left[p.disconnect_stops]
    yield "load", {True: "can be read", False: "cannot be read", None: "not measured"}[p.load_readable]
    yield "weights", p.weight_version or "not said"
    yield "JSON schemas", "yes" if p.structured else "no"
    if p.router:
        yield "routing keys", "not measured" if p.keys_moved is None else f"{p.keys} on {p.places} workers, {p.keys_moved} of them moved"
    yield "health", {True: "answers", False: "does not answer", None: "not measured"}[p.health]
    yield "key", {True: "needed, and given", False: "none needed", None: "not measured"}[p.key_needed]
