"""Sorting rows by sensitivity, so that rows of equal sensitivity share a group of 16.

The 16 rows of a group have the same number of bits. If their sensitivities differ widely, that number is too small for
some rows and too large for others. So rows are put into 16 classes, a factor of two apart in sensitivity, and stored
class by class. A row's class takes four bits; this pays where rows are long, and most in embeddings, whose
neighbouring rows differ by orders of magnitude (measured: docs/experiments/allocation/sorted-rows.md).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.row_order import CLASSES, class_nbytes, stored_order
from ciuic_cli.codecs.transform import TILE


def row_classes(sensitivity: torch.Tensor) -> NDArray[np.uint8]:
    """Classes (m,) uint8 of rows by their sensitivity (m,), one octave each; the last class is the most sensitive."""
    s = sensitivity.double()
    highest = float(s.max())
    if not highest > 0:
        return np.zeros(len(s), np.uint8)
    octaves_below = torch.log2(highest / s.clamp_min(highest * 2.0**-CLASSES)).floor()
    return (CLASSES - 1 - octaves_below.clamp(0, CLASSES - 1)).to(torch.uint8).numpy()


def sorting_pays(sensitivity: torch.Tensor, row_class: NDArray[np.uint8], cols: int) -> bool:
    """Whether sorting saves more bytes at the same predicted loss than the classes take."""
    rows = len(sensitivity)
    order = torch.from_numpy(stored_order(row_class))
    bits_saved = (_mean_log(sensitivity) - _mean_log(sensitivity[order])) / math.log(4.0)  # per weight
    return bits_saved * rows * cols / 8 > class_nbytes(rows)


def _mean_log(sensitivity: torch.Tensor) -> float:
    """Mean logarithm of the groups' sensitivities.

    With bits allocated optimally, the loss at a given budget is proportional to the groups' geometric mean.
    """
    padded = torch.nn.functional.pad(sensitivity.double(), (0, -len(sensitivity) % TILE))
    groups = padded.reshape(-1, TILE).sum(1)
    return float(groups.clamp_min(1e-12 * float(groups.max()) + 1e-300).log().mean())
