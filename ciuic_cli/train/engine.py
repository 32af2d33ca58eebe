"""A training run: data, model, adapter, transformers' Trainer, and the finished adapter's folder.

The loop, the optimizer and the schedule are transformers'. Ours are the data, the layers, the resumable checkpoints and
the output, which appears in one rename.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.artifact import publishing
from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.checkpoint.folder import locate, read_config, read_json
from ciuic_cli.errors import CiuicError, EnvironmentFault, UsageError
from ciuic_cli.process.memory import configure_allocators
from ciuic_cli.process.threads import threads
from ciuic_cli.recipes import write_recipe
from ciuic_cli.report.training.training_page import render_training_page
from ciuic_cli.runtime.loading import choose_device, load
from ciuic_cli.train import full
from ciuic_cli.train.examples import Example
from ciuic_cli.train.history import best_step, evaluations, has_stopped, steps_of
from ciuic_cli.train.memory.choice import activation_store, checkpointing_options
from ciuic_cli.train.memory.updates import uncompiled
from ciuic_cli.train.options import TrainOptions, option_name
from ciuic_cli.train.packing import Row, batch_of
from ciuic_cli.train.planning.limits import planned_batch, process_bytes, require_fits
from ciuic_cli.train.planning.memory_plan import PlannedModel
from ciuic_cli.train.preparation import describe, padding_of, read_held_out, read_rows
from ciuic_cli.train.run_folder import RunFolder
from ciuic_cli.train.targets import lora_config

Progress = Callable[[str, int, int], None]
REPORT, PAGE = "train_report.json", "train_report.html"
"""Names of the report in the output folder: for programs, and for people."""
LOGS = "runs"
"""The folder of TensorBoard's files, of transformers; it moves from the run's folder to the output."""


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
        The report that is also written as `train_report.json`; `train_report.html` shows it, and `recipe.yaml` has
        the options.

    Raises:
        InputError: model, data or output cannot be used, or an unfinished run had other options.
        UsageError: an option does not fit the model, or the training diverged.
        TargetError: the run does not fit --max-memory; nothing was allocated.
        EnvironmentFault: the machine cannot do it, or a package of --report-to or --optim is missing.
    """
    configure_allocators()
    _check_trackers(options.report_to)
    check_names(options)
    out = Path(os.path.abspath(out))
    folder = locate(model)
    if out.exists() and not publishing.may_replace(out, force=False):
        tidy_up_after(out)
    publishing.require_new(out, folder)
    examples, rows = read_rows(folder, options)
    held_out = read_held_out(folder, options)
    hint(f"{len(examples):,} examples in {len(rows):,} rows")
    run = RunFolder(out)
    description = describe(folder, options, choose_device(device))
    if options.max_memory is not None:
        batch = planned_batch(rows, options.per_device_train_batch_size)
        process = process_bytes(choose_device(device))
        plan = require_fits(PlannedModel.of_folder(folder), options, batch, options.max_memory, process)
        hint(f"planned memory: {plan.total / 1e9:.2f} GB ({plan.sentence()})")
    with run.locked(), threads(run.begin(description, torch.get_num_threads())):
        with _kept_if_begun(run):
            trainer = _trainer(folder, run, rows, held_out, options, device, progress, hint)
            _continue(trainer, run, options, hint)
            _require_finite(trainer, run)
        report = _report(trainer, examples, rows)
        unfinished = publishing.begin(out)
        if options.method == "full":
            full.save(trainer, unfinished, folder)
        else:
            trainer.model.save_pretrained(unfinished, save_embedding_layers=False)
        _write_reports(unfinished, {**report, "options": description}, options)
        if (run.path / LOGS).is_dir():
            shutil.copytree(run.path / LOGS, unfinished / LOGS)
        publishing.publish(out, force=False)
        run.remove()
    return report


def write_report(file: Path, report: dict[str, Any]) -> None:
    """Write the report of a run as JSON."""
    file.write_text(json.dumps(report, indent=1))


def _write_reports(folder: Path, report: dict[str, Any], options: TrainOptions) -> None:
    """Write the report, its page and the recipe into the adapter's folder."""
    write_report(folder / REPORT, report)
    (folder / PAGE).write_text(render_training_page(report), encoding="utf-8")
    write_recipe(folder, "train", options.to_dict())
    for file in folder.iterdir():  # safetensors gives its files a mode of its own; here the umask decides
        if file.is_file():
            file.chmod(stat.S_IMODE((folder / REPORT).stat().st_mode))


def tidy_up_after(out: Path) -> None:
    """Remove the working folders of a run that was killed after its output had got its name."""
    run = RunFolder(out)
    with suppress(CiuicError, OSError, ValueError, KeyError):
        options = json.loads((out / REPORT).read_bytes())["options"]
        if run.path.is_dir():
            with run.locked():
                if run.description() not in (None, options):
                    return
                publishing.discard(out)
                run.remove()


@contextmanager
def _kept_if_begun(run: RunFolder) -> Iterator[None]:
    """After an error before the first checkpoint, remove the run's folder: the corrected command begins anew."""
    try:
        yield
    except BaseException:
        if run.last_checkpoint() is None:
            run.remove()
        raise


def check_names(options: TrainOptions) -> None:
    """Raise UsageError for an optimizer or a schedule that transformers does not know or that needs options that the
    command does not have, EnvironmentFault for one whose package is missing."""
    from transformers import get_scheduler
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    for name, kind in (("optim", OptimizerNames), ("lr_scheduler_type", SchedulerType)):
        known = sorted(one.value for one in kind)
        value = getattr(options, name)
        if value not in known:
            raise UsageError(
                f"{option_name(name)} {value:.60} is unknown to transformers",
                remedy=f"use one of {', '.join(known)}",
            )
    # torch's own needs no trial, which would join the processes of torchrun.
    if options.optim != OptimizerNames.ADAMW_TORCH:
        _try_optimizer(options)
    model = torch.nn.Linear(1, 1)
    schedule = options.lr_scheduler_type
    try:
        if schedule == SchedulerType.REDUCE_ON_PLATEAU:
            raise ValueError("it needs the evaluation's loss while the run goes on")
        get_scheduler(schedule, torch.optim.SGD(model.parameters()), 1, 2)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"--lr-scheduler-type {schedule} cannot be used: {error}", remedy="use linear, cosine or constant"
        ) from error


def _try_optimizer(options: TrainOptions) -> None:
    """Make the optimizer as transformers does, for errors like those of `check_names`."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory(prefix="ciuic-") as scratch:
        arguments = TrainingArguments(output_dir=scratch, optim=options.optim, use_cpu=True, report_to="none")
        try:
            Trainer.get_optimizer_cls_and_kwargs(arguments, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
        except ImportError as error:
            raise EnvironmentFault(
                f"--optim {options.optim} needs a package that is missing: {error}",
                remedy='pip install "ciuic-cli[lowbit]" (bitsandbytes, torchao), or use adamw_torch',
            ) from error
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"--optim {options.optim} cannot be used: {error}", remedy="use adamw_torch or adamw_bnb_8bit"
            ) from error


def _check_trackers(names: tuple[str, ...]) -> None:
    """Raise UsageError for a tracker that transformers does not know, EnvironmentFault for one that is missing."""
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    known = [name for name in names if name not in ("none", "all")]
    for name in known:
        if name not in INTEGRATION_TO_CALLBACK:
            raise UsageError(
                f"--report-to {name} is unknown to transformers",
                remedy=f"use none, all, or some of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}",
            )
        if name not in get_available_reporting_integrations():
            raise EnvironmentFault(
                f"--report-to {name} needs a package that is not installed", remedy=f"pip install {name}"
            )
    if len(names) > 1 and len(known) < len(names):
        raise UsageError("--report-to none and all stand alone", remedy="give one of them, or names")


def _continue(trainer: Any, run: RunFolder, options: TrainOptions, hint: Callable[[str], None]) -> None:
    """Train from the last checkpoint to the end; then the trainer's model is the result."""
    from transformers.trainer_callback import TrainerState

    checkpoint = run.last_checkpoint()
    state = None
    if checkpoint is not None:
        hint(f"continuing from step {checkpoint.name.rpartition('-')[2]}")
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    patience = options.early_stopping_patience
    had_stopped = state is not None and patience is not None and has_stopped(state.log_history, patience)
    if had_stopped:
        trainer.state = state  # transformers would take one more step
    else:
        with uncompiled(trainer.args.device):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    best = best_step(trainer.state.log_history) if options.keeps_best else None
    if best is not None:
        hint(f"the adapter of step {best} has the lowest evaluation loss")
    elif options.keeps_best:
        hint("no evaluation has a finite loss: the last adapter is kept")
    if best is not None or had_stopped:
        _load_adapter(trainer.model, run.checkpoint(trainer.state.global_step if best is None else best))


def _load_adapter(model: Any, folder: Path) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))


def _require_finite(trainer: Any, run: RunFolder) -> None:
    """Raise UsageError if a trained parameter has values that are NaN or infinite. 8-bit codes are always finite."""
    from ciuic_cli.checkpoint.formats import count_nonfinite

    for name, parameter in trainer.model.named_parameters():
        is_dense = parameter.requires_grad and parameter.untyped_storage().nbytes() > 0
        if is_dense and count_nonfinite(parameter.detach().float().cpu()):
            raise UsageError(
                "the training diverged: its result has values that are NaN or infinite",
                tensor=name,
                remedy=f"lower --learning-rate, and remove {run.path} to begin again",
            )


def finished_report(out: Path, options: TrainOptions) -> dict[str, Any] | None:
    """The report of the adapter in `out`, if a run with these options finished it; None otherwise."""
    file = out / REPORT
    if not file.is_file():
        return None
    report = read_json(out, REPORT, remedy="choose another folder, or move this one away")
    used = report.pop("options", {})
    wanted = options.to_dict()
    return report if {name: used.get(name) for name in wanted} == wanted else None


def _trainer(
    folder: Path,
    run: RunFolder,
    rows: list[Row],
    held_out: list[Row],
    options: TrainOptions,
    device: str,
    progress: Progress,
    hint: Callable[[str], None],
) -> Any:
    from transformers import PrinterCallback, TrainingArguments, set_seed

    from ciuic_cli.train.callbacks import Checkpoints, Display, EarlyStopping, Meter
    from ciuic_cli.train.trainer import limit_memory

    target = choose_device(device)
    base = (
        full.load_for_training(folder, target)
        if options.method == "full"
        else load_for_adapter(folder, target)
    )
    set_seed(options.seed)  # the adapter's random factors
    adapted = base if options.method == "full" else with_adapter(base, options)
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
        eval_strategy="steps" if held_out else "no",
        eval_steps=options.eval_steps,
        per_device_eval_batch_size=options.per_device_eval_batch_size,
        metric_for_best_model="loss" if options.keeps_best else None,  # its checkpoint is not removed
        greater_is_better=False,
        save_steps=options.save_steps,
        save_total_limit=3 if options.keeps_best else 2,
        include_num_input_tokens_seen="all",
        seed=options.seed,
        use_cpu=target.type == "cpu",
        dataloader_pin_memory=target.type != "cpu",
        remove_unused_columns=False,
        report_to=list(options.report_to) or "none",
        disable_tqdm=True,
    )
    meter = Meter(target)
    callbacks: list[Any] = [meter, Checkpoints(run, with_evaluations=options.keeps_best)]
    if options.early_stopping_patience is not None:
        callbacks.append(EarlyStopping(options.early_stopping_patience))
    trainer = full.trainer_class(options)(
        meter=meter,
        store=activation_store(adapted, options, target, run.path),
        model=adapted,
        args=arguments,
        train_dataset=rows,
        eval_dataset=held_out or None,
        data_collator=lambda batch: batch_of(batch, padding),
        callbacks=[*callbacks, Display(progress, hint)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def with_adapter(base: Any, options: TrainOptions) -> Any:
    """The loaded model `base` with an untrained adapter, as a PeftModel."""
    from peft import get_peft_model

    config = lora_config(base, options)
    with warnings.catch_warnings():
        # PEFT reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        adapted = get_peft_model(base, config)
    adapted.config.use_cache = False
    return adapted


def load_for_adapter(folder: Path, target: torch.device) -> Any:
    """An artifact, or a dense checkpoint in the dtype of its files."""
    if is_artifact(read_config(folder)):
        return load(folder, target)
    return full.load_dense(folder).to(target)


def _report(trainer: Any, examples: list[Example], rows: list[Row]) -> dict[str, Any]:
    """Counts, and what the log of the run has: all processes of the run are counted."""
    log = trainer.state.log_history
    steps = steps_of(log)
    return {
        "steps": trainer.state.global_step,
        "planned_steps": trainer.state.max_steps,
        "examples": len(examples),
        "rows": len(rows),
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "losses": [entry["loss"] for entry in steps],
        "evaluations": [{"step": entry["step"], "loss": entry["eval_loss"]} for entry in evaluations(log)],
        "best_step": best_step(log),
        "memory_bytes": [entry["memory_bytes"] for entry in steps],
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        **{f"{kind}_bytes": count for kind, count in full.memory_of(trainer).items()},
        "seconds": round(steps[-1]["seconds"], 2),
        "tokens_per_second": round(steps[-1]["num_input_tokens_seen"] / steps[-1]["seconds"], 1),
    }
