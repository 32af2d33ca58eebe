"""`ciuic export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import Json, PathArgument, Quiet, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries
from ciuic_cli.report.readable import readable_bytes


class Format(StrEnum):
    """The formats of an export: a dense checkpoint in one of these dtypes."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def export(
    path: PathArgument,
    destination: Annotated[
        Path,
        typer.Argument(metavar="DEST", readable=False, help="Folder to write; it must be absent or empty."),
    ],
    to: Annotated[Format, typer.Option("--to", help="Number format of the decoded weights.")] = Format.bf16,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write an artifact as an ordinary dense checkpoint, for programs that do not know its format."""
    console = Console(json_mode=json, quiet=quiet)

    def action() -> None:
        folder = locate(path)
        configure_numeric_libraries()
        from ciuic_cli.export.dense import export_dense

        with console.progress() as progress:
            written = export_dense(folder, destination, to=to.value, progress=progress)
        for warning in written.warnings:
            console.warning(warning)
        console.json(
            {
                "path": str(destination),
                "file_bytes": written.file_bytes,
                "files": written.files,
                "to": to.value,
            }
        )
        console.data(
            f"{destination}: {readable_bytes(written.file_bytes)} in {written.files} file(s), {to.value}"
        )

    execute(console, action)
