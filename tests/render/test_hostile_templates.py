"""Templates whose next message depends on what came before: a stand-in history cannot stand in, and says so."""

from __future__ import annotations

import pytest

from tests.support.histories import assistant, call, result, user
from turnloom.render.contract import Rendered, Unbridgeable
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing import corpus
from turnloom.testing.tokenizers import qwen_directory
from turnloom.tokenizer import HFTokenizer, load_tokenizer

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT

DEPENDS = {
    "counts messages": "{% for m in messages %}" + TURN + "{% endfor %}[{{ messages|length }}]\n" + PROMPT,
    "numbers messages": "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + PROMPT,
    "repeats the first": "{% for m in messages %}{% if loop.last %}{{ messages[0].content }}\n{% endif %}" + TURN + "{% endfor %}" + PROMPT,
    "quotes the last reply": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.index0 %}> {{ messages[loop.index0-1].content[:20] }}\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    "ends by length": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{{ '<|endoftext|>' if m.role == 'assistant' and m.content|length > 20 else '<|im_end|>' }}\n{% endfor %}" + PROMPT,
}


def with_template(template: str) -> HFTokenizer:
    return load_tokenizer(qwen_directory("qwen3"), chat_template=template)


@pytest.mark.parametrize("template", DEPENDS.values(), ids=DEPENDS)
def test_what_depends_on_the_history_is_not_bridged(template: str) -> None:
    found = ChatTemplateRenderer(with_template(template)).bridge(assistant("hi"), (), [user("more")], ())
    assert isinstance(found, Unbridgeable)
    assert "depends on what came before" in found.detail


def test_a_template_that_only_lists_messages_is() -> None:
    assert isinstance(ChatTemplateRenderer(with_template(PLAIN)).bridge(assistant("hi"), (), [user("more")], ()), Rendered)


def test_one_call_a_message_with_named_results_is_not_bridged_after_several() -> None:
    """gpt-oss's own template names a result by the last call it has shown."""
    tokenizer = corpus.load("trl/gptoss")
    reply = assistant("", call(id="a", name="alpha"), call(id="b", name="beta"))
    found = ChatTemplateRenderer(tokenizer).bridge(reply, (), [result("1", "a"), result("2", "b")], ())
    assert isinstance(found, Unbridgeable)
    llama = ChatTemplateRenderer(corpus.load("trl/llama3_1")).bridge(reply, (), [result("1", "a"), result("2", "b")], ())
    assert isinstance(llama, Rendered), "its results name nothing"


def test_one_id_for_two_calls_shows_each_result_once() -> None:
    tokenizer = corpus.load("trl/llama3_1")
    renderer = ChatTemplateRenderer(tokenizer, corpus.entry("trl/llama3_1").template_kwargs)
    history = [user("go"), assistant("", call(id="x"), call(id="x")), result("RESULT-ONE", "x"), result("RESULT-TWO", "x")]
    text = tokenizer.decode(renderer.render(history, ()).ids.tolist())
    assert text.index("RESULT-ONE") < text.index("RESULT-TWO")
    assert (text.count("RESULT-ONE"), text.count("RESULT-TWO")) == (1, 1)
