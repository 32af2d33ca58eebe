"""Input scales: columns of a matrix divided by factors of their own before they are rounded.

An error costs tr(E H Eᵀ) and the code's error is alike in all columns of a row, as large as the row's energy makes it.
With the columns divided by S the energy is Σ c_j / S_j², c_j being that of column j in all rows, each row weighted by
what it matters; and H becomes S H S, of which error feedback leaves about Σ S_j² d_j, d_j = 1 / (H⁻¹)_jj being what the
other inputs cannot make up for. The product is least where S_j⁴ = c_j / d_j. (Scales on the inputs for quantization's
sake: SmoothQuant, Xiao et al. 2023; AWQ, Lin et al. 2024.)
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.packing import encode_input_scales, input_factors
from ciuic_cli.passes.linear_algebra import damped_cholesky, solve_lower
from ciuic_cli.passes.quantize import INPUT_DAMPING, ROWS_AT_ONCE, Importance, input_feedback
from ciuic_cli.threads import one_thread

_LEAST = 1e-6
"""Share of the mean energy that every column counts as having at least."""


def scaled(
    weight: torch.Tensor, importance: Importance, input_scale: NDArray[np.uint8] | None
) -> tuple[torch.Tensor, Importance]:
    """A weight (m, n) and its importance as they are with the inputs scaled."""
    if input_scale is None:
        return weight, importance
    factors = input_factors(input_scale)
    contexts = importance.contexts
    return weight / factors, replace(
        importance,
        inputs=_scaled_moment(importance.inputs, factors),
        contexts=None if contexts is None else contexts * factors,
    )


def _scaled_moment(moment: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return moment * factors * factors[:, None]


def input_scales(weight: torch.Tensor, importance: Importance) -> NDArray[np.uint8] | None:
    """The codes (n,) of the best input scales of a weight (m, n) float32; None where they do not pay for their bytes.

    Halving an error takes one bit of every weight, and the scales take a byte of every column.
    """
    rows, cols = weight.shape
    energy = _column_energy(weight, importance.outputs)
    inverse = _inverse_diagonal(importance.inputs)
    if inverse is None:
        return None
    with one_thread():
        mean = energy.mean()
        if not mean > 0:
            return None
        wish = (energy.clamp_min(_LEAST * mean) * inverse) ** 0.25
        wish /= wish.log().mean().exp()
        codes = encode_input_scales(wish)
        factors = input_factors(codes)
        shrunk = (energy / factors.double() ** 2).sum() / energy.sum()
    saved = -0.5 * math.log2(
        float(shrunk) * _cost(_scaled_moment(importance.inputs, factors)) / _cost(importance.inputs)
    )  # bits per weight
    return codes if saved * rows * cols > 8 * cols else None


def _column_energy(weight: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """(n,) float64 energy of each column of a weight (m, n), its rows weighted by G's diagonal."""
    g = (outputs if outputs.dim() == 1 else outputs.diagonal()).float()
    energy = torch.zeros(weight.shape[1], dtype=torch.float64)
    with one_thread():
        for begin in range(0, len(weight), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            energy += (weight[rows].square() * g[rows, None]).sum(0, dtype=torch.float64)
    return energy


def _inverse_diagonal(moment: torch.Tensor) -> torch.Tensor | None:
    """(n,) float64 diagonal of the inverse of H (n, n), damped as for rounding; None where it has none."""
    h = moment.to(torch.float64, copy=True)
    with one_thread():
        average = h.diagonal().mean()
    h.diagonal().add_(INPUT_DAMPING * average + 1e-12)
    lower, _ = damped_cholesky(h)
    del h
    if lower is None:
        return None
    columns = solve_lower(lower, torch.eye(len(lower), dtype=torch.float64))
    with one_thread():
        return columns.square_().sum(0)


def _cost(moment: torch.Tensor) -> float:
    """tr(D): what error feedback leaves of H (n, n)."""
    noise = input_feedback(moment)[1].noise
    with one_thread():
        return float(noise.sum())
