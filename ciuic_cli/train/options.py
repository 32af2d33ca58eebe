"""The options of a training run, checked once. Names are those of transformers' TrainingArguments and of axolotl."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ciuic_cli.errors import UsageError

METHODS = ("lora", "full")
"""What may be trained: an adapter, while the weights stay as they are; or all weights of a dense checkpoint."""

WEIGHTS = ("int8",)
"""How weights may be stored while they are trained."""


ACTIVATIONS = ("int8", "int8-offload")
"""How activations may be kept for the backward pass: in 8 bits, on the device or in main memory (CPU: on disk)."""


@dataclass(frozen=True)
class TrainOptions:
    """One training run.

    Raises:
        UsageError: a value is out of range; the message names the command's option.
    """

    train_file: Path
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
    activations: str | None = None
    weights: str | None = None
    sync_steps: int = 100
    save_steps: int = 50
    seed: int = 42

    def __post_init__(self) -> None:
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
            *("every_n_layers", "save_steps", "sync_steps"),
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{option_name(name)} must be at least 1, not {getattr(self, name)}")
        if self.sequence_len < 2:
            raise UsageError("--sequence-len must be at least 2: the first token cannot be learned")
        if not (0 < self.learning_rate < math.inf):
            raise UsageError(f"--learning-rate must be positive, not {self.learning_rate}")
        if not (0 < self.num_train_epochs < math.inf):
            raise UsageError(f"--num-train-epochs must be positive, not {self.num_train_epochs}")
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(f"--lora-dropout must be at least 0 and below 1, not {self.lora_dropout}")
        if self.warmup_steps < 0 or self.max_steps == 0 or self.max_steps < -1:
            raise UsageError("--warmup-steps must not be negative, and --max-steps must be positive")

    def to_dict(self) -> dict[str, Any]:
        """All options, as JSON holds them."""
        return {
            **asdict(self),
            "train_file": str(self.train_file),
            "lora_target_modules": list(self.lora_target_modules),
        }


def option_name(field: str) -> str:
    """The command's option for a field: "--lora-r" for lora_r."""
    return "--" + field.replace("_", "-")
