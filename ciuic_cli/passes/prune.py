"""The prune pass: what can be left out altogether, decided by the same price as every other arm.

Row groups are pruned inside the budget itself (width 0 is one of their arms). This module adds the two
structures in which several matrices go together: the channels of an MLP (the rows of gate and up, and with them
the columns of down), and whole routed experts. Removing them costs what the down projection loses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.passes.linear_algebra import damped_cholesky, solve_lower, solve_transposed
from ciuic_cli.passes.quantize import BLOCK, KroneckerFisher


@dataclass(frozen=True)
class Structure:
    """Row groups of several matrices that go together.

    down: the matrix that loses inputs; block: which 16 of its columns (None: all of it, an expert); members:
    (matrix, row group) pairs, the group None where it is all of them; loss: KL per token of the removal.
    """

    down: str
    block: int | None
    members: tuple[tuple[str, int | None], ...]
    loss: float


def masks(structures: Iterable[Structure], groups: Mapping[str, int]) -> dict[str, NDArray[np.bool_]]:
    """The row groups that the structures remove, as one mask per matrix."""
    found: dict[str, NDArray[np.bool_]] = {}
    for structure in structures:
        for key, group in structure.members:
            found.setdefault(key, np.zeros(groups[key], bool))[slice(None) if group is None else group] = True
    return found


def forced_groups(
    candidates: Mapping[str, tuple[NDArray[np.float64], int]], share: float
) -> dict[str, NDArray[np.bool_]]:
    """The row groups to leave out so that `share` of all candidates' weights go, least loss per weight first.

    candidates: matrix -> (removal loss of each row group, weights in a group).
    """
    entries = [
        (float(loss) / weights, key, group, weights)
        for key, (losses, weights) in candidates.items()
        for group, loss in enumerate(losses)
    ]
    left = share * sum(entry[3] for entry in entries)
    found = {key: np.zeros(len(losses), bool) for key, (losses, _) in candidates.items()}
    for _, key, group, weights in sorted(entries):
        if left <= 0:
            break
        found[key][group] = True
        left -= weights
    return found


def channel_loss(down: torch.Tensor, fisher: KroneckerFisher) -> NDArray[np.float64]:
    """KL per token of removing each block of 16 inputs of a down projection (m, n), others unchanged: (n/16,)."""
    g, h = fisher.outputs, fisher.inputs
    weighted = down * g[:, None] if g.dim() == 1 else g @ down
    gram = down.T @ weighted  # (n, n): wᵢᵀ G wⱼ
    count = -(-down.shape[1] // BLOCK)
    losses = np.zeros(count)
    for block in range(count):
        part = slice(block * BLOCK, min((block + 1) * BLOCK, down.shape[1]))
        losses[block] = 0.5 * float((gram[part, part] * h[part, part]).sum())
    return losses


def removed_columns(structures: Iterable[Structure], key: str, cols: int) -> torch.Tensor | None:
    """Mask (cols,) of the inputs that matrix `key` loses, or None if it keeps all."""
    blocks = [s.block for s in structures if s.down == key and s.block is not None]
    if not blocks:
        return None
    mask = torch.zeros(-(-cols // BLOCK), BLOCK, dtype=torch.bool)
    mask[blocks] = True
    return mask.reshape(-1)[:cols]


def correct_remaining(down: torch.Tensor, h: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """The down projection (m, n) without the removed columns, the others corrected by least squares.

    The kept columns take over what the removed ones contributed as far as their inputs are correlated:
    W_k + W_r H_rk H_kk⁻¹ (optimal brain surgeon, for a set of columns).
    """
    kept = ~removed
    corrected = down.clone()
    corrected[:, removed] = 0
    block = h[kept][:, kept].double()
    block.diagonal().add_(1e-2 * block.diagonal().mean())
    lower, _ = damped_cholesky(block)
    if lower is not None:
        transfer = solve_transposed(lower, solve_lower(lower, h[kept][:, removed].double()))  # H_kk⁻¹ H_kr
        corrected[:, kept] += down[:, removed] @ transfer.float().T
    return corrected
