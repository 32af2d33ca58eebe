"""The `ciuic` command: options in, tables or one JSON object out; an error becomes a message and a code.

Only this file knows the command line. Heavy modules are imported inside the commands, so that `--help`, wrong
options and wrong paths answer at once.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ciuic_cli._version import __version__
from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.console import Console, run
from ciuic_cli.cli.tables import (
    show_bench,
    show_compressed,
    show_description,
    show_evaluation,
    show_verification,
)
from ciuic_cli.compression.options import (
    DEFAULT_RATIO,
    DEFAULT_SEQLEN,
    DEFAULT_WIDTHS,
    NSAMPLES,
    SEED,
    SEQLEN,
    WIDTHS,
    check_bits,
    check_device,
    check_prune,
    check_rank,
    check_size,
    check_target,
    width_names,
)
from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.evaluation.bench import NEW_TOKENS, PROMPT_TOKENS
from ciuic_cli.process.openmp import sleep_between_work

_UNITS = {
    unit: base**power
    for power, letter in enumerate("KMGT", start=1)
    for unit, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024))
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)")

EXIT_CODES = (
    "Exit codes: 0 done; 1 a bug of ciuic; 2 wrong usage; 3 bad input; 4 the target cannot be met; "
    "5 the machine refuses (disk, device, memory, lock); 130 interrupted."
)

app = typer.Typer(
    name="ciuic",
    epilog=EXIT_CODES,
    help="Compress a causal language model into a byte budget, and look at what it cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class EffortLevel(StrEnum):
    """How much calibration text and code search a run spends."""

    fast = "fast"
    default = "default"
    best = "best"


class MtpLayers(StrEnum):
    """What becomes of the multi-token-prediction layers."""

    keep = "keep"
    drop = "drop"


def parse_size(text: str) -> int:
    """Bytes of "8GiB", "500MB", "1.5GB" or "4365952"; raises UsageError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    unit = found[2].upper() if found else ""
    if found is None or unit not in ("", "B", *_UNITS):
        raise UsageError(f"{text!r:.60} is no size", remedy="write it like 8GiB, 500MB, 1.5GB or 4365952")
    size = Decimal(found[1]) * _UNITS.get(unit, 1)
    if 0 < size < 1 or (unit in ("", "B") and size != int(size)):
        raise UsageError(f"{text!r} is no whole number of bytes", remedy="write it like 8GiB, 500MB or 1.5GB")
    return check_size(int(size))


def parse_bits(text: str) -> tuple[float, ...]:
    """The widths of "2,3,4", ascending and each once; raises UsageError for any that the code has not."""
    widths = {f"{width:g}": width for width in WIDTHS}
    names = [part.strip() for part in text.split(",")]
    return check_bits([widths.get(name, name) for name in names])


def parse_prune(text: str) -> str | float:
    """ "off", "auto", or a share in [0, 1); raises UsageError for anything else."""
    value: str | float = text
    with suppress(ValueError):
        value = float(text)
    return check_prune(value)


def parse_rank(text: str) -> str | int:
    """ "off", "auto", or a positive multiple of 16; raises UsageError for anything else."""
    return check_rank(int(text) if re.fullmatch(r"[0-9]{1,9}", text) else text)


def _execute(console: Console, action: Callable[[], None]) -> NoReturn:
    """Run a command and leave with its exit code; what libraries print to stdout goes to stderr."""

    def guarded() -> None:
        _require_working_directory()
        with redirect_stdout(sys.stderr):
            action()

    raise typer.Exit(run(console, guarded))


def _require_working_directory() -> None:
    """Libraries end the process where it is gone, with words that nobody understands."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise EnvironmentFault(
            "the working directory was removed", remedy="change to a folder that exists"
        ) from error


def _announce_device(console: Console, device: str) -> None:
    """Refuse a GPU that is not there, before any work; say that "auto" found none."""
    from ciuic_cli.runtime.loading import choose_device

    if choose_device(device).type == "cpu" and device == "auto":
        console.hint("torch sees no GPU here: the work is done on the CPU")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ciuic {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
) -> None:
    """Compress a causal language model into a byte budget, and look at what it cost."""


_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Checkpoint: a folder, or a hub id such as org/name.")
]
_Path = Annotated[str, typer.Argument(metavar="PATH", help="Artifact or checkpoint: a folder, or a hub id.")]
_Base = Annotated[str | None, typer.Option(metavar="MODEL", help="The original, to compare with.")]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


@app.command()
def compress(
    model: _Model,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            readable=False,  # as below: what cannot be read is bad input, and said by us
            help="Folder to write; must not exist, unless --force.",
        ),
    ],
    ratio: Annotated[
        float | None,
        typer.Option(show_default=f"{DEFAULT_RATIO:g}", help="Bytes at 2 per parameter over bytes of OUT."),
    ] = None,
    target_bpw: Annotated[float | None, typer.Option(help="Instead: stored bits per weight.")] = None,
    target_size: Annotated[
        str | None, typer.Option(help="Instead: bytes, such as 8GiB, 500MB or 4365952.")
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", readable=False, help="UTF-8 text to calibrate on (repeatable)."),
    ] = None,
    nsamples: Annotated[
        int | None,
        typer.Option(
            min=NSAMPLES[0], max=NSAMPLES[1], show_default="by effort", help="Calibration sequences."
        ),
    ] = None,
    seqlen: Annotated[
        int | None,
        typer.Option(
            min=SEQLEN[0],
            max=SEQLEN[1],
            show_default=f"{DEFAULT_SEQLEN}, or the model's positions",
            help="Tokens per sequence.",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=SEED[0], max=SEED[1], help="Of what is drawn at random: another seed gives other bytes."
        ),
    ] = 0,
    effort: Annotated[
        EffortLevel,
        typer.Option(
            help="Work spent on quality. fast: trellis of 2^12 states, 24 calibration sequences; default: 2^16, 64; "
            "best: 2^16, 128, and then recovery: row scales and norms are tuned on more text."
        ),
    ] = EffortLevel.default,
    prune: Annotated[
        str, typer.Option(help="off, auto (as the budget decides), or the share of weights to leave out.")
    ] = "auto",
    rank: Annotated[
        str, typer.Option(help="off, auto (as the budget decides), or the rank of every low-rank part.")
    ] = "auto",
    bits: Annotated[
        str, typer.Option(help="Bits per weight that 16 rows of a matrix may have; 1 and 1.5 too.")
    ] = width_names(DEFAULT_WIDTHS),
    mtp: Annotated[
        MtpLayers, typer.Option(help="Keep or drop the multi-token-prediction layers.")
    ] = MtpLayers.drop,
    device: _Device = "auto",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Forecast time, memory and disk, then stop at the plan; write nothing."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace an existing OUT; discard an unfinished run that had other options."
        ),
    ] = False,
    json: _Json = False,
) -> None:
    """Compress MODEL into OUT, within a byte budget and with the least damage that it allows."""
    console = Console(json_mode=json)

    def action() -> None:
        options: dict[str, Any] = {
            **check_target(ratio, target_bpw, None if target_size is None else parse_size(target_size)),
            "prune": parse_prune(prune),
            "rank": parse_rank(rank),
            "bits": parse_bits(bits),
            "device": check_device(device),
        }
        folder = locate(model)
        sleep_between_work()
        from ciuic_cli.compression.pipeline import compress as run_compress
        from ciuic_cli.process.workers import leads

        if leads():
            _announce_device(console, device)
        with console.progress() as progress:
            report = run_compress(
                folder,
                out,
                **options,
                calibration=calibration or (),
                nsamples=nsamples,
                seqlen=seqlen,
                seed=seed,
                effort=effort.value,
                mtp=mtp.value,
                dry_run=dry_run,
                force=force,
                progress=progress,
                hint=console.hint,
            )
        if not leads():
            return
        console.json(report)
        show_compressed(console, report, "the plan" if dry_run else str(out))
        if dry_run:
            console.hint("a dry run: nothing was written. Without --dry-run the same command does it.")
            return
        place, original = shlex.quote(str(out)), shlex.quote(model)
        console.hint(f"the whole account: {out / 'memory_report.html'}")
        console.hint(f"next: ciuic eval {place} --base {original}")
        console.hint(f"      ciuic bench {place} --base {original}")

    _execute(console, action)


@app.command()
def inspect(
    path: _Path,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its checksum.")] = False,
    json: _Json = False,
) -> None:
    """Say what a checkpoint or an artifact contains, from its headers alone."""
    console = Console(json_mode=json)

    def action() -> None:
        folder = locate(path)
        from ciuic_cli.artifact.verification import verify as run_verify
        from ciuic_cli.report.inspection import describe

        checked: dict[str, Any] = {}
        if verify:
            with console.progress() as progress:
                verification = run_verify(folder, lambda done, total: progress("verify", done, total))
            checked = {"verification": asdict(verification)}
            if verification.problems:
                # Headers of damaged files are not worth a description.
                console.json({"path": str(folder), **checked})
                show_verification(console, verification)
                verification.require_intact(folder)
        found = describe(folder)
        console.json({**found.as_dict(tensors), **checked})
        show_description(console, found, tensors)
        if verify:
            show_verification(console, verification)

    _execute(console, action)


@app.command("eval")
def evaluate(
    path: _Path,
    base: _Base = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", readable=False, show_default="the package's own", help="UTF-8 text."),
    ] = None,
    seqlen: Annotated[int, typer.Option(min=64, max=1 << 20, help="Tokens per window.")] = 1024,
    limit: Annotated[int | None, typer.Option(min=1, show_default="all", help="Windows at most.")] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Continue this text too, before and after.")
    ] = None,
    device: _Device = "auto",
    json: _Json = False,
) -> None:
    """Measure the perplexity of PATH, and with --base how far its predictions are from the original's."""
    console = Console(json_mode=json)

    def action() -> None:
        check_device(device)
        if prompt is not None and not prompt.strip():
            raise UsageError("--prompt is empty", remedy="give some words to continue")
        folder = locate(path)
        original = None if base is None else locate(base)
        sleep_between_work()
        from transformers.utils.logging import disable_progress_bar

        from ciuic_cli.evaluation.perplexity import evaluate as run_evaluate
        from ciuic_cli.evaluation.perplexity import generate_text

        disable_progress_bar()  # transformers' own, of loading; ours shows the windows
        _announce_device(console, device)
        with console.progress() as progress:
            found = run_evaluate(
                folder, base=original, text=text, seqlen=seqlen, limit=limit, device=device,
                progress=progress, hint=console.hint,
            )  # fmt: skip
        if prompt is not None:
            found["prompt"] = prompt
            if original is not None:
                try:
                    found["text_before"] = generate_text(original, prompt, device=device)
                except EnvironmentFault as fault:  # what was measured stays worth having
                    console.hint(f"no text of the original: {fault}")
            found["text_after"] = generate_text(folder, prompt, device=device)
        console.json(found)
        show_evaluation(console, found, str(folder))

    _execute(console, action)


def _tokens(short: str, long: str, usual: int, text: str) -> Any:
    return typer.Option(short, long, min=1, max=1 << 30, show_default=f"{usual}, or what fits", help=text)


@app.command()
def bench(
    path: _Path,
    base: _Base = None,
    prompt_tokens: Annotated[
        int | None, _tokens("-p", "--prompt-tokens", PROMPT_TOKENS, "Tokens to prefill.")
    ] = None,
    new_tokens: Annotated[int | None, _tokens("-n", "--new-tokens", NEW_TOKENS, "Tokens to decode.")] = None,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", min=1, max=1 << 30, help="Measured runs.")
    ] = 5,
    batch_size: Annotated[int, typer.Option(min=1, max=1 << 30, help="Sequences at once.")] = 1,
    device: _Device = "auto",
    json: _Json = False,
) -> None:
    """Measure memory, prefill and decode speed of PATH, and of the original, each in a process of its own."""
    console = Console(json_mode=json)

    def action() -> None:
        check_device(device)
        folder = locate(path)
        original = None if base is None else locate(base)
        from ciuic_cli.evaluation.bench import bench as run_bench

        _announce_device(console, device)
        with console.progress() as progress:
            found = run_bench(
                folder,
                base=original,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                repetitions=repetitions,
                batch_size=batch_size,
                device=device,
                progress=progress,
                hint=console.hint,
            )
        console.json(found)
        show_bench(console, found, str(folder))

    _execute(console, action)


def main() -> None:
    """Run the command that the process was started with, and exit with its code."""
    sys.exit(run(Console(), _dispatch))


def _dispatch() -> None:
    try:
        app()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and Rich would leave with code 1
            raise end.__context__ from None
        raise


if __name__ == "__main__":
    main()
