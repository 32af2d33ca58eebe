"""Sorting rows by sensitivity, so that rows of equal sensitivity share a group of 16.

The 16 rows of a group have the same number of bits. If their sensitivities differ widely, that number is too small for
some rows and too large for others. So rows are put into 16 classes, a factor of two apart in sensitivity, and stored
class by class. A row's class takes four bits, which pays where rows are long. It pays most in embeddings, whose
neighbouring rows differ by orders of magnitude (measured: docs/experiments/allocation/sorted-rows.md).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from ciuic_cli.codecs.row_order import CLASSES, class_nbytes, stored_order
from ciuic_cli.codecs.transform import TILE

_SENSITIVITY_FLOOR = 1e-12
"""Least sensitivity of a group in `_mean_log`, as a share of the largest: pruned rows and padding have none (chosen,
not tuned)."""
_TINY = 1e-300
"""Added to it, so that the logarithm exists where all sensitivities are 0."""


def row_classes(sensitivity: torch.Tensor) -> NDArray[np.uint8]:
    """Classes (m,) uint8 of rows by their sensitivity (m,), one octave each; the last class is the most sensitive."""
    s = sensitivity.double()
    highest = float(s.max())
    if not highest > 0:
        return np.zeros(len(s), np.uint8)
    octaves_below = torch.log2(highest / s.clamp_min(highest * 2.0**-CLASSES)).floor()
    return (CLASSES - 1 - octaves_below.clamp(0, CLASSES - 1)).to(torch.uint8).cpu().numpy()


def sorting_pays(sensitivity: torch.Tensor, row_class: NDArray[np.uint8], cols: int) -> bool:
    """Whether sorting saves more bytes at the same predicted loss than the classes take."""
    rows = len(sensitivity)
    order = torch.from_numpy(stored_order(row_class)).to(sensitivity.device)
    bits_saved = (_mean_log(sensitivity) - _mean_log(sensitivity[order])) / math.log(4.0)  # per weight
    return bits_saved * rows * cols / 8 > class_nbytes(rows)


def _mean_log(sensitivity: torch.Tensor) -> float:
    """Mean logarithm of the groups' sensitivities.

    With the best allocation of bits, the loss at a given budget is proportional to the geometric mean of these.
    """
    padded = torch.nn.functional.pad(sensitivity.double(), (0, -len(sensitivity) % TILE))
    groups = padded.reshape(-1, TILE).sum(1)
    return float(groups.clamp_min(_SENSITIVITY_FLOOR * float(groups.max()) + _TINY).log().mean())
