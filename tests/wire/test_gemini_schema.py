"""Google's schema dialect becomes JSON Schema; JSON Schema stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from turnloom.errors import BadRequest
from turnloom.wire.gemini.schema import json_schema

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "types in capitals": (
        {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
        {"type": "object", "properties": {"a": {"type": "string"}}},
    ),
    "a property may have a keyword's name": (
        {"type": "OBJECT", "properties": {"type": {"type": "STRING"}, "nullable": {"type": "BOOLEAN"}, "any_of": {"type": "NUMBER"}}},
        {"type": "object", "properties": {"type": {"type": "string"}, "nullable": {"type": "boolean"}, "any_of": {"type": "number"}}},
    ),
    "nullable": ({"type": "INTEGER", "nullable": True}, {"type": ["integer", "null"]}),
    "not nullable": ({"type": "INTEGER", "nullable": False}, {"type": "integer"}),
    "a nullable choice": ({"type": "STRING", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
    "a nullable union": ({"anyOf": [{"type": "STRING"}], "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    "snake case": (
        {"any_of": [{"type": "ARRAY", "min_items": "1", "max_items": 3, "items": {"type": "STRING", "max_length": "9"}}]},
        {"anyOf": [{"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "string", "maxLength": 9}}]},
    ),
    "ordering": (
        {"properties": {"a": {}, "b": {}, "c": {}}, "propertyOrdering": ["c", "gone", "a"]},
        {"properties": {"c": {}, "a": {}, "b": {}}},
    ),
    "format of a choice": ({"type": "STRING", "format": "enum", "enum": ["a"]}, {"type": "string", "enum": ["a"]}),
    "other formats": ({"type": "STRING", "format": "date-time"}, {"type": "string", "format": "date-time"}),
    "example": ({"type": "STRING", "example": {"type": "OBJECT"}}, {"type": "string", "examples": [{"type": "OBJECT"}]}),
    "unspecified": ({"type": "TYPE_UNSPECIFIED", "description": "STRING"}, {"description": "STRING"}),
    "values are not schemas": (
        {"default": {"type": "STRING"}, "enum": ["STRING", {"type": "STRING"}]},
        {"default": {"type": "STRING"}, "enum": ["STRING", {"type": "STRING"}]},
    ),
    "additional": ({"additionalProperties": {"type": "STRING"}}, {"additionalProperties": {"type": "string"}}),
    "none additional": ({"additional_properties": False}, {"additionalProperties": False}),
    "references": ({"defs": {"a": {"type": "STRING"}}, "ref": "#/$defs/a"}, {"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"}),
}


@pytest.mark.parametrize(("google", "plain"), CASES.values(), ids=CASES)
def test_googles_words(google: dict[str, Any], plain: dict[str, Any]) -> None:
    found = json_schema(google, "parameters")
    assert found == plain
    if "properties" in plain:
        assert list(found["properties"]) == list(plain["properties"]), "order is meant"
    assert json_schema(found, "parameters") == found, "and what came out stays"


def test_what_google_genai_writes_is_read() -> None:
    def look(path: str, depth: int = 2, kinds: list[str] | None = None) -> None:
        """Look."""

    declared = types.FunctionDeclaration.from_callable_with_api_option(callable=look)
    assert declared.parameters is not None
    written = declared.parameters.model_dump(mode="json", by_alias=True, exclude_none=True)
    found = json_schema(written, "parameters")
    assert found["type"] == "object"
    assert found["properties"]["path"] == {"type": "string"}
    assert found["properties"]["depth"] == {"type": "integer", "default": 2}
    assert found["properties"]["kinds"]["type"] == ["array", "null"]
    assert found["required"] == ["path"]


WORDS = st.sampled_from(["string", "number", "integer", "boolean", "array", "object", "null"])
PLAIN = st.recursive(
    st.fixed_dictionaries(
        {"type": WORDS | st.lists(WORDS, min_size=1, max_size=2)}, optional={"description": st.text(max_size=3), "const": st.just("STRING")}
    ),
    lambda inner: st.fixed_dictionaries(
        {"type": WORDS},
        optional={
            "properties": st.dictionaries(st.sampled_from(["type", "items", "min_items", "x"]), inner, max_size=3),
            "items": inner,
            "anyOf": st.lists(inner, max_size=2),
            "minItems": st.integers(0, 5),
            "required": st.just(["x"]),
            "x-own": st.just({"type": "STRING"}),
        },
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_json_schema_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert json_schema(schema, "parameters") == schema


def test_a_type_that_there_is_not() -> None:
    with pytest.raises(BadRequest, match=r"parameters\.items\.type: 'TEXT' is no type"):
        json_schema({"items": {"type": "TEXT"}}, "parameters")
