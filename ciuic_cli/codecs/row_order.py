"""The order in which a sorted matrix stores its rows, and the bytes of its row classes.

Sorting puts rows of similar sensitivity into the same group of 16, so that a group's bits per weight suit all of its
rows. Each row has a class of 0 to 15; the stored rows are those of class 0, then those of class 1, and so on. Rows of
one class keep their order. Measured: docs/experiments/allocation/sorted-rows.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ciuic_cli.codecs.scales import Bytes
from ciuic_cli.integers import ceil_div

CLASSES = 16
"""Number of row classes: a class takes four bits."""


def stored_order(row_class: Bytes) -> npt.NDArray[np.int64]:
    """int64 [rows]: for each stored row, its number in the matrix."""
    return np.argsort(row_class, kind="stable")


def stored_position(row_class: Bytes) -> npt.NDArray[np.int64]:
    """int64 [rows]: where each of the matrix's rows is stored; the inverse of `stored_order`."""
    return np.argsort(stored_order(row_class))


def class_nbytes(rows: int) -> int:
    """Bytes of the classes of `rows` rows."""
    return ceil_div(rows, 2)


def classes_to_bytes(row_class: Bytes) -> bytes:
    """Two classes per byte, the even row in the low half; the last high half of an odd number is 0."""
    pairs = np.concatenate([row_class, np.zeros(len(row_class) % 2, np.uint8)]).reshape(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 4).tobytes()


def classes_from_bytes(stored: Bytes, rows: int) -> Bytes:
    """Inverse of `classes_to_bytes`: uint8 [rows]."""
    return np.stack([stored & 15, stored >> 4], axis=1).reshape(-1)[:rows]
