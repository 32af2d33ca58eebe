"""`ciuic inspect`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import Json, PathArgument, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.tables import show_description, show_verification


def inspect(
    path: PathArgument,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its checksum.")] = False,
    json: Json = False,
) -> None:
    """Describe a checkpoint or an artifact from its headers."""
    console = Console(json_mode=json)

    def action() -> None:
        folder = locate(path)
        from ciuic_cli.artifact.verification import verify as run_verify
        from ciuic_cli.report.inspection import describe

        section: dict[str, Any] = {}
        if verify:
            with console.progress() as progress:
                verification = run_verify(folder, lambda done, total: progress("verify", done, total))
            section = {"verification": asdict(verification)}
            if verification.problems:  # damaged files are not described
                console.json({"path": str(folder), **section})
                show_verification(console, verification)
                verification.require_intact(folder)
        description = describe(folder)
        console.json({**description.as_dict(tensors), **section})
        show_description(console, description, tensors)
        if verify:
            show_verification(console, verification)

    execute(console, action)
