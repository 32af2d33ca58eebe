"""`ciuic compress`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import (
    DEVICE_HELP,
    JSON_HELP,
    QUIET_HELP,
    REVISION_HELP,
    CalibrationFiles,
    CalibrationOnly,
    Model,
    SequenceLength,
    announce_device,
    execute,
    given_options,
    samples_option,
)
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.help import BUDGET, PASSES, RUN
from ciuic_cli.cli.tables import show_account, show_compressed
from ciuic_cli.cli.values import parse_bits, parse_prune, parse_rank
from ciuic_cli.compression.options import (
    BITS,
    DEFAULT_BITS,
    DEFAULT_RATIO,
    EFFORTS,
    CompressOptions,
    bits_text,
)
from ciuic_cli.compression.recipe import read_recipe
from ciuic_cli.hub.download import with_revision
from ciuic_cli.integers import parse_duration, parse_size
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

if TYPE_CHECKING:
    from ciuic_cli.profiling.account import Account
    from ciuic_cli.profiling.peaks import AccountRow
    from ciuic_cli.report.schema import MemoryReport


class EffortLevel(StrEnum):
    """Presets of the amount of calibration text, the trellis size, and recovery."""

    fast = "fast"
    default = "default"
    best = "best"


BUDGETS = {"ratio", "target_bpw", "target_size"}
"""Options of which only one may be given."""


class MtpLayers(StrEnum):
    """Whether the multi-token-prediction layers are kept."""

    keep = "keep"
    drop = "drop"


def compress(
    context: typer.Context,
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
            metavar="RATIO",
            rich_help_panel=BUDGET,
            show_default=f"{DEFAULT_RATIO:g}",
            help="All parameters at 2 bytes each, over the bytes of OUT's safetensors files.",
        ),
    ] = None,
    target_bpw: Annotated[
        float | None,
        typer.Option(
            metavar="BITS", rich_help_panel=BUDGET, help="Instead of --ratio: stored bits per parameter."
        ),
    ] = None,
    target_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=BUDGET,
            help="Instead of --ratio: bytes of OUT's safetensors files, such as 8GiB, 500M or 4365952.",
        ),
    ] = None,
    calibration: CalibrationFiles = None,
    calibration_only: CalibrationOnly = False,
    nsamples: Annotated[int | None, samples_option("by effort")] = None,
    seqlen: SequenceLength = None,
    prune: Annotated[
        str,
        typer.Option(
            metavar="off|auto|SHARE",
            rich_help_panel=PASSES,
            help="off: prune nothing; auto: the budget decides; SHARE: this share of the prunable weights.",
        ),
    ] = "auto",
    rank: Annotated[
        str,
        typer.Option(
            metavar="off|auto|RANK",
            rich_help_panel=PASSES,
            help="Low-rank parts. off: none; auto: the budget decides; RANK: this rank everywhere.",
        ),
    ] = "auto",
    bits: Annotated[
        str,
        typer.Option(
            metavar="BITS,...",
            rich_help_panel=PASSES,
            show_default="all from 2 on",
            help="Bits per weight that a group of 16 rows may have, out of "
            f"{', '.join(f'{value:g}' for value in BITS if value)}.",
        ),
    ] = bits_text(DEFAULT_BITS),
    mtp: Annotated[
        MtpLayers,
        typer.Option(rich_help_panel=PASSES, help="Keep or drop the multi-token-prediction layers."),
    ] = MtpLayers.drop,
    effort: Annotated[
        EffortLevel,
        typer.Option(
            rich_help_panel=RUN,
            help="Time spent on quality, as mean trellis states per weight and calibration sequences. "
            + "; ".join(f"{name}: {level.states}, {level.nsamples}" for name, level in EFFORTS.items())
            + ", then recovery: row scales and norms are tuned on more text.",
        ),
    ] = EffortLevel.default,
    states: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=RUN,
            show_default="by effort",
            help="Mean trellis states per weight, 4096 to 65536; the search takes time in proportion.",
        ),
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            rich_help_panel=RUN,
            help="Instead of --effort: most time of the forecast run, such as 1h, 90m or 45s. Text, search and probes "
            "are chosen for the least predicted loss.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", rich_help_panel=RUN, help=DEVICE_HELP)] = "auto",
    seed: Annotated[
        int,
        typer.Option(metavar="N", rich_help_panel=RUN, help="Random seed; another seed gives other bytes."),
    ] = 0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=RUN,
            help="Forecast time, memory and disk, collect the statistics, show the plan, and write nothing.",
        ),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            rich_help_panel=RUN,
            help="Print what each phase computes, the processor's seconds, and the share of the machine's peak.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            rich_help_panel=RUN,
            help="Replace an older artifact at OUT; discard an unfinished run with other options.",
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            rich_help_panel=RUN,
            help="YAML file of options, such as an artifact's recipe.yaml; options given here come first.",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            rich_help_panel=RUN,
            help="Continue this text with both models, for the report's page.",
        ),
    ] = None,
    max_disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=RUN,
            help="For a model on the hub: most bytes of its weights on disk at a time, such as 50GB.",
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=RUN, show_default="the main branch", help=REVISION_HELP),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", rich_help_panel=RUN, help=QUIET_HELP)] = False,
    json: Annotated[bool, typer.Option("--json", rich_help_panel=RUN, help=JSON_HELP)] = False,
) -> None:
    """Compress MODEL into OUT, with the least loss that the byte budget allows."""
    console = Console(json_mode=json, quiet=quiet)

    def action() -> None:
        values: dict[str, Any] = {
            "ratio": ratio,
            "target_bpw": target_bpw,
            "target_size": None if target_size is None else parse_size(target_size),
            "calibration": tuple(calibration or ()),
            "calibration_only": calibration_only,
            "nsamples": nsamples,
            "seqlen": seqlen,
            "seed": seed,
            "effort": effort.value,
            "states": states,
            "time_budget": None if time_budget is None else parse_duration(time_budget),
            "prune": parse_prune(prune),
            "rank": parse_rank(rank),
            "bits": parse_bits(bits),
            "mtp": mtp.value,
            "device": device,
            "prompt": prompt,
            "dry_run": dry_run,
            "force": force,
        }
        if config is not None:
            values |= _from_recipe(config, context)
        options = CompressOptions(**values)  # refuses wrong values before anything heavy is imported
        source = with_revision(model, revision)
        limit = None if max_disk is None else parse_size(max_disk)
        folder = source if limit is not None else locate(source)
        account = _account() if profile else None
        report = _run(console, folder, out, options, limit, account)
        if report is not None:
            rows = _account_rows(account)
            console.json(
                {**report.to_dict(), "profile": [asdict(row) for row in rows]} if rows else report.to_dict()
            )
            show_compressed(console, report, "the plan" if dry_run else str(out))
            show_account(console, rows)
            _show_next_steps(console, source, out, options)

    execute(console, action)


def _from_recipe(file: Path, context: typer.Context) -> dict[str, Any]:
    """The options of a recipe, except those that the command line gives."""
    given = given_options(context)
    found = read_recipe(file)
    for name, parse in (
        ("target_size", parse_size),
        ("bits", parse_bits),
        ("time_budget", parse_duration),
    ):
        if isinstance(found.get(name), str):
            found[name] = parse(found[name])
    left_out = given | BUDGETS if given & BUDGETS else given
    return {name: value for name, value in found.items() if name not in left_out}


def _run(
    console: Console,
    model: str | Path,
    out: Path,
    options: CompressOptions,
    max_disk: int | None,
    account: Account | None,
) -> MemoryReport | None:
    """The report of the run; None in all processes of torchrun but the first."""
    configure_numeric_libraries()
    from transformers.utils.logging import disable_progress_bar

    from ciuic_cli.compression.pipeline import compress as run_compress
    from ciuic_cli.process.workers import is_leader

    disable_progress_bar()  # of loading the finished artifact, in transformers
    if is_leader():
        announce_device(console, options.device)
    with console.progress() as progress:
        report = run_compress(
            model,
            out,
            progress=progress,
            hint=console.hint,
            max_disk=max_disk,
            account=account,
            **asdict(options),
        )
    return report if is_leader() else None


def _account() -> Account:
    configure_numeric_libraries()  # the account imports torch
    from ciuic_cli.profiling.account import Account

    return Account()


def _account_rows(account: Account | None) -> list[AccountRow]:
    """The lines of the account, as shares of peaks that are measured now."""
    if account is None:
        return []
    from ciuic_cli.profiling.peaks import account_rows, measure_peaks

    return account_rows(account, measure_peaks())


def _show_next_steps(console: Console, model: str, out: Path, options: CompressOptions) -> None:
    if options.dry_run:
        console.hint("dry run: nothing was written; run the same command without --dry-run")
        return
    artifact, original = shlex.quote(str(out)), shlex.quote(model)
    text = " --text FILE" if options.calibration else ""
    console.hint(f"full report: {out / 'memory_report.html'}")
    console.hint(f"next: ciuic eval {artifact} --base {original}{text}")
    if options.calibration:
        console.hint("      (FILE: text like that of --calibration, but not the same text)")
    console.hint(f"      ciuic bench {artifact} --base {original}")
