"""The order in which the columns of a matrix are rounded; GPTQ's act-order (desc_act) for blocks of 16 columns.

Rounding goes from the last block of columns to the first. With H = L D Lᵀ the loss of a block's error depends on its
block of D: the part of H that blocks rounded later cannot compensate. The determinant of D is that of H in any order.
Its trace is smallest where the blocks of D are most similar. So columns with small entries in H are rounded last,
because nothing compensates their error. The order is not stored, because every tile decodes by itself.

Source: GPTQ (Frantar et al. 2022) orders by the diagonal of H; here the order follows the Schur complements of H.
"""

from __future__ import annotations

import torch

from ciuic_cli.codecs.transform import TILE
from ciuic_cli.process.threads import one_thread

PIVOTS = 16
"""Blocks that are chosen one by one. The others follow by their trace in the Schur complement of these, because the
first few blocks bring nearly all of the improvement (measured: docs/experiments/codes/column-order.md)."""


def rounding_order(moment: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 columns, from the one to round last to the one to round first.

    Pivoted block Cholesky: the next block is the one with the least trace in the Schur complement of those before.

    Args:
        moment: H (n, n) float32, positive definite, n a multiple of 16.

    Returns:
        int64 (n / 16,) on the moment's device, a permutation that does not depend on the number of threads.
    """
    blocks = len(moment) // TILE
    traces = moment.diagonal().reshape(blocks, TILE).double().sum(1)  # of the Schur complement's blocks
    factor = moment.new_empty(len(moment), TILE * min(PIVOTS, blocks))
    chosen: list[int] = []
    with one_thread():
        while len(chosen) < min(PIVOTS, blocks):
            block, done = int(traces.argmin()), TILE * len(chosen)
            rows = slice(TILE * block, TILE * (block + 1))
            residual = moment[rows].T - factor[:, :done] @ factor[rows, :done].T
            corner, info = torch.linalg.cholesky_ex(residual[rows])
            if int(info):  # singular to working precision: the others follow by their present traces
                break
            columns = torch.linalg.solve_triangular(corner.T, residual, upper=True, left=False)
            factor[:, done : done + TILE] = columns
            traces -= columns.square().reshape(blocks, TILE * TILE).double().sum(1)
            traces[block] = torch.inf
            chosen.append(block)
    others = [block for block in traces.argsort(stable=True).cpu().tolist() if block not in chosen]
    return torch.tensor(chosen + others, device=moment.device)
