"""`ciuic train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ciuic_cli.cli.arguments import Device, Json, Quiet, announce_device, execute, given_options
from ciuic_cli.cli.console import Console
from ciuic_cli.cli.help import DATA, EVALUATION, LORA, MEMORY, STEPS
from ciuic_cli.cli.merge import METHOD_HELP, MergeMethod, merged
from ciuic_cli.compression.options import check_device
from ciuic_cli.errors import UsageError
from ciuic_cli.integers import parse_size
from ciuic_cli.process.libraries import require_training
from ciuic_cli.process.numeric_libraries import configure_numeric_libraries
from ciuic_cli.recipes import read_recipe
from ciuic_cli.report.readable import count_of
from ciuic_cli.train.options import KEYS, TrainOptions

MERGED = "merged"
"""Name of the merged model's folder in the adapter's."""


def train(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Artifact or checkpoint: a folder, or a hub id.")
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="New folder for the adapter, in PEFT's format, or the model."),
    ],
    train_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            show_default=False,
            rich_help_panel=DATA,
            help="JSON lines, or a folder: messages, prompt and completion, or text. Required, here or in the recipe.",
        ),
    ] = None,
    eval_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            rich_help_panel=DATA,
            help="The same kind of file; the loss on it is measured every --eval-steps steps.",
        ),
    ] = TrainOptions.eval_file,
    method: Annotated[
        str, typer.Option(rich_help_panel=STEPS, help="lora, or full: all weights of a dense checkpoint.")
    ] = TrainOptions.method,
    learning_rate: Annotated[
        float, typer.Option(rich_help_panel=STEPS, help="Highest learning rate.")
    ] = TrainOptions.learning_rate,
    num_train_epochs: Annotated[
        float, typer.Option(rich_help_panel=STEPS, help="Passes over the data.")
    ] = TrainOptions.num_train_epochs,
    max_steps: Annotated[
        int,
        typer.Option(rich_help_panel=STEPS, help="Steps in total, instead of epochs.", show_default="all"),
    ] = TrainOptions.max_steps,
    per_device_train_batch_size: Annotated[
        int, typer.Option(rich_help_panel=STEPS, help="Rows per forward pass.")
    ] = TrainOptions.per_device_train_batch_size,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(rich_help_panel=STEPS, help="Forward passes per step.")
    ] = TrainOptions.gradient_accumulation_steps,
    warmup_steps: Annotated[
        int, typer.Option(rich_help_panel=STEPS, help="Steps until the highest learning rate.")
    ] = TrainOptions.warmup_steps,
    lr_scheduler_type: Annotated[
        str, typer.Option(rich_help_panel=STEPS, help="Any schedule of transformers.")
    ] = TrainOptions.lr_scheduler_type,
    optim: Annotated[
        str, typer.Option(rich_help_panel=STEPS, help="Any optimizer of transformers.")
    ] = TrainOptions.optim,
    sequence_len: Annotated[
        int,
        typer.Option(
            "--sequence-len", "--seqlen", metavar="N", rich_help_panel=STEPS, help="Most tokens of a row."
        ),
    ] = TrainOptions.sequence_len,
    sample_packing: Annotated[
        bool, typer.Option(rich_help_panel=DATA, help="Put several examples into a row.")
    ] = TrainOptions.sample_packing,
    train_on_inputs: Annotated[
        bool, typer.Option("--train-on-inputs", rich_help_panel=DATA, help="Learn prompts, too.")
    ] = TrainOptions.train_on_inputs,
    lora_r: Annotated[
        int, typer.Option(rich_help_panel=LORA, help="Rank of the adapter.")
    ] = TrainOptions.lora_r,
    lora_alpha: Annotated[
        int, typer.Option(rich_help_panel=LORA, help="The adapter is scaled by alpha / r.")
    ] = TrainOptions.lora_alpha,
    lora_dropout: Annotated[
        float, typer.Option(rich_help_panel=LORA, help="Share of inputs dropped.")
    ] = TrainOptions.lora_dropout,
    lora_target_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="all",
            rich_help_panel=LORA,
            help="Linear layer or expert stack; repeatable.",
        ),
    ] = None,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing",
            rich_help_panel=MEMORY,
            help="Compute activations again in the backward pass.",
        ),
    ] = TrainOptions.activation_checkpointing,
    every_n_layers: Annotated[
        int, typer.Option(rich_help_panel=MEMORY, help="Layers between two checkpoints of activations.")
    ] = TrainOptions.every_n_layers,
    eval_steps: Annotated[
        int, typer.Option(rich_help_panel=EVALUATION, help="Steps between two evaluations.")
    ] = TrainOptions.eval_steps,
    per_device_eval_batch_size: Annotated[
        int, typer.Option(rich_help_panel=EVALUATION, help="Rows per pass of an evaluation.")
    ] = TrainOptions.per_device_eval_batch_size,
    early_stopping_patience: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=EVALUATION,
            help="End after N evaluations in a row without a lower loss, and keep the best adapter.",
        ),
    ] = TrainOptions.early_stopping_patience,
    load_best_model_at_end: Annotated[
        bool,
        typer.Option(
            "--load-best-model-at-end",
            rich_help_panel=EVALUATION,
            help="Keep the adapter with the lowest evaluation loss.",
        ),
    ] = TrainOptions.load_best_model_at_end,
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="STORE",
            show_default="exact",
            rich_help_panel=MEMORY,
            help="Keep activations in 8 bits: int8, or int8-offload (in main memory; on a CPU, on disk).",
        ),
    ] = TrainOptions.activations,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            show_default="float32",
            rich_help_panel=MEMORY,
            help="With --method full: store weights in 8 bits: int8; or in 8 and 4: adaptive.",
        ),
    ] = TrainOptions.weights,
    sync_steps: Annotated[
        int,
        typer.Option(
            rich_help_panel=MEMORY,
            help="Steps between two corrections of weights in few bits by their rounding errors.",
        ),
    ] = TrainOptions.sync_steps,
    fsdp: Annotated[
        bool,
        typer.Option(
            "--fsdp", rich_help_panel=MEMORY, help="With torchrun: divide the model among the processes."
        ),
    ] = False,
    comm: Annotated[
        str,
        typer.Option(metavar="WIRE", rich_help_panel=MEMORY, help="What --fsdp sends: fp32, bf16 or int8."),
    ] = "fp32",
    save_steps: Annotated[
        int, typer.Option(help="Steps between two resumable checkpoints.")
    ] = TrainOptions.save_steps,
    seed: Annotated[
        int,
        typer.Option(rich_help_panel=STEPS, help="Random seed of the adapter and of the order of the data."),
    ] = TrainOptions.seed,
    report_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="none",
            help="Tracker of transformers, such as tensorboard or wandb; or all; repeatable.",
        ),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default="no limit",
            rich_help_panel=MEMORY,
            help="Memory that the run may take, such as 11GB; planned first.",
        ),
    ] = None,
    merge: Annotated[
        MergeMethod | None,
        typer.Option(
            show_default="off",
            rich_help_panel=LORA,
            help=f"Then merge the adapter into OUT/merged: {METHOD_HELP}",
        ),
    ] = None,
    device: Device = "auto",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            help="YAML file of options, such as a result's recipe.yaml; options given here come first.",
        ),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Adapt MODEL to a training file with LoRA, or train all its weights. Continues after a crash."""
    console = Console(json_mode=json, quiet=quiet)

    def action() -> None:
        chosen = _options(context, config)
        device = check_device(chosen.pop("device"))
        options = TrainOptions(**chosen)
        configure_numeric_libraries()
        require_training()
        from transformers.utils.logging import disable_progress_bar

        from ciuic_cli.artifact.reader import open_artifact
        from ciuic_cli.train.engine import finished_report
        from ciuic_cli.train.engine import train as run_training

        disable_progress_bar()
        if merge is not None and options.method != "lora":
            raise UsageError(f"--merge needs --method lora, not {options.method}", remedy="leave --merge out")
        if fsdp:
            if merge is not None or any((options.eval_file, options.report_to, options.max_memory)):
                raise UsageError(
                    "--fsdp has neither --eval-file, --report-to, --max-memory nor --merge",
                    remedy="leave them out, or train in one process",
                )
            _train_sharded(console, model, out, options, comm, device)
            return
        announce_device(console, device)
        if merge is not None:
            open_artifact(model)  # raises before the training if there is no artifact to merge into
        report = None if merge is None else finished_report(out, options)
        if report is None:
            with console.progress() as progress:
                report = run_training(
                    model, out, options, device=device, progress=progress, hint=console.hint
                )
        _show(console, out, report)
        if merge is not None:
            text, length = options.train_file, options.sequence_len
            found = merged(console, model, out, out / MERGED, merge, text, length, device)
            report = {**report, "merged": found.as_dict()}
        console.json(report)

    execute(console, action)


def _options(context: typer.Context, config: Path | None) -> dict[str, Any]:
    """All options by name: from the command line, else from the recipe, else the defaults."""
    values = {name: context.params[name] for name in KEYS}
    for name in ("lora_target_modules", "report_to"):
        values[name] = tuple(values[name] or ())
    found = {} if config is None else read_recipe(config, KEYS)
    values |= {name: value for name, value in found.items() if name not in given_options(context)}
    if isinstance(values["max_memory"], str):
        values["max_memory"] = parse_size(values["max_memory"])
    return values


def _show(console: Console, out: Path, report: dict[str, Any]) -> None:
    losses, evaluations = report["losses"], report["evaluations"]
    line = f"{out}: {count_of(report['steps'], 'step')}, loss {losses[0]:.4f} to {losses[-1]:.4f}"
    if evaluations:
        line += f"; evaluation loss {evaluations[0]['loss']:.4f} to {evaluations[-1]['loss']:.4f}"
    console.data(line)
    console.hint(f"full report: {out / 'train_report.html'}")


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
        console.data(f"{out}: {count_of(report['steps'], 'step')} in {report['processes']} processes{losses}")
