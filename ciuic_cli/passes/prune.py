"""The prune pass: structured pruning of MLP channels and routed experts.

To prune is to set weights to zero and store no codes for them. The bit allocation prunes single row groups: 0 bits are
one of their arms. This module adds two structures that span several matrices: a block of 16 MLP channels (rows of gate
and up, and the matching columns of down), and a whole routed expert. The loss of a structure is that of its down
projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.transform import TILE
from ciuic_cli.integers import ceil_div
from ciuic_cli.passes.feedback import pad_square
from ciuic_cli.passes.fisher import KroneckerFisher
from ciuic_cli.passes.linear_algebra import damped_cholesky, solve_lower, solve_transposed
from ciuic_cli.process.threads import one_thread

CORRECTION_DAMPING = 1e-2
"""Added to the diagonal of H of the kept inputs before the least-squares correction, as a share of its mean (chosen,
not tuned)."""


@dataclass(frozen=True)
class Structure:
    """Row groups of several matrices that are pruned together, or not at all.

    Attributes:
        down: key of the down projection whose inputs are pruned.
        block: the pruned block of 16 columns of `down`; None: all of `down`, with its expert.
        members: (matrix key, row group) pairs; a group of None means all rows.
        loss: KL per token of pruning the structure.
    """

    down: str
    block: int | None
    members: tuple[tuple[str, int | None], ...]
    loss: float


def masks(structures: Iterable[Structure], groups: Mapping[str, int]) -> dict[str, NDArray[np.bool_]]:
    """One mask (groups,) of pruned row groups per matrix that has any; groups: matrix key -> number of row groups."""
    pruned: dict[str, NDArray[np.bool_]] = {}
    for structure in structures:
        for key, group in structure.members:
            mask = pruned.setdefault(key, np.zeros(groups[key], bool))
            mask[slice(None) if group is None else group] = True
    return pruned


def groups_to_prune(
    candidates: Mapping[str, tuple[NDArray[np.float64], int]], share: float
) -> dict[str, NDArray[np.bool_]]:
    """Masks of the row groups that together have `share` of all candidates' weights, those with the least loss per
    weight.

    candidates: matrix key -> (pruning loss of each row group, weights in a group).
    """
    entries = [
        (float(loss) / weights, key, group, weights)
        for key, (losses, weights) in candidates.items()
        for group, loss in enumerate(losses)
    ]
    to_prune = share * sum(entry[3] for entry in entries)
    pruned = {key: np.zeros(len(losses), bool) for key, (losses, _) in candidates.items()}
    for _, key, group, weights in sorted(entries):
        if to_prune <= 0:
            break
        pruned[key][group] = True
        to_prune -= weights
    return pruned


def channel_loss(down: torch.Tensor, fisher: KroneckerFisher) -> NDArray[np.float64]:
    """(ceil(n / 16),) KL per token of pruning each block of 16 inputs of a down projection (m, n), the others
    unchanged."""
    g, h = fisher.outputs, fisher.inputs
    extra = -down.shape[1] % TILE
    down = torch.nn.functional.pad(down, (0, extra))
    weighted = down * g[:, None] if g.dim() == 1 else g @ down
    left, right = (matrix.unflatten(1, (-1, TILE)).movedim(1, 0) for matrix in (down, weighted))
    gram = left.transpose(1, 2) @ right  # (blocks, 16, 16): wᵢᵀ G wⱼ of the inputs in a block
    inputs = pad_square(h)  # by any values, because they multiply zeros
    inputs = inputs.unfold(0, TILE, TILE).unfold(1, TILE, TILE).diagonal().permute(2, 0, 1)
    with one_thread():
        losses: NDArray[np.float64] = 0.5 * (gram * inputs).sum((1, 2)).double().cpu().numpy()
    return losses


def pruned_columns(structures: Iterable[Structure], key: str, cols: int) -> torch.Tensor | None:
    """Mask (cols,) of the pruned inputs of the matrix `key`; None if there are none."""
    blocks = [s.block for s in structures if s.down == key and s.block is not None]
    if not blocks:
        return None
    mask = torch.zeros(ceil_div(cols, TILE), TILE, dtype=torch.bool)
    mask[blocks] = True
    return mask.reshape(-1)[:cols]


def correct_kept(down: torch.Tensor, h: torch.Tensor, pruned: torch.Tensor) -> torch.Tensor:
    """A copy of the down projection (m, n) with zeros in the pruned columns, the kept ones corrected by least squares.

    As far as inputs are correlated, the kept columns k take over the contribution of the pruned ones p:
    W_k + W_p H_pk H_kk⁻¹. Source: optimal brain surgeon (Hassibi & Stork 1993), for a set of columns.

    Args:
        h: H (n, n) of the inputs.
        pruned: (n,) bool.
    """
    pruned = pruned.to(down.device)
    kept = ~pruned
    corrected = down.clone()
    corrected[:, pruned] = 0
    block = h[kept][:, kept].double()
    block.diagonal().add_(CORRECTION_DAMPING * block.diagonal().mean())
    lower, _ = damped_cholesky(block)
    if lower is not None:
        transfer = solve_transposed(lower, solve_lower(lower, h[kept][:, pruned].double()))  # H_kk⁻¹ H_kp
        corrected[:, kept] += down[:, pruned] @ transfer.float().T
    return corrected
