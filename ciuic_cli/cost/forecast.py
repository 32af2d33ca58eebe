"""What a run will take on this machine: seconds, disk and peak memory, before it begins.

Bytes follow from the headers. Times are measured here, on random matrices of the model's own shapes (cut to a
thousand rows and columns), and scaled to the whole: factorisations by their operations, coding by weights, sweeps
by the operations of their products, all by what else the machine is doing at that moment.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from ciuic_cli.allocation.matrices import (
    EMBEDDING_ROLES,
    UNPROBED_ROLES,
    UNPRUNED_ROLES,
    WeightMatrix,
    full_outputs,
    weight_matrices,
    working_bytes,
)
from ciuic_cli.allocation.probes import PROBED_LAYERS, with_rounding_noise
from ciuic_cli.checkpoint.keeping import is_mtp
from ciuic_cli.checkpoint.model_map import ModelMap, Parameter
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.layerwise.layer_stream import compute_dtype, logit_tokens
from ciuic_cli.passes import lowrank
from ciuic_cli.passes.feedback import factor_inputs
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.predicted_loss import removal_loss
from ciuic_cli.passes.prepare import prepare
from ciuic_cli.passes.rounding import round_prepared
from ciuic_cli.passes.scale import input_scales
from ciuic_cli.process.memory import PARALLEL_WORK_BYTES, resident_bytes
from ciuic_cli.process.threads import parallel_map
from ciuic_cli.recovery.tuning import CHECKS, SEQUENCES
from ciuic_cli.statistics.collect import CHUNK
from ciuic_cli.statistics.experts import full_moments_fit
from ciuic_cli.statistics.moments import MEETING_TOKENS, meeting_work

CUT = 1024
"""Rows and columns of the matrices that are timed."""
CODED_ROWS = 64
"""Rows of the part that is coded for its time."""
REPEATS = 3
"""Timings of each, of which the shortest counts: the others had company."""
LOGIT_COPIES = 6
PLAN_BYTES = 400
"""Of arms and plan in memory, per group of 16 rows."""
TUNING_BYTES = 72
"""Of recovery in memory, per row: its factor, what Adam keeps of it, and all that again while it is saved."""


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of a whole run, by phase, and the most bytes on disk and in memory."""

    seconds: dict[str, float]
    disk_bytes: int
    peak_rss_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_seconds": self.total_seconds}

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def sentence(self) -> str:
        """For people."""
        hours, minutes = divmod(round(self.total_seconds / 60), 60)
        spent = f"{hours} h {minutes:02d} min" if hours else f"{max(1, minutes)} min"
        return (
            f"a whole run is expected to take {spent}, {self.peak_rss_bytes / 1e9:.1f} GB of memory at its peak, "
            f"and {self.disk_bytes / 1e9:.1f} GB of disk"
        )


@dataclass(frozen=True)
class Text:
    """Sequences that are calibrated on, those held out of them, the length of each, and those of recovery's steps."""

    sequences: int
    held_out: int
    length: int
    recovery: int = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


def forecast(
    model_map: ModelMap, text: Text, *, L: int, ranks: bool, budget: int, device: torch.device
) -> Forecast:
    """Predict a run of `compress` with these sequences, window, byte budget, and with or without low-rank arms."""
    matrices = weight_matrices(model_map.parameters.values())
    base = resident_bytes()  # now: what timing matrices leaves behind is used again
    return Forecast(
        _seconds(model_map, matrices, text, L, ranks, device),
        disk_bytes(model_map, matrices, text, budget),
        peak_bytes(model_map, matrices, text, base, halved=compute_dtype(device) == torch.bfloat16),
    )


def moment_bytes(parameter: Parameter) -> int:
    """Bytes of the statistics of one parameter, as `collect_statistics` keeps them."""
    rows, cols = parameter.shape[-2:]
    one = 4 * (cols * cols + (rows * rows if full_outputs(parameter.role, rows) else rows))
    if len(parameter.shape) < 3:
        return one
    experts = parameter.shape[0]
    return one + experts * (one if full_moments_fit(experts, rows, cols) else 4 * (rows + cols))


def _run(model_map: ModelMap) -> list[Parameter]:
    """What the model computes with: multi-token-prediction layers are coded, but never run."""
    return [parameter for parameter in model_map.parameters.values() if not is_mtp(parameter)]


def _compressed(model_map: ModelMap) -> list[Parameter]:
    return [parameter for parameter in _run(model_map) if parameter.compress]


def _width(model_map: ModelMap) -> tuple[int, int]:
    """Size of the hidden state and of the vocabulary."""
    config = model_map.config.get_text_config()
    streams = int(getattr(config, "hc_mult", 1) or 1)  # DeepSeek-V4 carries several residual streams
    return streams * int(config.hidden_size), int(config.vocab_size)


def vocabulary_bytes(model_map: ModelMap) -> int:
    """Bytes of the statistics of tokens: contexts and frequencies, and the moment below the embedding."""
    hidden, vocabulary = _width(model_map)
    return 4 * (vocabulary * hidden + vocabulary + hidden * hidden)


def disk_bytes(model_map: ModelMap, matrices: Sequence[WeightMatrix], text: Text, budget: int) -> int:
    """The most bytes that journal and output take at any time."""
    hidden, vocabulary = _width(model_map)
    state = 4 * text.tokens * hidden
    sweeps = state * (len(model_map.layer_prefixes) + 3)
    moments = sum(moment_bytes(parameter) for parameter in _compressed(model_map))
    predictions = 4 * text.held_out * text.length * vocabulary
    arms = sum(5 * 8 * matrix.groups + 1500 for matrix in matrices)
    step = SEQUENCES * text.length * (hidden * (len(model_map.layer_prefixes) + 2) + vocabulary)
    recovery = 4 * (2 * text.recovery * text.length * hidden + step) if text.recovery else 0
    return max(sweeps, moments + vocabulary_bytes(model_map) + predictions + arms + 2 * budget + recovery)


def peak_bytes(
    model_map: ModelMap, matrices: Sequence[WeightMatrix], text: Text, base: int, *, halved: bool
) -> int:
    """The most resident bytes: `base` now, and the largest of the phases on top of it.

    halved: whether the statistics' products are in bfloat16 here.
    """
    hidden, vocabulary = _width(model_map)
    inside = max(
        (_busy_bytes(matrix) for matrix in matrices if matrix.role not in EMBEDDING_ROLES), default=0
    )
    outside = max((_busy_bytes(matrix) for matrix in matrices if matrix.role in EMBEDDING_ROLES), default=0)
    layers = []
    for prefix in model_map.layer_prefixes:
        parameters = [p for p in model_map.parameters.values() if p.name.startswith(prefix)]
        moments = [moment_bytes(p) for p in parameters if p.compress]
        widest = max((sum(p.shape[-2:]) for p in parameters if p.compress), default=0)
        activations = 4 * min(CHUNK, text.sequences) * text.length * (12 * hidden + 8 * widest)
        stacked = sum(p.numel for p in parameters if len(p.shape) == 3)
        others = sum(p.numel for p in parameters) - stacked
        # Products in bfloat16: the stacks are, and of all else a copy is kept for the backward pass. Moments are held
        # twice: of one segment of the text, and their sums. Probes measure in float32, but the stacks have the model's
        # own dtype, and one matrix is prepared at a time.
        stacks = stacked * model_map.dtype.itemsize
        layers.append(
            (2 * stacked + 6 * others if halved else stacks + 4 * others) + 2 * sum(moments) + activations
        )
        layers.append(stacks + 4 * others + max(activations, inside))
    ends = 4 * sum(
        p.numel for p in model_map.parameters.values() if p.role in EMBEDDING_ROLES and not p.tied_to
    )
    logits = LOGIT_COPIES * 4 * min(text.length, logit_tokens(vocabulary)) * vocabulary
    surroundings = ends + max(logits + 2 * vocabulary_bytes(model_map), outside)
    plan = PLAN_BYTES * sum(matrix.groups for matrix in matrices)
    tuning = TUNING_BYTES * sum(matrix.rows for matrix in matrices) if text.recovery else 0
    return base + tuning + max([*layers, surroundings, plan])


def _beside(matrix: WeightMatrix) -> int:
    """How many matrices like it are worked on at once."""
    return torch.get_num_threads() if working_bytes(matrix) <= PARALLEL_WORK_BYTES else 1


def _busy_bytes(matrix: WeightMatrix) -> int:
    """What work on the matrix takes, and on as many like it as are worked on side by side."""
    return working_bytes(matrix) * _beside(matrix)


def _seconds(
    model_map: ModelMap,
    matrices: Sequence[WeightMatrix],
    text: Text,
    L: int,
    ranks: bool,
    device: torch.device,
) -> dict[str, float]:
    total = dict.fromkeys(("statistics", "arms", "probe", "encode", "recovery", "measure"), 0.0)
    decoding = 0.0
    probed = min(1.0, PROBED_LAYERS / max(1, len(model_map.layer_prefixes)))
    shapes = Counter(replace(matrix, name="", expert=None) for matrix in matrices)
    for matrix, count in shapes.items():
        time_of = _time_matrix(matrix, L, ranks)
        total["arms"] += count * time_of["arms"]
        total["probe"] += 0.0 if matrix.role in UNPROBED_ROLES else count * time_of["probe"] * (1 + probed)
        total["encode"] += count * time_of["encode"]
        decoding += 0.0 if matrix.role in MTP_ROLES else count * time_of["decode"]
    product = _time_products(device)
    routed = _active_weights(model_map)
    read = _time_reading(model_map, matrices)
    weights = sum(parameter.numel for parameter in _run(model_map))
    roles = len({matrix.role for matrix in matrices if matrix.role not in UNPROBED_ROLES})
    contexts = math.prod(_width(model_map))
    moments = contexts + sum(
        _moment_work(p, text.length) * (_share(model_map) if len(p.shape) == 3 else 1)
        for p in _compressed(model_map)
    )
    # Forward, again before the backward pass, and as much for the gradients there; then both moments of every token.
    total["statistics"] += text.tokens * (3 * routed + moments) * product + 2 * weights * read
    total["probe"] += (roles + 2) * (text.held_out * text.length * routed * product + weights * read)
    total["measure"] += text.held_out * text.length * routed * product + weights * read + decoding
    if text.recovery:
        # The original forward; then forward, again before the backward pass, and the gradients there. Every step takes
        # every layer twice.
        total["recovery"] += 4 * text.recovery * text.length * routed * product
        total["recovery"] += 2 * (text.recovery // SEQUENCES) * (weights * read + decoding)
        total["recovery"] += (CHECKS + 1) * total["measure"]
    return total


def _moment_work(parameter: Parameter, length: int) -> float:
    """Multiplications that one token of a sequence of so many adds to a parameter's moments."""
    rows, cols = parameter.shape[-2:]
    together = min(length, MEETING_TOKENS)
    meeting = min(meeting_work(together, rows, cols)) / together if len(parameter.shape) < 3 else 0.0
    return float(meeting + cols * cols + (rows * rows if full_outputs(parameter.role, rows) else rows))


def _experts(parameter: Parameter) -> int:
    return parameter.shape[0] if len(parameter.shape) == 3 else 1


def _share(model_map: ModelMap) -> float:
    """Experts that a token is sent to, at least one."""
    return float(getattr(model_map.config.get_text_config(), "num_experts_per_tok", None) or 1)


def _active_weights(model_map: ModelMap) -> float:
    """Weights that one token is multiplied with."""
    return sum(
        p.numel * (min(1.0, _share(model_map) / _experts(p)) if len(p.shape) == 3 else 1.0)
        for p in _run(model_map)
        if len(p.shape) > 1 and p.role != "embedding"
    )


def _clock(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _time_matrix(matrix: WeightMatrix, L: int, ranks: bool) -> dict[str, float]:
    """Seconds of arms, one probe, encoding and decoding of a matrix, its share of those of as many as are made side by
    side."""
    full = full_outputs(matrix.role, matrix.rows)
    rows, cols = min(matrix.rows, CUT), min(matrix.cols, CUT)
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    fisher = KroneckerFisher(torch.eye(cols) / cols, torch.eye(rows) if full else torch.ones(rows))
    prepared = prepare(weight, fisher)  # loads what is loaded once, too
    bits = np.full(len(prepared.weight) // 16, 4, np.uint8)
    some = prepare(weight[:CODED_ROWS], KroneckerFisher(fisher.inputs, torch.ones(min(CODED_ROWS, rows))))
    beside = _beside(matrix)

    def clock(run: Callable[[], Any]) -> float:
        def together() -> None:
            list(parallel_map(range(beside), lambda _: run(), lambda _: beside == 1))

        return min(_clock(together) for _ in range(REPEATS)) / beside

    def noise() -> None:
        with_rounding_noise(prepared, bits, L, torch.Generator().manual_seed(0))

    factoring = _factor_work(matrix.rows, matrix.cols, full) / _factor_work(rows, cols, full)
    preparing = factoring * clock(lambda: prepare(weight, fisher))
    disturbing = factoring * clock(noise)
    area = matrix.weights / (rows * cols)
    sorting = area * clock(lambda: prepared.reordered(fisher, torch.arange(rows)).row_sensitivity)
    sorting += area * clock(lambda: removal_loss(weight, fisher))
    if matrix.expert is None and matrix.role not in UNPROBED_ROLES:
        of_inputs = _factor_work(matrix.rows, matrix.cols, False) / _factor_work(rows, cols, False)
        # Where they pay, H is factored once more.
        sorting += of_inputs * clock(lambda: input_scales(weight, fisher, prepared.inputs))
        sorting += of_inputs * clock(lambda: factor_inputs(fisher.inputs))
    if ranks and matrix.role not in UNPRUNED_ROLES:
        sorting += area * clock(lambda: lowrank.residual_energies(weight, torch.ones(rows), lowrank.RANKS))
    found: list[PackedMatrix] = []
    coding = clock(lambda: found.append(round_prepared(some, bits[: len(some.weight) // 16], L=L)))
    coding *= matrix.rows / min(CODED_ROWS, matrix.rows) * matrix.cols / cols
    decoding = clock(lambda: decode_dense(found[0])) * matrix.weights / (found[0].rows * found[0].cols)
    return {
        "arms": preparing + sorting, "probe": preparing + disturbing, "encode": preparing + coding,
        "decode": decoding,
    }  # fmt: skip


def _factor_work(rows: int, cols: int, full: bool) -> float:
    """Operations of the two factorisations and of the transforms, up to a factor."""
    return float(cols**3 + (rows**3 if full else 0) + rows * cols * 64)


def _time_products(device: torch.device) -> float:
    """Seconds per weight and token of a float32 product of 512 tokens (the slower of the two in use)."""
    x, w = torch.randn(512, CUT, device=device), torch.randn(CUT, CUT, device=device)
    torch.nn.functional.linear(x, w)
    best = min(_clock(lambda: float(torch.nn.functional.linear(x, w).sum())) for _ in range(REPEATS))
    return best / (512 * CUT * CUT)


def _time_reading(model_map: ModelMap, matrices: Iterable[WeightMatrix]) -> float:
    """Seconds per weight to read, decode and copy."""
    matrix = min(matrices, key=lambda matrix: abs(matrix.weights - (1 << 22)))

    def read() -> int:
        value = (
            model_map.read(matrix.name)
            if matrix.expert is None
            else model_map.read_expert(matrix.name, matrix.expert)
        )
        return int(torch.isfinite(value.float()).sum())

    return min(_clock(read), _clock(read)) / matrix.weights
