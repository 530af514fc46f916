"""`turnloom engine`: the embedded engine as a server."""

from __future__ import annotations

from typing import Annotated

import typer

from turnloom.cli.common import run_async


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

    run_async(serve_embedded(model, host=host, port=port, parallel=parallel, ready=lambda url: typer.echo(f"turnloom: {model} on {url}")))
