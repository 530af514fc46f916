"""What a check found, for a person and for a program. It judges nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from turnloom.core.dump import escaped

LAWS: Mapping[str, str] = {
    "readable": "every row can be read",
    "columns": "per-token columns have one length and the right types",
    "ids": "token ids are non-negative int32",
    "mask": "the loss mask holds 0 and 1",
    "only_sampled": "only sampled tokens with a finite logprob train",
    "logprobs": "a logprob stands exactly where a token was sampled, is at most 0, and is the same in every sample",
    "prompt_len": "prompt_len is the index of the first sampled token",
    "turns": "each turn is one contiguous run, turns in rising order",
    "once": "each sampled token trains at most once",
    "prefix": "samples that share a turn are identical up to its end, or to where one says that it was cut or realigned",
    "weights": "the weights of a rollout's samples are positive and sum to 1",
    "rewards": "a rollout's samples have one reward, unless rewards are per lineage",
    "sample_index": "sample_index is unique within a session",
}
"""What a file can prove, in the order shown."""

SHOWN = 20
"""So many findings of each law are kept; all are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation. `row` is 1-based (the line of a JSON lines file), `position` a 0-based token index."""

    law: str
    message: str
    row: int | None = None
    session: str = ""
    position: int | None = None

    def line(self) -> str:
        where = [f"row {self.row}" if self.row is not None else "", f"session {self.session}" if self.session else ""]
        where.append(f"token {self.position}" if self.position is not None else "")
        return f"{self.law}: {', '.join(filter(None, where))}: {self.message}"


@dataclass(slots=True)
class Report:
    """`violations` counts per law; `findings` keeps the first SHOWN of each. A law in `unjudged` could not be checked, and why."""

    source: str = ""
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    sampled: int = 0
    trained: int = 0
    sessions: int = 0
    rollouts: int = 0
    violations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAWS, 0))
    findings: list[Finding] = field(default_factory=list)
    unjudged: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Nothing is wrong, and there was something to judge."""
        return self.rows > 0 and not any(self.violations.values())

    def add(self, finding: Finding) -> None:
        self.violations[finding.law] += 1
        if self.violations[finding.law] <= SHOWN:
            self.findings.append(finding)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def format_report(report: Report) -> list[str]:
    """Lines of plain text: the figures, one line per law, then the findings. What the file says is shown escaped."""
    head = f"{report.source}: " if report.source else ""
    lines = [
        f"{head}{report.samples} samples, {report.tokens} tokens, {report.sampled} sampled, {report.trained} trained, "
        f"{report.sessions} sessions, {report.rollouts} rollouts"
    ]
    for law, meaning in LAWS.items():
        count = report.violations[law]
        verdict = f"{count} WRONG" if count else "unjudged" if law in report.unjudged else "ok"
        reason = f" ({report.unjudged[law]})" if law in report.unjudged else ""
        lines.append(f"  {verdict:<9} {law:<13} {meaning}{reason}")
    lines += [f"  {finding.line()}" for finding in report.findings]
    hidden = sum(report.violations.values()) - len(report.findings)
    if hidden:
        lines.append(f"  and {hidden} more")
    lines.append("every law holds" if report.ok else f"{sum(report.violations.values())} violations" if report.rows else "no samples")
    return [escaped(line) for line in lines]


@dataclass(frozen=True, slots=True)
class SampleDifference:
    """|recorded - recomputed| over the trained tokens that were compared. `reason` says why the others, if any, were not."""

    row: int
    session: str
    sample_index: int
    trained: int
    compared: int
    max: float | None
    mean: float | None
    worst: int | None
    """Token position of `max`."""
    reason: str = ""
    refused: bool = False
    """The engine would not take the sequence: too long for it, or ids it does not have."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Recorded logprobs against an engine's own prefill. Differences are in nats."""

    samples: tuple[SampleDifference, ...]
    tolerance: float

    @property
    def compared(self) -> int:
        return sum(s.compared for s in self.samples)

    @property
    def max(self) -> float | None:
        return max((s.max for s in self.samples if s.max is not None), default=None)

    @property
    def mean(self) -> float | None:
        """Over tokens, not samples."""
        total = sum(s.mean * s.compared for s in self.samples if s.mean is not None)
        return total / self.compared if self.compared else None

    @property
    def ok(self) -> bool:
        """Every compared token is within the tolerance, none was refused, and something was compared where anything trains."""
        if any(s.refused for s in self.samples):
            return False
        if not self.compared:
            return not any(s.trained for s in self.samples)
        return all(s.max is None or s.max <= self.tolerance for s in self.samples)

    def to_dict(self) -> dict[str, Any]:
        figures = {"tolerance": self.tolerance, "compared": self.compared, "max": self.max, "mean": self.mean}
        return {"ok": self.ok, **figures, "samples": [asdict(s) for s in self.samples]}


def format_engine_report(report: EngineReport) -> list[str]:
    """Lines of plain text: each sample, then the verdict. What the samples say is shown escaped."""
    lines = []
    for s in report.samples:
        name = f"  row {s.row}, session {s.session}, sample {s.sample_index}: "
        figures = f"{s.compared} of {s.trained} trained tokens compared"
        if s.max is not None and s.mean is not None:
            wrong = "" if s.max <= report.tolerance else " TOO FAR"
            figures += f", max {s.max:.2e} at token {s.worst}, mean {s.mean:.2e}{wrong}"
        lines.append(name + figures + (f" ({s.reason})" if s.reason else ""))
    if report.max is None or report.mean is None:
        lines.append("nothing could be compared" if not report.ok else "nothing trains, so there is nothing to compare")
    else:
        verdict = "within" if report.ok else "NOT within"
        lines.append(
            f"{report.compared} tokens, max {report.max:.2e}, mean {report.mean:.2e}: {verdict} the tolerance {report.tolerance:g}"
        )
    return [escaped(line) for line in lines]
