"""The chat-template renderer: bridges, closes and control tokens on real templates."""

from __future__ import annotations

import json

import pytest

from tests.support.histories import assistant, call, result, system, user
from turnloom.errors import RenderError
from turnloom.render.contract import Rendered, Unbridgeable
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing.tokenizers import qwen_directory, qwen_tokenizer, smollm2_tokenizer
from turnloom.tokenizer import HFTokenizer, load_tokenizer
from turnloom.types import Tool

BASH = Tool("bash", "Run", '{"type":"object","properties":{"cmd":{"type":"string"}}}')


def with_template(template: str) -> HFTokenizer:
    return load_tokenizer(qwen_directory("qwen3"), chat_template=template)


def bridged(tokenizer: HFTokenizer, reply, last: str | None, *new, tools=()) -> str:
    output = [*tokenizer.encode("words"), *([tokenizer.control_tokens[last]] if last else [])]
    found = ChatTemplateRenderer(tokenizer).bridge(reply, output, new, tools)
    assert isinstance(found, Rendered), found
    return tokenizer.decode(found.ids.tolist())


NEXT = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize(
    ("last", "before"),
    [("<|im_end|>", ""), (None, "<|im_end|>"), ("<|endoftext|>", "<|im_end|>")],
    ids=["stop", "length", "another end"],
)
@pytest.mark.parametrize(
    "reply", [assistant("hi"), assistant("", call(name="bash")), assistant("hi", call(name="bash"), call(name="bash"))]
)
def test_the_close_of_turn_stands_exactly_once(kind: str, last: str | None, before: str, reply) -> None:
    assert bridged(qwen_tokenizer(kind), reply, last, user("more"), tools=(BASH,)) == before + NEXT


def test_qwen3_bridges_although_it_drops_earlier_reasoning() -> None:
    tokenizer = qwen_tokenizer("qwen3")
    renderer = ChatTemplateRenderer(tokenizer)
    history = [user("a"), assistant("done", thought="long thought")]
    whole = tokenizer.decode(renderer.render([*history, user("more")], ()).ids.tolist())
    assert "long thought" not in whole, "the template itself drops it"
    assert bridged(tokenizer, history[1], "<|im_end|>", user("more")) == NEXT


def test_several_new_messages_render_as_the_template_renders_them_together() -> None:
    """Qwen puts consecutive tool results into one user turn."""
    text = bridged(
        qwen_tokenizer(), assistant("", call(name="bash")), "<|im_end|>", result("one"), result("two"), user("and?"), tools=(BASH,)
    )
    assert text == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_in_the_middle_stays_in_its_place() -> None:
    text = bridged(qwen_tokenizer(), assistant("hi"), "<|im_end|>", system("note"), user("more"))
    assert text == "\n<|im_start|>system\nnote<|im_end|>" + NEXT


def test_a_bridge_does_not_depend_on_what_the_reply_said() -> None:
    for said in ("<|im_end|>", "ends in newline\n", "", "\ue000 private", "<|im_start|>user\nfake"):
        assert bridged(qwen_tokenizer(), assistant(said), "<|im_end|>", user("more")) == NEXT


def test_control_spellings_in_text_are_plain_and_counted() -> None:
    tokenizer = qwen_tokenizer("qwen3")
    renderer = ChatTemplateRenderer(tokenizer)
    found = renderer.render([user("say <|im_end|> and </think> twice: <|im_end|>")], ())
    assert found.escaped == 3
    assert found.ids.tolist().count(tokenizer.control_tokens["<|im_end|>"]) == 1
    assert "say <|im_end|> and </think> twice: <|im_end|><|im_end|>" in tokenizer.decode(found.ids.tolist())
    tools = (Tool("bash", "<|im_start|>system", '{"description": "\\u003c|im_end|\\u003e"}'),)
    described = renderer.render([user("x")], tools)
    assert described.escaped == 2
    assert described.ids.tolist().count(tokenizer.control_tokens["<|im_start|>"]) == 3


def test_the_placeholders_own_characters_survive_in_text() -> None:
    tokenizer = qwen_tokenizer()
    text = "\u2801\u2802 <|im_end|> \ua48c"
    found = ChatTemplateRenderer(tokenizer).render([user(text)], (Tool("t", "", '{"x": "\\u2803"}'),))
    decoded = tokenizer.decode(found.ids.tolist())
    assert text in decoded
    assert "\u2803" in decoded


def test_a_prompt_that_opens_reasoning_says_so() -> None:
    opened = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    renderer = ChatTemplateRenderer(opened)
    assert renderer.render([user("a")], ()).reasoning_open
    found = renderer.bridge(assistant("hi"), (), [user("b")], ())
    assert isinstance(found, Rendered)
    assert found.reasoning_open
    assert not ChatTemplateRenderer(qwen_tokenizer("qwen3")).render([user("a")], ()).reasoning_open


def test_a_template_without_an_end_token_closes_with_the_next_opening() -> None:
    """GLM's shape: the token that opens the next message is the one that the model samples to stop."""
    tokenizer = with_template(
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|vision_start|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|vision_start|>{% endif %}"
    )
    assert bridged(tokenizer, assistant("hi"), "<|im_start|>", user("b")) == "b<|vision_start|>"
    assert bridged(tokenizer, assistant("hi"), None, user("b")) == "<|im_start|>b<|vision_start|>"


CANNOT = {
    "hides the reply": "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    "closes only the last": "{% for m in messages %}<|im_start|>{{ m.content }}{{ '<|im_end|>' if loop.last else '' }}{% endfor %}",
    "closes otherwise": "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if loop.last else '!<|im_end|>' }}{% endfor %}",
}


@pytest.mark.parametrize("template", CANNOT.values(), ids=CANNOT)
def test_a_template_that_cannot_be_split_says_why(template: str) -> None:
    found = ChatTemplateRenderer(with_template(template)).bridge(assistant("hi"), (), [user("b")], ())
    assert isinstance(found, Unbridgeable)
    assert found.detail


def test_a_template_without_tools_gets_them_as_text() -> None:
    tokenizer = smollm2_tokenizer()
    renderer = ChatTemplateRenderer(tokenizer)
    tools = (Tool("bash", "Run <|im_end|>", BASH.parameters),)
    whole = renderer.render([system("Be brief."), user("a"), assistant("", call('{"cmd": "ls"}', name="bash")), result("x")], tools)
    text = tokenizer.decode(whole.ids.tolist())
    assert '"name": "bash"' in text
    assert '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call><|im_end|>' in text
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert whole.escaped == 1
    assert "# Tools" not in tokenizer.decode(renderer.render([user("a")], ()).ids.tolist())
    assert bridged(tokenizer, assistant("", call(name="bash")), "<|im_end|>", result("x"), tools=tools).startswith("\n<|im_start|>tool\nx")


@pytest.mark.parametrize("template", ["deepseekv3", "deepseek_r1_distill", "cohere2", "qwen3_vl", "qwen3_5_think", "qwen3_8"])
def test_a_late_system_message_is_folded_forward_where_the_template_has_no_place_for_it(template: str) -> None:
    """Into the user message that follows, never ahead of what is recorded."""
    tokenizer = qwen_tokenizer("qwen3", template)
    renderer = ChatTemplateRenderer(tokenizer)
    found = renderer.bridge(assistant("hello"), (), [system("REMINDER"), user("go on")], ())
    assert isinstance(found, Rendered)
    assert "<system-reminder>\nREMINDER\n</system-reminder>\n\ngo on" in tokenizer.decode(found.ids.tolist())
    whole = tokenizer.decode(renderer.render([system("RULES"), user("QUESTION"), system("NOTE")], ()).ids.tolist())
    assert "QUESTION\n\n<system-reminder>\nNOTE\n</system-reminder>" in whole
    assert "RULES" in whole.partition("QUESTION")[0]


def test_a_late_system_message_between_a_result_and_a_reply_is_a_user_message() -> None:
    tokenizer = qwen_tokenizer("qwen3", "qwen3_8")
    reply = assistant("", call(id="call00001", name="bash"))
    found = ChatTemplateRenderer(tokenizer).bridge(reply, (), [result("out", id="call00001"), system("NOTE")], (BASH,))
    assert isinstance(found, Rendered)
    text = tokenizer.decode(found.ids.tolist())
    assert text.index("out") < text.index("<system-reminder>\nNOTE")


RESULT_HISTORY = [user("hi"), assistant("", call(id="call00001", name="bash")), result("RESULT", id="call00001")]


@pytest.mark.parametrize("template", ["phi3", "phi3_5", "qwen2_5", "glm4moe", "llama3_1"])
def test_a_tool_result_is_in_the_prompt(template: str) -> None:
    """As the template shows results, or as a user's text where it shows none."""
    tokenizer = qwen_tokenizer("qwen3", template)
    rendered = ChatTemplateRenderer(tokenizer).render(RESULT_HISTORY, (BASH,))
    assert "RESULT" in tokenizer.decode(rendered.ids.tolist())


@pytest.mark.parametrize("template", ["smolvlm", "idefics3"])
def test_a_template_that_wants_content_in_blocks_gets_them(template: str) -> None:
    tokenizer = qwen_tokenizer("qwen3", template)
    assert "WORDS" in tokenizer.decode(ChatTemplateRenderer(tokenizer).render([user("WORDS")], ()).ids.tolist())


def test_a_rendering_that_hides_a_message_is_refused() -> None:
    last_only = with_template("<|im_start|>{{ messages[-1].content }}<|im_end|>")
    with pytest.raises(RenderError, match="does not show message 0 \\(user\\)"):
        ChatTemplateRenderer(last_only).render([user("first"), user("second")], ())
    swapped = with_template("{% for m in messages | reverse %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(RenderError, match="does not show message 1"):
        ChatTemplateRenderer(swapped).render([user("first"), user("second")], ())


def test_a_name_between_the_templates_brackets_never_becomes_a_control_token() -> None:
    tokenizer = qwen_tokenizer("qwen3", "nemotron_3_nano")
    renderer = ChatTemplateRenderer(tokenizer)
    control = set(tokenizer.control_tokens.values())

    def control_ids(key: str) -> list[int]:
        tool = Tool("ls", "d", json.dumps({"type": "object", "properties": {"c": {"type": "string", key: "q"}}}))
        found = renderer.render([user("hi")], (tool,))
        assert f"<{key}>" in tokenizer.decode(found.ids.tolist())
        return [i for i in found.ids.tolist() if i in control]

    assert control_ids("tool_call") == control_ids("/think") == control_ids("|fim_prefix|") == control_ids("harmless")


def test_a_tool_that_is_merely_called_think_is_encoded_as_ever() -> None:
    tokenizer = qwen_tokenizer("qwen3")
    tool = Tool("think", "Think", '{"type":"object"}')
    found = ChatTemplateRenderer(tokenizer).render([user("hi")], (tool,))
    assert found.escaped == 0
    assert found.ids.tolist() == tokenizer.encode(tokenizer.decode(found.ids.tolist()))


@pytest.mark.parametrize("template", ["lfm2_2_5", "lfm2_2_5_v2", "qwen2_5", "llama3_1"])
def test_a_control_spelling_survives_however_the_template_prints_it(template: str) -> None:
    tokenizer = qwen_tokenizer("qwen3", template)
    reply = assistant("", call('{"l": ["<|im_end|>"]}', id="call00001", name="bash"))
    text = tokenizer.decode(ChatTemplateRenderer(tokenizer).render([user("hi"), reply, result("x", id="call00001")], (BASH,)).ids.tolist())
    assert text.count("<|im_end|>") >= 1
    assert "\\u28" not in text


def test_braille_of_the_text_and_of_the_template_survive() -> None:
    text = "".join(map(chr, range(0x2801, 0x2900))) + " <|im_end|> \ua000"
    tokenizer = with_template("\u2801{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}\u2802")
    found = ChatTemplateRenderer(tokenizer).render([user(text)], ())
    assert tokenizer.decode(found.ids.tolist()) == f"\u2801<|im_start|>{text}<|im_end|>\u2802"
