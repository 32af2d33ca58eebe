"""Arguments and options that several commands share, and the function that runs a command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ciuic_cli.cli.console import Console
from ciuic_cli.cli.exit_codes import run
from ciuic_cli.cli.help import CALIBRATION
from ciuic_cli.compression.options import DEFAULT_SEQLEN
from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.process.libraries import require_supported_transformers

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Checkpoint: a folder, or a hub id such as org/name.")
]
PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="Artifact or checkpoint: a folder, or a hub id.")
]
Base = Annotated[str | None, typer.Option(metavar="MODEL", help="The original model, for comparison.")]
DEVICE_HELP = "auto (a GPU if torch finds one), cpu, cuda or cuda:N."
QUIET_HELP = "Print no progress and no remarks on stderr; warnings and errors stay."
JSON_HELP = "Print one JSON object and nothing else on stdout."
REVISION_HELP = "Branch, tag or commit of a model on the hub; also written org/name@revision."
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", show_default="the main branch", help=REVISION_HELP)
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help=DEVICE_HELP)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)]
Json = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
CalibrationFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        readable=False,
        rich_help_panel=CALIBRATION,
        show_default="only the package's mix",
        help="UTF-8 text like the text that the model will see, or training data as for ciuic train (.jsonl or a "
        "folder); may be repeated. The package's own mix of texts adds half as many sequences, "
        "which count less.",
    ),
]
CalibrationOnly = Annotated[
    bool,
    typer.Option(
        "--calibration-only",
        rich_help_panel=CALIBRATION,
        help="All sequences from the text of --calibration: for a model that will see no other text.",
    ),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--seqlen",
        metavar="N",
        rich_help_panel=CALIBRATION,
        show_default=f"{DEFAULT_SEQLEN}, or the model's positions if fewer",
        help="Tokens per calibration sequence, at least 32.",
    ),
]


def samples_option(default: str) -> Any:
    """The option --nsamples; `default` is printed as its default."""
    return typer.Option(
        metavar="N",
        rich_help_panel=CALIBRATION,
        show_default=default,
        help="Calibration sequences, at least 2, without those that the mix adds.",
    )


def execute(console: Console, action: Callable[[], None]) -> NoReturn:
    """Run a command and exit with its code. Prints of libraries to stdout go to stderr."""

    def guarded() -> None:
        _require_working_directory()
        require_supported_transformers()
        with redirect_stdout(sys.stderr):
            action()

    raise typer.Exit(run(console, guarded))


def given_options(context: typer.Context) -> set[str]:
    """Names of the parameters that the command line gives; they come before those of a recipe."""
    return {
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


def announce_device(console: Console, device: str) -> None:
    """Raise EnvironmentFault for a GPU that does not exist, before any work; print a hint if "auto" finds no GPU."""
    from ciuic_cli.runtime.loading import choose_device

    if choose_device(device).type == "cpu" and device == "auto":
        console.hint("torch finds no GPU: running on the CPU")


def _require_working_directory() -> None:
    """Raise EnvironmentFault if the working directory was removed; libraries would fail with obscure messages."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise EnvironmentFault(
            "the working directory was removed", remedy="change to a folder that exists"
        ) from error
