"""How a parameter's bare text becomes a JSON value of the type its schema allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnloom.parse.schema import encode, load, types_of


def types(schema: Any, **root: Any) -> set[str]:
    return set(types_of("p", {"properties": {"p": schema}, **root}))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "INTEGER"}, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"enum": ["1", "2"]}, {"string"}),
        ({"enum": ["auto", 1, 1.5, None, True, [], {}]}, {"string", "integer", "number", "null", "boolean", "array", "object"}),
        ({"type": ["string", "integer"], "enum": ["1", "2"]}, {"string"}),
        ({"const": 3}, {"integer"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "array"}, {"anyOf": [{"type": "boolean"}]}]}, {"array", "boolean"}),
        ({"anyOf": [{"description": "anything"}, {"type": "null"}]}, {"string", "null"}),
        ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, {"integer"}),
        ({"allOf": [{"minimum": 1}, {"type": ["integer", "string"]}, {"type": "integer"}]}, {"integer"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({}, {"string"}),
        ({"type": "any"}, {"string"}),
        ({"type": []}, {"string"}),
        ({"enum": []}, {"string"}),
        (True, {"string"}),
        (None, {"string"}),
        ({"$ref": "#/$defs/N"}, {"number"}),
        ({"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}, {"number", "null"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/missing/deeper"}, {"string"}),
        ({"$ref": "https://example.com/schema"}, {"string"}),
    ],
)
def test_types_that_a_schema_allows(schema: Any, expected: set[str]) -> None:
    assert types(schema, **{"$defs": {"N": {"type": "number"}, "a/b": {"type": "boolean"}}}) == expected


def test_schema_that_names_itself_ends() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/L"}] * 9 + [{"type": "array"}]}
    assert types({"$ref": "#/$defs/L"}, **{"$defs": {"L": loop}}) == {"array"}


def test_schema_nested_without_end_is_a_string() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(300):
        deep = {"anyOf": [deep]}
    assert types(deep) == {"string"}


def test_undeclared_parameter_takes_additional_properties_or_is_a_string() -> None:
    assert types_of("x", {"properties": {}, "additionalProperties": {"type": "integer"}}) == {"integer"}
    assert types_of("x", {"properties": {}, "additionalProperties": False}) == {"string"}
    assert types_of("x", {}) == {"string"}


@pytest.mark.parametrize(
    ("text", "allowed", "expected"),
    [
        ("\n12\n", "string", '"12"'),
        (" a ", "string", '" a "'),
        ("\n 12 \n", "integer", "12"),
        ("12.0", "integer", "12.0"),
        ("12.5", "integer", None),
        ("1e400", "integer", None),
        ("12", "number", "12"),
        ("-1.50E+3", "number", "-1.50E+3"),
        ("NaN", "number", None),
        ("1 2", "number", None),
        ("٣", "integer", None),
        ('"12"', "integer", None),
        ("", "integer", None),
        ("true", "boolean", "true"),
        ("True", "boolean", "true"),
        ("False", "boolean", "false"),
        ("TRUE", "boolean", None),
        ("1", "boolean", None),
        ("null", "null", "null"),
        ("None", "null", "null"),
        ("None", "boolean", None),
        ('{"a": 1, "a": 2}', "object", '{"a": 1, "a": 2}'),
        ("[1]", "object", None),
        ("{'a': 1}", "object", None),
        ("[1,\n 2]", "array", "[1,\n 2]"),
        ("12", "string integer", "12"),
        ("twelve", "string integer", '"twelve"'),
        ("007", "string integer", '"007"'),
        ('\n"12"\n', "string integer", '"\\"12\\""'),
        ("null", "string null", "null"),
        ("None", "string null", '"None"'),
        ("True", "string boolean", '"True"'),
        ("12", "array null", None),
    ],
)
def test_text_becomes_a_value_of_an_allowed_type(text: str, allowed: str, expected: str | None) -> None:
    assert encode(text, frozenset(allowed.split())) == expected


def test_deeply_nested_value_is_no_json() -> None:
    assert encode("[" * 1000 + "]" * 1000, frozenset({"array"})) is None
    assert load("[" * 100_000) == {}


def test_schema_is_loaded_only_from_an_object() -> None:
    assert load(json.dumps({"type": "object"})) == {"type": "object"}
    assert load("[1]") == {}
    assert load("") == {}
