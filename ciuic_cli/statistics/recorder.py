"""Records the moments of a layer's matrices while it runs backward: which products are watched, and which are kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ciuic_cli.layerwise.linear_hooks import Hook, Key, LinearHook, Product, WatchedLinear
from ciuic_cli.process.memory import limit_freed_memory
from ciuic_cli.profiling.account import measured
from ciuic_cli.statistics import lower_half
from ciuic_cli.statistics.experts import full_moments_fit
from ciuic_cli.statistics.moments import Moments
from ciuic_cli.statistics.spare_memory import SpareMemory

FULL_FISHER_LIMIT = 16384
"""Most outputs with which G is kept in full; above it (in practice: the head) only its diagonal. No measurement is on
record."""


def records_full_outputs(rows: int, cols: int, *, tall: bool) -> bool:
    """Whether G of a matrix (rows, cols) is recorded in full, or only its diagonal.

    tall: whether it is recorded in full where there are more rows than columns
    (docs/experiments/statistics/tall-matrices.md has what that gains and costs).
    """
    return rows <= FULL_FISHER_LIMIT and (tall or rows <= cols)


class MomentRecorder(LinearHook):
    """While active, every product with a watched weight adds its inputs and output gradients to `moments`.

    If full moments of all experts of a stack would take too much memory (`experts.py`), each expert gets diagonals. The
    pool of the stack then gets full moments, under the key (name, None).

    Args:
        dtype: of the layer's products; see `symmetric_product`.
        spare: memory for the sums.
        tall_outputs: `tall` of `records_full_outputs` for matrices outside stacks; in stacks it is True.
    """

    def __init__(
        self,
        watched: Sequence[WatchedLinear],
        dtype: torch.dtype,
        spare: SpareMemory | None = None,
        *,
        tall_outputs: bool = True,
    ) -> None:
        super().__init__(watched)
        self.dtype = dtype
        self._spare = spare
        self.moments: dict[Key, Moments] = {}
        self._roles = {item.name: item.role for item in watched}
        stacks = [item for item in watched if item.tensor.dim() == 3]
        self._tall = {item.name: tall_outputs or item.tensor.dim() == 3 for item in watched}
        self._pooled = {item.name for item in stacks if not full_moments_fit(*item.tensor.shape)}

    def watch(self, product: Product) -> Hook:
        key, shape, rows, x = product.key, product.shape, product.rows, product.x
        if rows == slice(0, shape[0]):
            return lambda gradient: self._record(key, shape, x, gradient)

        def record_group(gradient: torch.Tensor) -> None:
            """Gradients of one group of rows; those of the other rows are zero."""
            whole = torch.zeros(len(gradient), shape[0], device=gradient.device)
            whole[:, rows] = gradient
            self._record(key, shape, x, whole)

        return record_group

    def _record(self, key: Key, shape: torch.Size, x: torch.Tensor, gradient: torch.Tensor) -> None:
        limit_freed_memory()
        rows, cols = shape
        name, expert = key
        # The layer multiplied inputs of this dtype; the hook has them as they were before autocast rounded them.
        x, gradient = x.reshape(-1, cols).to(self.dtype), gradient.reshape(-1, rows)
        with torch.autocast(x.device.type, enabled=False), measured("moments", self._roles.get(name, "")):
            if expert is not None and name in self._pooled:
                self._moments_of(key, shape, x.device, diagonals=True).add_tokens(x, gradient)
                self._moments_of((name, None), shape, x.device).add_tokens(x, gradient)
            else:
                moments = self._moments_of(key, shape, x.device)
                moments.add_tokens(x, gradient, all_outputs=expert is not None)

    def _moments_of(
        self, key: Key, shape: torch.Size, device: torch.device, *, diagonals: bool = False
    ) -> Moments:
        if key not in self.moments:
            rows, cols = shape
            full = records_full_outputs(rows, cols, tall=self._tall.get(key[0], True))
            self.moments[key] = Moments.zeros(
                rows, cols, device, self.dtype, spare=self._spare,
                full_inputs=not diagonals, full_outputs=full and not diagonals,
            )  # fmt: skip
        return self.moments[key]


def recorded_bytes(watched: Sequence[WatchedLinear], *, tall_outputs: bool) -> int:
    """Bytes of the full moments of these matrices; stacks are left out. tall_outputs: see `records_full_outputs`."""
    shapes = [item.tensor.shape for item in watched if item.tensor.dim() == 2]
    return sum(
        lower_half.bytes_of(cols)
        + (lower_half.bytes_of(rows) if records_full_outputs(rows, cols, tall=tall_outputs) else 0)
        for rows, cols in shapes
    )
