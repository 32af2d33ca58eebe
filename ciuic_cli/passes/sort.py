"""Which rows of a matrix are stored together: rows that matter alike share their 16 rows' bits.

The 16 rows of a group have one width. Where some of them matter far more than others, it is too little for these and
too much for those: the budget pays for the mean of what they lose where it could pay for each by itself. Rows are
therefore put into 16 classes, a factor of two apart in what an error in them costs, and stored class by class. A class
takes four bits; it pays where rows are long, and in a vocabulary above all.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.packing import CLASSES, class_nbytes, stored_order
from ciuic_cli.passes.quantize import BLOCK


def row_classes(row_loss: torch.Tensor) -> NDArray[np.uint8]:
    """Classes (m,) of rows by what they lose (m,) per unit of code error; the last class matters most."""
    loss = row_loss.double()
    highest = float(loss.max())
    if not highest > 0:
        return np.zeros(len(loss), np.uint8)
    below = torch.log2(highest / loss.clamp_min(highest * 2.0**-CLASSES)).floor()
    return (CLASSES - 1 - below.clamp(0, CLASSES - 1)).to(torch.uint8).numpy()


def sorting_pays(row_loss: torch.Tensor, row_class: NDArray[np.uint8], cols: int) -> bool:
    """Whether the bits that the sorted groups save at the same loss take more than the classes do."""
    rows = len(row_loss)
    order = torch.from_numpy(stored_order(row_class))
    saved = (_mean_log(row_loss) - _mean_log(row_loss[order])) / math.log(4.0)  # bits per weight
    return saved * rows * cols / 8 > class_nbytes(rows)


def _mean_log(row_loss: torch.Tensor) -> float:
    """Mean logarithm of the groups' losses: widths that are free to follow them make the sum as their product."""
    padded = torch.nn.functional.pad(row_loss.double(), (0, -len(row_loss) % BLOCK))
    groups = padded.reshape(-1, BLOCK).sum(1)
    return float(groups.clamp_min(1e-12 * float(groups.max()) + 1e-300).log().mean())
