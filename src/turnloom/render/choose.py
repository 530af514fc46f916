"""Which renderer a name means, and which one a chat template calls for. Makes one; does no IO and reads no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnloom.errors import ConfigError
from turnloom.imports import load_object
from turnloom.render.contract import Renderer, Tokenizer
from turnloom.render.harmony import CONTROL, HarmonyRenderer, HarmonySettings
from turnloom.render.package import PackageRenderer
from turnloom.render.template import ChatTemplateRenderer, SpecialTokens

NAMES = ("auto", "template", "harmony", "renderers")

_TAUGHT = ("<|start|>", "<|channel|>", "<|message|>")


def choose_renderer(
    name: str,
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    today: str = "",
    special_tokens: SpecialTokens = "plain",
) -> Renderer:
    """The renderer that `name` means; loading one may take a second.

    `auto`: harmony where the chat template teaches it, else the chat template.
    `template`, `harmony`; `renderers` or `renderers/NAME`, from the package of that
    name; or `package.module:Name`, called with the tokenizer and the template
    kwargs. `today` (ISO) is the date that harmony's system message gives where
    the template kwargs name none. Raises ConfigError for anything else, and for
    `special_tokens="template"` where no template is.
    """
    kwargs = dict(template_kwargs or {})
    if name == "auto":
        name = "harmony" if special_tokens == "plain" and teaches_harmony(tokenizer) else "template"
    if name == "template":
        return ChatTemplateRenderer(tokenizer, kwargs, special_tokens=special_tokens)
    if special_tokens != "plain":
        raise ConfigError(f"the renderer {name!r} writes special tokens in message text as plain text only; use renderer `template`")
    if name == "harmony":
        return HarmonyRenderer(tokenizer, HarmonySettings.of({"current_date": today, **kwargs}))
    package, _, of_package = name.partition("/")
    if package == "renderers":
        return PackageRenderer(tokenizer, of_package, kwargs)
    if ":" in name:
        return _imported(name, tokenizer, kwargs)
    raise ConfigError(f"no renderer is called {name!r}: use {', '.join(NAMES)}, renderers/NAME or package.module:Name")


def teaches_harmony(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes harmony's headers and the tokenizer has its control tokens."""
    return all(s in tokenizer.chat_template for s in _TAUGHT) and all(s in tokenizer.control_tokens for s in CONTROL)


def _imported(path: str, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any]) -> Renderer:
    make = load_object(path, "the renderer")
    if not callable(make):
        raise ConfigError(f"the renderer {path!r} cannot be called with a tokenizer and template kwargs")
    made: Renderer = make(tokenizer, template_kwargs)
    lacking = [attribute for attribute in ("end_ids", "render", "bridge") if not hasattr(made, attribute)]
    if lacking:
        raise ConfigError(f"what the renderer {path!r} makes has no {', '.join(lacking)}")
    return made
