"""`ciuic train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ciuic_cli.cli.arguments import Device, Json, announce_device, execute
from ciuic_cli.cli.console import Console
from ciuic_cli.compression.options import check_device
from ciuic_cli.errors import EnvironmentFault
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries

if TYPE_CHECKING:
    from ciuic_cli.train.options import TrainOptions


def train(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Artifact or checkpoint: a folder, or a hub id.")
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="New folder for the adapter, in PEFT's format, or the model."),
    ],
    train_file: Annotated[
        Path,
        typer.Option(
            metavar="FILE", readable=False, help="JSON lines: messages, prompt and completion, or text."
        ),
    ],
    method: Annotated[str, typer.Option(help="lora, or full: all weights of a dense checkpoint.")] = "lora",
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-4,
    num_train_epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 1.0,
    max_steps: Annotated[
        int, typer.Option(help="Steps in total, instead of epochs.", show_default="all")
    ] = -1,
    per_device_train_batch_size: Annotated[int, typer.Option(help="Rows per forward pass.")] = 1,
    gradient_accumulation_steps: Annotated[int, typer.Option(help="Forward passes per step.")] = 1,
    warmup_steps: Annotated[int, typer.Option(help="Steps until the highest learning rate.")] = 0,
    lr_scheduler_type: Annotated[str, typer.Option(help="Any schedule of transformers.")] = "linear",
    optim: Annotated[str, typer.Option(help="Any optimizer of transformers.")] = "adamw_torch",
    sequence_len: Annotated[int, typer.Option(help="Most tokens of a row.")] = 1024,
    sample_packing: Annotated[bool, typer.Option(help="Put several examples into a row.")] = True,
    train_on_inputs: Annotated[bool, typer.Option("--train-on-inputs", help="Learn prompts, too.")] = False,
    lora_r: Annotated[int, typer.Option(help="Rank of the adapter.")] = 16,
    lora_alpha: Annotated[int, typer.Option(help="The adapter is scaled by alpha / r.")] = 32,
    lora_dropout: Annotated[float, typer.Option(help="Share of inputs dropped.")] = 0.0,
    lora_target_modules: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", show_default="all", help="Linear layer or expert stack; repeatable."),
    ] = None,
    activation_checkpointing: Annotated[
        bool,
        typer.Option("--activation-checkpointing", help="Compute activations again in the backward pass."),
    ] = False,
    every_n_layers: Annotated[int, typer.Option(help="Layers between two checkpoints of activations.")] = 1,
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="STORE",
            show_default="exact",
            help="Keep activations in 8 bits: int8, or int8-offload (in main memory; on a CPU, on disk).",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="CODE", show_default="float32", help="With --method full: store weights in 8 bits: int8."
        ),
    ] = None,
    sync_steps: Annotated[
        int, typer.Option(help="Steps between two corrections of 8-bit weights by their rounding errors.")
    ] = 100,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="With torchrun: divide the model among the processes.")
    ] = False,
    comm: Annotated[
        str, typer.Option(metavar="WIRE", help="What --fsdp sends: fp32, bf16 or int8.")
    ] = "fp32",
    save_steps: Annotated[int, typer.Option(help="Steps between two resumable checkpoints.")] = 50,
    seed: Annotated[int, typer.Option(help="Random seed of the adapter and of the order of the data.")] = 42,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Adapt MODEL to a training file with LoRA, or train all its weights. Continues after a crash."""
    console = Console(json_mode=json)

    def action() -> None:
        check_device(device)
        from ciuic_cli.train.options import TrainOptions

        options = TrainOptions(
            train_file=train_file, method=method, learning_rate=learning_rate,
            num_train_epochs=num_train_epochs, max_steps=max_steps,
            per_device_train_batch_size=per_device_train_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps, warmup_steps=warmup_steps,
            lr_scheduler_type=lr_scheduler_type, optim=optim, sequence_len=sequence_len,
            sample_packing=sample_packing, train_on_inputs=train_on_inputs, lora_r=lora_r,
            lora_alpha=lora_alpha, lora_dropout=lora_dropout,
            lora_target_modules=tuple(lora_target_modules or ()),
            activation_checkpointing=activation_checkpointing, every_n_layers=every_n_layers,
            activations=activations, weights=weights, sync_steps=sync_steps,
            save_steps=save_steps, seed=seed,
        )  # fmt: skip
        configure_numeric_libraries()
        try:
            import accelerate  # noqa: F401
            import peft  # noqa: F401
        except ImportError as error:
            raise EnvironmentFault(
                f"training needs the package {error.name}", remedy='pip install "ciuic-cli[train]"'
            ) from error
        from transformers.utils.logging import disable_progress_bar

        from ciuic_cli.train.engine import train as run_training

        disable_progress_bar()
        if fsdp:
            _train_sharded(console, model, out, options, comm, device)
            return
        announce_device(console, device)
        with console.progress() as progress:
            report = run_training(model, out, options, device=device, progress=progress, hint=console.hint)
        console.json(report)
        losses = report["losses"]
        console.data(f"{out}: {report['steps']} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")

    execute(console, action)


def _train_sharded(
    console: Console, model: str, out: Path, options: TrainOptions, comm: str, device: str
) -> None:
    from ciuic_cli.process.workers import is_leader
    from ciuic_cli.train.sharding.run import train_sharded

    if not is_leader():
        train_sharded(model, out, options, comm, device=device)
        return
    announce_device(console, device)
    with console.progress() as progress:
        report = train_sharded(model, out, options, comm, device=device, progress=progress, hint=console.hint)
    if report is not None:
        console.json(report)
        losses = f", last loss {report['losses'][-1]:.4f}" if report["losses"] else ""
        console.data(f"{out}: {report['steps']} steps in {report['processes']} processes{losses}")
