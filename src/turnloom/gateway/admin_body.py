"""How the admin API reads its bodies."""

from __future__ import annotations

from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from turnloom.errors import BadRequest
from turnloom.gateway.body import read_body


class AdminModel(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _whole(cls, value: object) -> object:
        """JSON has one kind of number: 5.0 is 5."""
        return int(value) if isinstance(value, float) and value.is_integer() else value


M = TypeVar("M", bound=AdminModel)


async def read_model(http: web.Request, model: type[M]) -> M:
    """Raises BadRequest, and BodyTooLarge."""
    raw = await read_body(http, admin=True)
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise refusal(error) from error


def refusal(error: ValidationError) -> BadRequest:
    """The first thing that is wrong, and where."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(each)[:80] for each in first["loc"]) or "body"
    return BadRequest(f"{where}: {first['msg']}")
