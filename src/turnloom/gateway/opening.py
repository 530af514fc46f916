"""What a session may be opened with, whoever asks: over HTTP and in this process the same is refused, in the same words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from turnloom.errors import BadRequest, ConfigError
from turnloom.gateway.admin_bodies import LimitsBody, OpenBody, SamplingBody
from turnloom.gateway.admin_body import AdminModel, refusal
from turnloom.store.contract import Limits
from turnloom.types import Sampling

M = TypeVar("M", bound=AdminModel)

SCHEMA = "json_schema"
"""The one field of `Sampling` that is a request's and no session's over HTTP."""


def checked(model: type[M], values: Mapping[str, Any]) -> M:
    """Raises BadRequest that names the field."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise refusal(error) from error


def opening(
    values: Mapping[str, Any],
    sampling: Sampling | Mapping[str, Any] | None,
    limits: Limits | Mapping[str, Any] | None,
    defaults: tuple[Sampling, Limits],
) -> tuple[OpenBody, Sampling, Limits]:
    """What is to be opened. A mapping says what differs from the gateway's own; a `Sampling` or `Limits` is whole. Raises BadRequest.

    What the body holds is the caller's no more: metadata is a copy, with lists where there were tuples, as it will be read again.
    """
    body = checked(OpenBody, values)
    body.metadata = json.loads(json.dumps(body.metadata))
    return body, whole_sampling(sampling, defaults[0]), whole_limits(limits, defaults[1])


def whole_sampling(given: Sampling | Mapping[str, Any] | None, default: Sampling = Sampling()) -> Sampling:  # noqa: B008
    """Raises BadRequest."""
    if given is None:
        return default
    values = _values(default if isinstance(given, Mapping) else given, Sampling, "sampling")
    schema = values.pop(SCHEMA)
    if not isinstance(schema, str):
        raise BadRequest(f"sampling.{SCHEMA}: must be the text of a JSON Schema")
    if isinstance(given, Mapping):
        values |= given
    return replace(_inside("sampling", SamplingBody, _listed(values)).sampling(), json_schema=schema)


def whole_limits(given: Limits | Mapping[str, Any] | None, default: Limits = Limits()) -> Limits:  # noqa: B008
    """Raises BadRequest."""
    if given is None:
        return default
    values = {**_values(default, Limits, "limits"), **given} if isinstance(given, Mapping) else _values(given, Limits, "limits")
    return _inside("limits", LimitsBody, values).limits()


def said_sampling(given: Sampling | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What is sent of it over HTTP: of a mapping what it names, of a `Sampling` all. Raises BadRequest."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return _inside("sampling", SamplingBody, _listed(dict(given))).model_dump(exclude_unset=True)
    whole = _values(whole_sampling(given), Sampling, "sampling")
    if whole.pop(SCHEMA):
        raise BadRequest(f"sampling.{SCHEMA}: belongs to a request, not to a session")
    return _listed(whole)


def said_limits(given: Limits | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """As `said_sampling`. Raises BadRequest."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return _inside("limits", LimitsBody, given).model_dump(exclude_unset=True)
    return _values(whole_limits(given), Limits, "limits")


def check_defaults(sampling: Sampling, limits: Limits) -> None:
    """What sessions have that are given nothing. Raises ConfigError."""
    try:
        whole_sampling(sampling)
        whole_limits(limits)
    except BadRequest as error:
        raise ConfigError(str(error)) from error


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _inside(name: str, model: type[M], values: Mapping[str, Any]) -> M:
    try:
        return checked(model, values)
    except BadRequest as error:
        raise BadRequest(f"{name}.{error}") from error


def _values(given: object, kind: type[Any], name: str) -> dict[str, Any]:
    if not isinstance(given, kind):
        raise BadRequest(f"{name}: must be a {kind.__name__} or a mapping, and is a {type(given).__name__}")
    return {field.name: getattr(given, field.name) for field in fields(kind)}
