"""The predicted loss of every choice of bits: KL per token of rounding a group of 16 rows, or of pruning it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.rate_distortion import MSE_BY_L
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.passes import feedback
from ciuic_cli.passes.chunk_size import chunk_rows, equal_slices
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.process.threads import one_thread

MULTIPLIED_COLUMNS = 1024
"""Most columns of H that are multiplied at a time. The products above its diagonal are left out: nearly half of all
where there are many columns (chosen, not tuned)."""


def predicted_loss(
    sensitivity: NDArray[np.float64], pruning: NDArray[np.float64], bits: tuple[float, ...], L: int
) -> NDArray[np.float64]:
    """KL per token of each group at each number of bits per weight, (groups, len(bits)).

    Args:
        sensitivity: (groups,) KL per unit of normalised code error: sums of `PreparedMatrix.row_sensitivity`.
        pruning: (groups,) KL of pruning the group, which is what 0 bits mean.
        bits: bits per weight K. The normalised error of the code is MSE_BY_L[L][K] 4^-K.
        L: trellis state bits.
    """
    error = MSE_BY_L[L]
    columns = [pruning if k == 0 else sensitivity * error[k] * 4.0**-k for k in bits]
    return np.stack(columns, axis=1)


def pruning_loss(weight: torch.Tensor, fisher: KroneckerFisher) -> torch.Tensor:
    """(m,) KL per token of setting each row of a weight (m, n) float32 to zero."""
    h, g = fisher.inputs.float(), fisher.outputs
    g = (g if g.dim() == 1 else g.diagonal()).float()
    with one_thread():
        mean, damping = float(g.mean()), feedback.INPUT_DAMPING * float(h.diagonal().mean())
    chunks = weight.split(chunk_rows(weight.shape[1]))
    row_energy = [_energy(w, h) + damping * w.square().sum(1) for w in chunks]
    # The curvature does not describe errors as large as a whole row: pruning a saturated attention head seems free. So
    # G of every row counts as at least the mean (measured: docs/experiments/allocation/saturated-heads.md).
    return 0.5 * g.clamp_min(mean) * torch.cat(row_energy)


def _energy(weight: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """(m,) wᵀ H w of each row of a weight (m, n), for a symmetric H (n, n) of which the lower half is read."""
    energy = weight.new_zeros(len(weight))
    for part in equal_slices(len(moment), MULTIPLIED_COLUMNS):
        columns, rest = weight[:, part], slice(part.stop, None)
        product = 0.5 * columns @ moment[part, part]
        if part.stop < len(moment):
            product.addmm_(weight[:, rest], moment[rest, part])
        energy += 2 * (product * columns).sum(1)
    return energy


def group_sums(per_row: torch.Tensor) -> NDArray[np.float64]:
    """(groups,) sums of a value per row (m,) over groups of 16 rows."""
    padded = torch.nn.functional.pad(per_row, (0, -len(per_row) % TILE))
    return padded.double().reshape(-1, TILE).sum(1).cpu().numpy()
