"""transformers' Trainer with the loss of `train.loss`, and layers that give freed memory back."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from transformers import Trainer
from transformers.modeling_layers import GradientCheckpointingLayer

from ciuic_cli.process.memory import limit_freed_memory
from ciuic_cli.train.callbacks import Meter
from ciuic_cli.train.examples import IGNORED
from ciuic_cli.train.loss import chunked_loss
from ciuic_cli.train.memory.activations import ActivationStore
from ciuic_cli.train.memory.updates import slice_updates

FREED_BYTES = 64 << 20
"""Growth of the process, in bytes, after which a layer gives freed pages back. Measured:
docs/experiments/training/lora-memory.md."""


class ChunkedLossTrainer(Trainer):
    """A Trainer whose steps never hold the logits of a whole batch.

    Args:
        meter: its figures are added to the log of every step.
        store: keeps the activations of training steps; default: autograd does.
        options: of transformers' Trainer; `eval_dataset` is a list of rows.
    """

    def __init__(self, *, meter: Meter, store: ActivationStore | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.meter = meter
        self._store = store
        # The Trainer counts the learned tokens of all passes of a step; the loss is the sum divided by their number.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss; no outputs, because the logits of all tokens do not exist."""
        labels = inputs["labels"]
        others = {name: value for name, value in inputs.items() if name != "labels"}
        with nullcontext() if self._store is None else self._store:
            loss = chunked_loss(model, others, labels, num_items_in_batch)
        return (loss, {}) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that `--optim` names; one with states in few bits updates large parameters slice by slice."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        slice_updates(optimizer)
        return optimizer

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The mean loss of all learned tokens of the evaluation rows, as `{"eval_loss": ...}`.

        transformers averages the means of batches, whatever their tokens. Its data loader also draws from torch's
        random numbers, so that evaluations would change the training; here they do not.
        """
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        model: Any = self.model
        began, was_training = time.monotonic(), model.training
        model.eval()
        total, size = 0.0, self.args.per_device_eval_batch_size
        with torch.no_grad():
            for begin in range(0, len(rows), size):
                batch = self._prepare_inputs(self.data_collator(rows[begin : begin + size]))
                total += float(self.compute_loss(model, batch, num_items_in_batch=1))
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        model.train(was_training)
        learned = sum(label != IGNORED for row in rows for label in row["labels"][1:])
        metrics = {f"{metric_key_prefix}_loss": total / learned}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.meter.leave_out(time.monotonic() - began)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer does, with the meter's figures in the entries of steps."""
        if "loss" in logs:
            logs |= self.meter.figures(self.state.num_input_tokens_seen)
        super().log(logs)


def limit_memory(model: Any) -> None:
    """Let every layer of `model` give freed memory back, forward and backward, if the process has grown.

    Between the activations that are kept, glibc's heap fills with holes: without this, the heap of a step takes twice
    the bytes in use.
    """

    def after_backward(_: torch.Tensor) -> None:
        limit_freed_memory(FREED_BYTES)

    def after_forward(module: Any, arguments: Any, outputs: Any) -> None:
        limit_freed_memory(FREED_BYTES)
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs
        if hidden.requires_grad:
            hidden.register_hook(after_backward)  # runs before the layer's own backward pass

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_hook(after_forward)
