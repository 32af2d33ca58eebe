"""Recovery: after rounding, factors of rows and norms are tuned by gradient descent on the KL divergence.

Each matrix was rounded by itself. Tuning numbers that are stored anyway corrects part of the combined error. Row i of
a linear has a factor f_i, and so has each weight of a norm (`row_factors.py`). All factors start at 1. Each step
computes the gradient of the loss on `STEP_SEQUENCES` sequences of calibration text (`gradients.py`), and Adam (Kingma
and Ba, 2015) changes all factors; `schedule.py` has the learning rate.

`EVALUATIONS` times during a run, the KL of the artifact, with factors as it would store them, is measured on held-out
text. The factors with the least KL are the result; after two rises in a row no further step is made. Each evaluation
also saves the state from which a killed run resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import nn

from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.integers import ceil_div
from ciuic_cli.layerwise.linear_hooks import Key
from ciuic_cli.layerwise.partial_model import Adjust
from ciuic_cli.process.progress import Progress
from ciuic_cli.process.workers import Workers
from ciuic_cli.recovery.gradients import STEP_SEQUENCES, FactorGradients
from ciuic_cli.recovery.row_factors import CodedLookup, Factors, tunable_shapes
from ciuic_cli.recovery.schedule import PEAK_LEARNING_RATE, learning_rate

EVALUATIONS = 4
"""Evaluations on held-out text during a run, evenly spread. No measurement is on record."""
ADAM_BETAS = (0.9, 0.95)
"""Adam's decay rates. No measurement is on record."""


@dataclass(frozen=True)
class RecoveryResult:
    """The result of recovery.

    Attributes:
        factors: those with the least held-out KL; empty if no evaluation was below the start.
        steps: optimizer steps that were made.
        kl_before, kl_after: held-out KL in nats per token, without and with the factors.
    """

    factors: dict[Key, torch.Tensor]
    steps: int
    kl_before: float
    kl_after: float


class Recovery:
    """Tunes the factors of a rounded model step by step; one object per worker.

    Args:
        coded: the rounded matrices.
        adjust: other changes of the layers in the artifact (pruned experts).
        text: LongTensor (steps * STEP_SEQUENCES, length), of which each step takes the next sequences.
        folder: of this worker alone, for activations.
        state: the last state that `tune` saved, in an earlier process.
    """

    def __init__(
        self,
        model_map: ModelMap,
        coded: CodedLookup,
        adjust: Adjust,
        text: torch.Tensor,
        folder: Path,
        *,
        device: torch.device,
        workers: Workers,
        state: bytes | None = None,
    ) -> None:
        shapes = tunable_shapes(model_map, coded)
        self._factors = {key: nn.Parameter(torch.ones(shape)) for key, shape in shapes.items()}
        self._optimizer = torch.optim.Adam(
            [{"params": [*self._factors.values()]}], PEAK_LEARNING_RATE, ADAM_BETAS
        )
        self._best: dict[Key, torch.Tensor] = {}
        self._kls: list[float] = []  # held-out KL at the start and at each evaluation so far
        self._steps, self._step = len(text) // STEP_SEQUENCES if shapes else 0, 0
        if state is not None:
            self._restore(state)
        self._gradients = FactorGradients(
            model_map, self._factors, coded, adjust, text, self._step, folder, device=device, workers=workers
        )

    def tune(
        self,
        measure: Callable[[Factors], float],
        save_state: Callable[[Callable[[], bytes]], None],
        progress: Progress,
    ) -> RecoveryResult:
        """Make all steps that are left, until held-out KL has risen twice in a row or a gradient is not finite.

        measure: KL of the artifact with these factors on held-out text, in nats per token. save_state: called after
        each evaluation with a function that returns the state as bytes.
        """
        if not self._kls:
            self._kls.append(measure({}))
        if self._has_steps_left():
            self._gradients.prepare(progress)
        steps_between = max(1, ceil_div(self._steps, EVALUATIONS))
        while self._has_steps_left() and self._take_step():
            progress("recovery", self._step, self._steps)
            if self._step % steps_between == 0 or self._step == self._steps:
                self._evaluate(measure)
                save_state(self._state)
        return RecoveryResult(self._best, self._step, self._kls[0], min(self._kls))

    def _has_steps_left(self) -> bool:
        rising = len(self._kls) > 2 and self._kls[-3] < self._kls[-2] < self._kls[-1]
        return self._step < self._steps and not rising

    def _take_step(self) -> bool:
        """Change all factors once; returns False, without a change, if a gradient is NaN or infinite."""
        self._optimizer.zero_grad()
        self._gradients.accumulate(self._step)
        gradients = [factor.grad for factor in self._factors.values() if factor.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return False
        self._optimizer.param_groups[0]["lr"] = learning_rate(self._step, self._steps, self._kls[0])
        self._optimizer.step()
        self._step += 1
        return True

    def _evaluate(self, measure: Callable[[Factors], float]) -> None:
        """Measure the held-out KL with the current factors, and keep a copy of them if it is the least so far."""
        values = {key: factor.detach() for key, factor in self._factors.items()}
        changed = {key: value.clone() for key, value in values.items() if bool((value != 1).any())}
        kl = measure(changed)
        if kl < min(self._kls):
            self._best = changed
        self._kls.append(kl)

    def _state(self) -> bytes:
        """A safetensors file with the step, the KLs, and "<kind>/<number>" for each factor: its value, Adam's tensors,
        and its best value."""
        tensors = {"step": torch.tensor(self._step), "kls": torch.tensor(self._kls, dtype=torch.float64)}
        for number, (key, factor) in enumerate(self._factors.items()):
            of_factor = {"factor": factor.detach(), **self._optimizer.state[factor]}
            if key in self._best:
                of_factor["best"] = self._best[key]
            tensors |= {f"{kind}/{number}": tensor for kind, tensor in of_factor.items()}
        return save(tensors)

    def _restore(self, state: bytes) -> None:
        tensors = load(state)
        self._step, self._kls = int(tensors.pop("step")), tensors.pop("kls").tolist()
        factors = [*self._factors.items()]
        for name, tensor in tensors.items():
            kind, _, number = name.partition("/")
            key, factor = factors[int(number)]
            if kind == "factor":
                factor.data.copy_(tensor)
            elif kind == "best":
                self._best[key] = tensor
            else:
                self._optimizer.state[factor][kind] = tensor
