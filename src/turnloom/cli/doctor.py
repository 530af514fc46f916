"""`turnloom doctor`: what a tokenizer's chat template can do, before anything is run with it."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer

from turnloom.cli.common import ChatTemplateOption, RendererOption, TemplateArgOption, ToolFormatOption, say, template_kwargs
from turnloom.engine.models import find_model
from turnloom.parse.contract import CallEvent, ParserFactory
from turnloom.parse.formats import AUTO, parser_factory, taught_format
from turnloom.render.choose import choose_renderer
from turnloom.render.contract import Renderer
from turnloom.render.profile import CALLED, TOOL, Profile, find_profile, shown_call, writes_calls_as_text
from turnloom.tokenizer import HFTokenizer, load_tokenizer


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="A tokenizer's folder, hub id or .gguf file, or local:MODEL.")],
    chat_template: ChatTemplateOption = None,
    template_arg: TemplateArgOption = None,
    renderer: RendererOption = "auto",
    tool_format: ToolFormatOption = AUTO,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Print a template's profile: what bridges, how turns end, whether calls are read, what becomes of reasoning.

    Exit code 1 when some way to go on cannot be bridged (such turns are rendered whole and fork), or when a call is not read.

    Example: `turnloom doctor --tokenizer Qwen/Qwen3-8B`
    """
    source = find_model(tokenizer.removeprefix("local:")) if tokenizer.startswith("local:") else tokenizer
    loaded = load_tokenizer(source, chat_template=chat_template)
    chosen = choose_renderer(renderer, loaded, template_kwargs(template_arg))
    as_text = writes_calls_as_text(chosen)
    parser = parser_factory(tool_format, loaded.chat_template, calls_as_text=as_text)
    profile, read = find_profile(chosen, loaded), _reads_calls(chosen, loaded, parser)
    named = taught_format(loaded.chat_template, as_text) if tool_format == AUTO else tool_format
    described = _described(loaded, profile) | {"tool_format": named, "calls_read": read}
    if json:
        say(json_text.dumps(described, ensure_ascii=False))
    else:
        for line in _lines(described, profile):
            say(line)
    if not (profile.bridgeable and read):
        raise typer.Exit(1)


def _reads_calls(renderer: Renderer, tokenizer: HFTokenizer, parser: ParserFactory) -> bool:
    """Whether a call comes back from a reply as the renderer writes it."""
    text, reasoning_open = shown_call(renderer, tokenizer)
    reader = parser([TOOL], reasoning_open)
    calls = [event for event in reader.feed(text) + reader.finish() if isinstance(event, CallEvent)]
    return [(call.name, json_text.loads(call.arguments)) for call in calls] == [(CALLED.name, json_text.loads(CALLED.arguments))]


def _lines(described: dict[str, Any], profile: Profile) -> list[str]:
    """The profile for a person."""
    lines = [f"{described['tokenizer']}: {described['vocab_size']} ids, {described['control_tokens']} control tokens"]
    lines += [f"  bridge {shape:<12} {answer}" for shape, answer in profile.bridges.items()]
    lines += [f"  whole  {shape:<12} {answer}" for shape, answer in profile.whole.items() if answer != "yes"]
    lines.append(f"  end tokens          {' '.join(profile.end_tokens) or 'none'}")
    lines.append(f"  tool results        {described['tool_results']}")
    lines.append(f"  tool format         {described['tool_format']}")
    read = "read back" if described["calls_read"] else "not read: they reach the client as text; give --tool-format"
    lines.append(f"  calls               {read}")
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
        "reasoning": profile.reasoning,
        "opens_reasoning": profile.opens_reasoning,
        "appends": profile.appends,
        "quirks": list(profile.quirks),
    }
