"""What a template cannot show is written around, in histories that agents do send."""

from __future__ import annotations

import functools

import pytest

from turnloom.render.contract import Rendered
from turnloom.render.quirks import Quirk
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing.corpus import load
from turnloom.types import Message, Reasoning, Text, Tool, ToolCall, ToolResult

BASH = Tool("bash", "Run", '{"type": "object", "properties": {"cmd": {"type": "string"}}}')
NEMO = "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407"


@functools.cache
def renderer_of(name: str) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(load(name))


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def test_the_system_message_is_shown_while_a_tool_result_stands_last() -> None:
    """Mistral NeMo's template shows it only in a user message that is the last."""
    renderer = renderer_of(NEMO)
    call = Message("assistant", (ToolCall("call00001", "bash", '{"cmd": "ls"}'),))
    history = [Message("system", (Text("Be brief."),)), user("List."), call, Message("tool", (ToolResult("call00001", "a.txt"),))]
    text = renderer.tokenizer.decode(renderer.render(history, [BASH]).ids.tolist())
    assert text.count("Be brief.") == 1
    first = renderer.tokenizer.decode(renderer.render(history[:2], [BASH]).ids.tolist())
    assert text.startswith(first), "and where it stood before"


def test_a_result_names_the_call_by_the_id_that_the_model_wrote() -> None:
    renderer = renderer_of(NEMO)
    reply = Message("assistant", (ToolCall("toolu_minted", "bash", '{"cmd": "ls"}', written="Ab3dE6gH9"),))
    bridged = renderer.bridge(reply, (), [Message("tool", (ToolResult("toolu_minted", "a.txt"),))], [BASH])
    assert isinstance(bridged, Rendered)
    assert '"call_id": "Ab3dE6gH9"' in renderer.tokenizer.decode(bridged.ids.tolist())


@pytest.mark.parametrize("parts", [(), (Reasoning("hm"),)])
def test_a_reply_without_words_can_be_shown(parts: tuple[Reasoning, ...]) -> None:
    """Ministral's template refuses an empty reply."""
    renderer = renderer_of("llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512")
    text = renderer.tokenizer.decode(renderer.render([user("one"), Message("assistant", parts), user("two")], []).ids.tolist())
    assert text.index("one") < text.index("two")


def test_calls_as_text_have_the_models_own_tags() -> None:
    """And only those: what a call holds stays text."""
    tokenizer = load("trl/qwen2_5_vl")
    renderer = renderer_of("trl/qwen2_5_vl")
    opened = tokenizer.control_tokens["<tool_call>"]

    def count(cmd: str) -> int:
        call = Message("assistant", (Text(" "), ToolCall("c", "bash", f'{{"cmd": "{cmd}"}}')))
        history = [user("List."), call, Message("tool", (ToolResult("c", "a.txt"),))]
        return renderer.render(history, []).ids.tolist().count(opened)

    assert count("ls") == 1
    assert count("<tool_call>") == 1


def test_blank_text_before_a_call_is_not_written_beside_the_formats_own() -> None:
    renderer = renderer_of("llama.cpp/deepseek-ai-DeepSeek-V4")

    def text(*parts: Text) -> str:
        reply = Message("assistant", (*parts, ToolCall("c", "bash", '{"cmd": "ls"}')))
        history = [user("List."), reply, Message("tool", (ToolResult("c", "a.txt"),))]
        return renderer.tokenizer.decode(renderer.render(history, [BASH]).ids.tolist())

    assert text(Text("\n\n")) == text()


@pytest.mark.parametrize(
    ("name", "counts"),
    [("trl/cohere2", False), ("llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use", True), ("llama.cpp/Cohere2MoE", True)],
)
def test_a_template_numbers_calls_only_where_it_shows_them(name: str, counts: bool) -> None:
    """One that refuses a second round of calls as messages does not count them: it gets them as text."""
    renderer = renderer_of(name)
    assert (Quirk.COUNTS_CALLS in renderer.traits) == counts
    reply = Message("assistant", (ToolCall("c", "bash", '{"cmd": "ls"}'),))
    result = Message("tool", (ToolResult("c", "a.txt"),))
    assert isinstance(renderer.bridge(reply, (), [result], [BASH], calls_before=2), Rendered)
