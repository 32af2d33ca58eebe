"""A training run: data, model, adapter, transformers' Trainer, and the finished adapter's folder.

The loop, the optimizer and the schedule are transformers'. Ours are the data, the layers, the resumable checkpoints and
the output, which appears in one rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from ciuic_cli.artifact import publishing
from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.checkpoint.folder import locate, read_config
from ciuic_cli.errors import InputError
from ciuic_cli.process.memory import configure_allocators
from ciuic_cli.process.threads import threads
from ciuic_cli.runtime.loading import choose_device, load
from ciuic_cli.text.tokenizer import open_tokenizer
from ciuic_cli.train import full
from ciuic_cli.train.examples import Example, read_examples
from ciuic_cli.train.memory.choice import activation_store, checkpointing_options
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.packing import Row, batch_of, pack, row_of
from ciuic_cli.train.run_folder import RunFolder
from ciuic_cli.train.targets import lora_config

Progress = Callable[[str, int, int], None]
REPORT = "train_report.json"
"""Name of the report in the output folder."""


def train(
    model: str | Path,
    out: Path,
    options: TrainOptions,
    *,
    device: str = "auto",
    progress: Progress = lambda what, done, total: None,
    hint: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Train a LoRA adapter on `model`, or all its weights, and write the result to `out`.

    The same call after a crash continues from the last checkpoint, with as many threads of torch as the run began with,
    and ends with the same bytes.

    Args:
        model: an artifact of `ciuic compress` or a dense checkpoint: a folder or a hub id.
        out: the folder of the adapter, in PEFT's format, or of the trained model; absent or empty.
        progress: called with phase, steps done and steps in total.
        hint: called with one line per ten steps: loss, tokens per second, memory, time left.

    Returns:
        The report that is also written as `train_report.json`.

    Raises:
        InputError: model, data or output cannot be used, or an unfinished run had other options.
        UsageError: an option does not fit the model.
        EnvironmentFault: the machine cannot do it.
    """
    configure_allocators()
    out = Path(os.path.abspath(out))
    folder = locate(model)
    if out.exists() and not publishing.may_replace(out, force=False):
        raise InputError("the output exists", file=out, remedy="choose another folder, or move it away")
    examples, rows = read_rows(folder, options)
    run = RunFolder(out)
    description = describe(folder, options)
    with run.locked(), threads(run.begin(description, torch.get_num_threads())):
        trainer = _trainer(folder, run, rows, options, device, progress, hint)
        checkpoint = run.last_checkpoint()
        if checkpoint is not None:
            hint(f"continuing from step {checkpoint.name.rpartition('-')[2]}")
        began = time.monotonic()
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        report = _report(trainer, examples, rows, time.monotonic() - began)
        unfinished = publishing.begin(out)
        if options.method == "full":
            full.save(trainer, unfinished, folder)
        else:
            trainer.model.save_pretrained(unfinished, save_embedding_layers=False)
        write_report(unfinished / REPORT, report, description)
        publishing.publish(out, force=False)
        run.remove()
    return report


def read_rows(folder: Path, options: TrainOptions) -> tuple[list[Example], list[Row]]:
    """The examples of the training file, and the rows that they fill."""
    examples = read_examples(
        options.train_file,
        open_tokenizer(folder),
        max_length=options.sequence_len,
        train_on_inputs=options.train_on_inputs,
    )
    if options.sample_packing:
        return examples, pack(examples, options.sequence_len)
    return examples, [row_of([example]) for example in examples]


def describe(folder: Path, options: TrainOptions) -> dict[str, Any]:
    """What must be equal for a run to be continued: options, data and model."""
    return {
        **options.to_dict(),
        "train_file_sha256": hashlib.sha256(options.train_file.read_bytes()).hexdigest(),
        "model": str(folder.resolve()),
        "model_files": {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))},
    }


def write_report(file: Path, report: dict[str, Any], description: dict[str, Any]) -> None:
    """Write the report of a run, with what was run."""
    file.write_text(json.dumps({**report, "options": description}, indent=1))


def padding_of(model: Any) -> int:
    """The token that fills short rows."""
    tokens = (model.config.pad_token_id, model.config.eos_token_id, 0)
    return next(token for token in tokens if isinstance(token, int))


def _trainer(
    folder: Path,
    run: RunFolder,
    rows: list[Row],
    options: TrainOptions,
    device: str,
    progress: Progress,
    hint: Callable[[str], None],
) -> Any:
    from transformers import PrinterCallback, TrainingArguments, set_seed

    from ciuic_cli.train.callbacks import Checkpoints, Display
    from ciuic_cli.train.trainer import ChunkedLossTrainer, limit_memory

    target = choose_device(device)
    base = full.load_for_training(folder, target) if options.method == "full" else _load(folder, target)
    set_seed(options.seed)  # the adapter's random factors
    adapted = base if options.method == "full" else _adapted(base, options)
    if target.type == "cpu":
        limit_memory(base)
    padding = padding_of(base)
    arguments = TrainingArguments(
        output_dir=str(run.path),
        learning_rate=options.learning_rate,
        num_train_epochs=options.num_train_epochs,
        max_steps=options.max_steps,
        per_device_train_batch_size=options.per_device_train_batch_size,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        warmup_steps=options.warmup_steps,
        lr_scheduler_type=options.lr_scheduler_type,
        optim=options.optim,
        activation_checkpointing=options.activation_checkpointing,
        activation_checkpointing_kwargs=checkpointing_options(base, options),
        max_grad_norm=0.0 if options.weights else 1.0,  # 8-bit weights: gradients never exist together
        bf16=False,  # no autocast: the model already has its dtype, the adapter is float32
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=options.save_steps,
        save_total_limit=2,
        seed=options.seed,
        use_cpu=target.type == "cpu",
        dataloader_pin_memory=target.type != "cpu",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
    )
    make = partial(full.LowBitTrainer, options=options) if options.weights else ChunkedLossTrainer
    trainer = make(
        store=activation_store(adapted, options, target, run.path),
        model=adapted,
        args=arguments,
        train_dataset=rows,
        data_collator=lambda batch: batch_of(batch, padding),
        callbacks=[Checkpoints(run), Display(progress, hint, [len(row["input_ids"]) for row in rows])],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _adapted(base: Any, options: TrainOptions) -> Any:
    from peft import get_peft_model

    adapted = get_peft_model(base, lora_config(base, options))
    adapted.config.use_cache = False
    return adapted


def _load(folder: Path, target: torch.device) -> Any:
    if is_artifact(read_config(folder)):
        return load(folder, target)
    from transformers import AutoModelForCausalLM

    dense: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    return dense.to(target)


def _report(trainer: Any, examples: list[Any], rows: list[Row], seconds: float) -> dict[str, Any]:
    """Losses by step, counts, and memory. Figures of time are of this process: a continued run counts only its part."""
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": trainer.state.global_step,
        "examples": len(examples),
        "rows": len(rows),
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "losses": losses,
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "seconds": round(seconds, 2),
        **{f"{kind}_bytes": count for kind, count in full.memory_of(trainer).items()},
        "resident_bytes": psutil.Process().memory_info().rss,
    }
