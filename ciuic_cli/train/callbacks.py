"""What happens beside the training loop: checkpoints are marked complete, a run stops early, progress is shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from ciuic_cli.process.memory import resident_bytes
from ciuic_cli.train.history import best_step, evaluations, has_stopped, steps_of
from ciuic_cli.train.run_folder import RunFolder

SHOWN_EVERY = 10
"""Steps between two lines of progress (chosen)."""


class Checkpoints(TrainerCallback):
    """Marks each checkpoint once all its files are written.

    Args:
        with_evaluations: also save a checkpoint at every evaluation, so that the best one is kept.
    """

    def __init__(self, run: RunFolder, *, with_evaluations: bool) -> None:
        self._run, self._with_evaluations = run, with_evaluations

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or self._with_evaluations

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.mark_complete(state.global_step)


class EarlyStopping(TrainerCallback):
    """Ends the training once `patience` evaluations in a row were no better than the best one before.

    transformers' callback of this name counts in an attribute, which a resumed run begins at zero. Here the history
    decides, which every checkpoint contains.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if has_stopped(state.log_history, self._patience):
            control.should_training_stop = True


class Meter(TrainerCallback):
    """Time, tokens and memory of a run, for its log.

    Args:
        device: where the model is; on a GPU, the memory is torch's highest since the last figures.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: dict[str, Any] = {}
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        steps = steps_of(state.log_history)
        self._before = steps[-1] if steps else {"seconds": 0.0, "num_input_tokens_seen": 0}
        self._since = time.monotonic()

    def leave_out(self, seconds: float) -> None:
        """Do not count these last seconds: an evaluation."""
        self._since += seconds

    def figures(self, tokens: int) -> dict[str, float]:
        """Of the step that has just ended. tokens: of all steps so far.

        Returns:
            seconds: of training, earlier processes of the run included; evaluations are left out.
            tokens_per_second: of this process.
            memory_bytes: resident memory of the process, or highest allocated memory of the GPU.
        """
        seconds = time.monotonic() - self._since
        return {
            "seconds": self._before["seconds"] + seconds,
            "tokens_per_second": (tokens - self._before["num_input_tokens_seen"]) / max(1e-9, seconds),
            "memory_bytes": self._memory(),
        }

    def _memory(self) -> int:
        if self._device.type != "cuda":
            return resident_bytes()
        highest = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return highest


class Display(TrainerCallback):
    """Steps for a progress bar, and lines with loss, speed, memory and time left."""

    def __init__(self, progress: Callable[[str, int, int], None], hint: Callable[[str], None]) -> None:
        self._progress, self._hint = progress, hint
        self._first: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        steps = steps_of(state.log_history)
        self._first = steps[-1] if steps else {"step": 0, "seconds": 0.0}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress("training", state.global_step, state.max_steps)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress("training", state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        step = state.global_step
        if not logs or "loss" not in logs or (step % SHOWN_EVERY and step != state.max_steps):
            return
        per_step = (logs["seconds"] - self._first["seconds"]) / max(1, step - self._first["step"])
        self._hint(
            f"step {step} of {state.max_steps}: loss {logs['loss']:.4f}, "
            f"{logs['tokens_per_second']:.0f} tokens/s, {logs['memory_bytes'] / 1e9:.2f} GB, "
            f"{readable_seconds(per_step * (state.max_steps - step))} left"
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loss = evaluations(state.log_history)[-1]["eval_loss"]
        best = best_step(state.log_history)
        note = "the best so far" if best == state.global_step else f"the best was at step {best}"
        self._hint(f"step {state.global_step} of {state.max_steps}: evaluation loss {loss:.4f}, {note}")


def readable_seconds(seconds: float) -> str:
    """ "48 s", "12 min 5 s" or "3 h 7 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
