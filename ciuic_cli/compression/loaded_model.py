"""Runs a finished artifact the way a user loads it, before it is published.

Until then the run has measured the rounded weights in the original model, layer by layer. A fault in the plug-in, or a
model whose code reads a weight in a way that the plug-in does not know, shows only in the loaded artifact.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from ciuic_cli.compression.run import Run
from ciuic_cli.errors import CiuicError, InputError, TargetError
from ciuic_cli.evaluation.estimates import Floats, mean_of
from ciuic_cli.evaluation.kl_meter import CHECKED_TOKENS
from ciuic_cli.evaluation.opening import artifact_in_memory
from ciuic_cli.process.memory import machine_fault, return_freed_memory

STANDARD_ERRORS = 4.0
"""Standard errors by which the two measurements may differ. Chosen: chance passes it once in 16,000 runs."""
RELATIVE_TOLERANCE = 0.02
"""Share of the KL by which the two may differ besides. Chosen: other orders of summation move experts' choices."""
ABSOLUTE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
"""Nats per token by which the two may differ besides, by the dtype of activations. Two bfloat16 computations of one
model differ by 0.001 (`evaluate`)."""


def require_loadable(run: Run, folder: Path, rounded: list[Floats]) -> None:
    """Load the artifact in `folder` by transformers with the plug-in, and compare its KL with that of its weights.

    Args:
        rounded: KL of every held-out token of the rounded weights, measured layer by layer.

    Raises:
        TargetError: the two measurements differ by more than their standard errors allow.
        InputError: transformers cannot load or run the artifact.
        EnvironmentFault: memory does not suffice.
    """
    return_freed_memory()
    count = min(CHECKED_TOKENS, len(rounded[0]))
    name = type(run.map.meta_model()).__name__
    try:
        with artifact_in_memory(
            folder, run.device, run.map.layer_prefixes, most=run.task.work_bytes()
        ) as model:
            dtype = model.dtype
            loaded = run.meter().token_kls_of_model(model, folder / "config.json", count)
        del model  # frees it
    except CiuicError as error:
        if isinstance(error, InputError):
            raise _cannot_run(run, name, error.message) from error
        raise
    except Exception as error:
        fault = machine_fault(error)
        if fault is not None:
            raise fault from error
        raise _cannot_run(
            run, name, f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        ) from error
    return_freed_memory()
    _require_agreement(run, name, rounded[0][:count], loaded, dtype)


def allowed_difference(rounded: Floats, loaded: Floats, dtype: torch.dtype) -> float:
    """The largest difference of the two means, in nats per token, that chance and rounding explain.

    Both models predict the same tokens, so the standard error is that of the differences token by token, but at most
    that of two independent measurements as exact as `rounded`: a fault would raise its own limit otherwise.
    """
    differences, before = mean_of([loaded - rounded]), mean_of([rounded])
    stderr = min(differences.stderr, math.sqrt(2) * before.stderr)
    absolute = ABSOLUTE_TOLERANCE.get(dtype, ABSOLUTE_TOLERANCE[torch.float32])
    return STANDARD_ERRORS * stderr + RELATIVE_TOLERANCE * abs(before.value) + absolute


def _require_agreement(run: Run, name: str, rounded: Floats, loaded: Floats, dtype: torch.dtype) -> None:
    before, after = mean_of([rounded]), mean_of([loaded])
    difference = abs(after.value - before.value)
    if np.isfinite(loaded).all() and difference <= allowed_difference(rounded, loaded, dtype):
        return
    raise TargetError(
        f"the finished artifact, loaded by transformers as {name}, predicts otherwise than its weights do in the "
        f"original model: KL {after.value:.4g} ± {after.stderr:.2g} nats per token instead of {before.value:.4g} ± "
        f"{before.stderr:.2g}. Nothing was published",
        file=run.map.checkpoint.folder,
        remedy="report it: ciuic does not load models of this class correctly with the installed transformers",
    )


def _cannot_run(run: Run, name: str, reason: str) -> InputError:
    return InputError(
        f"transformers cannot run the finished artifact as {name}: {reason}. Nothing was published",
        file=run.map.checkpoint.folder,
        remedy="ciuic does not support models of this class with the installed transformers; try another version of it",
    )
