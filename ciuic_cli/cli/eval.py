"""`ciuic eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import Base, Device, Json, PathArgument, announce_device, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.tables import show_evaluation
from ciuic_cli.compression.options import check_device
from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.process.openmp import sleep_between_work


def evaluate(
    path: PathArgument,
    base: Base = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", readable=False, show_default="the package's own", help="UTF-8 text."),
    ] = None,
    seqlen: Annotated[int, typer.Option(min=64, max=1 << 20, help="Tokens per window.")] = 1024,
    limit: Annotated[int | None, typer.Option(min=1, show_default="all", help="Windows at most.")] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Continue this text too, before and after.")
    ] = None,
    device: Device = "auto",
    json: Json = False,
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

        disable_progress_bar()  # transformers' bar of loading; ours shows the windows
        announce_device(console, device)
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
                except EnvironmentFault as fault:  # the measurements are still worth showing
                    console.hint(f"no text of the original: {fault}")
            found["text_after"] = generate_text(folder, prompt, device=device)
        console.json(found)
        show_evaluation(console, found, str(folder))

    execute(console, action)
