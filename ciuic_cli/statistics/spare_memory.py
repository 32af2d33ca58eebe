"""Memory of sums that are not needed any more, kept for new ones."""

from __future__ import annotations

from collections import defaultdict

import torch

from ciuic_cli.statistics import lower_half


class SpareMemory:
    """Memory of sums that are not needed any more, for new sums.

    Memory from the system must be mapped and cleared page by page, which took a tenth of the statistics' time where
    matrices have 8,960 rows (measured: docs/experiments/scale/large-matrices.md). Several threads may share it.
    """

    def __init__(self) -> None:
        self._spare: dict[tuple[tuple[int, ...], torch.device], list[torch.Tensor]] = defaultdict(list)

    def zeros(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Float32 zeros: a vector, or the lower half of a square matrix (`lower_half.py`)."""
        is_matrix = len(shape) == 2
        try:
            memory = self._spare[shape, device].pop()
        except IndexError:
            return lower_half.zeros(shape[0], device) if is_matrix else torch.zeros(shape, device=device)
        return lower_half.cleared(memory) if is_matrix else memory.zero_()

    def keep(self, *sums: torch.Tensor) -> None:
        """Take the memory of these sums, which nobody reads any more."""
        for tensor in sums:
            self._spare[tuple(tensor.shape), tensor.device].append(tensor)

    def clear(self) -> None:
        """Free the memory."""
        self._spare.clear()
