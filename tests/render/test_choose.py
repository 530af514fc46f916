"""Which renderer a name means, and what is said about a name that means none."""

from __future__ import annotations

import pytest

from tests.render.o200k import o200k_tokenizer
from tests.support.histories import user
from turnloom.errors import ConfigError
from turnloom.render.choose import choose_renderer, teaches_harmony
from turnloom.render.harmony import HarmonyRenderer
from turnloom.render.package import PackageRenderer
from turnloom.render.template import ChatTemplateRenderer
from turnloom.testing.tokenizers import qwen_tokenizer


def custom(tokenizer, template_kwargs):
    return ChatTemplateRenderer(tokenizer, template_kwargs)


def useless(tokenizer, template_kwargs):
    return object()


def test_auto_is_harmony_where_the_template_teaches_it_and_the_template_elsewhere() -> None:
    assert isinstance(choose_renderer("auto", qwen_tokenizer()), ChatTemplateRenderer)
    assert isinstance(choose_renderer("auto", o200k_tokenizer()), HarmonyRenderer)
    assert isinstance(choose_renderer("template", o200k_tokenizer()), ChatTemplateRenderer)
    assert teaches_harmony(o200k_tokenizer())


def test_harmony_has_the_day_it_is_given_unless_the_template_kwargs_name_one() -> None:
    def prompt(**kwargs: str) -> str:
        made = choose_renderer("harmony", o200k_tokenizer(), kwargs, today="2025-06-28")
        return o200k_tokenizer().decode(made.render([user("a")], ()).ids.tolist())

    assert "Current date: 2025-06-28\n" in prompt()
    assert "Current date: 2024-01-01\n" in prompt(current_date="2024-01-01")
    assert "Reasoning: high\n" in prompt(reasoning_effort="high")


def test_a_renderer_of_the_package_goes_by_its_own_name() -> None:
    pytest.importorskip("renderers.base", reason="the package renderers is not tried: pip install 'turnloom[renderers]'")
    assert isinstance(choose_renderer("renderers/qwen3", qwen_tokenizer("qwen3")), PackageRenderer)


def test_a_renderer_of_one_s_own_goes_by_its_import_path() -> None:
    made = choose_renderer(f"{__name__}:custom", qwen_tokenizer("qwen3"), {"enable_thinking": False})
    assert isinstance(made, ChatTemplateRenderer)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jinja", "auto, template, harmony, renderers"),
        ("harmony", r"<\|start\|>"),
        (f"{__name__}:useless", "has no end_ids, render, bridge"),
        (f"{__name__}:NOTHING", "cannot be imported"),
        (f"{__name__}:__name__", "cannot be called"),
    ],
)
def test_a_name_that_means_no_renderer_is_an_error_that_says_what_does(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose_renderer(name, qwen_tokenizer())


def test_special_tokens_in_text_are_the_template_s_alone() -> None:
    assert isinstance(choose_renderer("auto", o200k_tokenizer(), special_tokens="template"), ChatTemplateRenderer)
    with pytest.raises(ConfigError, match="`template`"):
        choose_renderer("harmony", o200k_tokenizer(), special_tokens="template")
