"""`ciuic merge`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ciuic_cli.cli.arguments import Device, Json, announce_device, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.compression.options import check_device
from ciuic_cli.process.libraries import require_training
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

if TYPE_CHECKING:
    from ciuic_cli.train.merging.merge import MergeReport


class MergeMethod(StrEnum):
    """How an adapter becomes part of the model."""

    requantize = "requantize"
    low_rank = "low-rank"
    bf16 = "bf16"


METHOD_HELP = (
    "requantize (code the merged weights again, in as many bytes), low-rank (keep the codes, and add the adapter as "
    "low-rank parts) or bf16 (a dense model)."
)


def merge(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Artifact: a folder, or a hub id.")],
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Folder of the adapter, in PEFT's format.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the merged model.")],
    train_file: Annotated[
        Path,
        typer.Option(
            metavar="FILE", readable=False, help="The training text: for statistics, and to measure KL."
        ),
    ],
    method: Annotated[MergeMethod, typer.Option(help=METHOD_HELP)] = MergeMethod.requantize,
    sequence_len: Annotated[
        int, typer.Option("--sequence-len", "--seqlen", metavar="N", help="Most tokens of an example.")
    ] = 1024,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Merge a LoRA adapter into the compressed model on which it was trained. Continues after a crash."""
    console = Console(json_mode=json)

    def action() -> None:
        check_device(device)
        configure_numeric_libraries()
        require_training()
        announce_device(console, device)
        report = merged(console, model, adapter, out, method, train_file, sequence_len, device)
        console.json(report.as_dict())

    execute(console, action)


def merged(
    console: Console,
    model: str,
    adapter: Path,
    out: Path,
    method: MergeMethod,
    train_file: Path,
    sequence_len: int,
    device: str,
) -> MergeReport:
    """Merge, and print what it did."""
    from transformers.utils.logging import disable_progress_bar

    from ciuic_cli.checkpoint.folder import locate
    from ciuic_cli.text.tokenizer import open_tokenizer
    from ciuic_cli.train.examples import Limits, read_examples
    from ciuic_cli.train.merging.merge import merge as run_merge

    disable_progress_bar()
    folder = locate(model)
    limits = Limits.of_model(folder, sequence_len)
    examples = read_examples(train_file, open_tokenizer(folder), limits, train_on_inputs=True)
    with console.progress() as progress:
        report = run_merge(
            model, adapter, out, method, examples, device=device, progress=progress, hint=console.hint
        )
    console.data(
        f"{out}: {report.bytes_after / 1e6:.2f} MB ({report.bytes_before / 1e6:.2f} MB before). KL to the adapter's "
        f"model on {report.tokens} tokens: {report.kl_merged:.4g} nats per token; without the adapter "
        f"{report.kl_base:.4g}"
    )
    return report
