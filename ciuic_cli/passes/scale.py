"""Input scales: every column of a matrix is divided by a factor before it is rounded, and its input multiplied by it.

The code's error has the same variance in all columns of a row, proportional to the row's effective variance. The loss
of this error is proportional to tr(D) of H = L D Lᵀ. With columns divided by S_j, block b of a row has the energy
e_b = Σ w_j² / S_j², and the row's effective variance is the power mean of order p of these (`effective_variance.py`).
H becomes S H S, whose tr(D) is taken as Σ S_j² d_j. Here d_j = 1 / (H⁻¹)_jj is the part of input j that the other
inputs cannot compensate; where there are many inputs, the others in its block of at most BLOCK_INPUTS.

Every row gets the bits that it needs. So the bits per weight grow with the mean logarithm of the rows' effective
variances plus log tr(D). Their sum is least where S_j⁴ = c_j / d_j; c_j is w_j² e_b^(p-1) / Σ e_b^p, summed over the
rows. The energies depend on S, so a fixed-point iteration finds it.

Sources: SmoothQuant (Xiao et al. 2023) and AWQ (Lin et al. 2024) scale inputs for quantization.
Measured: docs/experiments/codes/input-scales.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.scales import encode_input_scales, input_factors
from ciuic_cli.codecs.transform import TILE, block_width, padded
from ciuic_cli.passes.chunk_size import equal_slices, part_slices
from ciuic_cli.passes.effective_variance import effective_variance, log_variance_gradient
from ciuic_cli.passes.feedback import input_damping
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.linear_algebra import damped_cholesky, inverse_lower
from ciuic_cli.process.threads import one_thread

BLOCK_INPUTS = 1024
"""Most inputs of a block of H whose inverse is computed. With 1,536 inputs, two blocks take a third of the time of all
inputs together and cost 0.001 bits per weight of down projections. With 8,960, a quarter of the inputs per block takes
a tenth and costs 0.002 bits (measured: docs/experiments/scale/large-moments.md)."""
_ITERATIONS = 5
"""Fixed-point iterations (chosen, not tuned). All but the first change log S by half of the difference; the whole
difference would make loud and quiet blocks change places for ever."""
_SHARE_FLOOR = 1e-6
"""Least share c_j of a column, relative to the mean share (chosen, not tuned)."""
_VARIANCE_FLOOR = 1e-30
"""Rows with no more effective variance than this are zero, and do not count (chosen, not tuned)."""


def scaled(
    weight: torch.Tensor, fisher: KroneckerFisher, input_scale: NDArray[np.uint8] | None
) -> tuple[torch.Tensor, KroneckerFisher]:
    """Divide the columns of a weight (m, n) by the input scales and transform its Fisher information accordingly.

    `weight` and H are changed in place. input_scale: (n,) codes; None changes nothing.
    """
    if input_scale is None:
        return weight, fisher
    factors = input_factors(input_scale).to(weight.device)
    contexts = None if fisher.contexts is None else replace(fisher.contexts, column_factors=factors)
    inputs = fisher.inputs.mul_(factors).mul_(factors[:, None])
    return weight.div_(factors), replace(fisher, inputs=inputs, contexts=contexts)


def input_scales(weight: torch.Tensor, fisher: KroneckerFisher) -> NDArray[np.uint8] | None:
    """The codes (n,) of the best input scales of a weight (m, n) float32; None if they save less than their bytes.

    The scales take one byte per column. One bit per weight is worth a factor of four in the loss.
    """
    rows, cols = weight.shape
    if not bool(weight.any()):
        return None
    inverse = _inverse_diagonal(fisher.inputs)
    if inverse is None:
        return None
    scales = torch.ones(cols, dtype=torch.float64, device=weight.device)
    with one_thread():
        for iteration in range(_ITERATIONS):
            share = _column_shares(weight, scales.float())
            target = (share.clamp_min(_SHARE_FLOOR * share.mean()) * inverse) ** 0.25
            scales = (scales * target).sqrt() if iteration else target
            scales /= scales.max()  # at most 1: no activation overflows
        codes = encode_input_scales(scales.cpu())
    factors = input_factors(codes).to(weight.device)
    log_saved = _mean_log_variance(weight, torch.ones_like(factors)) - _mean_log_variance(weight, factors)
    with one_thread():
        plain, better = float((1 / inverse).sum()), float((factors.double().square() / inverse).sum())
        log_saved += math.log(plain / better)
    return codes if log_saved / math.log(4.0) * rows * cols > 8 * cols else None


def _block_energies(
    weight: torch.Tensor, factors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For some rows of a weight (m, n) at a time: their squares (rows, blocks, block width), padded; and the
    mean squares (rows, blocks) of each block with the columns divided by `factors`."""
    padding, blocks = padded(weight.shape[1]) - weight.shape[1], (-1, block_width(weight.shape[1]))
    inverse_squares = torch.nn.functional.pad(factors.square().reciprocal(), (0, padding))
    inverse_squares = inverse_squares.unflatten(0, blocks)
    for part in part_slices(weight):
        rows = weight[part].square()
        squares = (torch.nn.functional.pad(rows, (0, padding)) if padding else rows).unflatten(1, blocks)
        yield squares, (squares * inverse_squares).mean(2)


def _column_shares(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """c of the top of this file, (n,) float64, up to a constant factor."""
    shares = torch.zeros(padded(weight.shape[1]), dtype=torch.float64, device=weight.device)
    for squares, block_squares in _block_energies(weight, factors):
        squares.mul_(log_variance_gradient(block_squares)[:, :, None])
        shares += squares.flatten(1).sum(0, dtype=torch.float64)
    return shares[: weight.shape[1]]


def _mean_log_variance(weight: torch.Tensor, factors: torch.Tensor) -> float:
    """Mean logarithm of the effective variances of all rows that are not zero."""
    width = block_width(weight.shape[1])
    with one_thread():
        energies = _block_energies(weight, factors)
        variances = torch.cat([effective_variance(block_squares, width) for _, block_squares in energies])
        return float(variances[variances > _VARIANCE_FLOOR].double().log().mean())


def _inverse_diagonal(moment: torch.Tensor) -> torch.Tensor | None:
    """(n,) float64 diagonal of H⁻¹ for H (n, n), damped as for rounding; None if H could not be factored.

    With more than BLOCK_INPUTS inputs, H is taken as block diagonal, in blocks of about the same size.
    """
    with one_thread():
        damping = input_damping(moment.diagonal().mean())
    parts = []
    for inputs in equal_slices(len(moment), BLOCK_INPUTS):
        damped = moment[inputs, inputs].clone()
        damped.diagonal().add_(damping)
        lower, _ = damped_cholesky(damped)
        if lower is None:
            return None
        squares = inverse_lower(lower).square_()  # H⁻¹ is the Gram matrix of the inverse
        with one_thread():
            # A float64 sum of float32 numbers takes five times as long as the float32 sums of blocks of rows.
            sums = torch.stack([rows.sum(0) for rows in squares.split(TILE)])
            parts.append(sums.sum(0, dtype=torch.float64))
    return torch.cat(parts)
