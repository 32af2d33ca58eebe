"""The plan: the arm that was chosen for every matrix and row group. `planning.make_plan` makes it; probes and encoding
follow it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import WeightMatrix
from ciuic_cli.codecs.bits import bits_of
from ciuic_cli.codecs.trellis import DEFAULT_L
from ciuic_cli.passes import lowrank, prune


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The arm that was chosen for one matrix.

    Attributes:
        row_bits: (groups,) uint8, bits per weight of each row group as `PackedMatrix.row_bits` has them.
        rank: rank of the low-rank part, 0 for none. lowrank_bytes: its exact bytes.
        predicted_kl: KL per token. 0 for matrices of multi-token-prediction layers, because the model's own predictions
            do not depend on them.
        row_class, input_scale: as in `ArmTable`.
        L: trellis state bits. code_loss: KL per token of the codes of row groups with the same bits per weight, by
            these bits; without groups in pruned structures.
    """

    matrix: WeightMatrix
    row_bits: NDArray[np.uint8]
    rank: int
    lowrank_bytes: int
    predicted_kl: float
    row_class: NDArray[np.uint8] | None = None
    input_scale: NDArray[np.uint8] | None = None
    L: int = DEFAULT_L
    code_loss: dict[float, float] = field(default_factory=dict)

    @property
    def is_zero(self) -> bool:
        """Whether the matrix is pruned as a whole."""
        return not self.row_bits.any() and not self.rank

    @property
    def widths(self) -> set[float]:
        """Bits per weight of its codes, with those of the low-rank part."""
        widths = set(bits_of(self.row_bits).tolist()) - {0.0}
        return widths | {float(lowrank.FACTOR_BITS)} if self.rank else widths


@dataclass(frozen=True)
class Plan:
    """The arms that were chosen for all matrices.

    Attributes:
        matrices: by matrix key.
        blob_bytes: exact bytes of each compressed parameter.
        file_bytes: bytes of all safetensors files. budget: bytes that they may take.
        multiplier: Lagrange multiplier of the budget, KL per byte.
        pruned_structures: MLP channels and experts that are pruned.
    """

    matrices: dict[str, MatrixPlan]
    blob_bytes: dict[str, int]
    file_bytes: int
    budget: int
    multiplier: float
    pruned_structures: tuple[prune.Structure, ...] = ()

    @property
    def predicted_kl(self) -> float:
        """KL per token of the whole model."""
        return sum(matrix_plan.predicted_kl for matrix_plan in self.matrices.values())

    @cached_property
    def rounding_kl(self) -> dict[str, float]:
        """Predicted KL of each matrix without the loss of pruned structures, which counts for down projections."""
        kl = {key: matrix_plan.predicted_kl for key, matrix_plan in self.matrices.items()}
        for structure in self.pruned_structures:
            kl[structure.down] -= structure.loss
        return kl

    @cached_property
    def structure_masks(self) -> dict[str, NDArray[np.bool_]]:
        """Masks (groups,) of the row groups in pruned structures, for each matrix that has any."""
        groups = {key: len(matrix_plan.row_bits) for key, matrix_plan in self.matrices.items()}
        return prune.masks(self.pruned_structures, groups)
