"""The document itself: paths, parameters, responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby
from typing import Any

from turnloom import errors
from turnloom.errors import TurnloomError
from turnloom.gateway import routes
from turnloom.gateway.body import MAX_BODY
from turnloom.gateway.labels import HEADER, LABEL
from turnloom.gateway.openapi import admin
from turnloom.gateway.openapi.anthropic import ANTHROPIC
from turnloom.gateway.openapi.gemini import GEMINI
from turnloom.gateway.openapi.openai_chat import OPENAI_CHAT
from turnloom.gateway.openapi.openai_responses import OPENAI_RESPONSES
from turnloom.gateway.openapi.shapes import READ_PAST, TEXT, Schema, Shapes, either, record, said
from turnloom.wire.contract import COUNT, DEFAULT_READING, Dialect
from turnloom.wire.fields import MAX_MODEL

Operation = dict[str, Any]

_SHAPES: Mapping[str, Shapes] = {
    "anthropic": ANTHROPIC,
    "openai_chat": OPENAI_CHAT,
    "openai_responses": OPENAI_RESPONSES,
    "gemini": GEMINI,
}
_NAMES = {"anthropic": "Anthropic", "openai_chat": "OpenAIChat", "openai_responses": "OpenAIResponses", "gemini": "Gemini"}
_EVERYBODYS = ["openai_chat", "anthropic", "gemini"]
"""The dialects whose models are at `/v1/models`."""
_DIALECTS = routes.make_dialects(DEFAULT_READING)

FAILURES: tuple[tuple[TurnloomError, str], ...] = (
    (errors.BadRequest("messages: must be a list with at least one message"), "malformed, unsupported or contradictory"),
    (errors.UnknownResponse("resp_" + "0" * 32), "`previous_response_id` names no reply of this session"),
    (errors.PromptTooLong(40_000, 32_766), "more tokens than the context holds"),
    (errors.RenderError("the chat template refuses these messages"), "the chat template refuses the messages"),
    (errors.EngineRejected("the engine refused the request"), "the engine refused the request"),
    (errors.Unauthorized("no session has this key"), "no session has this key"),
    (errors.BodyTooLarge(f"the request body is larger than {MAX_BODY} bytes"), f"the body is larger than {MAX_BODY} bytes"),
    (errors.LimitReached("this session has used its 10 turns"), "a limit of the session"),
    (errors.SessionClosed("this session is finished; open a new one"), "the session is finished"),
    (errors.EngineOverloaded("the engine is busy"), "the engine is busy: ask again"),
    (errors.EngineAborted("the engine ended this reply early"), "the engine ended the reply early: ask again"),
    (errors.EngineUnavailable("the engine cannot be reached"), "the engine cannot be reached"),
    (errors.EngineProtocol("the engine broke its contract"), "the engine broke its contract"),
    (errors.StoreError("the disk is full"), "the turn could not be made durable"),
)
"""One of each error that a client can meet, and what it means. How a dialect answers it is asked of the dialect."""

_ABOUT = f"""Four providers' APIs, as their agents use them, before the engines of its pools. A session is told by its key: in the
path, or in any of the headers and the query parameter that the providers' clients send; of several the path's wins, then the bearer
token. Every GET answers HEAD too; what is not here is a 404. A field marked `{READ_PAST}` counts as absent where it has another
shape."""

_LABEL = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": f"^(?:{LABEL.pattern})?$"},
    "description": "What the request is for. Else it is recognised.",
}
_KEY = {"name": "key", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}, "description": "The session's key."}
_MODEL = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_MODEL},
    "description": "Any name.",
}
_ALT = {
    "name": "alt",
    "in": "query",
    "required": False,
    "schema": {"enum": ["sse", "json"]},
    "description": "`sse`: server-sent events; else one JSON array.",
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "x_goog_api_key": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
    "key": {"type": "apiKey", "in": "query", "name": "key"},
}


@cache
def document() -> bytes:
    """The document as JSON."""
    return json.dumps(_document(), ensure_ascii=False, separators=(",", ":")).encode()


def _document() -> dict[str, Any]:
    paths: dict[str, dict[str, Operation]] = {}
    for prefix in ("", "/s/{key}"):
        for path, method, operation in _operations():
            paths.setdefault(prefix + path if prefix or path else "/", {})[method] = _placed(operation, prefix)
    paths["/s/{key}/"] = {"get": _placed(_hello("root_slash"), "/s/{key}")}
    for path, method, operation in admin.operations():
        paths.setdefault(admin.PREFIX + path, {})[method] = operation
    paths |= {"/healthz": {"get": _HEALTH}, "/metrics": {"get": _METRICS}, "/openapi.json": {"get": _SELF}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Turnloom gateway",
            "version": "1",
            "description": _ABOUT,
        },
        "paths": paths,
        "components": {
            "schemas": {**_schemas(), **admin.schemas()},
            "responses": _refusals(),
            "securitySchemes": {**_SECURITY, **admin.SECURITY},
        },
    }


def _operations() -> Iterator[tuple[str, str, Operation]]:
    """(path, method, operation) of every route that exists with and without a key in its path."""
    for path, name in routes.TURNS.items():
        yield path, "post", _turn(name, name)
    for path, name in routes.COUNTS.items():
        yield path, "post", _post(name, f"{name}_count", "Count the tokens that the prompt would have.", _of(name, "Count"))
    yield "/v1/responses", "get", _websocket()
    for version in routes.VERSIONS:
        tag = version.strip("/")
        for verb in routes.GENERATE:
            yield f"{version}/models/{{model}}:{verb}", "post", _gemini(verb, f"gemini_{verb}_{tag}")
        count = _post("gemini", f"gemini_count_{tag}", "Count the tokens that the prompt would have.", _of("gemini", "Count"), [_MODEL])
        count["requestBody"] = _body("GeminiCountRequest")
        yield f"{version}/models/{{model}}:{COUNT}", "post", count
        spoken = ["gemini"] if version == "/v1beta" else _EVERYBODYS
        yield f"{version}/models", "get", _get(f"models_{tag}", "The models there are: each pool's.", spoken, "Models")
        yield f"{version}/models/{{model}}", "get", _get(f"model_{tag}", "Every name is that one model.", spoken, "Model", [_MODEL])
    yield "/api/hello", "get", _hello("hello")
    yield "", "get", _hello("root")


def _turn(name: str, operation_id: str, parameters: list[Any] | None = None) -> Operation:
    operation = _post(name, operation_id, "Sample one turn.", _of(name, "Reply"), [*(parameters or []), _LABEL])
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": said(TEXT, _SHAPES[name].events)}
    return operation


def _gemini(verb: str, operation_id: str) -> Operation:
    if verb == routes.GENERATE[0]:
        operation = _turn("gemini", operation_id, [_MODEL])
        del operation["responses"]["200"]["content"]["text/event-stream"]
        return operation
    operation = _turn("gemini", operation_id, [_MODEL, _ALT])
    operation["responses"]["200"]["content"]["application/json"] = {"schema": said({"type": "array"}, GEMINI.events)}
    return operation


def _post(name: str, operation_id: str, summary: str, answer: Schema, parameters: list[Any] | None = None) -> Operation:
    return {
        "operationId": operation_id,
        "tags": [name],
        "summary": summary,
        "parameters": parameters or [],
        "requestBody": _body(f"{_NAMES[name]}Request"),
        "responses": {"200": _ok(answer), **{status: _refusal([name], status) for status in _errors([name])}},
    }


def _get(operation_id: str, summary: str, spoken: list[str], what: str, parameters: list[Any] | None = None) -> Operation:
    answer = either(*(_of(name, what) for name in spoken)) if len(spoken) > 1 else _of(spoken[0], what)
    return {
        "operationId": operation_id,
        "tags": spoken,
        "summary": summary,
        "parameters": parameters or [],
        "responses": {"200": _ok(answer), "401": _refusal(spoken, "401")},
    }


def _websocket() -> Operation:
    refusals = {"404": "Replies cannot be fetched again.", "426": "There is no WebSocket here: POST instead."}
    shown = {"application/json": {"schema": _of("openai_responses", "Error")}}
    return {
        "operationId": "openai_responses_websocket",
        "tags": ["openai_responses"],
        "summary": "Refused, so that clients fall back to POST.",
        "parameters": [],
        "security": [],
        "responses": {status: {"description": why, "content": shown} for status, why in refusals.items()},
    }


def _hello(operation_id: str) -> Operation:
    return {
        "operationId": operation_id,
        "summary": "Answers what agents probe for before they start.",
        "parameters": [],
        "security": [],
        "responses": {"200": {"description": "Here.", "content": {"text/plain": {"schema": TEXT}}}},
    }


def _placed(operation: Operation, prefix: str) -> Operation:
    """The operation with its key outside the path, or in it."""
    if prefix:
        moved = {**operation, "operationId": f"session_{operation['operationId']}", "parameters": [_KEY, *operation["parameters"]]}
        return {**moved, "security": []}
    return {"security": [{name: []} for name in _SECURITY], **operation}


def _body(name: str) -> dict[str, Any]:
    description = f"At most {MAX_BODY} bytes, compressed or not."
    return {"required": True, "description": description, "content": {"application/json": {"schema": _ref(name)}}}


def _ok(schema: Schema) -> dict[str, Any]:
    return {"description": "Done.", "content": {"application/json": {"schema": schema}}}


def _refusal(spoken: list[str], status: str) -> dict[str, str]:
    return {"$ref": f"#/components/responses/{_refusal_name(spoken, status)}"}


def _refusal_name(spoken: list[str], status: str) -> str:
    return f"{'Or'.join(_NAMES[name] for name in spoken)}{status}"


def _refusals() -> dict[str, Any]:
    every = [[name] for name in _NAMES]
    found = {_refusal_name(spoken, status): response for spoken in every for status, response in _errors(spoken).items()}
    return {**found, _refusal_name(_EVERYBODYS, "401"): _errors(_EVERYBODYS)["401"]}


def _errors(spoken: list[str]) -> dict[str, Any]:
    """Responses by status, each with an example of every error that has it, in the dialects' own words."""
    found = [(status, example) for name in spoken for status, example in _answered(name)]
    return {status: _error([example for _, example in group], spoken) for status, group in groupby(sorted(found, key=_status), _status)}


def _status(found: tuple[str, Any]) -> str:
    return found[0]


def _answered(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    dialect: Dialect = getattr(_DIALECTS, name)
    for error, meaning in FAILURES:
        if isinstance(error, errors.UnknownResponse) and name != "openai_responses":
            continue
        answer = dialect.error(error)
        yield (
            str(answer.status),
            {"name": f"{name}_{type(error).__name__}", "meaning": meaning, "value": json.loads(answer.body), "headers": answer.headers},
        )


def _error(examples: list[dict[str, Any]], spoken: list[str]) -> dict[str, Any]:
    meanings = dict.fromkeys(example["meaning"] for example in examples)
    headers = sorted({header.lower() for example in examples for header in example["headers"]})
    schema = either(*(_of(name, "Error") for name in spoken)) if len(spoken) > 1 else _of(spoken[0], "Error")
    shown = {example["name"]: {"summary": example["meaning"], "value": example["value"]} for example in examples}
    response: dict[str, Any] = {
        "description": "; ".join(meanings).capitalize() + ".",
        "content": {"application/json": {"schema": schema, "examples": shown}},
    }
    return {**response, "headers": {header: {"schema": TEXT} for header in headers}} if headers else response


def _of(name: str, what: str) -> Schema:
    return _ref(f"{_NAMES[name]}{what}")


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _schemas() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for name, shapes in _SHAPES.items():
        spelled = {
            "Request": shapes.request,
            "Reply": shapes.reply,
            "Count": shapes.count,
            "Models": shapes.models,
            "Model": shapes.model,
            "Error": shapes.error,
        }
        found |= {f"{_NAMES[name]}{what}": schema for what, schema in spelled.items()}
    found["GeminiCountRequest"] = either(_ref("GeminiRequest"), record({"generateContentRequest": _ref("GeminiRequest")}))
    return found


_HEALTH: Operation = {
    "operationId": "health",
    "summary": "Whether the engine is ready.",
    "security": [],
    "responses": {
        status: {"description": words, "content": {"application/json": {"schema": record({"ready": {"type": "boolean"}})}}}
        for status, words in (("200", "Ready."), ("503", "Not ready."))
    },
}
_METRICS: Operation = {
    "operationId": "metrics",
    "summary": "Prometheus metrics.",
    "security": [],
    "responses": {"200": {"description": "The metrics.", "content": {"text/plain": {"schema": TEXT}}}},
}
_SELF: Operation = {
    "operationId": "openapi",
    "summary": "This document.",
    "security": [],
    "responses": {"200": {"description": "The document.", "content": {"application/json": {"schema": {"type": "object"}}}}},
}
