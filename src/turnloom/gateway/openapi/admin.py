"""The admin API in the document: its schemas are those of the models that read the bodies and of the types that answers have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from turnloom.core.unroll import Overlong
from turnloom.export.registry import FORMATS
from turnloom.gateway import admin_answers as answers
from turnloom.gateway.admin_bodies import FinishBody, OpenBody, RewardBody
from turnloom.gateway.admin_engines import PauseBody, ResumeBody
from turnloom.gateway.openapi.shapes import TEXT, Schema

PREFIX = "/api/v1"
SECURITY = {"adminKey": {"type": "http", "scheme": "bearer", "description": "The admin key. Without one the admin API is locked."}}

_REF = "#/components/schemas/{model}"
_MODELS: tuple[type[Any], ...] = (
    OpenBody,
    RewardBody,
    FinishBody,
    PauseBody,
    ResumeBody,
    answers.Opened,
    answers.SessionList,
    answers.Status,
    answers.TreeAnswer,
    answers.StoreAnswer,
    answers.PoolAnswer,
    answers.PoolsAnswer,
    answers.ErrorAnswer,
)
_REFUSED = {
    "400": "A field is malformed, unknown, or contradicts another.",
    "401": "The admin key is missing or wrong.",
    "404": "There is no such session, or no such pool.",
    "413": "The body is too large.",
    "429": "A limit is reached.",
    "500": "The store, or the gateway, failed.",
    "502": "An engine broke its contract.",
    "503": "An engine cannot be reached.",
}


@cache
def schemas() -> dict[str, Schema]:
    """By name: what is read as it may be sent, what is answered as it is written."""
    modes: list[Any] = [
        (model, "validation" if model.__name__.endswith("Body") else "serialization", TypeAdapter(model)) for model in _MODELS
    ]
    _, spelled = TypeAdapter.json_schemas(modes, ref_template=_REF)
    found: dict[str, Schema] = spelled["$defs"]
    return found


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(path, method, operation) of every call."""
    lines = {"description": "One canonical sample a line, or a file.", "content": _samples()}
    session = [_path("id")]
    yield "/sessions", "post", _operation("open", "Open a session.", OpenBody, {"201": _answer(answers.Opened)}, "413", "429")
    listed = [_whole("limit", 0, 1000, 100), _whole("offset", 0, 2**31 - 1, 0), _query("status", {"enum": ["open", "closed"]})]
    yield "/sessions", "get", _operation("list", "Sessions, newest first.", None, {"200": _answer(answers.SessionList)}, parameters=listed)
    status = {"200": _answer(answers.Status)}
    yield "/sessions/{id}", "get", _operation("get", "One session.", None, status, "404", parameters=session)
    dropped = {"204": {"description": "It and its turns are forgotten."}}
    yield "/sessions/{id}", "delete", _operation("drop", "Drop a session.", None, dropped, "404", parameters=session)
    tree = {"200": _answer(answers.TreeAnswer)}
    yield "/sessions/{id}/tree", "get", _operation("tree", "Its messages and turns.", None, tree, "404", parameters=session)
    chosen = [
        *session,
        _query("format", {"enum": [*FORMATS]}),
        _whole("max_tokens", 2, 2**31 - 1, None),
        _query("overlong", {"enum": [str(each) for each in Overlong]}),
        _query("skip_label", {"type": "array", "items": TEXT}),
    ]
    yield "/sessions/{id}/samples", "get", _operation("samples", "Its samples.", None, {"200": lines}, "404", parameters=chosen)
    yield (
        "/sessions/{id}/reward",
        "post",
        _operation("reward", "Add a reward.", RewardBody, status, "404", "413", parameters=session, required=True),
    )
    yield (
        "/sessions/{id}/finish",
        "post",
        _operation("finish", "Close it; again is no error.", FinishBody, status, "404", "413", parameters=session),
    )
    yield "/store", "get", _operation("store", "What the store holds.", None, {"200": _answer(answers.StoreAnswer)})
    text = {"200": {"description": "Prometheus text.", "content": {"text/plain": {"schema": TEXT}}}}
    yield "/metrics", "get", _operation("metrics", "What `/metrics` says.", None, text)
    yield "/engines", "get", _operation("engines", "Every pool's state.", None, {"200": _answer(answers.PoolsAnswer)})
    pool = {"200": _answer(answers.PoolAnswer)}
    yield "/pause", "post", _operation("pause", "Hold a pool's requests.", PauseBody, pool, "404", "413", "502", "503")
    yield "/resume", "post", _operation("resume", "Let them go on.", ResumeBody, pool, "404", "413", "502", "503")


def _operation(
    name: str,
    summary: str,
    body: type[Any] | None,
    answered: dict[str, Any],
    *refused: str,
    parameters: list[dict[str, Any]] | None = None,
    required: bool = False,
) -> dict[str, Any]:
    statuses = {"401", "400", "500", *refused}
    found: dict[str, Any] = {
        "operationId": f"admin_{name}",
        "tags": ["admin"],
        "summary": summary,
        "security": [{"adminKey": []}],
        "parameters": parameters or [],
        "responses": {**answered, **{status: _answer(answers.ErrorAnswer, _REFUSED[status]) for status in sorted(statuses)}},
    }
    if body is not None:
        found["requestBody"] = {"required": required, "content": {"application/json": {"schema": _ref(body)}}}
    return found


def _answer(model: type[Any], description: str = "Done.") -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(model)}}}


def _samples() -> dict[str, Any]:
    return {kind: {"schema": TEXT} for kind in ("application/x-ndjson", "application/vnd.apache.parquet", "application/octet-stream")}


def _ref(model: type[Any]) -> Schema:
    return {"$ref": _REF.format(model=model.__name__)}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query(name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _whole(name: str, least: int, most: int, default: int | None) -> dict[str, Any]:
    schema: Schema = {"type": "integer", "minimum": least, "maximum": most}
    return _query(name, schema if default is None else {**schema, "default": default})
