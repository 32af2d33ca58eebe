"""Records the moments of a layer's matrices: H while it runs forward, G while it runs backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ciuic_cli.layerwise.linear_hooks import Hook, Key, LinearHook, Product, WatchedLinear
from ciuic_cli.process.memory import limit_freed_memory
from ciuic_cli.profiling.account import measured
from ciuic_cli.statistics import lower_half
from ciuic_cli.statistics.experts import full_moments_fit
from ciuic_cli.statistics.moments import TALL_OUTPUT_STEP, Moments, vector_norms
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
    """While active, products with watched weights add to `moments`.

    If full moments of all experts of a stack would take too much memory (`experts.py`), each expert gets diagonals. The
    pool of the stack then gets full moments, under the key (name, None).

    Args:
        dtype: of the layer's products; see `symmetric_product`.
        spare: memory for the sums.
    """

    def __init__(
        self, watched: Sequence[WatchedLinear], dtype: torch.dtype, spare: SpareMemory | None = None
    ) -> None:
        super().__init__(watched)
        self.dtype, self._spare = dtype, spare
        self.moments: dict[Key, Moments] = {}
        self._roles = {item.name: item.role for item in watched}
        stacks = [item for item in watched if item.tensor.dim() == 3]
        self._pooled = {item.name for item in stacks if not full_moments_fit(*item.tensor.shape)}

    def _role(self, key: Key) -> str:
        return self._roles.get(key[0], "")

    def _rounded(self, product: Product) -> torch.Tensor:
        """The inputs (t, n) in the dtype in which the layer multiplied them; the hook has them as they were before
        autocast rounded them."""
        return product.x.reshape(-1, product.shape[1]).to(self.dtype)

    def _sums_of(self, key: Key) -> list[tuple[Key, bool]]:
        """The sums to which a matrix adds its tokens, and whether they are full."""
        name, expert = key
        if expert is None or name not in self._pooled:
            return [(key, True)]
        return [(key, False), ((name, None), True)]


class InputRecorder(MomentRecorder):
    """Records H. No gradient is needed.

    Attributes:
        weight: of the tokens that are recorded next.
    """

    needs_gradients = False
    weight = 1.0

    def watch(self, product: Product) -> None:
        limit_freed_memory()
        x = self._rounded(product)
        with torch.autocast(x.device.type, enabled=False), measured("moments", self._role(product.key)):
            for key, full in self._sums_of(product.key):
                if key not in self.moments:
                    self.moments[key] = Moments.of_inputs(
                        x.shape[1], x.device, self.dtype, full=full, spare=self._spare
                    )
                self.moments[key].add_inputs(x, self.weight)


class InputSharing(LinearHook):
    """Finds the matrices with the same inputs, such as q, k and v: they have the same H. Stacks are left out.

    It keeps all inputs of the products, so it is for one chunk.
    """

    needs_gradients = False

    def __init__(self, watched: Sequence[WatchedLinear]) -> None:
        super().__init__([item for item in watched if item.tensor.dim() == 2])
        self._inputs: dict[str, list[tuple[Any, ...]]] = {item.name: [] for item in watched}
        self._kept: list[torch.Tensor] = []  # so that no two tensors have the same address

    def watch(self, product: Product) -> None:
        x = product.x
        self._kept.append(x)
        # Without tokens it has no address of its own.
        place = (x.data_ptr(), x.shape, x.stride(), x._version) if x.numel() else (product.key,)
        self._inputs[product.key[0]].append(place)

    def firsts(self) -> list[int]:
        """For each of the watched matrices, in their order, the number of the first one with the same inputs. It is its
        own if there is none, and where the chunk had no tokens for the matrix."""
        found: dict[Any, int] = {}
        return [
            found.setdefault(tuple(inputs) or name, number)
            for number, (name, inputs) in enumerate(self._inputs.items())
        ]


class OutputRecorder(MomentRecorder):
    """Records G, of gradients.

    Args:
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
        super().__init__(watched, dtype, spare)
        self._tall_outputs = tall_outputs

    def watch(self, product: Product) -> Hook:
        key, shape, rows = product.key, product.shape, product.rows
        norms = vector_norms(self._rounded(product))
        if rows == slice(0, shape[0]):
            return lambda gradient: self._record(key, shape, norms, gradient)

        def record_group(gradient: torch.Tensor) -> None:
            """Gradients of one group of rows; those of the other rows are zero."""
            whole = torch.zeros(len(gradient), shape[0], device=gradient.device)
            whole[:, rows] = gradient
            self._record(key, shape, norms, whole)

        return record_group

    def _record(self, key: Key, shape: torch.Size, norms: torch.Tensor, gradient: torch.Tensor) -> None:
        """norms: (t, 1), of the inputs."""
        limit_freed_memory()
        (rows, cols), outside_stacks = shape, key[1] is None
        gradient = gradient.reshape(-1, rows)
        recorded = records_full_outputs(rows, cols, tall=self._tall_outputs or not outside_stacks)
        with torch.autocast(norms.device.type, enabled=False), measured("moments", self._role(key)):
            for sums, full in self._sums_of(key):
                if sums not in self.moments:
                    self.moments[sums] = Moments.of_outputs(
                        rows, norms.device, self.dtype, full=full and recorded, spare=self._spare
                    )
                step = TALL_OUTPUT_STEP if outside_stacks and recorded and rows > cols else 1
                self.moments[sums].add_outputs(gradient, norms, step=step)


def recorded_input_bytes(watched: Sequence[WatchedLinear]) -> int:
    """Bytes of the full sums for H of these matrices; stacks are left out."""
    return sum(lower_half.bytes_of(item.tensor.shape[1]) for item in watched if item.tensor.dim() == 2)


def recorded_output_bytes(watched: Sequence[WatchedLinear], *, tall_outputs: bool) -> int:
    """As `recorded_input_bytes`, for G. tall_outputs: see `records_full_outputs`."""
    shapes = [item.tensor.shape for item in watched if item.tensor.dim() == 2]
    return sum(
        lower_half.bytes_of(rows)
        for rows, cols in shapes
        if records_full_outputs(rows, cols, tall=tall_outputs)
    )
