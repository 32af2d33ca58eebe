"""Forecast of a `compress` run on this machine: seconds, bytes of disk, and peak memory.

Bytes are computed from the checkpoint's headers. Seconds are timed on random matrices of the model's own shapes
(`timing.py`) and scaled up. Other work on the machine lengthens timings and forecast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ciuic_cli.allocation.machine import machine_for, processor
from ciuic_cli.allocation.matrices import (
    EMBEDDING_ROLES,
    UNPROBED_ROLES,
    WeightMatrix,
    full_outputs,
    weight_matrices,
    working_bytes,
)
from ciuic_cli.allocation.pool_factors import KEPT_POOLS
from ciuic_cli.allocation.probes import PROBED_LAYERS
from ciuic_cli.checkpoint.model_map import ModelMap, Parameter
from ciuic_cli.checkpoint.mtp_parameters import is_mtp
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.rate_distortion import nominal_window
from ciuic_cli.cost.timing import time_matrix, time_products, time_reading
from ciuic_cli.layerwise.layer_stream import compute_dtype
from ciuic_cli.layerwise.logits import logit_tokens
from ciuic_cli.process.memory import resident_bytes
from ciuic_cli.recovery.gradients import STEP_SEQUENCES
from ciuic_cli.recovery.tuning import EVALUATIONS
from ciuic_cli.statistics.collect import CHUNK_SEQUENCES
from ciuic_cli.statistics.compact import compact_bytes
from ciuic_cli.statistics.experts import full_moments_fit
from ciuic_cli.statistics.moments import PAIR_TOKENS, pair_sum_work

LOGIT_COPIES = 6
"""Estimated number of float32 arrays of the logits' size that exist at a time. No measurement is on record."""
PLAN_BYTES = 400
"""Bytes of arms and plan in memory, per group of 16 rows. Measured: docs/experiments/scale/plan-memory.md."""
TUNING_BYTES = 72
"""Bytes of recovery in memory, per row: the factor, Adam's two moments, the best factor, and copies of all while the
state is saved. Computed, not measured: docs/SCALE.md."""
_ARM_FIELDS = 5
"""Float64 numbers per group of 16 rows in the journal's file of a matrix's arms (`allocation/arms_file.py`).
Estimated."""
_ARM_FILE_BYTES = 1500
"""Other bytes of such a file: header and low-rank parts. Estimated."""
_LAYER_COPIES, _WIDEST_COPIES = 12, 8
"""Float32 copies of a chunk's hidden states, and of the widest matrix's inputs and outputs, while a layer runs forward
and backward. Estimated; docs/SCALE.md compares forecasts with runs."""


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of a whole run by phase, and the most bytes on disk and resident in memory."""

    seconds: dict[str, float]
    disk_bytes: int
    peak_rss_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_seconds": self.total_seconds}

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def sentence(self) -> str:
        """One sentence for the terminal."""
        hours, minutes = divmod(round(self.total_seconds / 60), 60)
        spent = f"{hours} h {minutes:02d} min" if hours else f"{max(1, minutes)} min"
        return (
            f"a whole run is expected to take {spent}, {self.peak_rss_bytes / 1e9:.1f} GB of memory at its peak, "
            f"and {self.disk_bytes / 1e9:.1f} GB of disk"
        )


@dataclass(frozen=True)
class TextSize:
    """Numbers of sequences (statistics, held out, all recovery steps), and the tokens of each."""

    sequences: int
    held_out: int
    length: int
    recovery: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the statistics' sequences."""
        return self.sequences * self.length


def forecast(
    model_map: ModelMap, text: TextSize, *, states: int, ranks: bool, budget: int, device: torch.device
) -> Forecast:
    """Predict a run of `compress`; takes seconds, because it times matrices.

    states: mean trellis states per weight. ranks: whether arms with a low-rank part are priced. budget: bytes of the
    artifact.
    """
    matrices = weight_matrices(model_map.parameters.values())
    base = resident_bytes()  # before matrices are timed: the run reuses the memory that they leave behind
    return Forecast(
        _seconds(model_map, matrices, text, states, ranks, device),
        disk_bytes(model_map, matrices, text, budget),
        peak_bytes(model_map, matrices, text, base, bfloat16=compute_dtype(device) == torch.bfloat16),
    )


def moment_bytes(parameter: Parameter) -> int:
    """Bytes of H and G of one parameter in memory; of a stack those of all experts and of their pool."""
    return _moment_bytes(parameter, lambda size: 4 * size * size)


def stored_moment_bytes(parameter: Parameter) -> int:
    """As `moment_bytes`, but on the disk."""
    return _moment_bytes(parameter, compact_bytes)


def _moment_bytes(parameter: Parameter, of_moment: Callable[[int], int]) -> int:
    """of_moment: bytes of a full moment by its number of rows."""
    rows, cols = parameter.shape[-2:]
    full = of_moment(cols) + (of_moment(rows) if full_outputs(parameter.role, rows) else 4 * rows)
    if len(parameter.shape) < 3:
        return full
    experts = parameter.shape[0]
    return full + experts * (full if full_moments_fit(experts, rows, cols) else 4 * (rows + cols))


def pools_statistics(model_map: ModelMap, matrix: WeightMatrix) -> bool:
    """True if the matrix is an expert, and full moments exist for its pool only, not for each expert."""
    if matrix.expert is None or matrix.role in MTP_ROLES:
        return False
    return not full_moments_fit(_experts(model_map.parameters[matrix.name]), matrix.rows, matrix.cols)


def _executed(model_map: ModelMap) -> list[Parameter]:
    """Parameters that take part when the model runs: multi-token-prediction layers are coded, but never run."""
    return [parameter for parameter in model_map.parameters.values() if not is_mtp(parameter)]


def _executed_compressible(model_map: ModelMap) -> list[Parameter]:
    """Parameters whose statistics are collected."""
    return [parameter for parameter in _executed(model_map) if parameter.compress]


def _hidden_and_vocabulary(model_map: ModelMap) -> tuple[int, int]:
    """Numbers per token between layers, and tokens in the vocabulary."""
    config = model_map.config.get_text_config()
    streams = int(getattr(config, "hc_mult", 1) or 1)  # DeepSeek-V4 carries several residual streams
    return streams * int(config.hidden_size), int(config.vocab_size)


def vocabulary_bytes(model_map: ModelMap) -> int:
    """Bytes in memory of the vocabulary's statistics: contexts and frequencies of tokens, the embedding's moment."""
    hidden, vocabulary = _hidden_and_vocabulary(model_map)
    return 4 * (vocabulary * hidden + vocabulary + hidden * hidden)


def stored_vocabulary_bytes(model_map: ModelMap) -> int:
    """As `vocabulary_bytes`, but on the disk, where contexts are in bfloat16."""
    hidden, vocabulary = _hidden_and_vocabulary(model_map)
    return 2 * vocabulary * hidden + 4 * (vocabulary + hidden * hidden)


def disk_bytes(model_map: ModelMap, matrices: Sequence[WeightMatrix], text: TextSize, budget: int) -> int:
    """The most bytes that journal and output take on disk at a time.

    There are three such moments: the middle of the two sweeps, the end of the plan, and the end of the run. A matrix's
    statistics are deleted when it is coded, so codes replace them.
    """
    hidden, vocabulary = _hidden_and_vocabulary(model_map)
    state = 4 * text.tokens * hidden
    sweeps = state * (len(model_map.layer_prefixes) + 3)
    moments = sum(stored_moment_bytes(parameter) for parameter in _executed_compressible(model_map))
    predictions = 4 * text.held_out * text.length * vocabulary
    arms = sum(_ARM_FIELDS * 8 * matrix.groups + _ARM_FILE_BYTES for matrix in matrices)
    step = STEP_SEQUENCES * text.length * (hidden * (len(model_map.layer_prefixes) + 2) + vocabulary)
    recovery = 4 * (2 * text.recovery * text.length * hidden + step) if text.recovery else 0
    statistics = moments + stored_vocabulary_bytes(model_map)
    return max(sweeps, predictions + arms + max(statistics, 2 * budget + recovery))


def peak_bytes(
    model_map: ModelMap, matrices: Sequence[WeightMatrix], text: TextSize, base: int, *, bfloat16: bool
) -> int:
    """The most resident bytes: `base`, which are resident before the run, and the largest phase on top of it.

    bfloat16: whether the statistics' matrix products are in bfloat16 on this machine.
    """
    hidden, vocabulary = _hidden_and_vocabulary(model_map)
    largest_in_layers = max(
        (_side_by_side_bytes(matrix) for matrix in matrices if matrix.role not in EMBEDDING_ROLES), default=0
    )
    pooled = (m for m in matrices if m.expert == 0 and pools_statistics(model_map, m))
    # The factors of a pool are as large as the two moments that they replace.
    largest_in_layers += KEPT_POOLS * max((8 * max(m.rows, m.cols) ** 2 for m in pooled), default=0)
    largest_outside = max(
        (_side_by_side_bytes(matrix) for matrix in matrices if matrix.role in EMBEDDING_ROLES), default=0
    )
    layers = []
    for prefix in model_map.layer_prefixes:
        parameters = [p for p in model_map.parameters.values() if p.name.startswith(prefix)]
        moments = [moment_bytes(p) for p in parameters if p.compress]
        widest = max((sum(p.shape[-2:]) for p in parameters if p.compress), default=0)
        activations = 4 * min(CHUNK_SEQUENCES, text.sequences) * text.length
        activations *= _LAYER_COPIES * hidden + _WIDEST_COPIES * widest
        stacked = sum(p.numel for p in parameters if len(p.shape) == 3)
        others = sum(p.numel for p in parameters) - stacked
        # Statistics: with bfloat16 products the stacks are bfloat16, and all other weights exist as float32 and as a
        # bfloat16 copy for the backward pass. Moments exist twice: of one segment of the text, and the sums.
        # Probes: products are float32, and stacks have the model's own dtype. Matrices are perturbed at the same time.
        stacks = stacked * model_map.dtype.itemsize
        layers.append(
            (2 * stacked + 6 * others if bfloat16 else stacks + 4 * others) + 2 * sum(moments) + activations
        )
        layers.append(stacks + 4 * others + max(activations, largest_in_layers))
    embedding_and_head = 4 * sum(
        p.numel for p in model_map.parameters.values() if p.role in EMBEDDING_ROLES and not p.tied_to
    )
    logits = LOGIT_COPIES * 4 * min(text.length, logit_tokens(vocabulary)) * vocabulary
    outside_layers = embedding_and_head + max(logits + 2 * vocabulary_bytes(model_map), largest_outside)
    plan = PLAN_BYTES * sum(matrix.groups for matrix in matrices)
    tuning = TUNING_BYTES * sum(matrix.rows for matrix in matrices) if text.recovery else 0
    return base + tuning + max([*layers, outside_layers, plan])


def _side_by_side_bytes(matrix: WeightMatrix) -> int:
    """Bytes of work on all matrices of this shape that are worked on side by side."""
    return working_bytes(matrix) * processor().side_by_side(matrix)


def _seconds(
    model_map: ModelMap,
    matrices: Sequence[WeightMatrix],
    text: TextSize,
    states: int,
    ranks: bool,
    device: torch.device,
) -> dict[str, float]:
    """Seconds of each phase."""
    machine = machine_for(device)
    total = dict.fromkeys(("statistics", "arms", "probe", "encode", "recovery", "measure"), 0.0)
    decoding = 0.0  # all matrices once
    probed_share = min(1.0, PROBED_LAYERS / max(1, len(model_map.layer_prefixes)))
    shapes = Counter(
        (replace(matrix, name="", expert=None), pools_statistics(model_map, matrix)) for matrix in matrices
    )
    for (matrix, pooled), count in shapes.items():
        time_of = time_matrix(matrix, nominal_window(states), machine, ranks=ranks, pooled=pooled)
        total["arms"] += count * time_of["arms"]
        # The probe of the matrix's role, and the last one, perturb it in some of the layers.
        probes = 0.0 if matrix.role in UNPROBED_ROLES else 2.0
        if matrix.role not in EMBEDDING_ROLES:
            probes *= probed_share
        total["probe"] += count * probes * time_of["probe"]
        total["encode"] += count * time_of["encode"] * states / (1 << nominal_window(states))
        decoding += 0.0 if matrix.role in MTP_ROLES else count * time_of["decode"]
    product = time_products(device)
    active = _active_weights(model_map)
    read = time_reading(model_map, matrices)
    weights = sum(parameter.numel for parameter in _executed(model_map))
    roles = len({matrix.role for matrix in matrices if matrix.role not in UNPROBED_ROLES})
    contexts = math.prod(_hidden_and_vocabulary(model_map))
    moments = contexts + sum(
        _moment_work(p, text.length) * (_experts_per_token(model_map) if len(p.shape) == 3 else 1)
        for p in _executed_compressible(model_map)
    )
    # Products of the forward sweep, of recomputing each layer, and of its gradients; then H and G of every token. Every
    # weight is read in both sweeps.
    total["statistics"] += text.tokens * (3 * active + moments) * product + 2 * weights * read
    total["probe"] += (roles + 2) * (text.held_out * text.length * active * product + weights * read)
    total["measure"] += text.held_out * text.length * active * product + weights * read + decoding
    if text.recovery:
        # Products of the original, of the forward pass, of recomputing each layer, and of its gradients. Every step
        # reads and decodes every layer twice.
        total["recovery"] += 4 * text.recovery * text.length * active * product
        total["recovery"] += 2 * (text.recovery // STEP_SEQUENCES) * (weights * read + decoding)
        total["recovery"] += (EVALUATIONS + 1) * total["measure"]
    # The finished artifact runs once more, from its codes.
    total["measure"] += text.held_out * text.length * active * product + decoding
    return total


def _moment_work(parameter: Parameter, length: int) -> float:
    """Multiplications per token for a parameter's H and G; length: tokens per sequence."""
    rows, cols = parameter.shape[-2:]
    tokens = min(length, PAIR_TOKENS)
    pairs = min(pair_sum_work(tokens, rows, cols)) / tokens if len(parameter.shape) < 3 else 0.0
    return float(pairs + cols * cols + (rows * rows if full_outputs(parameter.role, rows) else rows))


def _experts(parameter: Parameter) -> int:
    return parameter.shape[0] if len(parameter.shape) == 3 else 1


def _experts_per_token(model_map: ModelMap) -> float:
    """Experts that each token is routed to, 1 in a model without experts."""
    return float(getattr(model_map.config.get_text_config(), "num_experts_per_tok", None) or 1)


def _active_weights(model_map: ModelMap) -> float:
    """Weights that each token is multiplied with."""
    return sum(
        p.numel * (min(1.0, _experts_per_token(model_map) / _experts(p)) if len(p.shape) == 3 else 1.0)
        for p in _executed(model_map)
        if len(p.shape) > 1 and p.role != "embedding"
    )
