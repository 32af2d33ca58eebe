"""`ciuic eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import Base, Device, Json, PathArgument, Quiet, announce_device, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.tables import show_evaluation
from ciuic_cli.compression.options import check_device
from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries


def evaluate(
    path: PathArgument,
    base: Base = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            show_default="the package's own evaluation text",
            help="UTF-8 text to measure on.",
        ),
    ] = None,
    seqlen: Annotated[int, typer.Option(metavar="N", min=64, max=1 << 20, help="Tokens per window.")] = 1024,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default="all", help="Largest number of windows.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Also continue this text, with PATH and with --base."),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure the perplexity of PATH, and with --base its KL divergence from the original."""
    console = Console(json_mode=json, quiet=quiet)

    def action() -> None:
        check_device(device)
        if prompt is not None and not prompt.strip():
            raise UsageError("--prompt is empty", remedy="give a text to continue")
        folder = locate(path)
        original = None if base is None else locate(base)
        configure_numeric_libraries()
        from transformers.utils.logging import disable_progress_bar

        from ciuic_cli.evaluation.perplexity import evaluate as run_evaluate
        from ciuic_cli.evaluation.perplexity import generate_text

        disable_progress_bar()  # of loading, in transformers; ours shows the windows
        announce_device(console, device)
        with console.progress() as progress:
            evaluation = run_evaluate(
                folder, base=original, text=text, seqlen=seqlen, limit=limit, device=device,
                progress=progress, hint=console.hint,
            )  # fmt: skip
        if prompt is not None:
            evaluation["prompt"] = prompt
            if original is not None:
                try:
                    evaluation["text_before"] = generate_text(original, prompt, device=device)
                except EnvironmentFault as fault:  # the measurements are shown all the same
                    console.hint(f"no text of the original: {fault}")
            evaluation["text_after"] = generate_text(folder, prompt, device=device)
        console.json(evaluation)
        show_evaluation(console, evaluation, str(folder))
        if text is None:
            console.hint(
                "measured on the package's own text; perplexity is high on text unlike the model's training text: "
                "--text FILE measures on yours"
            )

    execute(console, action)
