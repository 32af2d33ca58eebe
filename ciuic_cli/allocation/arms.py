"""Arms: the candidate treatments among which the budget chooses.

An arm is one way to store a matrix, or one group of 16 of its rows: bits per weight, pruning, the rank of a low-rank
part, sorted rows, input scales. Each arm has a predicted loss (KL per token) and exact bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import UNPRUNED_ROLES, WeightMatrix
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.codecs.transform import TILE
from ciuic_cli.errors import InputError
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.predicted_loss import predicted_loss
from ciuic_cli.statistics.files import Statistics

MIN_BITS_UNPRUNED = 2
"""Least bits per weight of matrices in UNPRUNED_ROLES, unless the user allows only fewer (chosen, not tuned). At one
bit the error has a quarter of a row's energy; other text than the calibration text may depend on that row."""


@dataclass(frozen=True)
class PassOptions:
    """The choices that the user allows.

    Attributes:
        bits: bits per weight that a row group may have, ascending.
        L: trellis state bits.
        prune: "off", "auto", or a share of the prunable weights.
        rank: "off", "auto", or the rank of every low-rank part.
    """

    bits: tuple[float, ...]
    L: int = 16
    prune: str | float = "auto"
    rank: str | int = "auto"

    def bits_for(self, matrix: WeightMatrix) -> tuple[float, ...]:
        """Bits per weight that row groups of this matrix may have; 0 prunes a group."""
        if matrix.role in UNPRUNED_ROLES:
            return tuple(bits for bits in self.bits if bits >= MIN_BITS_UNPRUNED) or self.bits
        return ((0,) if self.prune != "off" else ()) + self.bits

    def ranks_for(self, matrix: WeightMatrix) -> tuple[int, ...]:
        """Ranks that a low-rank part of this matrix may have, all below its full rank."""
        if self.rank == "off":
            return ()
        ranks = lowrank.RANKS if self.rank == "auto" else (int(self.rank),)
        return tuple(rank for rank in ranks if rank <= highest_rank(matrix))


def highest_rank(matrix: WeightMatrix) -> int:
    """The highest rank that a low-rank part of this matrix may have: a multiple of 16 below its full rank; 0 if it may
    have no such part."""
    return 0 if matrix.role in UNPRUNED_ROLES else (min(matrix.rows, matrix.cols) - 1) // TILE * TILE


@dataclass(frozen=True, slots=True)
class ArmTable:
    """All arms of one matrix: predicted KL and exact bytes of each row group at each number of bits.

    Created by `pricing.price_matrix`. Row groups are groups of 16 stored rows.

    Attributes:
        bits: bits per weight on offer, ascending. L: trellis state bits.
        sensitivity: (groups,) KL per token and per unit of normalised code error.
        pruning_loss: (groups,) KL per token of pruning the group.
        lowrank: the low-rank parts on offer. rank: that of the part which `loss` and `lowrank_bytes` assume; 0: none.
        correction: factor on the predicted KL, from probes.
        channels: for a down projection, (cols / 16,) KL per token of pruning each block of 16 inputs; otherwise empty.
        singular: whether H was singular before damping (few tokens, or inputs that are always 0).
        row_class: (rows,) uint8 classes by which the rows are sorted, or None.
        input_scale: (cols,) uint8 codes of the input scales, or None.
        row_sorted: the table of the same matrix with its rows sorted, if that pays; otherwise None.
    """

    matrix: WeightMatrix
    bits: tuple[float, ...]
    L: int
    sensitivity: NDArray[np.float64]
    pruning_loss: NDArray[np.float64]
    lowrank: list[lowrank.LowRankPart] = field(default_factory=list)
    rank: int = 0
    correction: float = 1.0
    channels: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    singular: bool = False
    row_class: NDArray[np.uint8] | None = None
    input_scale: NDArray[np.uint8] | None = None
    row_sorted: ArmTable | None = None

    @property
    def loss(self) -> NDArray[np.float64]:
        """(groups, bits) predicted KL per token, corrected."""
        remaining = next((part.remaining for part in self.lowrank if part.rank == self.rank), 1.0)
        loss = predicted_loss(self.sensitivity * remaining, self.pruning_loss, self.bits, self.L)
        return loss * self.correction

    @property
    def nbytes(self) -> NDArray[np.int64]:
        """(groups, bits) exact bytes of the codes."""
        per_bit = 2 * self.matrix.padded_cols
        return np.tile((np.array(self.bits) * per_bit).astype(np.int64), (self.matrix.groups, 1))

    @property
    def lowrank_bytes(self) -> int:
        return next((part.nbytes for part in self.lowrank if part.rank == self.rank), 0)


def rescale_uncovered(tables: Sequence[ArmTable], statistics: Statistics) -> list[ArmTable]:
    """The tables; those of matrices without statistics are rescaled to the median pruning loss per weight of the
    others.

    Without statistics the scale of a matrix's H and G is arbitrary, and its losses are proportional to it.
    """
    covered = [table for table in tables if statistics.covers(table.matrix.name)]
    median = (
        float(np.median([table.pruning_loss.sum() / table.matrix.weights for table in covered]))
        if covered
        else 1.0
    )
    rescaled = []
    for table in tables:
        per_weight = float(table.pruning_loss.sum()) / table.matrix.weights
        if per_weight > 0 and not statistics.covers(table.matrix.name):
            factor = median / per_weight
            table = replace(
                table, sensitivity=table.sensitivity * factor, pruning_loss=table.pruning_loss * factor
            )
        rescaled.append(table)
    return rescaled


def prunable_structures(tables: Sequence[ArmTable]) -> list[prune.Structure]:
    """Every structure that may be pruned: blocks of 16 MLP channels, and whole routed experts."""
    by_key = {table.matrix.key: table for table in tables}
    structures = []
    for table in tables:
        matrix = table.matrix
        if 0 not in table.bits:
            continue
        names = [matrix.key.replace("down_proj", other) for other in ("gate_proj", "up_proj", "gate_up_proj")]
        partners = [by_key[name] for name in names if name in by_key and name != matrix.key]
        if not partners:
            continue
        # A group of sorted rows is not a block of channels.
        in_order = all(partner.row_class is None for partner in partners)
        for block, loss in enumerate(table.channels if in_order else ()):
            members = tuple(
                (partner.matrix.key, block) for partner in partners if partner.matrix.rows == matrix.cols
            )
            if members:
                structures.append(prune.Structure(matrix.key, block, members, float(loss) * table.correction))
        if matrix.expert is not None:
            expert = tuple((member.matrix.key, None) for member in (table, *partners))
            loss = float(table.pruning_loss.sum()) * table.correction
            structures.append(prune.Structure(matrix.key, None, expert, loss))
    return structures


def require_finite_loss(loss: NDArray[np.float64], matrix: WeightMatrix, model_map: ModelMap) -> None:
    """Raise InputError if a predicted loss, or a squared row norm, exceeds float32 or is NaN."""
    if not bool((loss <= np.finfo(np.float32).max).all()):
        raise InputError(
            "the predicted loss of this matrix is NaN or infinite",
            file=model_map.checkpoint.folder,
            tensor=matrix.key,
            remedy="its weights, or those before it, are finite but too large: download the checkpoint again",
        )
