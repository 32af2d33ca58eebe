"""Rounds the number of a matrix's rows up, so that products have few shapes.

oneDNN compiles a program for each number of rows, which takes a millisecond, and keeps few of them. An expert has
another number of tokens in every chunk, so a third of the statistics of a model with many experts was compiling
(measured: docs/experiments/runtime/compiled-products.md).
"""

from __future__ import annotations

import torch

from ciuic_cli.integers import round_up

_STEP = 32
"""Products with fewer than 1,024 rows get a multiple of so many rows, chosen by the measurements of that page."""
_FINENESS = 32
"""Products with more rows get a multiple of a power of two that is a thirty-second to a sixteenth of their rows."""


def with_rows_added(x: torch.Tensor) -> torch.Tensor:
    """x (m, k) with rows of zeros at the end, so that few numbers of rows occur. Drop their rows from the product."""
    rows = len(x)
    added = round_up(rows, max(_STEP, (1 << rows.bit_length()) // _FINENESS)) - rows
    return torch.nn.functional.pad(x, (0, 0, 0, added)) if added else x
