"""The seconds of a run's phases: rates that are measured on this machine once, times the work of a choice of options.

`measure_rates` times matrices of the model's shapes and a few products. `phase_seconds` is arithmetic, so that a time
budget can compare many choices (`compression/time_budget.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ciuic_cli.allocation.machine import machine_for
from ciuic_cli.allocation.matrices import (
    EMBEDDING_ROLES,
    UNPROBED_ROLES,
    WeightMatrix,
    full_outputs,
)
from ciuic_cli.checkpoint.model_map import ModelMap, Parameter
from ciuic_cli.checkpoint.mtp_parameters import is_mtp
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.cost.timing import role_of_timing, time_matrix, time_products, time_reading
from ciuic_cli.layerwise.chunk_threads import hidden_width
from ciuic_cli.recovery.gradients import STEP_SEQUENCES
from ciuic_cli.recovery.tuning import EVALUATIONS
from ciuic_cli.statistics.experts import full_moments_fit
from ciuic_cli.statistics.moments import PAIR_TOKENS, pair_sum_work


@dataclass(frozen=True)
class TextSize:
    """Numbers of sequences (statistics, held out, all recovery steps), and the tokens of each.

    probe: tokens of each held-out sequence that a role's probe runs.
    """

    sequences: int
    held_out: int
    length: int
    recovery: int = 0
    probe: int = 256

    @property
    def tokens(self) -> int:
        """Tokens of the statistics' sequences."""
        return self.sequences * self.length


def pools_statistics(model_map: ModelMap, matrix: WeightMatrix) -> bool:
    """True if the matrix is an expert, and full moments exist for its pool only, not for each expert."""
    if matrix.expert is None or matrix.role in MTP_ROLES:
        return False
    return not full_moments_fit(experts_of(model_map.parameters[matrix.name]), matrix.rows, matrix.cols)


def executed(model_map: ModelMap) -> list[Parameter]:
    """Parameters that take part when the model runs: multi-token-prediction layers are coded, but never run."""
    return [parameter for parameter in model_map.parameters.values() if not is_mtp(parameter)]


def executed_compressible(model_map: ModelMap) -> list[Parameter]:
    """Parameters whose statistics are collected."""
    return [parameter for parameter in executed(model_map) if parameter.compress]


def hidden_and_vocabulary(model_map: ModelMap) -> tuple[int, int]:
    """Numbers per token between layers, and tokens in the vocabulary."""
    return hidden_width(model_map), int(model_map.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class Rates:
    """How long this machine takes for the work of one model.

    Attributes:
        matrices: matrices of equal shape and treatment, how many there are, and the seconds of each
            (`timing.time_matrix`).
        product: seconds per weight and token of a product.
        read: seconds per weight that is read.
    """

    matrices: tuple[tuple[WeightMatrix, int, dict[str, float]], ...]
    product: float
    read: float


def measure_rates(
    model_map: ModelMap, matrices: Sequence[WeightMatrix], *, ranks: bool, device: torch.device
) -> Rates:
    """Time matrices of all shapes; takes seconds. ranks: whether arms with a low-rank part are priced."""
    machine = machine_for(device)
    timed: dict[tuple[Any, ...], dict[str, float]] = {}

    def seconds_of(matrix: WeightMatrix, *, pooled: bool) -> dict[str, float]:
        treatment = (matrix.rows, matrix.cols, pooled, role_of_timing(matrix.role))
        if treatment not in timed:
            timed[treatment] = time_matrix(matrix, machine, ranks=ranks, pooled=pooled)
        return timed[treatment]

    shapes = Counter(
        (replace(matrix, name="", expert=None), pools_statistics(model_map, matrix)) for matrix in matrices
    )
    return Rates(
        tuple(
            (matrix, count, seconds_of(matrix, pooled=pooled)) for (matrix, pooled), count in shapes.items()
        ),
        time_products(device),
        time_reading(model_map, matrices),
    )


def phase_seconds(
    model_map: ModelMap, rates: Rates, text: TextSize, *, states: int, probed_layers: int
) -> dict[str, float]:
    """Seconds of each phase. states: mean trellis states per weight. probed_layers: most layers of a probe."""
    total = dict.fromkeys(("statistics", "arms", "probe", "encode", "recovery", "measure"), 0.0)
    decoding = 0.0  # all matrices once
    probed_share = min(1.0, probed_layers / max(1, len(model_map.layer_prefixes)))
    roles = set()
    for matrix, count, time_of in rates.matrices:
        total["arms"] += count * time_of["arms"]
        # The probe of the matrix's role, and the last one, perturb it in some of the layers.
        probes = 0.0 if matrix.role in UNPROBED_ROLES else 2.0
        if matrix.role not in EMBEDDING_ROLES:
            probes *= probed_share
        if probes:
            roles.add(matrix.role)
        total["probe"] += count * probes * time_of["probe"]
        total["encode"] += count * (time_of["encode"] + time_of["state"] * states)
        decoding += 0.0 if matrix.role in MTP_ROLES else count * time_of["decode"]
    active = _active_weights(model_map)
    product, reading = rates.product, rates.read * sum(parameter.numel for parameter in executed(model_map))
    contexts = math.prod(hidden_and_vocabulary(model_map))
    moments = contexts + sum(
        _moment_work(p, text.length) * (_experts_per_token(model_map) if len(p.shape) == 3 else 1)
        for p in executed_compressible(model_map)
    )
    held_out = text.held_out * text.length * active * product
    probed = text.held_out * min(text.length, text.probe) * active * product
    # Products of the forward sweep, of recomputing each layer, and of its gradients; then H and G of every token. Every
    # weight is read in both sweeps.
    total["statistics"] += text.tokens * (3 * active + moments) * product + 2 * reading
    # Every role, all roles together, and the original.
    total["probe"] += len(roles) * probed + 2 * held_out + (len(roles) + 2) * reading
    total["measure"] += held_out + reading + decoding
    if text.recovery:
        # Products of the original, of the forward pass, of recomputing each layer, and of its gradients. Every step
        # reads and decodes every layer twice.
        total["recovery"] += 4 * text.recovery * text.length * active * product
        total["recovery"] += 2 * (text.recovery // STEP_SEQUENCES) * (reading + decoding)
        total["recovery"] += (EVALUATIONS + 1) * total["measure"]
    # The finished artifact runs once more, from its codes.
    total["measure"] += held_out + decoding
    return total


def _moment_work(parameter: Parameter, length: int) -> float:
    """Multiplications per token for a parameter's H and G; length: tokens per sequence."""
    rows, cols = parameter.shape[-2:]
    tokens = min(length, PAIR_TOKENS)
    pairs = min(pair_sum_work(tokens, rows, cols)) / tokens if len(parameter.shape) < 3 else 0.0
    return float(pairs + cols * cols + (rows * rows if full_outputs(parameter.role, rows) else rows))


def experts_of(parameter: Parameter) -> int:
    """Experts in a stack; 1 for other parameters."""
    return parameter.shape[0] if len(parameter.shape) == 3 else 1


def _experts_per_token(model_map: ModelMap) -> float:
    """Experts that each token is routed to, 1 in a model without experts."""
    return float(getattr(model_map.config.get_text_config(), "num_experts_per_tok", None) or 1)


def _active_weights(model_map: ModelMap) -> float:
    """Weights that each token is multiplied with."""
    return sum(
        p.numel * (min(1.0, _experts_per_token(model_map) / experts_of(p)) if len(p.shape) == 3 else 1.0)
        for p in executed(model_map)
        if len(p.shape) > 1 and p.role != "embedding"
    )
