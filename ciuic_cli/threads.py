"""The same bits for any number of threads, for what torch and LAPACK would cut up by threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """For sums over a whole tensor, and for QR and singular values: their rounding depends on the number of threads.

    Products, element-wise operations and sums along rows do not (the tests hold this for the products).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
