"""`ciuic export`."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import (
    DEVICE_HELP,
    CalibrationFiles,
    CalibrationOnly,
    Json,
    PathArgument,
    Quiet,
    SequenceLength,
    execute,
    given_options,
    samples_option,
)
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.help import CALIBRATION
from ciuic_cli.compression.options import DEFAULT_EFFORT, EFFORTS
from ciuic_cli.errors import UsageError
from ciuic_cli.export.gguf.types import DEFAULT_TARGET_BITS
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries
from ciuic_cli.report.readable import count_of, readable_bytes

GGUF = "With --to gguf"
"""Title of the group of options for GGUF files."""
GGUF_OPTIONS = {
    "target_bits", "llama_cpp", "calibration", "calibration_only", "nsamples", "seqlen", "device",
}  # fmt: skip
"""Options that only a GGUF file has."""


class Format(StrEnum):
    """The formats of an export: an artifact as a dense checkpoint in a dtype, or a dense checkpoint for llama.cpp."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    gguf = "gguf"


def export(
    context: typer.Context,
    path: PathArgument,
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="DEST",
            readable=False,
            help="Folder to write; it must be absent or empty. With --to gguf: file to write.",
        ),
    ],
    to: Annotated[
        Format,
        typer.Option(
            "--to",
            help="Number format of an artifact's decoded weights; or gguf: a file for llama.cpp, from an original "
            "checkpoint.",
        ),
    ] = Format.bf16,
    target_bits: Annotated[
        float,
        typer.Option(metavar="BITS", rich_help_panel=GGUF, help="Bits of the whole file per weight."),
    ] = DEFAULT_TARGET_BITS,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            readable=False,
            rich_help_panel=GGUF,
            show_default="programs on PATH",
            help="llama.cpp's folder, with convert_hf_to_gguf.py and llama-quantize (in build/bin, for example).",
        ),
    ] = None,
    calibration: CalibrationFiles = None,
    calibration_only: CalibrationOnly = False,
    nsamples: Annotated[int | None, samples_option(str(EFFORTS[DEFAULT_EFFORT].nsamples))] = None,
    seqlen: SequenceLength = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", rich_help_panel=CALIBRATION, help=DEVICE_HELP)
    ] = "auto",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write an artifact as an ordinary dense checkpoint, or a checkpoint as a GGUF file, for other programs."""
    console = Console(json_mode=json, quiet=quiet)

    def action() -> None:
        if to is Format.gguf:
            options = {
                "target_bits": target_bits, "llama_cpp": llama_cpp, "calibration": tuple(calibration or ()),
                "calibration_only": calibration_only, "nsamples": nsamples, "seqlen": seqlen, "device": device,
            }  # fmt: skip
            _export_gguf(console, path, destination, options)
            return
        if unused := sorted(given_options(context) & GGUF_OPTIONS):
            raise UsageError(
                f"--{unused[0].replace('_', '-')} is only for --to gguf",
                remedy="add --to gguf, or leave it out",
            )
        _export_dense(console, path, destination, to.value)

    execute(console, action)


def _export_dense(console: Console, path: str, destination: Path, to: str) -> None:
    folder = locate(path)
    configure_numeric_libraries()
    from ciuic_cli.export.dense import export_dense

    with console.progress() as progress:
        written = export_dense(folder, destination, to=to, progress=progress)
    for warning in written.warnings:
        console.warning(warning)
    console.json(
        {"path": str(destination), "file_bytes": written.file_bytes, "files": written.files, "to": to}
    )
    console.data(
        f"{destination}: {readable_bytes(written.file_bytes)} in {count_of(written.files, 'file')}, {to}"
    )


def _export_gguf(console: Console, path: str, destination: Path, options: dict[str, Any]) -> None:
    folder = locate(path)
    configure_numeric_libraries()
    from ciuic_cli.export.gguf.writing import GgufOptions, export_gguf

    checked = GgufOptions(**options)
    with console.progress() as progress:
        written = export_gguf(folder, destination, checked, progress=progress, hint=console.hint)
    console.json({"path": str(destination), "to": Format.gguf.value, **asdict(written)})
    shares = ", ".join(f"{name} {share:.1%}" for name, share in written.shares.items())
    console.data(
        f"{destination}: {readable_bytes(written.file_bytes)}, {written.bits:.3f} bits per weight, predicted KL "
        f"{written.predicted_kl:.4g}\nweights by type: {shares}"
    )
