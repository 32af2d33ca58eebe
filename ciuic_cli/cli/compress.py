"""`ciuic compress`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import Device, Json, Model, announce_device, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.tables import show_compressed
from ciuic_cli.cli.values import parse_bits, parse_prune, parse_rank, parse_size
from ciuic_cli.compression.options import (
    DEFAULT_BITS,
    DEFAULT_RATIO,
    DEFAULT_SEQLEN,
    NSAMPLES,
    SEED,
    SEQLEN,
    CompressOptions,
    bits_text,
)
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

if TYPE_CHECKING:
    from ciuic_cli.report.schema import MemoryReport


class EffortLevel(StrEnum):
    """Presets of the amount of calibration text, the trellis size, and recovery."""

    fast = "fast"
    default = "default"
    best = "best"


class MtpLayers(StrEnum):
    """Whether the multi-token-prediction layers are kept."""

    keep = "keep"
    drop = "drop"


def compress(
    model: Model,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            readable=False,  # Typer would exit with code 2 for an unreadable path; here that is bad input (code 3)
            help="Folder to write; it must be absent or empty, except with --force.",
        ),
    ],
    ratio: Annotated[
        float | None,
        typer.Option(
            show_default=f"{DEFAULT_RATIO:g}",
            help="2 bytes per parameter over the bytes of OUT.",
        ),
    ] = None,
    target_bpw: Annotated[
        float | None, typer.Option(help="Instead of --ratio: stored bits per weight.")
    ] = None,
    target_size: Annotated[
        str | None, typer.Option(help="Instead of --ratio: bytes, such as 8GiB, 500M or 4365952.")
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", readable=False, help="UTF-8 text for calibration (repeatable)."),
    ] = None,
    nsamples: Annotated[
        int | None,
        typer.Option(
            min=NSAMPLES[0],
            max=NSAMPLES[1],
            show_default="by effort",
            help="Number of calibration sequences.",
        ),
    ] = None,
    seqlen: Annotated[
        int | None,
        typer.Option(
            min=SEQLEN[0],
            max=SEQLEN[1],
            show_default=f"{DEFAULT_SEQLEN}, or the model's positions if fewer",
            help="Tokens per calibration sequence.",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=SEED[0], max=SEED[1], help="Random seed; another seed gives other bytes."),
    ] = 0,
    effort: Annotated[
        EffortLevel,
        typer.Option(
            help="Time spent on quality. fast: trellis with 2^12 states, 24 calibration sequences; default: 2^16, 64; "
            "best: 2^16, 128, followed by recovery: row scales and norms are tuned on more text."
        ),
    ] = EffortLevel.default,
    prune: Annotated[
        str, typer.Option(help="Pruning: off, auto (the budget decides), or the share of weights to prune.")
    ] = "auto",
    rank: Annotated[
        str, typer.Option(help="Low-rank parts: off, auto (the budget decides), or the rank of each.")
    ] = "auto",
    bits: Annotated[
        str,
        typer.Option(help="Bits per weight to choose from for every 16 rows; 1 and 1.5 are possible too."),
    ] = bits_text(DEFAULT_BITS),
    mtp: Annotated[
        MtpLayers, typer.Option(help="Keep or drop the multi-token-prediction layers.")
    ] = MtpLayers.drop,
    device: Device = "auto",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Forecast time, memory and disk, show the plan, and write nothing."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace an older artifact at OUT; discard an unfinished run with other options."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Compress MODEL into OUT, with the least loss that the byte budget allows."""
    console = Console(json_mode=json)

    def action() -> None:
        options = CompressOptions(  # refuses wrong values before anything heavy is imported
            ratio=ratio,
            target_bpw=target_bpw,
            target_size=None if target_size is None else parse_size(target_size),
            calibration=tuple(calibration or ()),
            nsamples=nsamples,
            seqlen=seqlen,
            seed=seed,
            effort=effort.value,
            prune=parse_prune(prune),
            rank=parse_rank(rank),
            bits=parse_bits(bits),
            mtp=mtp.value,
            device=device,
            dry_run=dry_run,
            force=force,
        )
        folder = locate(model)
        report = _run(console, folder, out, options)
        if report is not None:
            console.json(report.to_dict())
            show_compressed(console, report, "the plan" if dry_run else str(out))
            _show_next_steps(console, model, out, dry_run)

    execute(console, action)


def _run(console: Console, folder: Path, out: Path, options: CompressOptions) -> MemoryReport | None:
    """The report of the run; None in all processes of torchrun but the first."""
    configure_numeric_libraries()
    from transformers.utils.logging import disable_progress_bar

    from ciuic_cli.compression.pipeline import compress as run_compress
    from ciuic_cli.process.workers import is_leader

    disable_progress_bar()  # of loading the finished artifact, in transformers
    if is_leader():
        announce_device(console, options.device)
    with console.progress() as progress:
        report = run_compress(folder, out, progress=progress, hint=console.hint, **asdict(options))
    return report if is_leader() else None


def _show_next_steps(console: Console, model: str, out: Path, dry_run: bool) -> None:
    if dry_run:
        console.hint("dry run: nothing was written; run the same command without --dry-run")
        return
    artifact, original = shlex.quote(str(out)), shlex.quote(model)
    console.hint(f"full report: {out / 'memory_report.html'}")
    console.hint(f"next: ciuic eval {artifact} --base {original}")
    console.hint(f"      ciuic bench {artifact} --base {original}")
