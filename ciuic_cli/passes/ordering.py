"""The order in which the columns of a matrix are rounded.

With H = L D Lᵀ rounding goes from the last block of columns to the first, and a block's error costs its D: what is left
of its part of H once the blocks that are rounded after it may make up for it. The determinant of D is H's in any order,
its trace is not: it is the smaller, the more alike the blocks of D are. Columns that matter little are best rounded
last, where nothing is left to make up for their error. An artifact does not show the order: every tile decodes by
itself. (GPTQ's act-order is this idea by the diagonal of H alone: Frantar et al. 2022.)
"""

from __future__ import annotations

import torch

from ciuic_cli.codecs.transform import TILE
from ciuic_cli.process.threads import one_thread

PIVOTS = 16
"""How many blocks are chosen one by one, each knowing those before it; the others follow by what these leave of them.
The first few have nearly all of what an order can change."""


def rounding_order(moment: torch.Tensor) -> torch.Tensor:
    """The blocks of 16 columns from the one to be rounded last to the one to be rounded first.

    Each is the one with the least trace of what the blocks before it leave of H: Cholesky's factorisation with pivots.

    Args:
        moment: H (n, n) float32, positive definite, n a multiple of 16.

    Returns:
        int64 (n / 16,), a permutation; the same for any number of threads.
    """
    blocks = len(moment) // TILE
    left = moment.diagonal().reshape(blocks, TILE).double().sum(1)
    factor = moment.new_empty(len(moment), TILE * min(PIVOTS, blocks))
    chosen: list[int] = []
    with one_thread():
        while len(chosen) < min(PIVOTS, blocks):
            block, known = int(left.argmin()), TILE * len(chosen)
            rows = slice(TILE * block, TILE * (block + 1))
            rest = moment[rows].T - factor[:, :known] @ factor[rows, :known].T
            corner, info = torch.linalg.cholesky_ex(rest[rows])
            if int(info):  # singular to working precision: what is left orders the others
                break
            columns = torch.linalg.solve_triangular(corner.T, rest, upper=True, left=False)
            factor[:, known : known + TILE] = columns
            left -= columns.square().reshape(blocks, TILE * TILE).double().sum(1)
            left[block] = torch.inf
            chosen.append(block)
    others = [block for block in left.argsort(stable=True).tolist() if block not in chosen]
    return torch.tensor(chosen + others)
