"""Law 9: what message text holds, or holds a part of, never becomes a control token, and is in the prompt as it was written."""

from __future__ import annotations

import functools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.histories import assistant, call, result, system, user
from turnloom.render.contract import Rendered
from turnloom.render.shield import Edges, Shield
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing.corpus import entry, load
from turnloom.testing.tokenizers import qwen_directory
from turnloom.tokenizer import HFTokenizer, load_tokenizer
from turnloom.types import Message, Tool, ToolCall

TEMPLATES = ["trl/qwen3", "trl/qwen3_5_think", "llama.cpp/MiniMax-M2", "llama.cpp/Qwen3-Coder", "llama.cpp/ByteDance-Seed-OSS"]
FIELDS = ("system", "user", "text", "thought", "id", "name", "key", "value", "result", "description", "parameter", "about", "enum")
WORDS = {field: f"harmless{i:02}" for i, field in enumerate(FIELDS)}


@functools.cache
def renderer_of(name: str) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(load(name), entry(name).template_kwargs)


def parts(fields: dict[str, str]) -> tuple[list[Message], Message, list[Message], list[Tool]]:
    f = {**WORDS, **fields}
    said = {"type": "string", "description": f["about"], "enum": [f["enum"]]}
    schema = json.dumps({"type": "object", "properties": {f["parameter"]: said}, "required": [f["parameter"]]})
    reply = assistant(f["text"], call(json.dumps({f["key"]: f["value"]}), id=f["id"], name=f["name"]), thought=f["thought"])
    tools = [Tool(f["name"], f["description"], schema)]
    return [system(f["system"]), user(f["user"])], reply, [result(f["result"], id=f["id"]), user(f["user"])], tools


def rendered(name: str, fields: dict[str, str]) -> Rendered:
    first, reply, new, tools = parts(fields)
    return renderer_of(name).render([*first, reply, *new], tools)


def controls(name: str, found: Rendered) -> list[int]:
    known = set(load(name).control_tokens.values())
    return [index for index in found.ids.tolist() if index in known]


@pytest.mark.parametrize(
    ("template", "field", "text", "spelling"),
    [
        ("trl/qwen3_5_think", "key", "x<|im_end|", "<|im_end|>"),
        ("trl/nemotron_3_nano", "key", "</think", "</think>"),
        ("llama.cpp/Qwen3-Coder", "key", "<tool_call", "<tool_call>"),
        ("llama.cpp/MiniMax-M2", "user", "done ]~!b", "]~!b["),
        ("llama.cpp/MiniMax-M3", "key", "/mm:think>", "</mm:think>"),
        ("llama.cpp/ByteDance-Seed-OSS", "key", "<seed:eos", "<seed:eos>"),
        ("llama.cpp/meetkai-functionary-medium-v3.1", "name", "x<|eot_id|", "<|eot_id|>"),
        ("llama.cpp/meetkai-functionary-medium-v3.2", "text", "x<|eot_id|", "<|eot_id|>"),
    ],
)
def test_a_template_never_completes_a_control_token_of_message_text(template: str, field: str, text: str, spelling: str) -> None:
    fields = {"id": "call_1"} if field != "id" else {}
    harmless, found = rendered(template, fields), rendered(template, {**fields, field: text})
    assert controls(template, found) == controls(template, harmless)
    assert found.escaped > harmless.escaped == 0
    decoded = load(template).decode(found.ids.tolist())
    assert text.strip() in decoded
    assert decoded.count(spelling) > load(template).decode(harmless.ids.tolist()).count(spelling)


@st.composite
def pieces(draw: st.DrawFn, name: str) -> dict[str, str]:
    tokenizer = load(name)
    shown = [s for s in tokenizer.control_tokens if s in tokenizer.chat_template] or list(tokenizer.control_tokens)
    spelling = st.sampled_from(sorted(shown))
    cut = st.builds(lambda s, a, b: s[a : len(s) - b], spelling, st.integers(0, 3), st.integers(0, 3))
    text = st.lists(st.one_of(cut, st.sampled_from(["x", "<", ">", "]", "[", "/", " y"])), min_size=1, max_size=3).map("".join)
    # Templates leave out blank text by rule.
    return draw(st.dictionaries(st.sampled_from(FIELDS), text.filter(str.strip), min_size=1, max_size=4))


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_of_control_tokens_in_any_field_leave_the_control_tokens_alone(name: str, data: st.DataObject) -> None:
    fields = data.draw(pieces(name))
    found = rendered(name, fields)
    assert controls(name, found) == controls(name, rendered(name, {}))
    decoded = load(name).decode(found.ids.tolist())
    for field in ("system", "user", "result"):
        text = {**WORDS, **fields}[field].strip()
        assert text in decoded


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_bridge_completes_none_either(name: str) -> None:
    tokenizer, renderer = load(name), renderer_of(name)
    end = tokenizer.encode("words") + sorted(tokenizer.eos_ids)[:1]

    def bridged(text: str) -> Rendered:
        _, reply, new, tools = parts({})
        found = renderer.bridge(reply, end, [new[0], user(text)], tools)
        assert isinstance(found, Rendered), found
        return found

    harmless = controls(name, bridged("q"))
    for spelling in tokenizer.control_tokens:
        for text in (f"q {spelling[:-1]}", f"{spelling[1:]} q", spelling[1:-1]):
            found = bridged(text)
            assert controls(name, found) == harmless
            assert text.strip() in tokenizer.decode(found.ids.tolist())


def test_text_that_no_template_completes_is_encoded_as_ever() -> None:
    tokenizer = load("trl/qwen3")
    found = renderer_of("trl/qwen3").render([user("is a <"), assistant("> b"), user("think")], ())
    assert found.escaped == 0
    assert found.ids.tolist() == tokenizer.encode(tokenizer.decode(found.ids.tolist()))


def test_only_the_parts_that_are_completed_are_split_off() -> None:
    name = "trl/qwen3_5_think"
    found = rendered(name, {"key": "x<|im_end|", "user": "is a <", "result": "> b"})
    assert found.escaped == 1


def test_a_control_token_that_touches_a_part_is_found_where_it_overlaps_another() -> None:
    edges = Edges(["]~!b[", "[e~["])
    assert edges.find("q ]~!b ") == [(2, 6)]
    assert edges.touches("]~!b[e~[", 5, 8)
    assert not edges.touches("]~!b[e~", 5, 7)


@pytest.mark.parametrize("text", ["look at src/thinking.md", "/think", "read /no_think.md", "/home/thinkpad/x"])
@pytest.mark.parametrize("name", ["llama.cpp/NVIDIA-Nemotron-Nano-v2", "llama.cpp/HuggingFaceTB-SmolLM3-3B"])
def test_a_thinking_switch_in_text_is_text(name: str, text: str) -> None:
    tool = Tool("ls", f"Reads {text}.", '{"type":"object","properties":{}}')
    found = renderer_of(name).render([system(f"Sys {text}."), user(text)], (tool,))
    decoded = load(name).decode(found.ids.tolist())
    assert f"Sys {text}." in decoded
    assert f"Reads {text}." in decoded
    assert found.escaped == 0


def test_text_that_the_template_trims_is_completed_no_more() -> None:
    tokenizer = with_template("{% for m in messages %}<|im_start|>{{ m.content | trim }}>{{ '<' + m.content | trim + '>' }}{% endfor %}")
    found = ChatTemplateRenderer(tokenizer).render([user(" q<|im_end| \n"), user("\n|im_end|> x"), user(" /think ")], ())
    control = set(tokenizer.control_tokens.values())
    assert [i for i in found.ids.tolist() if i in control] == [tokenizer.control_tokens["<|im_start|>"]] * 3
    said = ("q<|im_end|", "|im_end|> x", "/think")
    assert tokenizer.decode(found.ids.tolist()) == "".join(f"<|im_start|>{text}><{text}>" for text in said)
    assert found.escaped == 4


def with_template(template: str) -> HFTokenizer:
    return load_tokenizer(qwen_directory("qwen3"), chat_template=template)


def test_braille_in_template_kwargs_is_no_anchor() -> None:
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ who }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ who }}\n{% endif %}"
    )
    renderer = ChatTemplateRenderer(tokenizer, {"who": "\u2801"})
    found = renderer.bridge(assistant("hi"), tokenizer.encode("hi"), [user("more")], ())
    assert isinstance(found, Rendered)
    assert tokenizer.decode(found.ids.tolist()) == "<|im_end|>\n<|im_start|>user \u2801\nmore<|im_end|>\n<|im_start|>assistant \u2801\n"


def test_braille_in_an_id_that_the_model_wrote_is_no_placeholder() -> None:
    reply = assistant("", ToolCall("call_1", "ls", "{}", "functions.ls:0\u2801\u2802"))
    shield = Shield(re.compile("<s>"), None, frozenset(), [reply], ())
    assert {shield.anchor, shield("<s>")}.isdisjoint("\u2801\u2802")
