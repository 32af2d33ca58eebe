"""`ciuic push`."""

from __future__ import annotations

from typing import Annotated

import typer

from ciuic_cli.cli.arguments import Json, Quiet, execute
from ciuic_cli.cli.console import Console


def push(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Artifact: a folder.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Repository on the hub, such as org/name.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None,
        typer.Option(metavar="BRANCH", show_default="main", help="Branch; made if it does not exist."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Upload an artifact to the Hugging Face hub, after a comparison with its checksums."""
    console = Console(json_mode=json, quiet=quiet)

    def action() -> None:
        from ciuic_cli.artifact.uploading import push as run_push

        with console.progress() as progress:
            address = run_push(
                path,
                name,
                private=private,
                revision=revision,
                progress=lambda done, total: progress("verify", done, total),
            )
        console.json({"url": address})
        console.data(address)

    execute(console, action)
