"""Input scales: columns of a matrix divided by factors of their own before they are rounded.

The code's error is alike in all columns of a row, as large as the row's energy makes it, and costs tr(D), which error
feedback leaves of H. With the columns divided by S the energy of block b of a row is e_b = Σ w_j² / S_j², that of the
row their power mean of order p (`unevenness.py`), and H becomes S H S, of which about Σ S_j² d_j is left, with
d_j = 1 / (H⁻¹)_jj, what the other inputs cannot make up for. Each row has the bits that it needs, so what counts is the
mean logarithm of the rows' energies, plus that of tr(D). It is least where S_j⁴ = c_j / d_j, c_j being
w_j² e_b^(p-1) / Σ e_b^p, added up over the rows; the energies depend on S in their turn. (Scales on the inputs for
quantization's sake: SmoothQuant, Xiao et al. 2023; AWQ, Lin et al. 2024.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.scales import encode_input_scales, input_factors
from ciuic_cli.codecs.transform import block_width, padded
from ciuic_cli.passes.linear_algebra import damped_cholesky, solve_lower
from ciuic_cli.passes.quantize import ROWS_AT_ONCE, Feedback, KroneckerFisher, damp, input_feedback
from ciuic_cli.passes.unevenness import even_square, influence
from ciuic_cli.process.threads import one_thread

_ROUNDS = 5
"""How often the shares c are taken, each time of the energies as the scales then are. After the first, half of a step
is taken, in logarithms: with whole ones loud and quiet blocks would change places for ever."""
_LEAST = 1e-6
"""What every column counts as having at least, as a share of the mean."""
_NOTHING = 1e-30


def scaled(
    weight: torch.Tensor, fisher: KroneckerFisher, input_scale: NDArray[np.uint8] | None
) -> tuple[torch.Tensor, KroneckerFisher]:
    """A weight (m, n) and its importance with the inputs scaled: weight and contexts in their own memory."""
    if input_scale is None:
        return weight, fisher
    factors = input_factors(input_scale)
    if fisher.contexts is not None:
        fisher.contexts.mul_(factors)
    return weight.div_(factors), replace(fisher, inputs=_scaled_moment(fisher.inputs, factors))


def input_scales(weight: torch.Tensor, fisher: KroneckerFisher, inputs: Feedback) -> NDArray[np.uint8] | None:
    """The codes (n,) of the best input scales of a weight (m, n) float32; None where they do not pay for their bytes.

    Scales take a byte of every column; halving the error saves one bit of every weight.

    Args:
        inputs: the feedback as it is without them.
    """
    rows, cols = weight.shape
    if not bool(weight.any()):
        return None
    inverse = _inverse_diagonal(fisher.inputs)
    if inverse is None:
        return None
    wish = torch.ones(cols, dtype=torch.float64)
    with one_thread():
        for number in range(_ROUNDS):
            share = _column_shares(weight, wish.float())
            found = (share.clamp_min(_LEAST * share.mean()) * inverse) ** 0.25
            wish = (wish * found).sqrt() if number else found
            wish /= wish.max()  # at most 1: no activation overflows
        codes = encode_input_scales(wish)
    factors = input_factors(codes)
    saved = _mean_log_energy(weight, torch.ones(cols)) - _mean_log_energy(weight, factors)
    left = input_feedback(_scaled_moment(fisher.inputs, factors))[1]
    with one_thread():
        saved += math.log(float(inputs.noise.sum()) / float(left.noise.sum()))
    return codes if saved / math.log(4.0) * rows * cols > 8 * cols else None


def _scaled_moment(moment: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return moment * factors * factors[:, None]


def _energies(weight: torch.Tensor, factors: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of some rows of a weight (m, n) at a time: the squares by the transform's blocks, padded (rows, blocks, width),
    and their means over each block with the columns divided by factors, (rows, blocks)."""
    padding, blocks = padded(weight.shape[1]) - weight.shape[1], (-1, block_width(weight.shape[1]))
    shares = torch.nn.functional.pad(factors.square().reciprocal(), (0, padding)).unflatten(0, blocks)
    for begin in range(0, len(weight), ROWS_AT_ONCE):
        rows = weight[begin : begin + ROWS_AT_ONCE].square()
        squares = (torch.nn.functional.pad(rows, (0, padding)) if padding else rows).unflatten(1, blocks)
        yield squares, (squares * shares).mean(2)


def _column_shares(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """c, (n,) float64, up to a factor."""
    found = torch.zeros(padded(weight.shape[1]), dtype=torch.float64)
    for squares, blocks in _energies(weight, factors):
        squares.mul_(influence(blocks)[:, :, None])
        found += squares.flatten(1).sum(0, dtype=torch.float64)
    return found[: weight.shape[1]]


def _mean_log_energy(weight: torch.Tensor, factors: torch.Tensor) -> float:
    """Over the rows that have any."""
    with one_thread():
        energies = torch.cat(
            [even_square(blocks, block_width(weight.shape[1])) for _, blocks in _energies(weight, factors)]
        )
        return float(energies[energies > _NOTHING].double().log().mean())


def _inverse_diagonal(moment: torch.Tensor) -> torch.Tensor | None:
    """(n,) float64 diagonal of the inverse of H (n, n), damped as for rounding; None where it has none."""
    h = moment.to(torch.float64, copy=True)
    damp(h)
    lower, _ = damped_cholesky(h)
    del h
    if lower is None:
        return None
    columns = solve_lower(lower, torch.eye(len(lower), dtype=torch.float64))
    with one_thread():
        return columns.square_().sum(0)
