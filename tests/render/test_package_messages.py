"""What the package `renderers` is given of a message, and what is said of one that it leaves out."""

from __future__ import annotations

import pytest

from tests.support.histories import LS, assistant, call, result, system, user
from turnloom.errors import RenderError
from turnloom.render.package import PackageRenderer
from turnloom.testing import corpus
from turnloom.tokenizer import HFTokenizer

pytest.importorskip("renderers", reason="the package renderers is not tried: pip install 'turnloom[renderers]'")

HISTORY = [
    user("a"),
    assistant("I look", call('{"p": "x"}', id="functions.ls:0"), call("[1]", id="functions.ls:1"), thought="hm"),
    result("one", id="functions.ls:0"),
    result("two", id="functions.ls:1"),
    user("b"),
]


def kimi() -> tuple[HFTokenizer, PackageRenderer]:
    tokenizer = corpus.load("llama.cpp/Kimi-K2-Instruct")
    return tokenizer, PackageRenderer(tokenizer, "kimi-k2")


def test_calls_and_results_are_given_with_their_ids() -> None:
    tokenizer, ours = kimi()
    text = tokenizer.decode(ours.render(HISTORY, (LS,)).ids.tolist())
    assert '<|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>{"p":"x"}<|tool_call_end|>' in text.replace(": ", ":")
    assert '<|tool_call_begin|>functions.ls:1<|tool_call_argument_begin|>{"arguments":[1]}' in text.replace(": ", ":")
    for number, words in enumerate(("one", "two")):
        assert f"<|im_system|>ls<|im_middle|>## Return of functions.ls:{number}\n{words}<|im_end|>" in text


def test_a_bridge_gives_results_with_their_ids_and_names() -> None:
    tokenizer, ours = kimi()
    bridged = ours.bridge(HISTORY[1], tokenizer.encode("x<|im_end|>"), HISTORY[2:], (LS,))
    text = tokenizer.decode(bridged.ids.tolist())  # type: ignore[union-attr]
    for number, words in enumerate(("one", "two")):
        assert f"<|im_system|>ls<|im_middle|>## Return of functions.ls:{number}\n{words}<|im_end|>" in text


def test_a_message_that_the_package_leaves_out_is_named() -> None:
    ours = PackageRenderer(corpus.load("llama.cpp/MiniMax-M2"), "minimax-m2")
    with pytest.raises(RenderError, match=r"does not show message 1 \(system\)"):
        ours.render([user("a"), system("late"), user("b")], ())


@pytest.mark.parametrize(("template", "name"), [("trl/qwen3_5_think", "qwen3.5"), ("trl/nemotron_3_nano", "nemotron-3")])
@pytest.mark.parametrize("key", ["x<s", "<|im_end|", "think", "/think"])
def test_the_package_completes_no_control_token_of_message_text(template: str, name: str, key: str) -> None:
    tokenizer = corpus.load(template)
    ours, control = PackageRenderer(tokenizer, name), set(tokenizer.control_tokens.values())

    def controls(key: str) -> list[int]:
        asked = assistant("", call(f'{{"{key}": "v"}}'))
        found = ours.render([user("a"), asked, result("r"), user("b")], (LS,)).ids.tolist()
        assert f"<parameter={key}>" in tokenizer.decode(found)
        return [index for index in found if index in control]

    assert controls(key) == controls("harmless")
