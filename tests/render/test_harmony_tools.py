"""Tools as gpt-oss reads them, schema by schema: the text that is expected, and the same from the openai-harmony package."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.render.o200k import harmony
from turnloom.errors import RenderError
from turnloom.render.harmony_tools import tools_section
from turnloom.types import Tool


def section(parameters: Any, description: str = "d") -> str:
    return tools_section([Tool("f", description, json.dumps(parameters))])


def written(parameters: Any) -> str:
    """The type of the tool's one argument."""
    head, _, rest = section(parameters).partition("type f = (_: ")
    assert head == "# Tools\n\n## functions\n\nnamespace functions {\n\n// d\n"
    return rest.removesuffix(") => any;\n\n} // namespace functions")


def theirs(parameters: Any) -> str:
    harmony()
    import openai_harmony as package

    about = package.DeveloperContent.new().with_function_tools([package.ToolDescription.new("f", "d", parameters=parameters)])
    said = package.Message.from_role_and_content(package.Role.DEVELOPER, about)
    text: str = harmony().decode(harmony().render(said))
    return text.partition("<|message|>")[2].removesuffix("<|end|>")


def one(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


CASES = {
    "nothing": ({"type": "object", "properties": {}}, "{\n}"),
    "required and not": (
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]},
        "{\na: string,\nb?: number,\n}",
    ),
    "a description": (one(type="boolean", description="why"), "{\n// why\na?: boolean,\n}"),
    "a title and examples": (
        one(type="string", title="T", description="why", examples=["x", "y"]),
        '{\n// T\n//\n// why\n// Examples:\n// - "x"\n// - "y"\na?: string,\n}',
    ),
    "words to choose from": (one(type="string", enum=["x", "y"], default="x"), '{\na?: "x" | "y", // default: x\n}'),
    "a word by default": (one(type="string", default="x"), '{\na?: string, // default: "x"\n}'),
    "an object by default": (one(type="object", default={"k": [1, 2], "l": 1e30}), '{\na?: {\n    }, // default: {"k":[1,2],"l":1e30}\n}'),
    "several kinds": (one(type=["integer", "null", "string"]), "{\na?: number | null | string,\n}"),
    "null as well": (one(type="number", nullable=True), "{\na?: number | null,\n}"),
    "lists": (one(type="array", items={"type": "array"}), "{\na?: Array<any>[],\n}"),
    "types as unlike as these": (
        one(oneOf=[{"type": "string", "description": "a path"}, {"type": "number", "default": 3}], description="place", default="x"),
        '{\n// place\n// default: "x"\na?:\n | string\n | number // default: 3\n,\n}',
    ),
    "the first type says what all say": (
        one(oneOf=[{"type": "string", "description": "place"}, {"type": "boolean", "description": "other"}], description="place"),
        "{\na?:\n | string\n | boolean // other\n,\n}",
    ),
    "only the types say something": (
        one(oneOf=[{"type": "string", "description": "place"}, {"type": "boolean", "description": "other"}]),
        "{\na?:\n | string // place\n | boolean // other\n,\n}",
    ),
    "types of an element": (
        one(type="array", items={"oneOf": [{"type": "string", "description": "s", "default": "x"}, {"enum": ["y"], "default": "y"}]}),
        '{\na?: \n     | string // s default: "x"\n     | any // default: "y"[],\n}',
    ),
}


@pytest.mark.parametrize(("parameters", "expected"), CASES.values(), ids=CASES)
def test_a_schema_is_written_as_a_type(parameters: Any, expected: str) -> None:
    assert written(parameters) == expected


@pytest.mark.parametrize("parameters", [case[0] for case in CASES.values()], ids=CASES)
def test_the_package_writes_the_same(parameters: Any) -> None:
    assert section(parameters) == theirs(parameters)


def test_a_tool_without_parameters_takes_nothing() -> None:
    assert tools_section([Tool("f", "one\r\ntwo\n\n", "")]) == (
        "# Tools\n\n## functions\n\nnamespace functions {\n\n// one\n// two\n// \ntype f = () => any;\n\n} // namespace functions"
    )


@pytest.mark.parametrize("parameters", ["{", '{"items":' * 3000 + "1" + "}" * 3000], ids=["no JSON", "too deep"])
def test_a_schema_that_cannot_be_written_is_refused_by_the_tool_s_name(parameters: str) -> None:
    with pytest.raises(RenderError, match="parameters of the tool 'f' cannot be written"):
        tools_section([Tool("f", "", parameters)])
