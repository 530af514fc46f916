"""The OpenAPI document: it names every route, holds to the code's limits, and tells the truth about requests and answers."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic.types
import jsonschema_rs
import openai.types.chat
import openai.types.responses
import pytest
import schemathesis
from google.genai import types as genai
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from schemathesis import GenerationMode
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from tests.support.dialects import ALL, DOCUMENT, error_of, validator
from tests.support.gateways import Bench, bench
from turnloom import errors
from turnloom.export.check import check_samples
from turnloom.gateway import routes
from turnloom.gateway.body import MAX_BODY
from turnloom.gateway.openapi import document
from turnloom.gateway.openapi.document import FAILURES
from turnloom.gateway.openapi.shapes import READ_PAST
from turnloom.testing.scripted_engine import Reply, ScriptedEngine
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.wire import contract, fields
from turnloom.wire.openai_chat.read import MAX_CHOICES

SDK: dict[str, TypeAdapter[Any]] = {
    "anthropic": TypeAdapter(anthropic.types.Message),
    "openai_chat": TypeAdapter(openai.types.chat.ChatCompletion),
    "openai_responses": TypeAdapter(openai.types.responses.Response),
    "gemini": TypeAdapter(genai.GenerateContentResponse),
}
EVENTS: dict[str, TypeAdapter[Any]] = {
    "anthropic": TypeAdapter(anthropic.types.RawMessageStreamEvent),
    "openai_chat": TypeAdapter(openai.types.chat.ChatCompletionChunk),
    "openai_responses": TypeAdapter(openai.types.responses.ResponseStreamEvent),
}


SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def test_it_is_an_openapi_document() -> None:
    OPENAPI_31_VALIDATOR.validate(DOCUMENT)
    for name in SCHEMAS:
        jsonschema_rs.meta.validate({**SCHEMAS[name], "$schema": "https://json-schema.org/draft/2020-12/schema"})
    operations = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(operations) == len(set(operations))
    for ref in re.findall(r'"\$ref":"#/([^"]+)"', document().decode()):
        found: Any = DOCUMENT
        for step in ref.split("/"):
            found = found[step]


async def test_it_is_served_and_names_every_route_and_no_other() -> None:
    async with bench() as b:
        async with b.http.get(b.gateway.url + "/openapi.json") as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            served = await answer.json()
        assert b.gateway._runner is not None
        routed = set()
        for route in b.gateway._runner.app.router.routes():
            path = route.resource.canonical  # type: ignore[union-attr]
            for verb in (*routes.GENERATE, contract.COUNT) if "{verb}" in path else ("",):
                routed.add((route.method, path.replace("{verb}", verb)))
    documented = {(method.upper(), path) for path, held in served["paths"].items() for method in held}
    assert {each for each in routed if each[0] != "HEAD"} == documented
    wire = {(method, path) for method, path in routed if not path.startswith("/api/v1/")}
    assert {path for method, path in wire if method == "HEAD"} == {path for method, path in wire if method == "GET"}


def test_every_path_parameter_is_declared() -> None:
    for path, held in DOCUMENT["paths"].items():
        for operation in held.values():
            named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert named == set(re.findall(r"\{(\w+)\}", path)), path


def leaves(kind: type[errors.TurnloomError]) -> Iterator[type[errors.TurnloomError]]:
    below = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    for each in below:
        yield from leaves(each)
    if not below:
        yield kind


def test_every_error_of_a_turn_is_documented_in_the_dialects_own_words() -> None:
    kinds = {*leaves(errors.RequestError), *leaves(errors.EngineError), errors.RenderError, errors.StoreError} - {errors.NotFound}
    assert {type(error) for error, _ in FAILURES} == kinds
    shown = DOCUMENT["components"]["responses"]
    dialects = routes.make_dialects(contract.DEFAULT_READING)
    for name, spoken in ALL.items():
        for error, _ in FAILURES:
            if isinstance(error, errors.UnknownResponse) and name != "openai_responses":
                continue
            told = getattr(dialects, name).error(error)
            response = shown[f"{spoken.schema}{told.status}"]
            example = response["content"]["application/json"]["examples"][f"{name}_{type(error).__name__}"]
            assert example["value"] == json.loads(told.body)
            assert {header.lower() for header in told.headers} <= set(response.get("headers", ()))
            assert error_of(spoken, told.status, told.body)


def test_limits_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = SCHEMAS["OpenAIChatRequest"]["properties"]
    assert chat["messages"]["maxItems"] == fields.MAX_MESSAGES
    assert chat["tools"]["maxItems"] == fields.MAX_TOOLS
    assert chat["n"]["maximum"] == MAX_CHOICES
    assert chat["stop"]["anyOf"][0]["anyOf"][1]["maxItems"] == contract.MAX_STOPS
    assert chat["stop"]["anyOf"][0]["anyOf"][0]["maxLength"] == contract.MAX_STOP_CHARS
    assert str(MAX_BODY) in DOCUMENT["paths"]["/v1/messages"]["post"]["requestBody"]["description"]


# --- requests that follow from the document, through the real gateway ---

BEYOND = re.compile(
    r"the last \w+ is (from the assistant|the model's)"
    r"|at least one (user )?message"
    r"|user message needs some text or a tool result"
    r"|not among the functions that tools declares"
    r"|Previous response with id"
)
"""What no schema can say: the last message, something said in any of them, names that stand elsewhere."""

ENDS = "<|im_end|>"


def narrowed(found: Any) -> Any:
    """A schema with fewer instances, each of them small: no fields but those it names, short lists and texts."""
    if isinstance(found, list):
        return [narrowed(each) for each in found]
    if not isinstance(found, dict):
        return found
    found = {key: value if key == "not" else narrowed(value) for key, value in found.items()}
    if found.get("type") == "object":
        if "properties" not in found:
            return {"enum": [{}, {"type": "object"}, {"type": "object", "properties": {"é": {"type": "string"}}, "required": ["é"]}]}
        found["additionalProperties"] = False
    if found.get("type") == "array":
        found["maxItems"] = min(found.get("maxItems", 4), 4)
    if found.get("type") in ("string", ["string", "null"]) and "pattern" not in found:
        found["maxLength"] = min(found.get("maxLength", 8), 8)
    return found


def insisted(found: Any) -> Any:
    """A schema without what it only recommends."""
    if isinstance(found, list):
        return [insisted(each) for each in found]
    if not isinstance(found, dict):
        return found
    return {} if found.get(READ_PAST) else {key: insisted(value) for key, value in found.items()}


GENERATED = schemathesis.openapi.from_dict({**DOCUMENT, "components": {**DOCUMENT["components"], "schemas": narrowed(SCHEMAS)}})
INSISTED = {"components": {"schemas": insisted(SCHEMAS)}}
ACCEPTED = {
    name: jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{spoken.schema}Request", **INSISTED}) for name, spoken in ALL.items()
}


def cases(name: str, mode: GenerationMode) -> Any:
    path = "/s/{key}" + ALL[name].path.replace("/models/m:", "/models/{model}:")
    parameters = {"key": "k", "model": "m"} if name == "gemini" else {"key": "k"}
    return GENERATED[path]["POST"].as_strategy(generation_mode=mode, path_parameters=parameters, headers={}, query={})


JUNK = st.sampled_from([None, 0, -7, 2.5, "junk", "", [], ["junk"], {}, {"junk": "junk"}])


@st.composite
def spoiled(draw: st.DrawFn, body: Any) -> Any:
    """The body with one value in it replaced, left out, or joined by another of its kind."""
    changed = copy.deepcopy(body)
    places = list(_places(changed))
    holder, key = draw(st.sampled_from(places))
    if draw(st.booleans()):
        holder[key] = draw(JUNK)
    elif draw(st.booleans()):
        del holder[key]
    else:
        _add(holder, draw(JUNK))
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, held in list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()):
        yield value, key
        yield from _places(held)


def _add(holder: Any, value: Any) -> None:
    if isinstance(holder, list):
        holder.append(value)
    else:
        holder["junk"] = value


def answer(body: dict[str, Any], index: int) -> Reply:
    """A text, or a call of the first tool that the prompt offers; now and then reasoning before it, and any style of chunks."""
    prompt = qwen_tokenizer("qwen2.5").decode(body["input_ids"])
    offered = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    said = "Größe ✓ 👩‍👩‍👧."
    if offered and index % 3:
        try:
            name = json.loads(offered[1].split("\n")[0])["function"]["name"]
        except (ValueError, KeyError, TypeError):
            name = "f"
        said += f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': {'a': 'é', 'n': index}})}\n</tool_call>"
    return Reply(f"<think>\nHm, {index}.\n</think>\n{said}" if index % 4 == 0 else said, chunk=1 + index % 7)


class Wire:
    """A gateway on a loop of its own that runs only while something is asked."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        tokenizer = qwen_tokenizer("qwen2.5")
        engine = ScriptedEngine(answer, tokenizer=tokenizer, end_id=tokenizer.control_tokens[ENDS], grammar_backend="xgrammar")
        self._bench = bench(engine=engine, tokenizer=tokenizer, images="placeholder")
        self.bench: Bench = self.runner.run(self._bench.__aenter__())

    def ask(self, name: str, body: Any) -> tuple[int, str, bytes]:
        """(status, content type, body)."""
        return self.runner.run(self._ask(name, body))

    async def _ask(self, name: str, body: Any) -> tuple[int, str, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = self.bench.handle.base_url + ALL[name].path
        async with asyncio.timeout(20), self.bench.http.post(url, data=data) as got:
            return got.status, got.content_type, await got.read()

    def close(self) -> None:
        self.runner.run(self._bench.__aexit__(None, None, None))
        self.runner.close()


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    held = Wire()
    yield held
    held.close()


def assert_shaped(name: str, sent: Any, status: int, content_type: str, raw: bytes) -> None:
    """The answer has a documented status and its schema, and the official SDK's type takes it."""
    if status != 200:
        assert content_type == "application/json"
        error_of(ALL[name], status, raw)
    elif content_type == "application/json":
        validator(f"{ALL[name].schema}Reply").validate(json.loads(raw))
        SDK[name].validate_python(own_words(json.loads(raw), sent))
    else:
        assert content_type == "text/event-stream"
        *events, last = [line.removeprefix("data: ") for line in raw.decode().split("\n") if line.startswith("data: ")]
        for event in (*events, last):
            if event != "[DONE]":
                EVENTS[name].validate_python(own_words(json.loads(event), sent))
        assert re.search(r'message_stop|^\[DONE\]$|"response.(completed|incomplete)"', last)


def own_words(answer: dict[str, Any], sent: Any) -> dict[str, Any]:
    """The answer, or an event, of Responses without the fields that say again what the client sent; they are as good as that was."""
    if answer.get("object") == "chat.completion.chunk":
        return functions_only(answer)
    if isinstance(answer.get("response"), dict):
        return {**answer, "response": own_words(answer["response"], sent)}
    if answer.get("object") != "response":
        return answer
    silent = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    return {key: silent.get(key) if key in sent and key != "model" else value for key, value in answer.items()}


def functions_only(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk of a chat without the kind of its calls to custom tools: the SDK's type of a chunk knows functions alone."""
    choices = [dict(choice) for choice in chunk["choices"]]
    for choice in choices:
        if calls := choice["delta"].get("tool_calls"):
            kept = [{name: value for name, value in call.items() if (name, value) != ("type", "custom")} for call in calls]
            choice["delta"] = {**choice["delta"], "tool_calls": kept}
    return {**chunk, "choices": choices}


def assert_lawful(wire: Wire) -> None:
    """Every turn on record is one that the engine sampled for a client that got it, and the samples pass their check."""
    turns = wire.runner.run(wire.bench.session()).tree.turns
    assert {t.id for t in turns.values()} == {body["rid"][:32] for body in wire.bench.engine.requests}
    assert {t.outcome for t in turns.values()} == {"delivered"}
    report = check_samples(wire.runner.run(wire.bench.handle.samples()))
    assert report.ok, report.findings
    assert report.samples > 4


def settled(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("name", ALL)
def test_what_the_document_allows_is_answered_and_what_it_forbids_is_refused(name: str, wire: Wire) -> None:
    """Each generated request, and three more with one value of it spoiled. Whether one must be answered is the document's word."""
    answered = {True: 0, False: 0}

    @settled(40)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        body = data.draw(cases(name, GenerationMode.POSITIVE)).body
        for sent in [body, *(data.draw(spoiled(body)) for _ in range(3))]:
            status, content_type, raw = wire.ask(name, sent)
            assert_shaped(name, sent, status, content_type, raw)
            allowed = ACCEPTED[name].is_valid(sent)
            assert status == (200 if allowed else 400) or (allowed and BEYOND.search(raw.decode())), (allowed, status, raw, sent)
            answered[status == 200] += 1

    run()
    assert min(answered.values()) > 15, "both sides of the document were tried"
    assert_lawful(wire)


LIMITS = {"anthropic": "max_tokens", "openai_chat": "max_completion_tokens", "openai_responses": "max_output_tokens"}
STOPS = {"anthropic": "stop_sequences", "openai_chat": "stop"}


def edges(name: str) -> Iterator[tuple[dict[str, Any], bool]]:
    """(fields, whether they are within) on both sides of every limit that a small request can meet."""
    stops = [(["s" * contract.MAX_STOP_CHARS] * contract.MAX_STOPS, True), (["s"] * (contract.MAX_STOPS + 1), False)]
    stops.append((["s" * (contract.MAX_STOP_CHARS + 1)], False))
    for number in (0, 1):
        yield {"generationConfig": {"maxOutputTokens": number}} if name == "gemini" else {LIMITS[name]: number}, number == 1
    if name != "openai_responses":
        for value, within in stops:
            yield {"generationConfig": {"stopSequences": value}} if name == "gemini" else {STOPS[name]: value}, within
    if name == "openai_chat":
        yield from (({"n": MAX_CHOICES}, True), ({"n": MAX_CHOICES + 1}, False))


@pytest.mark.parametrize("name", ALL)
def test_the_edges_of_the_document_are_the_gateways(name: str, wire: Wire) -> None:
    for more, within in edges(name):
        sent = {**ALL[name].body("Hi"), **more}
        assert ACCEPTED[name].is_valid(sent) == within, more
        assert wire.ask(name, sent)[0] == (200 if within else 400), more


@pytest.mark.parametrize("name", ALL)
def test_what_is_no_request_at_all_is_refused_in_the_dialects_shape(name: str, wire: Wire) -> None:
    @settled(8)
    @given(cases(name, GenerationMode.NEGATIVE))
    def run(case: Any) -> None:
        status, content_type, raw = wire.ask(name, case.body)
        assert_shaped(name, case.body, status, content_type, raw)
        assert status in (200, 400), raw

    run()
