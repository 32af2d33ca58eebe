"""What each matrix's every arm costs and saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.matrices import PLAIN_ROLES, WeightMatrix
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.errors import InputError
from ciuic_cli.passes import lowrank, prune
from ciuic_cli.passes.quantize import predicted_loss
from ciuic_cli.statistics.files import Statistics

LEAST_PLAIN_WIDTH = 2
"""Of matrices whose rows have to stay: one bit leaves a quarter of a row's energy as error, which other texts than the
calibration's may not forgive. Where only narrower widths are asked for, they have those."""


@dataclass(frozen=True)
class PassOptions:
    """What the user allows. prune: "off", "auto" or a share of the prunable weights; rank: "off", "auto" or a rank."""

    widths: tuple[float, ...]
    L: int = 16
    prune: str | float = "auto"
    rank: str | int = "auto"

    def widths_for(self, matrix: WeightMatrix) -> tuple[float, ...]:
        if matrix.role in PLAIN_ROLES:
            return tuple(width for width in self.widths if width >= LEAST_PLAIN_WIDTH) or self.widths
        return ((0,) if self.prune != "off" else ()) + self.widths

    def ranks_for(self, matrix: WeightMatrix) -> tuple[int, ...]:
        """The ranks a matrix's low-rank part may have, all below its full rank."""
        if self.rank == "off" or matrix.role in PLAIN_ROLES:
            return ()
        ranks = lowrank.RANKS if self.rank == "auto" else (int(self.rank),)
        return tuple(rank for rank in ranks if rank < min(matrix.rows, matrix.cols))


@dataclass(frozen=True, slots=True)
class Arms:
    """All arms of one matrix: predicted KL (groups, bits) and exact bytes, for the rank and correction they are given.

    sensitivity, removal: (groups,) KL per unit of normalised code error, and of leaving the group out.
    lowrank: the low-rank parts on offer; rank: the one that is taken, 0 for none.
    correction: factor on the predicted KL, from probes.
    channels: for a down projection, KL of losing each block of 16 of its inputs; otherwise empty.
    singular: whether its Hessian had less than full rank before damping (few tokens, or inputs that are always 0).
    row_class: None, or (rows,) the classes by which its rows are sorted; groups are of stored rows.
    input_scale: None, or (cols,) the codes of its input scales.
    sorted: the arms of the same matrix with its rows sorted, where that pays.
    """

    matrix: WeightMatrix
    widths: tuple[float, ...]
    L: int
    sensitivity: NDArray[np.float64]
    removal: NDArray[np.float64]
    lowrank: list[lowrank.LowRankArm] = field(default_factory=list)
    rank: int = 0
    correction: float = 1.0
    channels: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    singular: bool = False
    row_class: NDArray[np.uint8] | None = None
    input_scale: NDArray[np.uint8] | None = None
    sorted: Arms | None = None

    @property
    def loss(self) -> NDArray[np.float64]:
        shrink = next((arm.remaining for arm in self.lowrank if arm.rank == self.rank), 1.0)
        loss = predicted_loss(self.sensitivity * shrink, self.removal, self.widths, self.L)
        return loss * self.correction

    @property
    def nbytes(self) -> NDArray[np.int64]:
        per_bit = 2 * self.matrix.padded_cols
        return np.tile((np.array(self.widths) * per_bit).astype(np.int64), (self.matrix.groups, 1))

    @property
    def lowrank_bytes(self) -> int:
        return next((arm.nbytes for arm in self.lowrank if arm.rank == self.rank), 0)


def level_uncovered(arms: Sequence[Arms], statistics: Statistics) -> list[Arms]:
    """The arms, with every matrix without statistics as costly per weight as the median matrix that has them.

    Without statistics a matrix's own scale is arbitrary, and its loss is linear in it.
    """
    covered = [arm for arm in arms if statistics.covers(arm.matrix.name)]
    typical = (
        float(np.median([arm.removal.sum() / arm.matrix.weights for arm in covered])) if covered else 1.0
    )
    levelled = []
    for arm in arms:
        own = float(arm.removal.sum()) / arm.matrix.weights
        if own > 0 and not statistics.covers(arm.matrix.name):
            factor = typical / own
            arm = replace(arm, sensitivity=arm.sensitivity * factor, removal=arm.removal * factor)
        levelled.append(arm)
    return levelled


def structures_of(arms: Sequence[Arms]) -> list[prune.Structure]:
    """What can go together: blocks of 16 MLP channels, and whole routed experts."""
    by_key = {arm.matrix.key: arm for arm in arms}
    found = []
    for arm in arms:
        matrix = arm.matrix
        if 0 not in arm.widths:
            continue
        names = [matrix.key.replace("down_proj", other) for other in ("gate_proj", "up_proj", "gate_up_proj")]
        partners = [by_key[name] for name in names if name in by_key and name != matrix.key]
        if not partners:
            continue
        in_order = all(partner.row_class is None for partner in partners)  # else blocks are no channels
        for block, loss in enumerate(arm.channels if in_order else ()):
            members = tuple(
                (partner.matrix.key, block) for partner in partners if partner.matrix.rows == matrix.cols
            )
            if members:
                found.append(prune.Structure(matrix.key, block, members, float(loss) * arm.correction))
        if matrix.expert is not None:
            whole = tuple((member.matrix.key, None) for member in (arm, *partners))
            found.append(prune.Structure(matrix.key, None, whole, float(arm.removal.sum()) * arm.correction))
    return found


def require_weighable(loss: NDArray[np.float64], matrix: WeightMatrix, model_map: ModelMap) -> None:
    """Raise InputError for a predicted loss, or squares of weights, beyond float32: the budget cannot weigh it."""
    if not bool((loss <= np.finfo(np.float32).max).all()):
        raise InputError(
            "what this matrix would lose is predicted as NaN or infinity",
            file=model_map.checkpoint.folder,
            tensor=matrix.key,
            remedy="its weights, or those before it, are finite but too large: download the checkpoint again",
        )
