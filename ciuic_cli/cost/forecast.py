"""Forecast of a `compress` run on this machine: seconds, bytes of disk, and peak memory.

Bytes are computed from the checkpoint's headers. Seconds are timed on random matrices of the model's own shapes
(`timing.py`) and scaled up. Other work on the machine lengthens timings and forecast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ciuic_cli.allocation.machine import processor
from ciuic_cli.allocation.matrices import (
    EMBEDDING_ROLES,
    WeightMatrix,
    chunk_bytes,
    full_outputs,
    weight_matrices,
    working_bytes,
)
from ciuic_cli.allocation.pool_factors import KEPT_POOLS
from ciuic_cli.allocation.row_chunks import row_chunks_side_by_side
from ciuic_cli.artifact.layout import SHARD_BYTES
from ciuic_cli.checkpoint.model_map import ModelMap, Parameter
from ciuic_cli.cost.run_time import (
    Rates,
    TextSize,
    executed_compressible,
    has_own_inputs,
    hidden_and_vocabulary,
    kept_noise_bytes,
    measure_rates,
    phase_seconds,
    pools_statistics,
)
from ciuic_cli.layerwise.chunk_threads import (
    activation_bytes,
    chunks_side_by_side,
    heads_side_by_side,
    logit_bytes,
)
from ciuic_cli.layerwise.logits import logit_tokens
from ciuic_cli.layerwise.operations.mixed_precision import compute_dtype
from ciuic_cli.process.memory import KEPT_BYTES, SLACK, resident_bytes
from ciuic_cli.recovery.gradients import STEP_SEQUENCES
from ciuic_cli.statistics import lower_half
from ciuic_cli.statistics.compact import compact_bytes
from ciuic_cli.statistics.experts import full_moments_fit
from ciuic_cli.statistics.head_fisher import WEIGHT_BYTES
from ciuic_cli.statistics.sums import CHUNK_SEQUENCES, SEGMENTS

LOGIT_COPIES = 6
"""Estimated number of float32 arrays of the logits' size that the statistics of the head have at a time. No measurement
is on record."""
PLAN_BYTES = 400
"""Bytes of arms and plan in memory, per group of 16 rows. Measured: docs/experiments/scale/plan-memory.md."""
TUNING_BYTES = 72
"""Bytes of recovery in memory, per row: the factor, Adam's two moments, the best factor, and copies of all while the
state is saved. Computed, not measured: docs/SCALE.md."""
_ARM_BYTES = 72
"""Bytes per group of 16 rows in the journal's file of a matrix's arms (`allocation/arms_file.py`): sensitivity, loss of
pruning and what low-rank parts leave, in natural order and sorted; and the rows' classes."""
_ARM_FILE_BYTES = 1300
"""Other bytes of such a file: the header of 16 arrays. Measured."""
DISK_SHARE = 2.9
"""Noise is kept while a run has fewer bytes on the disk than this multiple of its model's, at two bytes per weight.
Chosen: at most three times, with some small files (docs/experiments/scale/disk.md)."""
LEAST_NOISE_BYTES = 512 << 20
"""Bytes of noise that are kept in any case. Chosen: the embedding of a model of 1.5 billion weights has 470 MB."""


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of a whole run by phase, and the most bytes on disk and resident in memory.

    The first phase, "start", is no prediction: the seconds from the beginning of the run to the forecast.
    """

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
        spent = f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
        if self.total_seconds < 90:
            spent = f"{max(1, round(self.total_seconds))} s"
        return (
            f"a whole run is expected to take {spent}, {self.peak_rss_bytes / 1e9:.1f} GB of memory at its peak, "
            f"and {self.disk_bytes / 1e9:.1f} GB of disk"
        )


def forecast(
    model_map: ModelMap,
    text: TextSize,
    *,
    states: int,
    probed_layers: int,
    ranks: bool,
    budget: int,
    device: torch.device,
    started: float,
    tall_outputs: bool = True,
    rates: Rates | None = None,
) -> Forecast:
    """Predict a run of `compress`; takes seconds, because it times matrices.

    states: mean trellis states per weight. probed_layers: most layers of a probe. ranks: whether arms with a low-rank
    part are priced. budget: bytes of the artifact. started: `time.monotonic()` at the beginning of the run.
    tall_outputs: see `allocation.matrices.full_outputs`. rates: of this model, if they have been measured.
    """
    matrices = weight_matrices(model_map.parameters.values())
    work = work_bytes(model_map, matrices, text, device=device, tall_outputs=tall_outputs)
    base = resident_bytes()  # before matrices are timed: the run reuses the memory that they leave behind
    rates = rates or measure_rates(model_map, matrices, ranks=ranks, device=device)
    phases = phase_seconds(
        model_map,
        rates,
        text,
        states=states,
        probed_layers=probed_layers,
        tall_outputs=tall_outputs,
        kept_noise=kept_noise(model_map, matrices, text, tall_outputs=tall_outputs),
    )
    return Forecast(
        {"start": time.monotonic() - started, **phases},
        disk_bytes(model_map, matrices, text, budget, tall_outputs=tall_outputs),
        base + work + _freed_bytes(base + work, work),
    )


def _freed_bytes(used: int, work: int) -> int:
    """The most freed bytes that stay resident (`limit_freed_memory`), where a phase uses `work` bytes and the whole
    process `used`. Of a small model at most 1.5 times `work` stays: the sample left 1.2 times (measured once)."""
    return max(SLACK, min(work * 3 // 2, KEPT_BYTES - used))


def moment_bytes(parameter: Parameter, *, tall_outputs: bool = True) -> tuple[int, int]:
    """Bytes of H and of G of one parameter in memory; of a stack those of all experts and of their pool. Without the H
    that it has in common with another one.

    tall_outputs: see `allocation.matrices.full_outputs`.
    """
    return _moment_bytes(parameter, lower_half.bytes_of, tall_outputs=tall_outputs)


def stored_moment_bytes(parameter: Parameter, *, tall_outputs: bool = True) -> tuple[int, int]:
    """As `moment_bytes`, but on the disk."""
    return _moment_bytes(parameter, compact_bytes, tall_outputs=tall_outputs)


def _moment_bytes(
    parameter: Parameter, of_moment: Callable[[int], int], *, tall_outputs: bool
) -> tuple[int, int]:
    """of_moment: bytes of a full moment by its number of rows."""
    rows, cols = parameter.shape[-2:]
    has_full_outputs = full_outputs(parameter.role, rows, cols, tall_outputs=tall_outputs)
    of_inputs = of_moment(cols) if has_own_inputs(parameter) else 0
    full = of_inputs, of_moment(rows) if has_full_outputs else 4 * rows
    if len(parameter.shape) < 3:
        return full
    experts = parameter.shape[0]
    each = full if full_moments_fit(experts, rows, cols) else (4 * cols, 4 * rows)
    return full[0] + experts * each[0], full[1] + experts * each[1]


def vocabulary_bytes(model_map: ModelMap) -> int:
    """Bytes in memory of the vocabulary's statistics: contexts and frequencies of tokens, the embedding's moment."""
    hidden, vocabulary = hidden_and_vocabulary(model_map)
    return 4 * (vocabulary * hidden + vocabulary + hidden * hidden)


def stored_vocabulary_bytes(model_map: ModelMap) -> int:
    """As `vocabulary_bytes`, but on the disk, where contexts are in bfloat16."""
    hidden, vocabulary = hidden_and_vocabulary(model_map)
    return 2 * vocabulary * hidden + 4 * (vocabulary + hidden * hidden)


def disk_bytes(
    model_map: ModelMap,
    matrices: Sequence[WeightMatrix],
    text: TextSize,
    budget: int,
    *,
    tall_outputs: bool = True,
) -> int:
    """The most bytes that journal and output take on disk at a time. tall_outputs: as in `moment_bytes`.

    There are three such moments: the middle of the two sweeps, the end of the plan, and the end of the run. A matrix's
    statistics are deleted when it is coded, so codes replace them.
    """
    hidden, vocabulary = hidden_and_vocabulary(model_map)
    state = 4 * text.gradient_tokens * hidden
    only_forward = 2 * 4 * (text.tokens - text.gradient_tokens) * hidden  # inputs and outputs of one layer
    head_sums = 4 * vocabulary * hidden
    of_inputs, _ = _moments_on_disk(model_map, tall_outputs=tall_outputs)
    sweeps = state * (len(model_map.layer_prefixes) + 3) + only_forward + head_sums + of_inputs
    step = STEP_SEQUENCES * text.length * (hidden * (len(model_map.layer_prefixes) + 2) + vocabulary)
    recovery = 4 * (2 * text.recovery * text.length * hidden + step) if text.recovery else 0
    probing = _probing_bytes(model_map, matrices, text)
    statistics = _statistics_bytes(model_map, tall_outputs=tall_outputs)
    room = kept_noise(model_map, matrices, text, tall_outputs=tall_outputs)
    noise = min(room, sum(kept_noise_bytes(model_map)))
    codes = stored_codes_bytes(budget, recovers=text.recovery > 0) + recovery
    return max(sweeps, probing + max(statistics + noise, codes))


def _probing_bytes(model_map: ModelMap, matrices: Sequence[WeightMatrix], text: TextSize) -> int:
    """Bytes on the disk of the arms, and of the original's predictions of the held-out sequences."""
    _, vocabulary = hidden_and_vocabulary(model_map)
    arms = sum(_ARM_BYTES * matrix.groups + _ARM_FILE_BYTES for matrix in matrices)
    return arms + 2 * text.held_out * text.length * vocabulary


def _statistics_bytes(model_map: ModelMap, *, tall_outputs: bool) -> int:
    """Bytes on the disk of the statistics."""
    return sum(_moments_on_disk(model_map, tall_outputs=tall_outputs)) + stored_vocabulary_bytes(model_map)


def _moments_on_disk(model_map: ModelMap, *, tall_outputs: bool) -> tuple[int, int]:
    """Bytes on the disk of all H, and of all G."""
    moments = [stored_moment_bytes(p, tall_outputs=tall_outputs) for p in executed_compressible(model_map)]
    return _total(moments)


def _total(moments: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Bytes of all H, and of all G."""
    return sum(of_inputs for of_inputs, _ in moments), sum(of_outputs for _, of_outputs in moments)


def kept_noise(
    model_map: ModelMap, matrices: Sequence[WeightMatrix], text: TextSize, *, tall_outputs: bool
) -> int:
    """`noise_room` when all statistics and arms are on the disk."""
    stored = _probing_bytes(model_map, matrices, text)
    return noise_room(model_map, stored + _statistics_bytes(model_map, tall_outputs=tall_outputs))


def noise_room(model_map: ModelMap, stored: int) -> int:
    """The most bytes of noise that a run keeps for its probes, beside `stored` bytes that it has on the disk."""
    return max(int(DISK_SHARE * 2 * model_map.stored_numel) - stored, LEAST_NOISE_BYTES)


def stored_codes_bytes(budget: int, *, recovers: bool) -> int:
    """The most bytes of codes on the disk at a time, with those of finished files; all codes twice if a run recovers.

    budget: bytes of the artifact.
    """
    return budget + (budget if recovers else min(budget, SHARD_BYTES))


def work_bytes(
    model_map: ModelMap,
    matrices: Sequence[WeightMatrix],
    text: TextSize,
    *,
    device: torch.device,
    tall_outputs: bool = True,
) -> int:
    """The most bytes that a phase takes in memory besides the process itself and freed memory.

    The finished artifact is not counted: a run loads it as a whole only if that takes no more (`loaded_model.py`).
    tall_outputs: as in `moment_bytes`.
    """
    bfloat16 = compute_dtype(device) == torch.bfloat16
    _, vocabulary = hidden_and_vocabulary(model_map)
    largest_in_layers = max(
        (_side_by_side_bytes(matrix) for matrix in matrices if matrix.role not in EMBEDDING_ROLES), default=0
    )
    pooled = (m for m in matrices if m.expert == 0 and pools_statistics(model_map, m))
    # The factors of a pool are as large as the two moments that they replace.
    largest_in_layers += KEPT_POOLS * max((8 * max(m.rows, m.cols) ** 2 for m in pooled), default=0)
    # While new values of an embedding or head are computed, its stored values are not in memory.
    largest_outside = max(
        (_side_by_side_bytes(m) - 4 * m.weights for m in matrices if m.role in EMBEDDING_ROLES), default=0
    )
    layers = []
    for prefix in model_map.layer_prefixes:
        parameters = [p for p in model_map.parameters.values() if p.name.startswith(prefix)]
        moments = [moment_bytes(p, tall_outputs=tall_outputs) for p in parameters if p.compress]
        tokens = min(CHUNK_SEQUENCES, text.sequences) * text.length
        activations = activation_bytes(model_map, prefix, tokens)
        stacked = sum(p.numel for p in parameters if len(p.shape) == 3)
        others = sum(p.numel for p in parameters) - stacked
        linears = sum(p.numel for p in parameters if p.compress and len(p.shape) == 2 and not p.transposed)
        # Statistics: with bfloat16 products, stacks and linears are bfloat16. H or G exist of each segment of the text
        # in work, of those that wait for an earlier one, and as sums.
        # Probes: products are float32, and stacks have the model's own dtype. Other values for matrices outside stacks
        # are computed before the layer is in memory, those of experts while it is there.
        stacks = stacked * model_map.dtype.itemsize
        weights = 2 * (stacked + linears) + 4 * (others - linears) if bfloat16 else stacks + 4 * others
        for sums in _total(moments):
            count = chunks_side_by_side(model_map, prefix, tokens, device, besides=sums)
            layers.append(weights + min(2 * count, SEGMENTS + 1) * sums + count * activations)
        layers.append(4 * linears + largest_in_layers)
        layers.append(stacks + 4 * (others + linears) + max(activations, largest_in_layers if stacked else 0))
    embedding_and_head = sum(
        p.numel for p in model_map.parameters.values() if p.role in EMBEDDING_ROLES and not p.tied_to
    )
    tokens = min(text.length, logit_tokens(vocabulary))
    logits = LOGIT_COPIES * 4 * tokens * vocabulary
    measured_logits = heads_side_by_side(model_map, tokens, device) * logit_bytes(vocabulary, tokens)
    head_sums = WEIGHT_BYTES + vocabulary_bytes(model_map)  # of a segment; the totals are on the disk
    outside_layers = max(
        (2 if bfloat16 else 4) * embedding_and_head + logits + head_sums,
        4 * embedding_and_head + max(measured_logits, largest_outside),
    )
    plan = PLAN_BYTES * sum(matrix.groups for matrix in matrices)
    tuning = TUNING_BYTES * sum(matrix.rows for matrix in matrices) if text.recovery else 0
    return tuning + max([*layers, outside_layers, plan])


def _side_by_side_bytes(matrix: WeightMatrix) -> int:
    """Bytes of work on all matrices of this shape, or all row chunks of one, that are worked on side by side."""
    together = processor().side_by_side(matrix)
    chunks = 1 if together > 1 else row_chunks_side_by_side(matrix)
    return together * working_bytes(matrix) + (chunks - 1) * chunk_bytes(matrix)
