"""Reads the body of a generateContent, streamGenerateContent or countTokens request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnloom.errors import BadRequest
from turnloom.types import Request, Tool
from turnloom.wire import fields
from turnloom.wire.contract import DEFAULT_READING, Envelope, Reading
from turnloom.wire.fields import MAX_TOOLS
from turnloom.wire.gemini.contents import ContentsReader
from turnloom.wire.gemini.fields import an_object, camel, objects, with_integers
from turnloom.wire.gemini.schema import json_schema
from turnloom.wire.json import read_object, text_of

SSE = "sse"
THOUGHTS = "thoughts"
"""Keys of `Request.wire`: the stream is one of server-sent events; the client asked to be shown the reasoning."""

_ANY_OBJECT = '{"type":"object"}'


def read(body: bytes, envelope: Envelope, reading: Reading = DEFAULT_READING) -> Request:
    sent = camel(read_object(body))
    counts = envelope.verb == "countTokens"
    if counts and sent.get("generateContentRequest") is not None:
        sent = an_object(sent["generateContentRequest"], "generateContentRequest")
    if sent.get("cachedContent"):
        raise BadRequest("cachedContent: cached contents are not kept here; send the whole request")
    contents = ContentsReader(reading)
    messages = [*contents.system(sent.get("systemInstruction")), *contents.messages(sent.get("contents"))]
    if messages[-1].role == "assistant" and not counts:
        raise BadRequest("contents: the last content is the model's; prefilling a reply is not supported, end with a user content")
    declared, declined = _tools(sent.get("tools"))
    call_tools, allowed = _function_calling(sent.get("toolConfig"), declared)
    config = an_object(sent.get("generationConfig"), "generationConfig")
    config = with_integers(config, "maxOutputTokens", "candidateCount", "logprobs")
    _refuse(config)
    thinking = an_object(config.get("thinkingConfig"), "generationConfig.thinkingConfig")
    model = envelope.model or sent.get("model")
    return Request(
        messages=tuple(messages),
        tools=allowed,
        max_tokens=fields.positive(config, "maxOutputTokens", "generationConfig"),
        stop=fields.stops(config.get("stopSequences"), "generationConfig.stopSequences"),
        stream=envelope.verb == "streamGenerateContent",
        model=model.removeprefix("models/") if isinstance(model, str) else "",
        call_tools=call_tools,
        logprobs=config.get("responseLogprobs") is True,
        json_schema=_json_schema(config),
        declined=declined,
        images=contents.images,
        wire={SSE: envelope.query.get("alt") == "sse", THOUGHTS: thinking.get("includeThoughts") is True},
    )


def _tools(value: Any) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """(the functions that the client runs, the names of the tools that only Google's servers have)."""
    tools: list[Tool] = []
    declined: dict[str, None] = {}
    for i, tool in enumerate(objects(value, "tools", MAX_TOOLS)):
        where = f"tools.{i}.functionDeclarations"
        declared = objects(tool.get("functionDeclarations"), where, MAX_TOOLS)
        tools += [_tool(each, f"{where}.{j}") for j, each in enumerate(declared)]
        declined |= {name: None for name, given in tool.items() if name != "functionDeclarations" and given is not None}
    return tuple(fields.at_most(MAX_TOOLS, tools, "tools")), tuple(declined)


def _tool(declared: Mapping[str, Any], where: str) -> Tool:
    name = fields.string(declared, "name", where)
    return Tool(name, fields.optional_string(declared, "description", where), text_of(_parameters(declared, where)))


def _parameters(declared: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Where both ways of saying it came, the one in JSON Schema holds."""
    schema, google = declared.get("parametersJsonSchema"), declared.get("parameters")
    if schema is None and google is None:
        return {"type": "object", "properties": {}}
    key, given = ("parametersJsonSchema", schema) if schema is not None else ("parameters", google)
    if not isinstance(given, dict):
        raise BadRequest(f"{where}.{key}: must be a schema object")
    return given if schema is not None else json_schema(given, f"{where}.{key}")


def _function_calling(value: Any, declared: tuple[Tool, ...]) -> tuple[bool, tuple[Tool, ...]]:
    """(whether tools may be called, those that may be). VALIDATED is read as AUTO: what parses was valid."""
    where = "toolConfig.functionCallingConfig"
    config = an_object(an_object(value, "toolConfig").get("functionCallingConfig"), where)
    mode = fields.optional_string(config, "mode", where).upper()
    if mode not in ("", "MODE_UNSPECIFIED", "AUTO", "VALIDATED", "NONE"):
        raise BadRequest(f"{where}.mode: {fields.shown(mode)} is not supported; the sampled tokens are the model's own, use AUTO or NONE")
    names = fields.items(config.get("allowedFunctionNames"), f"{where}.allowedFunctionNames", MAX_TOOLS)
    known = {tool.name for tool in declared}
    for i, name in enumerate(names):
        if not isinstance(name, str) or name not in known:
            raise BadRequest(f"{where}.allowedFunctionNames.{i}: {fields.shown(name)} is not among the functions that tools declares")
    wanted = set(names)
    allowed = tuple(tool for tool in declared if tool.name in wanted) if names and mode != "NONE" else declared
    return mode != "NONE", allowed


def _refuse(config: Mapping[str, Any]) -> None:
    """What would change the reply and cannot be had."""
    if config.get("candidateCount") not in (None, 0, 1):
        raise BadRequest("generationConfig.candidateCount: one candidate a request; ask again for another")
    if config.get("logprobs"):
        raise BadRequest("generationConfig.logprobs: only the chosen tokens' log-probabilities are known; use responseLogprobs alone")
    modalities = fields.items(config.get("responseModalities"), "generationConfig.responseModalities", MAX_TOOLS)
    if any(modality not in ("TEXT", "MODALITY_UNSPECIFIED") for modality in modalities):
        raise BadRequest('generationConfig.responseModalities: this model writes text only; use ["TEXT"]')


def _json_schema(config: Mapping[str, Any]) -> str:
    where = "generationConfig"
    kind = fields.optional_string(config, "responseMimeType", where) or "text/plain"
    if kind not in ("text/plain", "application/json"):
        raise BadRequest(f"{where}.responseMimeType: {fields.shown(kind)} is not supported; use text/plain or application/json")
    plain, google = config.get("responseJsonSchema"), config.get("responseSchema")
    if kind != "application/json":
        if plain is not None or google is not None:
            raise BadRequest(f"{where}.responseMimeType: a response schema needs application/json")
        return ""
    if plain is None and google is None:
        return _ANY_OBJECT
    key, given = ("responseJsonSchema", plain) if plain is not None else ("responseSchema", google)
    if not isinstance(given, dict):
        raise BadRequest(f"{where}.{key}: must be a schema object")
    return text_of(given if plain is not None else json_schema(given, f"{where}.{key}"))
