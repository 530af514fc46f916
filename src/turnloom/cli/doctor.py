"""`turnloom doctor`: what a tokenizer's chat template can do, before anything is run with it."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer

from turnloom.cli.common import ChatTemplateOption, RendererOption, TemplateArgOption, say, template_kwargs
from turnloom.engine.models import find_model
from turnloom.parse.formats import auto
from turnloom.render.choose import choose_renderer
from turnloom.render.profile import Profile, find_profile
from turnloom.tokenizer import HFTokenizer, load_tokenizer


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="A tokenizer's folder, hub id or .gguf file, or local:MODEL.")],
    chat_template: ChatTemplateOption = None,
    template_arg: TemplateArgOption = None,
    renderer: RendererOption = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Print a template's profile: what bridges, how turns end, what it has no place for, what becomes of reasoning.

    Exit code 1 when some way to go on cannot be bridged: such turns are rendered whole and fork.

    Example: `turnloom doctor --tokenizer Qwen/Qwen3-8B`
    """
    source = find_model(tokenizer.removeprefix("local:")) if tokenizer.startswith("local:") else tokenizer
    loaded = load_tokenizer(source, chat_template=chat_template)
    profile = find_profile(choose_renderer(renderer, loaded, template_kwargs(template_arg)), loaded)
    if json:
        say(json_text.dumps(_described(loaded, profile), ensure_ascii=False))
    else:
        for line in profile_lines(loaded, profile):
            say(line)
    if not profile.bridgeable:
        raise typer.Exit(1)


def profile_lines(tokenizer: HFTokenizer, profile: Profile) -> list[str]:
    """The profile for a person."""
    described = _described(tokenizer, profile)
    lines = [f"{described['tokenizer']}: {described['vocab_size']} ids, {described['control_tokens']} control tokens"]
    lines += [f"  bridge {shape:<12} {answer}" for shape, answer in profile.bridges.items()]
    lines += [f"  whole  {shape:<12} {answer}" for shape, answer in profile.whole.items() if answer != "yes"]
    lines.append(f"  end tokens          {' '.join(profile.end_tokens) or 'none'}")
    lines.append(f"  tool results        {described['tool_results']}")
    lines.append(f"  tool format         {described['tool_format']}")
    lines.append(f"  earlier reasoning   {profile.reasoning}" + (" (a bridge keeps its tokens)" if profile.reasoning != "kept" else ""))
    lines.append(f"  reasoning opened    {'by the prompt' if profile.opens_reasoning else 'by the model'}")
    lines.append(f"  history             {'only appended to' if profile.appends else 'rewritten as it grows'} by the template")
    lines.append(f"  quirks              {', '.join(profile.quirks) or 'none'}")
    return lines


def _described(tokenizer: HFTokenizer, profile: Profile) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "control_tokens": len(tokenizer.control_tokens),
        "bridges": profile.bridges,
        "whole": profile.whole,
        "end_tokens": list(profile.end_tokens),
        "tool_results": "as user text" if "results_as_text" in profile.quirks else "in their own role",
        "tool_format": auto(tokenizer.chat_template),
        "reasoning": profile.reasoning,
        "opens_reasoning": profile.opens_reasoning,
        "appends": profile.appends,
        "quirks": list(profile.quirks),
    }
