"""The adapter to the package `renderers`, with the real package: its prompts, its bridges, and what we hold it to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.histories import assistant, call, result, system, user
from turnloom.errors import ConfigError, RenderError
from turnloom.render.contract import Rendered, Unbridgeable
from turnloom.render.package import PackageRenderer
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing import corpus
from turnloom.testing.tokenizers import qwen_tokenizer
from turnloom.tokenizer import HFTokenizer
from turnloom.types import Tool

renderers = pytest.importorskip("renderers", reason="the package renderers is not tried: pip install 'turnloom[renderers]'")

LS = Tool("ls", "List", '{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}')
HISTORY = [system("sys"), user("hello"), assistant("", call('{"path":"b"}')), result("r"), assistant("done"), user("more")]

# A template of the corpus, the package's renderer for it, what a model writes for a reply of text and for one with a call.
FAMILIES = {
    "trl/qwen3": ("qwen3", "hi<|im_end|>", '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call><|im_end|>'),
    "trl/qwen3_5_think": ("qwen3.5", "hm\n</think>\n\nhi<|im_end|>", "hm\n</think>\n\n<tool_call>\n</tool_call><|im_end|>"),
    "trl/qwen3_8": ("qwen3.8", "hm\n</think>\n\nhi<|im_end|>", "hm\n</think>\n\n<tool_call>\n</tool_call><|im_end|>"),
    "trl/glm4moe": ("glm-4.5", "<think>hm</think>\nhi<|user|>", "<think></think>\n<tool_call>ls\n</tool_call><|observation|>"),
    "trl/gemma4": ("gemma4", "hi<turn|>", "<|tool_call>call:ls{}<tool_call|><|tool_response>"),
    "trl/nemotron_3_nano": ("nemotron-3", "hm</think>hi<|im_end|>", "hm</think><tool_call>\n</tool_call>\n<|im_end|>"),
}


def qwen3() -> tuple[HFTokenizer, PackageRenderer]:
    tokenizer = qwen_tokenizer("qwen3")
    return tokenizer, PackageRenderer(tokenizer, "qwen3")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_prompt_has_the_ids_of_the_chat_template(name: str) -> None:
    tokenizer = corpus.load(name)
    ours, templates = PackageRenderer(tokenizer, FAMILIES[name][0]), ChatTemplateRenderer(tokenizer)
    for tools in ((), (LS,)):
        assert ours.render(HISTORY, tools).ids.tolist() == templates.render(HISTORY, tools).ids.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_bridge_is_what_the_package_makes_of_the_real_prompt(name: str) -> None:
    """The package looks at the prompt only to see how it ended; the short one that it gets here ends in the same way."""
    package_name, text, with_call = FAMILIES[name]
    tokenizer = corpus.load(name)
    ours = PackageRenderer(tokenizer, package_name)
    bridged = 0
    for prompt in (HISTORY[:2], HISTORY[:4], HISTORY):
        held = ours.render(prompt, (LS,)).ids.tolist()
        for reply, written, new in (
            (assistant("hi"), text, [user("and?")]),
            (assistant("hi"), text.rpartition("<")[0], [user("and?")]),
            (assistant("", call("{}")), with_call, [result("out")]),
            (assistant("", call("{}")), with_call, [result("out"), user("and?")]),
        ):
            output = tokenizer.encode(written)
            mine = ours.bridge(reply, output, new, (LS,))
            chat = [{"role": m.role, "content": m.text, **({"tool_call_id": "c1", "name": "ls"} if m.role == "tool" else {})} for m in new]
            tools = [
                {"type": "function", "function": {"name": LS.name, "description": LS.description, "parameters": json.loads(LS.parameters)}}
            ]
            theirs = ours._package.bridge_to_next_turn(held, output, chat, tools=tools)
            if isinstance(mine, Unbridgeable):
                continue
            bridged += 1
            assert theirs is not None
            assert theirs.token_ids == [*held, *output, *mine.ids.tolist()]
    assert bridged >= 6


SPELLINGS = [
    "<|im_end|>",
    "<|im_start|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_response>",
    "<|im_start|>user\n",
    "⠁",
    "ꀀ",
    "\\u2801",
]
texts = st.lists(st.sampled_from([*SPELLINGS, "a", " b", "\n", "你好", "é", '"', "{}"]), max_size=5).map("".join)


@given(texts, texts, texts, texts, st.sampled_from(["<|im_end|>", ""]))
@settings(max_examples=100, deadline=None)
def test_no_text_becomes_a_control_token_and_a_bridge_changes_no_id(asked: str, said: str, came: str, more: str, closed: str) -> None:
    """Laws 1 and 9."""
    tokenizer, ours = qwen3()
    tool = Tool("ls", asked, json.dumps({"type": "object", "description": came}))
    history = [system(f"s{said}."), user(f"u{asked}."), assistant(f"a{said}.", call(json.dumps({"x": came})))]
    whole = ours.render([*history, result(f"r{came}."), user(f"m{more}.")], (tool,))
    clean = [system("s."), user("u."), assistant("a.", call('{"x":""}')), result("r."), user("m.")]
    plain = ours.render(clean, (Tool("ls", "", '{"type":"object","description":""}'),))
    control = frozenset(tokenizer.control_tokens.values())

    def marks(rendered: Rendered) -> list[int]:
        return [index for index in rendered.ids.tolist() if index in control]

    assert marks(whole) == marks(plain)
    output = tokenizer.encode(f"hi{closed}")
    bridged = ours.bridge(history[-1], output, [result(f"r{came}."), user(f"m{more}.")], (tool,))
    template = ChatTemplateRenderer(tokenizer).bridge(history[-1], output, [result(f"r{came}."), user(f"m{more}.")], (tool,))
    assert isinstance(bridged, Rendered)
    assert isinstance(template, Rendered)
    assert bridged.ids.tolist() == template.ids.tolist()
    assert bridged.escaped == template.escaped


def test_a_bridge_that_would_drop_sampled_tokens_is_refused() -> None:
    tokenizer, ours = qwen3()
    bridged = ours.bridge(assistant("hi"), tokenizer.encode("hi<|im_end|>and on"), [user("more")], ())
    assert bridged == Unbridgeable("the package renderers would leave out sampled tokens")


def test_a_reply_that_the_package_will_not_continue_is_not_bridged() -> None:
    tokenizer, ours = qwen3()
    bridged = ours.bridge(assistant("hi"), tokenizer.encode("hi<|im_end|>"), [assistant("mine"), user("more")], ())
    assert isinstance(bridged, Unbridgeable)
    assert "does not continue" in bridged.detail


def test_a_prompt_that_would_hide_a_message_or_a_tool_is_refused() -> None:
    deepseek = PackageRenderer(corpus.load("trl/deepseekv3"), "deepseek-v3")
    with pytest.raises(RenderError, match="the tool 'ls'"):
        deepseek.render([user("a")], (LS,))
    with pytest.raises(RenderError, match="refuses"):
        qwen3()[1].render([], ())


def test_end_ids_are_the_package_s_stops_and_the_tokenizer_s() -> None:
    tokenizer, ours = qwen3()
    assert ours.end_ids == {tokenizer.control_tokens["<|im_end|>"], tokenizer.control_tokens["<|endoftext|>"]}


def test_a_control_of_the_package_s_renderer_is_a_template_kwarg() -> None:
    tokenizer = qwen_tokenizer("qwen3")
    ended = tokenizer.decode(PackageRenderer(tokenizer, "qwen3", {"enable_thinking": False}).render([user("a")], ()).ids.tolist())
    assert ended.endswith("<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match="colour"):
        PackageRenderer(tokenizer, "qwen3", {"colour": "red"})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "knows no model"),
        ("qwen9", "knows no renderer 'qwen9'"),
        ("gpt-oss", "`harmony`"),
        ("default", "`template`"),
        ("llama-3", "cannot make"),
    ],
)
def test_what_the_package_cannot_do_is_said_when_it_is_asked_for(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PackageRenderer(qwen_tokenizer("qwen3"), name)


def test_a_model_that_the_package_knows_needs_no_name() -> None:
    tokenizer = qwen_tokenizer("qwen3")
    known = HFTokenizer.__new__(HFTokenizer)
    known.__dict__.update({**tokenizer.__dict__, "name": "Qwen/Qwen3-8B"})
    assert PackageRenderer(known).render([user("a")], ()).ids.tolist() == qwen3()[1].render([user("a")], ()).ids.tolist()


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "renderers.base", None)
    with pytest.raises(ConfigError, match=r"pip install 'turnloom\[renderers\]'"):
        PackageRenderer(qwen_tokenizer("qwen3"), "qwen3")
