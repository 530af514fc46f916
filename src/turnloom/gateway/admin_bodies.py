"""What the calls of the admin API that change sessions take."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from turnloom.core.credit import RewardRule
from turnloom.gateway.admin_body import AdminModel
from turnloom.gateway.body import check_json
from turnloom.store.contract import Limits, Repeats
from turnloom.types import Sampling
from turnloom.wire.contract import MAX_STOP_CHARS, MAX_STOPS


class SamplingBody(AdminModel):
    """A policy that any engine can run: its integers fit 32 bits, and the seed's 64."""

    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=2**31, json_schema_extra={"not": {"const": 0}})
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field([], max_length=MAX_STOPS)
    seed: int | None = Field(None, ge=0, lt=2**63)

    @field_validator("top_k")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 leaves no token to sample; -1 turns it off")
        return value

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.max_tokens, tuple(self.stop), self.seed)


class LimitsBody(AdminModel):
    max_turns: int | None = Field(None, ge=0, lt=2**31)
    max_context: int | None = Field(None, ge=2, lt=2**31)
    turn_timeout: float | None = Field(600.0, gt=0, lt=2**31)
    max_tokens: int | None = Field(None, ge=0, lt=2**53)
    max_bytes: int | None = Field(None, ge=0, lt=2**53)
    ttl: float | None = Field(None, gt=0, lt=2**31)
    idle_timeout: float | None = Field(None, gt=0, lt=2**31)

    def limits(self) -> Limits:
        return Limits(**self.model_dump())


class OpenBody(AdminModel):
    """`key` is for callers that must be able to ask again: 256 random bits of theirs. The same id with the same key is the same session."""

    id: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,128}$", json_schema_extra={"not": {"enum": [".", ".."]}})
    key: str | None = Field(None, pattern=r"^tl-[A-Za-z0-9_-]{43}$")
    sampling: SamplingBody | None = None
    limits: LimitsBody | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    group: str = ""
    rollout: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    reward_rule: RewardRule = "last"
    repeats: Repeats = "retry"

    @field_validator("id")
    @classmethod
    def _reachable(cls, value: str | None) -> str | None:
        """Clients take these out of a path before they send it."""
        if value in (".", ".."):
            raise ValueError("a path cannot hold it; choose another")
        return value

    @field_validator("metadata")
    @classmethod
    def _writable(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Samples carry it: what no export could write is refused when it comes."""
        check_json(value)
        return value


class RewardBody(AdminModel):
    """`lineage` is the id of a turn: the reward is of the samples that go through it. "" is the whole session."""

    value: float
    lineage: str = ""


class FinishBody(AdminModel):
    """`drain` is how many seconds turns in flight have to end."""

    reward: float | None = None
    drain: float | None = Field(None, ge=0, lt=2**31)
