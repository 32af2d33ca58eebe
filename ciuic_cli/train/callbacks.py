"""What happens beside the training loop: checkpoints are marked complete, and progress is shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from transformers import TrainerCallback

from ciuic_cli.train.run_folder import RunFolder

SHOWN_EVERY = 10
"""Steps between two lines of progress (chosen)."""


class Checkpoints(TrainerCallback):
    """Marks each checkpoint once all its files are written."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.mark_complete(state.global_step)


class Display(TrainerCallback):
    """Steps for a progress bar, and lines with loss, speed, memory and time left.

    Args:
        lengths: tokens of each row; their mean stands for the tokens of a batch's row.
    """

    def __init__(
        self, progress: Callable[[str, int, int], None], hint: Callable[[str], None], lengths: Sequence[int]
    ) -> None:
        self._progress, self._hint = progress, hint
        self._tokens_per_row = sum(lengths) / len(lengths)
        self._began, self._first_step = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began, self._first_step = time.monotonic(), state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress("training", state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        step = state.global_step
        if not logs or "loss" not in logs or (step % SHOWN_EVERY and step != state.max_steps):
            return
        seconds = (time.monotonic() - self._began) / max(1, step - self._first_step)
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
        memory = psutil.Process().memory_info().rss / 1e9
        self._hint(
            f"step {step} of {state.max_steps}: loss {float(logs['loss']):.4f}, "
            f"{rows * self._tokens_per_row / seconds:.0f} tokens/s, {memory:.2f} GB, "
            f"{seconds * (state.max_steps - step):.0f} s left"
        )
