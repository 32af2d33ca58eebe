"""`ciuic serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import PathArgument, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries


def serve(
    context: typer.Context,
    model: PathArgument,
    host: Annotated[str, typer.Option(metavar="NAME", help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Serve an artifact or a checkpoint over HTTP with OpenAI's interface, by `transformers serve`.

    Takes every option of `transformers serve`, too (--device, --dtype, --chat-template-kwargs, --log-level and so on).
    """
    console = Console()

    def action() -> None:
        folder = locate(model)
        configure_numeric_libraries()
        from ciuic_cli.serving.server import serve as run_server

        run_server(folder, host, port, context.args, console.hint)

    execute(console, action)
