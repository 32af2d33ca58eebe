"""Times of the work on one weight matrix, measured on random matrices of its shape.

The timed matrices have at most `TIMED_SIZE` rows and columns, those of coding `TIMED_CODED`. Times are scaled up:
factorisations by what a matrix of twice the size takes, coding by the number of weights, everything else by the
matrix's area. On a GPU everything but decoding is timed there, with as many matrices in work at once as in the run;
coding is also scaled by how much of the GPU the fronts of the two matrices fill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import torch

from ciuic_cli.allocation.machine import Machine
from ciuic_cli.allocation.matrices import (
    UNPROBED_ROLES,
    UNPRUNED_ROLES,
    WeightMatrix,
    full_outputs,
)
from ciuic_cli.allocation.pool_factors import SHARED_INPUT_ROLES
from ciuic_cli.allocation.pricing import UNSORTED_POOLED_ROLES
from ciuic_cli.allocation.probes import with_rounding_noise
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.packing import PackedMatrix
from ciuic_cli.codecs.trellis import decode_dense
from ciuic_cli.layerwise.operations.sequence_attention import NativeAttention
from ciuic_cli.layerwise.operations.stable_bits import outer_product
from ciuic_cli.passes import lowrank
from ciuic_cli.passes.chunk_size import device_kind
from ciuic_cli.passes.feedback import factor_inputs, factor_outputs
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.predicted_loss import pruning_loss
from ciuic_cli.passes.prepare import prepare
from ciuic_cli.passes.rounding import round_prepared
from ciuic_cli.passes.scale import BLOCK_INPUTS, input_scales
from ciuic_cli.passes.shared_factors import share_inputs, share_outputs
from ciuic_cli.process.threads import parallel_map
from ciuic_cli.statistics.compact import compact, expanded
from ciuic_cli.statistics.sums import CHUNK_SEQUENCES
from ciuic_cli.statistics.symmetric_product import add_symmetric_product

TIMED_SIZE = 1024
"""Most rows and columns of the matrices that are timed. No measurement is on record."""
TIMED_CODED = {"cpu": (64, TIMED_SIZE), "gpu": (256, 256)}
"""Most rows and columns of the matrices whose coding is timed, by kind of device: coding takes far longer than the
rest. On a GPU a front costs its launches whatever its size: with 1024 x 1024, timing the sample took over a minute on
an H200. Not tuned."""
TIMED_WINDOWS = (12, 14)
"""Trellis state bits with which coding is timed: the shortest, and most of those that `--effort default` chooses."""
TIMING_REPEATS = {"cpu": 2, "gpu": 1}
"""Repetitions of each timing, by kind of device. The shortest counts: other work on the machine delayed the others. On
a GPU a repetition has up to sixteen matrices. Chosen, not tuned."""
_TIMED_TOKENS = 512
"""Tokens of the timed product and attention: a usual length of calibration sequences."""
TIMED_FEW_TOKENS = 32
"""Tokens of the product that `time_few_tokens` times. Chosen: an expert gets about so many in a probe."""
_TIMED_HEADS, _HEAD_SIZE = 16, 64
"""Heads of the timed attention, and the numbers of each. Chosen: SmolLM2's heads are as large."""
_TIMED_READ_WEIGHTS = 1 << 22
"""Weights of the matrix on which reading is timed, if the model has one of that size. Chosen, not tuned."""


def role_of_timing(role: str) -> str:
    """One name for all roles whose matrices are treated alike, so that each shape is timed once."""
    is_special = role.startswith("expert") or role in UNPRUNED_ROLES
    return role if is_special else "linear"


def time_matrix(matrix: WeightMatrix, machine: Machine, *, ranks: bool, pooled: bool) -> dict[str, float]:
    """Seconds for pricing the "arms" of one matrix, one "probe" of it, to "encode" and to "decode" it.

    Where G is full, pricing takes "outputs of arms" seconds more, and a probe and coding "outputs" seconds. The search
    takes "state" seconds more for each mean state per weight: it is timed with two windows.

    Matrices are timed side by side as in the run, and the time is divided by their number.

    Args:
        ranks: whether arms with a low-rank part are priced.
        pooled: whether it is an expert that has only diagonals of moments beside its pool's.
    """
    full, kind = full_outputs(matrix.role, matrix.rows, matrix.cols), device_kind(machine.device)
    rows, cols = min(matrix.rows, TIMED_SIZE), min(matrix.cols, TIMED_SIZE)
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(machine.device)
    fisher = KroneckerFisher(torch.eye(cols) / cols, torch.eye(rows) if full else torch.ones(rows))
    fisher = fisher.to(machine.device)
    prepared = prepare(weight, fisher)  # not timed: the first call also loads the native library
    factored = factor_inputs(fisher.inputs)
    bits = np.full(len(prepared.weight) // 16, 4, np.uint8)
    coded_rows, coded_cols = (
        min(most, size) for most, size in zip(TIMED_CODED[kind], (rows, cols), strict=True)
    )
    of_rows = fisher.outputs[:coded_rows]
    part = prepare(
        weight[:coded_rows, :coded_cols],
        KroneckerFisher(
            fisher.inputs[:coded_cols, :coded_cols],
            of_rows[:, :coded_rows] if full and kind == "gpu" else of_rows.new_ones(coded_rows),
        ),
    )
    parallel = machine.side_by_side(matrix)

    def clock(run: Callable[[], Any]) -> float:
        def run_on_machine(_: int) -> None:
            with machine.own_stream():
                run()

        def together() -> None:
            for _ in parallel_map(range(parallel), run_on_machine, lambda _: parallel):
                pass
            machine.settle()

        machine.settle()
        return min(_clock(together) for _ in range(TIMING_REPEATS[kind])) / parallel

    def of_identity(factor: Callable[[torch.Tensor], Any]) -> Callable[[int], float]:
        def seconds(size: int) -> float:
            moment = torch.eye(size, device=machine.device) / size
            return clock(lambda: factor(moment))

        return seconds

    area_growth = matrix.weights / (rows * cols)
    timed_inputs, of_inputs = clock(lambda: factor_inputs(fisher.inputs)), cache(of_identity(factor_inputs))
    # Times of factorisations grow by this from the timed matrix to the real one.
    own_inputs = timed_inputs * factor_growth(timed_inputs, cols, matrix.cols, of_inputs)
    own_outputs = 0.0
    if full:
        own_outputs = clock(lambda: factor_outputs(fisher.outputs))
        own_outputs *= factor_growth(own_outputs, rows, matrix.rows, of_identity(factor_outputs))
    rest = area_growth * clock(lambda: prepare(weight, fisher, factored, prepared.outputs))
    # Moments are on the disk in a compact form, which each phase expands again.
    stored = compact(fisher.inputs.cpu())
    rest += (matrix.cols / cols) ** 2 * clock(lambda: expanded(**stored))
    predicted_inputs, outputs = own_inputs, own_outputs  # of pricing and probes; of rows in natural order
    if pooled:
        if matrix.role in SHARED_INPUT_ROLES:
            inputs_pool = share_inputs(fisher.inputs)
            assert inputs_pool is not None
            predicted_inputs = (matrix.cols / cols) ** 2 * clock(lambda: inputs_pool.of(fisher.inputs))
        outputs_pool = share_outputs(fisher.outputs) if full else None
        if outputs_pool is not None:
            ratios = weight.new_ones(rows)
            outputs = (matrix.rows / rows) ** 2 * clock(lambda: outputs_pool.of(ratios, fisher.outputs))
    sorts = not (pooled and matrix.role in UNSORTED_POOLED_ROLES)
    planned_outputs = own_outputs if sorts else outputs  # most plans sort the rows that may be sorted
    if full:
        stored_outputs = compact(fisher.outputs.cpu())
        loading = (matrix.rows / rows) ** 2 * clock(lambda: expanded(**stored_outputs))
        outputs, planned_outputs = outputs + loading, planned_outputs + loading
    pricing = area_growth * (
        clock(lambda: prepared.with_weight(weight).row_sensitivity)
        + clock(lambda: pruning_loss(weight, fisher)) * matrix.cols / cols
    )
    if not matrix.role.startswith("expert") and matrix.role not in UNPROBED_ROLES:
        block = min(matrix.cols, BLOCK_INPUTS)  # larger moments are inverted in blocks
        block_growth = factor_growth(timed_inputs, cols, block, of_inputs)
        pricing += matrix.cols / block * block_growth * clock(lambda: input_scales(weight, fisher))
    if ranks and matrix.role not in UNPRUNED_ROLES:
        pricing += area_growth * clock(
            lambda: lowrank.residual_energies(weight, weight.new_ones(rows), lowrank.RANKS)
        )
    solves = matrix.cols + (matrix.rows if full else 0), cols + (rows if full else 0)
    solve_growth = area_growth * solves[0] / solves[1]
    perturbing = solve_growth * clock(
        lambda: with_rounding_noise(prepared, bits, TIMED_WINDOWS[0], torch.Generator().manual_seed(0))
    )
    packed: list[PackedMatrix] = []
    coded_bits = bits[: len(part.weight) // 16]

    def coding(L: int) -> float:
        if kind == "gpu":  # the first call compiles the kernels
            round_prepared(part, coded_bits, L=L, rounder=machine.rounder)
        seconds = clock(lambda: packed.append(round_prepared(part, coded_bits, L=L, rounder=machine.rounder)))
        seconds *= matrix.rows / coded_rows * matrix.cols / coded_cols
        return seconds * (
            _filled(coded_rows, coded_cols, full, parallel, machine)
            / _filled(matrix.rows, matrix.cols, full, parallel, machine)
        )

    short, long = TIMED_WINDOWS
    seconds = {L: coding(L) for L in TIMED_WINDOWS}
    per_state = max(0.0, seconds[long] - seconds[short]) / ((1 << long) - (1 << short))
    without_states = max(0.0, seconds[short] - per_state * (1 << short))
    decoding = clock(lambda: decode_dense(packed[0])) * matrix.weights / (packed[0].rows * packed[0].cols)
    return {
        "arms": predicted_inputs + rest + pricing,
        "outputs of arms": outputs,
        "probe": predicted_inputs + rest + perturbing,
        "encode": own_inputs + rest + without_states,
        "outputs": planned_outputs,
        "state": per_state,
        "decode": decoding,
    }


def factor_growth(seconds: float, timed: int, size: int, clock: Callable[[int], float]) -> float:
    """By what the time of factorising grows from `timed` rows, which took `seconds`, to `size` rows.

    Factorisations of n rows take a n² + b n³, and at a thousand rows the first term is not small: the cube of the size
    alone forecast 1.8 times the time of 4,096 rows. Both terms follow from a second time.

    clock: seconds for a number of rows, at most twice as many as were timed.
    """
    if size <= timed:
        return 1.0
    second = min(size, 2 * timed)
    per_square, second_per_square = seconds / timed**2, clock(second) / second**2
    cubic = max(0.0, second_per_square - per_square) / (second - timed)
    square = max(0.0, second_per_square - cubic * second)
    return (square + cubic * size) * size**2 / seconds


def _filled(rows: int, cols: int, two_sided: bool, parallel: int, machine: Machine) -> float:
    """Share of the machine that `parallel` matrices of this shape keep busy while they are rounded."""
    return min(1.0, parallel * machine.occupancy(rows, cols, two_sided))


def time_products(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds per weight and token of a product in `dtype`."""
    x, w = (torch.randn(rows, TIMED_SIZE, device=device).to(dtype) for rows in (_TIMED_TOKENS, TIMED_SIZE))
    best = _least_time(lambda: float(torch.nn.functional.linear(x, w)[-1, -1]), device)
    return best / (_TIMED_TOKENS * TIMED_SIZE * TIMED_SIZE)


def time_few_tokens(device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> float:
    """Seconds per weight of a product in `dtype` with `TIMED_FEW_TOKENS` tokens. stored: the weights' dtype in memory.

    The library converts and packs the weights for every product. With the few tokens that an expert gets in a probe,
    that takes longer than the multiplications.
    """
    x = torch.randn(TIMED_FEW_TOKENS, TIMED_SIZE, device=device).to(dtype)
    w = torch.randn(TIMED_SIZE, TIMED_SIZE, device=device).to(stored)
    multiply = outer_product if dtype == torch.float32 else torch.nn.functional.linear
    return _least_time(lambda: float(multiply(x, w.to(dtype))[-1, -1]), device) / (TIMED_SIZE * TIMED_SIZE)


def time_moments(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds per number of H or G (as if both halves were computed) and token. dtype: to which vectors are rounded."""
    vectors = torch.randn(_TIMED_TOKENS, TIMED_SIZE, device=device).to(dtype)
    moment = torch.zeros(TIMED_SIZE, TIMED_SIZE, device=device)

    def add() -> float:
        add_symmetric_product(moment, vectors, vectors, dtype, rounded=True)
        return float(moment[-1, -1])

    return _least_time(add, device) / (_TIMED_TOKENS * TIMED_SIZE * TIMED_SIZE)


def time_activations(width: int, device: torch.device) -> float:
    """Seconds per number for an operation on the float32 activations of a chunk of text, (tokens, width).

    The system maps and clears the memory of large activations anew every time.
    """
    x = torch.randn(CHUNK_SEQUENCES * _TIMED_TOKENS, width, device=device)
    return _least_time(lambda: float((x * 2.0)[-1, -1]), device) / x.numel()


def time_attention(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of causal attention forward, and of forward and backward, per query, key, and number of all heads'
    outputs."""
    shape = (1, _TIMED_HEADS, _TIMED_TOKENS, _HEAD_SIZE)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> torch.Tensor:
        with NativeAttention():
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward() -> float:
        with torch.no_grad():
            return float(attend()[0, -1, -1, -1])

    def both() -> float:
        output = attend()
        gradient, *_ = torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
        return float(gradient[0, -1, -1, -1])

    work = _TIMED_TOKENS * _TIMED_TOKENS * _TIMED_HEADS * _HEAD_SIZE
    return _least_time(forward, device) / work, _least_time(both, device) / work


def _least_time(run: Callable[[], Any], device: torch.device) -> float:
    run()
    return min(_clock(run) for _ in range(TIMING_REPEATS[device_kind(device)]))


def time_reading(model_map: ModelMap, matrices: Iterable[WeightMatrix]) -> float:
    """Seconds per weight to read, decode and copy a matrix."""
    matrix = min(matrices, key=lambda matrix: abs(matrix.weights - _TIMED_READ_WEIGHTS))

    def read() -> int:
        value = (
            model_map.read(matrix.name)
            if matrix.expert is None
            else model_map.read_expert(matrix.name, matrix.expert)
        )
        return int(torch.isfinite(value.float()).sum())

    return min(_clock(read), _clock(read)) / matrix.weights


def _clock(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
