"""`ciuic eval`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ciuic_cli.checkpoint.folder import locate
from ciuic_cli.cli.arguments import Base, Device, Json, PathArgument, Quiet, announce_device, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.help import TASKS, TEXT
from ciuic_cli.cli.tables import show_evaluation, show_task_scores
from ciuic_cli.compression.options import check_device
from ciuic_cli.errors import EnvironmentFault, UsageError
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

DEFAULT_SEQLEN = 1024
"""Tokens per window (chosen: as the calibration texts of the tools that ciuic is compared with)."""


def evaluate(
    path: PathArgument,
    base: Base = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            rich_help_panel=TEXT,
            show_default="the package's own evaluation text",
            help="UTF-8 text to measure on, or data as for ciuic train (.jsonl or a folder).",
        ),
    ] = None,
    seqlen: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=64,
            max=1 << 20,
            rich_help_panel=TEXT,
            show_default=f"{DEFAULT_SEQLEN}",
            help="Tokens per window.",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", rich_help_panel=TEXT, help="Also continue this text, with PATH and with --base."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            rich_help_panel=TASKS,
            help="Instead of a text: tasks of lm-evaluation-harness, such as hellaswag,arc_easy.",
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            rich_help_panel=TASKS,
            help="Folder of further task files. Code that they name is run.",
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            rich_help_panel=TASKS,
            show_default="the task's",
            help="Examples before a question.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, rich_help_panel=TASKS, show_default="1", help="Documents computed together."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, show_default="all", help="Most windows, or most documents of each task."
        ),
    ] = None,
    device: Device = "auto",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure the perplexity of PATH, and with --base its KL divergence from the original; or scores on tasks."""
    console = Console(json_mode=json, quiet=quiet)

    def action() -> None:
        check_device(device)
        _check_together(
            {"--text": text, "--seqlen": seqlen, "--prompt": prompt},
            {"--include-path": include_path, "--num-fewshot": num_fewshot, "--batch-size": batch_size},
            tasks,
        )
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
        if tasks is not None:
            from ciuic_cli.evaluation.tasks import evaluate_tasks

            found = evaluate_tasks(
                folder, [name.strip() for name in tasks.split(",")], base=original, include_path=include_path,
                num_fewshot=num_fewshot, limit=limit, batch_size=batch_size or 1, device=device, hint=console.hint,
            )  # fmt: skip
            console.json(found)
            show_task_scores(console, found["tasks"], str(folder))
            return
        if text is None:
            console.hint(
                "measuring on the package's own text; perplexity is high on text unlike the model's training text: "
                "--text FILE measures on yours"
            )
        with console.progress() as progress:
            evaluation = run_evaluate(
                folder, base=original, text=text, seqlen=seqlen or DEFAULT_SEQLEN, limit=limit, device=device,
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

    execute(console, action)


def _check_together(
    for_text: Mapping[str, object], for_tasks: Mapping[str, object], tasks: str | None
) -> None:
    """Raise UsageError for options of the other kind of measurement."""
    wrong = [name for name, value in (for_tasks if tasks is None else for_text).items() if value is not None]
    if wrong:
        raise UsageError(
            f"{wrong[0]} {'needs' if tasks is None else 'does not go with'} --tasks",
            remedy="measure on a text or on tasks, in two runs",
        )
