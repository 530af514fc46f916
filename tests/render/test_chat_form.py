"""What a template is given: every field that the chat format has, in every message, of histories and of bridges."""

from __future__ import annotations

import pytest

from tests.support.histories import assistant, call, result, system, user
from turnloom.render.contract import Rendered
from turnloom.render.quirks import Quirk
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing.tokenizers import qwen_directory
from turnloom.tokenizer import HFTokenizer, load_tokenizer
from turnloom.types import Message, Text, Tool, ToolCall

# It refuses whatever lacks a field, and shows all of them.
STRICT = """
{%- for t in tools or [] %}
{%- if t.type != 'function' or t.function.description is not string or t.function.parameters is not mapping %}
{{- raise_exception('tool') }}{% endif %}
{{- '<|box_start|>' + t.function.name + ': ' + t.function.description + ' ' + t.function.parameters | tojson + '<|box_end|>' }}
{%- endfor %}
{%- for m in messages %}
{%- if m.content is not string %}{{ raise_exception('content') }}{% endif %}
{%- if m.role == 'tool' and (m.tool_call_id is not string or m.name is not string) %}{{ raise_exception('result') }}{% endif %}
{{- '<|im_start|>' + m.role + (' ' + m.name + ' ' + m.tool_call_id if m.role == 'tool' else '') + '\\n' }}
{%- if m.reasoning_content %}{{ '[' + m.reasoning_content + ']' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls and ONE and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}
{%- for c in m.tool_calls or [] %}
{%- if c.type != 'function' or c.function.arguments is not mapping %}{{ raise_exception('call') }}{% endif %}
{{- '<|object_ref_start|>' + c.id + ' ' + c.function.name + ' ' + c.function.arguments | tojson + '<|object_ref_end|>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TOOLS = (Tool("ls", "List", '{"type": "object"}'),)
BOX = '<|box_start|>ls: List {"type": "object"}<|box_end|>'


def tokenizer(one: bool) -> HFTokenizer:
    return load_tokenizer(qwen_directory("qwen3"), chat_template=STRICT.replace("ONE", str(one).lower()))


def text(tokenizer: HFTokenizer, found: object) -> str:
    assert isinstance(found, Rendered), found
    return tokenizer.decode(found.ids.tolist())


def said(role: str, words: str) -> str:
    return f"<|im_start|>{role}\n{words}<|im_end|>\n"


def called(id: str, arguments: str = "{}") -> str:
    return f"<|object_ref_start|>{id} ls {arguments}<|object_ref_end|>"


OPENED = "<|im_start|>assistant\n"
HISTORY = [
    system("s"),
    user("a"),
    assistant("I look", call('{"p": "x"}', id="c1"), call(id="c2"), thought="hm"),
    result("one", id="c1"),
    result("two", id="c2"),
    assistant("done"),
    user("b"),
]


def test_a_template_that_shows_everything_is_given_everything() -> None:
    strict = tokenizer(one=False)
    renderer = ChatTemplateRenderer(strict)
    assert renderer.traits.quirks == {Quirk.COUNTS_CALLS}, "it shows a result's id, and nothing else is odd"
    assert text(strict, renderer.render(HISTORY, TOOLS)) == (
        BOX
        + said("system", "s")
        + said("user", "a")
        + said("assistant", "[hm]I look" + called("c1", '{"p": "x"}') + called("c2"))
        + said("tool ls c1", "one")
        + said("tool ls c2", "two")
        + said("assistant", "done")
        + said("user", "b")
        + OPENED
    )


def test_one_call_a_message_keeps_the_words_with_the_first_and_each_result_after_its_own() -> None:
    strict = tokenizer(one=True)
    renderer = ChatTemplateRenderer(strict)
    assert renderer.traits.quirks == {Quirk.ONE_CALL, Quirk.COUNTS_CALLS}
    assert text(strict, renderer.render(HISTORY, TOOLS)) == (
        BOX
        + said("system", "s")
        + said("user", "a")
        + said("assistant", "[hm]I look" + called("c1", '{"p": "x"}'))
        + said("tool ls c1", "one")
        + said("assistant", called("c2"))
        + said("tool ls c2", "two")
        + said("assistant", "done")
        + said("user", "b")
        + OPENED
    )


@pytest.mark.parametrize("one", [False, True], ids=["any calls", "one call"])
def test_a_bridge_gives_all_of_it_too(one: bool) -> None:
    strict = tokenizer(one)
    renderer = ChatTemplateRenderer(strict)
    ended = [strict.control_tokens["<|im_end|>"]]
    bridged = renderer.bridge(HISTORY[2], ended, [*HISTORY[3:5], user("b")], TOOLS)
    assert text(strict, bridged) == "\n" + said("tool ls c1", "one") + said("tool ls c2", "two") + said("user", "b") + OPENED
    assert text(strict, renderer.bridge(assistant("done"), ended, [user("b")], TOOLS)) == "\n" + said("user", "b") + OPENED


def test_a_call_that_was_not_answered_stands_alone() -> None:
    strict = tokenizer(one=True)
    asked = Message("assistant", (Text("x"), ToolCall("c1", "ls", "{}"), ToolCall("c2", "ls", "{}"), ToolCall("c3", "ls", "{}")))
    history = [user("a"), asked, result("one", id="c1"), result("three", id="c3"), user("b")]
    shown = text(strict, ChatTemplateRenderer(strict).render(history, ()))
    assert shown == (
        said("user", "a")
        + said("assistant", "x" + called("c1"))
        + said("tool ls c1", "one")
        + said("assistant", called("c2"))
        + said("assistant", called("c3"))
        + said("tool ls c3", "three")
        + said("user", "b")
        + OPENED
    )


def with_system_refused(where: str) -> HFTokenizer:
    refusal = f"{{% if m.role == 'system' and {where} %}}{{{{ raise_exception('system') }}}}{{% endif %}}"
    written = "{% for m in messages %}" + refusal + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    return load_tokenizer(
        qwen_directory("qwen3"), chat_template=written + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


def test_a_system_message_without_a_place_stands_in_front_of_the_first_user_message() -> None:
    refusing = with_system_refused("true")
    renderer = ChatTemplateRenderer(refusing)
    assert Quirk.SYSTEM_IN_USER in renderer.traits
    history = [system("s"), user("a"), assistant("done"), user("b")]
    expected = said("user", "s\n\na") + said("assistant", "done") + said("user", "b") + OPENED
    assert text(refusing, renderer.render(history, ())) == expected
    opened = said("user", "s") + said("assistant", "done") + said("user", "b") + OPENED
    assert text(refusing, renderer.render([system("s"), *history[2:]], ())) == opened


def test_late_system_messages_become_reminders_one_after_another() -> None:
    refusing = with_system_refused("not loop.first")
    renderer = ChatTemplateRenderer(refusing)
    assert Quirk.LATE_SYSTEM_FOLDED in renderer.traits
    one, two = ("<system-reminder>\n" + word + "\n</system-reminder>" for word in ("one", "two"))
    history = [system("s"), user("a"), assistant("done"), system("one"), system("two"), user("b"), assistant("so"), user("c")]
    begun = said("system", "s") + said("user", "a") + said("assistant", "done")
    assert text(refusing, renderer.render(history, ())) == (
        begun + said("user", f"{one}\n\n{two}\n\nb") + said("assistant", "so") + said("user", "c") + OPENED
    )
    assert text(refusing, renderer.render(history[:5], ())) == begun + said("user", f"{one}\n\n{two}") + OPENED
    ends_in_user = [*history[:2], *history[3:5]]
    assert text(refusing, renderer.render(ends_in_user, ())) == said("system", "s") + said("user", f"a\n\n{one}\n\n{two}") + OPENED
    ended = [refusing.control_tokens["<|im_end|>"]]
    assert text(refusing, renderer.bridge(history[2], ended, history[3:5], ())) == "\n" + said("user", f"{one}\n\n{two}") + OPENED


def test_content_is_given_in_blocks_where_only_blocks_are_shown() -> None:
    """The template refuses any role but those of the chat format."""
    blocks = load_tokenizer(
        qwen_directory("qwen3"),
        chat_template="""
{%- for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('role') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- for b in m.content %}{% if b.type == 'text' %}{{ b.text }}{% endif %}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    )
    renderer = ChatTemplateRenderer(blocks)
    assert Quirk.CONTENT_BLOCKS in renderer.traits
    history = [system("s"), user("a"), assistant("done"), user("b")]
    expected = said("system", "s") + said("user", "a") + said("assistant", "done") + said("user", "b") + OPENED
    assert text(blocks, renderer.render(history, ())) == expected
