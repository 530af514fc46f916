"""`turnloom engine`: the embedded engine as a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from turnloom.cli.common import run_async, say


def register(app: typer.Typer) -> None:
    app.command()(engine)


def engine(
    model: Annotated[str, typer.Argument(help="A .gguf file, or smollm2: fetched once into the cache.")] = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 30000,
    parallel: Annotated[int, typer.Option(help="Requests decoded at once, each with the model's whole context.", min=1)] = 2,
) -> None:
    """Serve a GGUF model on the CPU, speaking SGLang's HTTP contract.

    Example: `turnloom engine smollm2 --port 30000`, then `turnloom serve --engine http://127.0.0.1:30000`
    """
    from turnloom.engine.embedded import serve_embedded

    def ready(url: str) -> None:
        say(f"turnloom: {model} on {url}")

    run_async(_until_stopped(serve_embedded(model, host=host, port=port, parallel=parallel, ready=ready)))


async def _until_stopped(serving: Coroutine[Any, Any, None]) -> None:
    """Ctrl-C and SIGTERM end it in good order: the model's own server is stopped, and the exit code is 0."""
    task = asyncio.ensure_future(serving)
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        say("turnloom: stopping")
