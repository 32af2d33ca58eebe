"""Training of all weights: with transformers' optimizers, or with weights in 8 bits, or 8 and 4, between their uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ciuic_cli.artifact.schema import is_artifact
from ciuic_cli.checkpoint.folder import read_config
from ciuic_cli.checkpoint.model_map import map_model
from ciuic_cli.checkpoint.reader import open_checkpoint
from ciuic_cli.errors import UsageError
from ciuic_cli.text.tokenizer import open_tokenizer
from ciuic_cli.train.memory.adaptive import AdaptiveQuantizer
from ciuic_cli.train.memory.weights import LayerwiseOptimizer
from ciuic_cli.train.options import TrainOptions
from ciuic_cli.train.trainer import ChunkedLossTrainer


def load_for_training(folder: Path, target: torch.device) -> Any:
    """The dense model in float32, whatever the dtype of its files: small updates are lost in bfloat16.

    Raises:
        UsageError: the model is an artifact.
    """
    if is_artifact(read_config(folder)):
        raise UsageError(
            "--method full cannot train a compressed model, whose codes have no gradients",
            remedy="use --method lora, or give the original checkpoint and compress the result",
        )
    model = load_dense(folder, dtype=torch.float32)
    model.config.use_cache = False
    return model.to(target)


def load_dense(folder: Path, **options: Any) -> Any:
    """The checkpoint's model. `options` go to `from_pretrained`.

    Raises InputError for weights that are missing or do not fit to config.json: transformers would initialise them.
    """
    from transformers import AutoModelForCausalLM

    if read_config(folder).get("quantization_config") is None:
        map_model(open_checkpoint(folder))
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options)


def save(trainer: Any, folder: Path, source: Path) -> None:
    """Write the trained model, in the dtype of the files in `source`, and its tokenizer to `folder`."""
    optimizer = _layerwise(trainer)
    if optimizer is not None:
        optimizer.finish()
    export(trainer.model, trainer.model.state_dict(), folder, source)


def export(model: Any, state: dict[str, torch.Tensor], folder: Path, source: Path) -> None:
    """Write `state`, the parameters of `model`, in the dtype of the files in `source`, with the tokenizer."""
    from transformers import AutoConfig

    dtype = AutoConfig.from_pretrained(source, trust_remote_code=False).dtype or torch.float32
    model.config.use_cache = True
    as_stored = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()
    }
    model.save_pretrained(folder, state_dict=as_stored)
    model.config.dtype = dtype  # save_pretrained writes that of the parameters in memory
    model.config.save_pretrained(folder)
    open_tokenizer(source).save_pretrained(folder)


def trainer_class(options: TrainOptions) -> Callable[..., ChunkedLossTrainer]:
    """The class of the Trainer for a run in one process; it takes the arguments of `ChunkedLossTrainer`."""
    return partial(LowBitTrainer, options=options) if options.weights else ChunkedLossTrainer


def memory_of(trainer: Any) -> dict[str, int]:
    """Bytes of weights and states on the device, and of residuals in main memory; empty without 8-bit weights."""
    optimizer = _layerwise(trainer)
    return {} if optimizer is None else optimizer.bytes()


def _layerwise(trainer: Any) -> LayerwiseOptimizer | None:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return optimizer if isinstance(optimizer, LayerwiseOptimizer) else None


class LowBitTrainer(ChunkedLossTrainer):
    """A Trainer whose optimizer is a `LayerwiseOptimizer`, which its checkpoints hold instead of the model."""

    def __init__(self, *, options: TrainOptions, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._options = options
        self._causal: Any = arguments["model"]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that `--optim` names, for one parameter at a time."""
        if self.optimizer is None:
            kind, chosen = self.get_optimizer_cls_and_kwargs(self.args, self._causal)
            chosen.pop("fused", None)
            self.optimizer = LayerwiseOptimizer(
                self._causal,
                lambda parameters: kind(parameters, **chosen),
                self.args.learning_rate,
                sync_steps=self._options.sync_steps,
                seed=self._options.seed,
                quantizer=AdaptiveQuantizer() if self._options.weights == "adaptive" else None,
            )
        return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The optimizer's state, which the Trainer saves beside this, is the whole model."""
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        self._causal.config.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: the optimizer loads the model."""
