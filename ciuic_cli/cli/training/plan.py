"""`ciuic plan`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ciuic_cli.checkpoint.folder import locate, read_config
from ciuic_cli.cli.arguments import Json, Quiet, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.errors import TargetError, UsageError
from ciuic_cli.hub.download import hub_id
from ciuic_cli.hub.headers import headers_only
from ciuic_cli.integers import parse_size
from ciuic_cli.process.libraries import require_training
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries
from ciuic_cli.report.readable import count_of, readable_bytes

LEAST_MEMORY = 1_000_000
"""Least bytes of --gpu-memory: fewer are a number whose unit was forgotten (chosen)."""
if TYPE_CHECKING:
    from ciuic_cli.train.planning.strategies import PlannedStrategy


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Checkpoint or artifact: a folder, a config.json, or a hub id."),
    ],
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each process, such as 24GB.")],
    gpus: Annotated[
        str,
        typer.Option(
            metavar="N,N",
            help="Numbers of GPUs (processes) that share the model; the table has a part for each.",
        ),
    ] = "1",
    sequence_len: Annotated[
        int,
        typer.Option("--sequence-len", "--seqlen", metavar="N", min=2, max=1 << 24, help="Tokens of a row."),
    ] = 1024,
    rows: Annotated[
        int, typer.Option(metavar="N", min=1, max=1 << 20, help="Rows per process and step.")
    ] = 4,
    lora_r: Annotated[int, typer.Option(metavar="N", min=1, max=1 << 16, help="Rank of adapters.")] = 16,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Run a step of every strategy that fits this machine's CPU, and compare."
        ),
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", readable=False, help="Write a page with a bar of memory per strategy."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Show what each way to train MODEL takes, from its config and headers alone: memory, bytes sent and time."""
    console = Console(json_mode=json, quiet=quiet)

    def action() -> None:
        limit, counts = parse_size(gpu_memory), _processes(gpus)
        if limit < LEAST_MEMORY:
            raise UsageError(
                f"--gpu-memory {gpu_memory}: {count_of(limit, 'byte')} are too few for any model",
                remedy="give a unit, such as 24GB",
            )
        if page is not None and page.is_dir():
            raise UsageError(f"--page {page} is a folder", remedy="give the name of a file")
        configure_numeric_libraries()
        require_training()
        with _folder(model) as found:
            report, planned = _plan(console, found, limit, counts, sequence_len, rows, lora_r, measure)
        report = {"model": model, **report}
        if page is not None:
            from ciuic_cli.report.training.plan_page import render_plan_page

            page.write_text(render_plan_page(report), encoding="utf-8")
        console.json(report)
        _show(console, report, planned)
        if not any(one.fits for one in planned):
            least = min(planned, key=lambda one: one.memory.total)
            raise TargetError(
                f"no strategy fits {readable_bytes(limit)}: the smallest, {least.strategy.name}, takes "
                f"{readable_bytes(least.memory.total)}",
                remedy="plan with more memory, more processes (--gpus), or shorter rows (--sequence-len)",
            )

    execute(console, action)


def _processes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 1 << 16 for part in parts):
        raise UsageError(f"--gpus {text!r:.60} are no numbers of processes", remedy="write --gpus 1,8")
    return sorted({int(part) for part in parts})


def _folder(model: str) -> AbstractContextManager[Path]:
    """The folder with the model's config and, of an artifact, its headers. Of a hub model, only these are fetched."""
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return nullcontext(path.parent)
    found = None if os.path.exists(model) else hub_id(model)
    return nullcontext(locate(model)) if found is None else headers_only(*found)


def _plan(
    console: Console,
    folder: Path,
    limit: int,
    gpus: list[int],
    tokens: int,
    rows: int,
    rank: int,
    measure: bool,
) -> tuple[dict[str, Any], list[PlannedStrategy]]:
    from ciuic_cli.train.planning.comparison import compared
    from ciuic_cli.train.planning.limits import CUDA_BYTES
    from ciuic_cli.train.planning.memory_plan import PlannedModel
    from ciuic_cli.train.planning.strategies import plan_strategies

    read_config(folder)
    with console.progress() as progress:
        planned = plan_strategies(
            PlannedModel.of_folder(folder), limit=limit, gpus=gpus, tokens=tokens, rows=rows, rank=rank,
            process=CUDA_BYTES, progress=progress,
        )  # fmt: skip
        strategies = [one.as_dict() for one in planned]
        if measure:
            for row, measured in zip(
                strategies, compared(folder, planned, tokens, progress, console.hint), strict=True
            ):
                row["measured"] = measured
    report = {
        "gpu_memory": limit,
        "gpus": gpus,
        "sequence_len": tokens,
        "rows": rows,
        "strategies": strategies,
    }
    return report, planned


def _show(console: Console, report: dict[str, Any], planned: list[PlannedStrategy]) -> None:
    console.table(
        f"{report['model']}: {count_of(report['rows'], 'row')} of {report['sequence_len']} tokens per process and "
        f"step, {readable_bytes(report['gpu_memory'])} per process",
        ["strategy", "weights", "gradients", "states", "activations", "scratch", "process", "total", "sent per step",
         "time", "fits", "bound"],
        [
            [
                one.strategy.name,
                readable_bytes(one.memory.weights + one.memory.adapter),
                *(readable_bytes(getattr(one.memory, name)) for name in
                  ("gradients", "states", "activations", "scratch", "process", "total")),
                readable_bytes(one.memory.sent),
                f"{one.slowdown:.2f}",
                "yes" if one.fits else "no",
                one.bound,
            ]
            for one in planned
        ],
        optional=["scratch", "process", "gradients", "bound", "sent per step", "states", "weights", "activations"],
    )  # fmt: skip
    console.hint(
        "time: per token, relative to the first strategy on one GPU, by arithmetic with an NVIDIA A100's data sheet"
    )
    rows = [
        [
            row["name"],
            *(readable_bytes(row["measured"][name]) for name in ("planned", "peak")),
            f"{row['measured']['planned'] / row['measured']['peak']:.3f}",
            *(readable_bytes(row["measured"][name]) for name in ("planned_resident", "resident")),
            f"{row['measured']['seconds']:.2f}",
        ]
        for row in report["strategies"]
        if row.get("measured")
    ]
    if rows:
        console.table(
            "On this machine's CPU",
            ["strategy", "planned", "measured", "ratio", "planned resident", "resident", "seconds"],
            rows,
        )
