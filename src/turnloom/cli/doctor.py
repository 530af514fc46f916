"""`turnloom doctor`: what a tokenizer's chat template can do, and what an engine is, before anything is run with them."""

from __future__ import annotations

import json as json_text
from typing import Annotated, Any

import typer

from turnloom.cli import doctor_engine
from turnloom.cli.common import ChatTemplateOption, RendererOption, TemplateArgOption, ToolFormatOption, say, template_kwargs
from turnloom.engine.models import tokenizer_source
from turnloom.errors import ConfigError
from turnloom.parse.contract import CallEvent, ParserFactory
from turnloom.parse.formats import AUTO, parser_factory, taught_format
from turnloom.render.choose import choose_renderer
from turnloom.render.contract import Renderer
from turnloom.render.profile import CALLED, TOOL, Profile, find_profile, shown_call, writes_calls_as_text
from turnloom.tokenizer import HFTokenizer, load_tokenizer


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A tokenizer's folder, hub id or .gguf file, or local:MODEL.")
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="An engine's URL; several with commas are looked at as one pool.")] = None,
    chat_template: ChatTemplateOption = None,
    template_arg: TemplateArgOption = None,
    renderer: RendererOption = "auto",
    tool_format: ToolFormatOption = AUTO,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Print a template's profile (what bridges, how turns end, whether calls are read), an engine's, and every trap found.

    Exit code 1 when some way to go on cannot be bridged (such turns are rendered whole and fork), when a call is not read,
    or when an engine would make a sample wrong or a turn fail.

    Example: `turnloom doctor --tokenizer Qwen/Qwen3-8B --engine http://127.0.0.1:30000`
    """
    if tokenizer is None and engine is None:
        raise ConfigError("nothing to look at: give --tokenizer, --engine, or both")
    loaded = None if tokenizer is None else _load(tokenizer, chat_template)
    found: dict[str, Any] = {}
    told: list[str] = []
    code = 0
    if loaded is not None:
        found, profile = _examine(loaded, template_arg, renderer, tool_format)
        told, code = _lines(found, profile), int(not (profile.bridgeable and found["calls_read"]))
    if engine is not None:
        report = doctor_engine.examine(engine, loaded)
        told += doctor_engine.lines(report)
        found = {**doctor_engine.described(report), "template": found or None}
        code = max(code, doctor_engine.exit_code(report))
    for line in [json_text.dumps(found, ensure_ascii=False)] if json else told:
        say(line)
    if code:
        raise typer.Exit(code)


def _load(name: str, chat_template: str | None) -> HFTokenizer:
    return load_tokenizer(tokenizer_source(name), chat_template=chat_template)


def _examine(loaded: HFTokenizer, template_arg: list[str] | None, renderer: str, tool_format: str) -> tuple[dict[str, Any], Profile]:
    """What JSON says of a template, and its profile."""
    chosen = choose_renderer(renderer, loaded, template_kwargs(template_arg))
    as_text = writes_calls_as_text(chosen)
    parser = parser_factory(tool_format, loaded.chat_template, calls_as_text=as_text)
    profile, read = find_profile(chosen, loaded), _reads_calls(chosen, loaded, parser)
    named = taught_format(loaded.chat_template, as_text) if tool_format == AUTO else tool_format
    return _described(loaded, profile) | {"tool_format": named, "calls_read": read}, profile


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
