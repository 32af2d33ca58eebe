"""The options of a training run, checked once. Names are those of transformers' TrainingArguments and of axolotl."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ciuic_cli.errors import UsageError

METHODS = ("lora", "full")
"""What may be trained: an adapter, while the weights stay as they are; or all weights of a dense checkpoint."""

WEIGHTS = ("int8", "adaptive")
"""How weights may be stored while they are trained: in 8 bits, or with 4 bits in the rows with smaller gradients."""


ACTIVATIONS = ("int8", "int8-offload")
"""How activations may be kept for the backward pass: in 8 bits, on the device or in main memory (CPU: on disk)."""

MOST_EPOCHS = 1_000_000
"""Most epochs (chosen, far above any run): their number times the rows must be a number of steps."""

EVALUATION = (
    *("eval_steps", "per_device_eval_batch_size"),
    *("early_stopping_patience", "load_best_model_at_end"),
)
"""Options that need an evaluation file."""


@dataclass(frozen=True)
class TrainOptions:
    """One training run. Numbers may be given as text, as in YAML, which reads 2e-4 as text; a list may be one item.

    max_memory: bytes that the run may take; None for no limit.

    Raises:
        UsageError: a value is of the wrong type or out of range; the message names the command's option.
    """

    train_file: Path
    eval_file: Path | None = None
    method: str = "lora"
    learning_rate: float = 2e-4
    num_train_epochs: float = 1.0
    max_steps: int = -1
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    warmup_steps: int = 0
    lr_scheduler_type: str = "linear"
    optim: str = "adamw_torch"
    sequence_len: int = 1024
    sample_packing: bool = True
    train_on_inputs: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] = ()
    activation_checkpointing: bool = False
    every_n_layers: int = 1
    eval_steps: int = 50
    per_device_eval_batch_size: int = 1
    early_stopping_patience: int | None = None
    load_best_model_at_end: bool = False
    activations: str | None = None
    weights: str | None = None
    sync_steps: int = 100
    save_steps: int = 50
    report_to: tuple[str, ...] = ()
    seed: int = 42
    max_memory: int | None = None

    def __post_init__(self) -> None:
        if self.train_file is None:
            raise UsageError("--train-file is missing", remedy="give it here or in the recipe")
        for name, kind in get_type_hints(type(self)).items():
            object.__setattr__(self, name, _typed(option_name(name), getattr(self, name), kind))
        if self.activations not in (None, *ACTIVATIONS):
            raise UsageError(
                f"--activations {self.activations} is unknown", remedy=f"use one of {', '.join(ACTIVATIONS)}"
            )
        if self.method not in METHODS:
            raise UsageError(f"--method {self.method} is unknown", remedy=f"use one of {', '.join(METHODS)}")
        if self.weights not in (None, *WEIGHTS):
            raise UsageError(
                f"--weights {self.weights} is unknown", remedy=f"use one of {', '.join(WEIGHTS)}"
            )
        if self.weights and (self.method != "full" or self.gradient_accumulation_steps > 1):
            raise UsageError(
                f"--weights {self.weights} needs --method full without --gradient-accumulation-steps: each gradient "
                "is used and freed inside the backward pass",
                remedy="raise --per-device-train-batch-size instead; activations take less with --activations int8",
            )
        for name in (
            *("per_device_train_batch_size", "gradient_accumulation_steps", "lora_r", "lora_alpha"),
            *("every_n_layers", "save_steps", "sync_steps", "eval_steps", "per_device_eval_batch_size"),
            *(() if self.early_stopping_patience is None else ("early_stopping_patience",)),
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{option_name(name)} must be at least 1, not {getattr(self, name)}")
        if self.max_memory is not None and self.max_memory < 1:
            raise UsageError(f"--max-memory must be a positive number of bytes, not {self.max_memory}")
        if self.sequence_len < 2:
            raise UsageError("--sequence-len must be at least 2: the first token cannot be learned")
        if not (0 < self.learning_rate < math.inf):
            raise UsageError(f"--learning-rate must be positive, not {self.learning_rate}")
        if not (0 < self.num_train_epochs <= MOST_EPOCHS):
            raise UsageError(
                f"--num-train-epochs must be positive and at most {MOST_EPOCHS:,}, not {self.num_train_epochs}"
            )
        if not 0 <= self.seed < 1 << 32:
            raise UsageError(f"--seed must be at least 0 and below 2^32, not {self.seed}")
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(f"--lora-dropout must be at least 0 and below 1, not {self.lora_dropout}")
        if self.warmup_steps < 0 or self.max_steps == 0 or self.max_steps < -1:
            raise UsageError("--warmup-steps must not be negative, and --max-steps must be positive")
        if self.method == "full" and (self.keeps_best or self.max_memory is not None):
            raise UsageError(
                "--method full has neither --early-stopping-patience, --load-best-model-at-end nor --max-memory",
                remedy="leave them out, or use --method lora",
            )
        if self.eval_file is None:
            for item in fields(self):
                if item.name in EVALUATION and getattr(self, item.name) != item.default:
                    raise UsageError(
                        f"{option_name(item.name)} needs --eval-file",
                        remedy="give a file to measure the loss on",
                    )

    @property
    def keeps_best(self) -> bool:
        """Whether the adapter with the lowest evaluation loss is the result, not the last one."""
        return self.load_best_model_at_end or self.early_stopping_patience is not None

    def to_dict(self) -> dict[str, Any]:
        """All options that decide the result, as JSON and YAML hold them."""
        return {
            name: _plain(value)
            for name, value in asdict(self).items()
            if name not in ("report_to", "max_memory")
        }


KEYS = (*(item.name for item in fields(TrainOptions)), "device")
"""The options that a recipe may have."""


def option_name(field: str) -> str:
    """The command's option for a field: "--lora-r" for lora_r."""
    return "--" + field.replace("_", "-")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _bounded(option: str, value: int) -> int:
    """The value. Raises UsageError if the libraries' 64-bit integers cannot hold it."""
    if not -(1 << 63) <= value < 1 << 63:
        raise UsageError(f"{option} {value} is too large", remedy="give a number below 2^63")
    return value


def _typed(option: str, value: Any, kind: Any) -> Any:
    """The value as its field's type: of numbers given as text, of whole floats, and of paths given as text."""
    if isinstance(kind, UnionType):
        return None if value is None else _typed(option, value, *(set(get_args(kind)) - {NoneType}))
    if get_origin(kind) is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_typed(option, item, str) for item in items)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}[
        kind
    ]
    try:
        if kind is float and (is_number or isinstance(value, str)):
            return float(value)
        if kind is int and (isinstance(value, str) or (is_number and value == int(value))):
            return _bounded(option, int(value))
        if kind is Path and isinstance(value, (str, Path)) and str(value) and "\0" not in str(value):
            return Path(value)
        if kind in (bool, str) and isinstance(value, kind):
            return value
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{option} is {value!r:.60}, not {wanted}", remedy=f"give {wanted}")
