"""`turnloom serve`: the gateway as a service."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from turnloom.cli.common import (
    DEFAULT_STORE,
    ChatTemplateOption,
    EngineAttemptsOption,
    EngineOption,
    EnginePatienceOption,
    HistoryOption,
    HistoryPolicy,
    ImagesOption,
    ImagesPolicy,
    LabelerOption,
    MatchingOption,
    RealignOption,
    RendererOption,
    RouteOption,
    SpecialTokensOption,
    SpecialTokensPolicy,
    StoreOption,
    TemplateArgOption,
    TokenizerOption,
    ToolFormatOption,
    WithoutQuirkOption,
    engine_options,
    reading_options,
    run_async,
    say,
    template_kwargs,
)
from turnloom.engine.pool import PATIENCE
from turnloom.errors import ConfigError
from turnloom.gateway import logs, otel
from turnloom.gateway.api import Gateway
from turnloom.gateway.bind import check_bind, checked_key
from turnloom.gateway.memory import IDLE_SECONDS, IDLE_SESSIONS
from turnloom.gateway.observe import Spans
from turnloom.store.contract import Limits
from turnloom.types import Sampling

log = logging.getLogger("turnloom.cli")

DRAIN_SECONDS = 20.0
"""Less than the 30 that orchestrators wait, as a rule, before they kill: aborts and the last writes come after it."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def register(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    engine: EngineOption,
    tokenizer: TokenizerOption = None,
    route: RouteOption = None,
    engine_attempts: EngineAttemptsOption = PATIENCE.attempts,
    engine_patience: EnginePatienceOption = PATIENCE.seconds,
    host: Annotated[str, typer.Option(help="Address to listen on. Anything but loopback needs --admin-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8600,
    store: StoreOption = DEFAULT_STORE,
    open_sessions: Annotated[
        bool, typer.Option("--open-sessions", help="An unknown key opens a session of its own. For trusted networks only.")
    ] = False,
    admin_key: Annotated[
        str, typer.Option(envvar="TURNLOOM_ADMIN_KEY", help="Opens the admin API. Default: a new one, printed.", show_default=False)
    ] = "",
    tool_format: ToolFormatOption = "auto",
    matching: MatchingOption = "canonical",
    history: HistoryOption = HistoryPolicy.SAMPLED,
    realign: RealignOption = 0,
    renderer: RendererOption = "auto",
    chat_template: ChatTemplateOption = None,
    template_arg: TemplateArgOption = None,
    special_tokens: SpecialTokensOption = SpecialTokensPolicy.PLAIN,
    labeler: LabelerOption = "auto",
    images: ImagesOption = ImagesPolicy.REFUSE,
    without_quirk: WithoutQuirkOption = None,
    temperature: Annotated[float, typer.Option(help="Pinned for every session that sets none.", min=0)] = 1.0,
    top_p: Annotated[float, typer.Option(help="Pinned for every session that sets none; 1 is off.", min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(help="Pinned for every session that sets none; -1 is off.")] = -1,
    max_turns: Annotated[int | None, typer.Option(help="Turns a session may take.", min=1)] = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and reply together.", min=2)] = None,
    max_session_tokens: Annotated[int | None, typer.Option(help="Tokens that are sampled in all turns of a session.", min=1)] = None,
    max_session_bytes: Annotated[int | None, typer.Option(help="Bytes that a session's turns take up in the store.", min=1)] = None,
    session_ttl: Annotated[float | None, typer.Option(help="Seconds after which a session is closed.", min=0.001)] = None,
    idle_timeout: Annotated[float | None, typer.Option(help="Seconds without a turn after which it is closed.", min=0.001)] = None,
    max_sessions: Annotated[int | None, typer.Option(help="Sessions that may be open at once.", min=1)] = None,
    loaded_sessions: Annotated[int, typer.Option(help="Sessions that stay in memory though nobody uses them.", min=1)] = IDLE_SESSIONS,
    loaded_seconds: Annotated[float, typer.Option(help="Seconds that each of them stays there.", min=0)] = IDLE_SECONDS,
    drain: Annotated[float, typer.Option(help="Seconds that turns in flight have when it is told to stop.", min=0)] = DRAIN_SECONDS,
    log_format: Annotated[LogFormat, typer.Option(help="text for people, json for machines: one object a line.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel | None, typer.Option(help="info says how each turn ended.", show_default="warning; info with -v")] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line for each request, without keys.")] = False,
    otel: Annotated[
        str,
        typer.Option(help="Send spans to the OTLP collector at http://HOST:4318. Default: what OTEL_… name.", show_default=False),
    ] = "",
) -> None:
    """Serve agents from an engine.

    Example: `turnloom serve --engine http://127.0.0.1:30000 --tokenizer Qwen/Qwen3-8B`

    Then open a session with `curl -X POST -H "Authorization: Bearer $ADMIN_KEY" http://127.0.0.1:8600/api/v1/sessions`
    and give its `env` to an agent.
    """
    admin_key = checked_key(admin_key)
    check_bind(host, admin_key)
    key = admin_key or secrets.token_urlsafe(32)
    _set_up_logs(log_format, log_level, access_log)
    gateway = Gateway(
        **engine_options(engine, tokenizer, route, engine_attempts, engine_patience),
        store=store,
        host=host,
        port=port,
        tool_format=tool_format,
        matching=matching,
        history=history.value,
        realign=realign,
        renderer=renderer,
        chat_template=chat_template,
        template_kwargs=template_kwargs(template_arg),
        special_tokens=special_tokens.value,
        **reading_options(labeler, images, without_quirk),
        sampling=Sampling(temperature, top_p, top_k),
        limits=Limits(
            max_turns=max_turns,
            max_context=max_context,
            max_tokens=max_session_tokens,
            max_bytes=max_session_bytes,
            ttl=session_ttl,
            idle_timeout=idle_timeout,
        ),
        max_sessions=max_sessions,
        loaded_sessions=loaded_sessions,
        loaded_seconds=loaded_seconds,
        admin_key=key,
        open_sessions=open_sessions,
        access_log=access_log,
        spans=_spans(otel),
    )
    run_async(_serve(gateway, store, "" if admin_key else key, drain))


def _set_up_logs(style: LogFormat, level: LogLevel | None, access: bool) -> None:
    logs.configure(style.value, logging.getLogger().level if level is None else getattr(logging, level.upper()))
    if access:
        logs.ACCESS.setLevel(logging.INFO)


def _spans(endpoint: str) -> Spans | None:
    """Raises ConfigError where they were asked for by name and OpenTelemetry is not installed."""
    if endpoint:
        return otel.open_spans(endpoint)
    if otel.spans_wanted(os.environ):
        try:
            return otel.open_spans()
        except ConfigError as error:
            log.warning("the environment names a collector of spans, and gets none: %s", error)
    return None


async def _serve(gateway: Gateway, store: Path, new_key: str, drain: float) -> None:
    async with gateway:
        logs.adopt("transformers")
        say(f"turnloom: serving on {gateway.url}, sessions in {store}")
        if new_key:
            say(f"turnloom: admin key {new_key}")
        await told_to_stop()
        left = gateway.in_flight
        have, them = ("turn in flight has", "it") if left == 1 else ("turns in flight have", "them")
        say(f"turnloom: stopping{f'; {left} {have} {drain:g} s, a second signal ends {them} now' if left else ''}")
        await gateway.stop(drain)


async def told_to_stop() -> None:
    """Return at SIGINT or SIGTERM. From then on another one ends the process at once: what clients were told is on disk."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def first() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, _end_now)
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, first)
    await told.wait()


def _end_now(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)
