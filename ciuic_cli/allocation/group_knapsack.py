"""The knapsack over the row groups of a whole model: from arms to an allocation, and from that to a plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ciuic_cli.allocation.arms import Arms
from ciuic_cli.allocation.artifact_size import blob_sizes, shards_of
from ciuic_cli.allocation.knapsack import Allocation, allocate
from ciuic_cli.allocation.plan import MatrixPlan, Plan
from ciuic_cli.artifact.layout import Shard, stored_bytes
from ciuic_cli.checkpoint.model_map import ModelMap
from ciuic_cli.checkpoint.roles import MTP_ROLES
from ciuic_cli.codecs.bits import bits_of, stored_bits
from ciuic_cli.errors import TargetError
from ciuic_cli.passes import prune


class GroupKnapsack:
    """Items are the row groups of all matrices, in order; options are bits per weight.

    `planning` changes the attributes between solutions.

    Attributes:
        arms: one per matrix, with the chosen rank.
        budget: bytes of the safetensors files.
        forced: masks (groups,) of row groups that get 0 bits, by matrix key.
        structures: the pruned structures, whose loss replaces that of their row groups.
        bits: all bits per weight that any matrix may have, ascending.
    """

    def __init__(
        self, model_map: ModelMap, arms: list[Arms], budget: int, forced: dict[str, NDArray[np.bool_]]
    ) -> None:
        self.map, self.arms, self.budget, self.forced = model_map, arms, budget, forced
        self.structures: list[prune.Structure] = []
        self.bits = tuple(sorted({bits for arm in arms for bits in arm.bits}))
        self._starts = np.cumsum([0, *(arm.matrix.groups for arm in arms)])

    def solve(self) -> Allocation:
        """The allocation with the least predicted loss.

        Raises TargetError, with the highest ratio that can be reached, if the budget is too small.
        """
        items = int(self._starts[-1])
        loss = np.full((items, len(self.bits)), np.inf, np.float32)
        nbytes = np.zeros((items, len(self.bits)), np.int32)
        for arm, start in zip(self.arms, self._starts, strict=False):
            stop = start + arm.matrix.groups
            nbytes[start:stop] = (np.array(self.bits) * 2 * arm.matrix.padded_cols).astype(np.int32)
            columns = [self.bits.index(bits) for bits in arm.bits]
            loss[start:stop, columns] = arm.loss
            forced = self.forced.get(arm.matrix.key)
            if forced is not None:
                loss[start:stop][forced, 1:] = np.inf
                loss[start:stop][forced, 0] = 0.0
        try:
            return allocate(loss, nbytes, self.budget - self._overhead())
        except TargetError as error:
            least, highest = self.least_bytes(), self.highest_ratio()
            raise TargetError(
                f"the target of {self.budget:,} bytes cannot be reached: the least is {least:,} bytes, "
                f"a ratio of {highest:.3f}",
                remedy=f"ask for --ratio {np.floor(highest * 100) / 100:.2f} or less",
            ) from error

    def least_bytes(self) -> int:
        """Bytes of the safetensors files with every row group at its fewest bits."""
        codes = sum(int(min(arm.bits) * 2 * arm.matrix.padded_cols) * arm.matrix.groups for arm in self.arms)
        return codes + self._overhead()

    def highest_ratio(self) -> float:
        """All parameters at 2 bytes each, over `least_bytes`."""
        return 2 * self.map.stored_numel / self.least_bytes()

    def plan(self, allocation: Allocation) -> Plan:
        """The plan for an allocation."""
        codes = stored_bits(self.bits)[allocation.choice]
        row_bits = {
            arm.matrix.key: codes[start : start + arm.matrix.groups]
            for arm, start in zip(self.arms, self._starts, strict=False)
        }
        matrices = {arm.matrix.key: self._matrix_plan(arm, row_bits[arm.matrix.key]) for arm in self.arms}
        blobs = blob_sizes(self.map, self.arms, row_bits)
        total = stored_bytes(shards_of(self.map, blobs))
        return Plan(matrices, blobs, total, self.budget, allocation.multiplier, tuple(self.structures))

    def _matrix_plan(self, arm: Arms, row_bits: NDArray[np.uint8]) -> MatrixPlan:
        matrix = arm.matrix
        columns = np.searchsorted(arm.bits, bits_of(row_bits))
        per_group = arm.loss[np.arange(len(row_bits)), columns]
        forced = self.forced.get(matrix.key)
        if forced is not None and self.structures:
            per_group = np.where(forced, 0.0, per_group)  # the structure's loss counts instead
        loss = float(per_group.sum()) + sum(s.loss for s in self.structures if s.down == matrix.key)
        loss = 0.0 if matrix.role in MTP_ROLES else loss
        return MatrixPlan(matrix, row_bits, arm.rank, arm.lowrank_bytes, loss, arm.row_class, arm.input_scale)

    def cost_of(self, allocation: Allocation) -> Callable[[prune.Structure], float]:
        """A function: the loss of a structure's members in this allocation plus multiplier · their bytes."""
        group_costs = {}
        for arm, start in zip(self.arms, self._starts, strict=False):
            chosen = allocation.choice[start : start + arm.matrix.groups]
            columns = np.searchsorted(arm.bits, np.array(self.bits)[chosen])
            rows = np.arange(arm.matrix.groups)
            group_costs[arm.matrix.key] = (
                arm.loss[rows, columns] + allocation.multiplier * arm.nbytes[rows, columns]
            )

        def cost(structure: prune.Structure) -> float:
            members = (
                group_costs[key] if group is None else group_costs[key][group]
                for key, group in structure.members
            )
            return float(sum(np.sum(member) for member in members))

        return cost

    def is_pruned(self, arm: Arms) -> bool:
        """Whether all row groups of the matrix are forced to 0 bits."""
        forced = self.forced.get(arm.matrix.key)
        return forced is not None and bool(forced.all())

    def _overhead(self) -> int:
        """Bytes of everything but codes; the header counts with its longest possible offsets."""
        smallest, largest = self._shards_at(0), self._shards_at(max(self.bits))
        headers = [sum(len(shard.header) for shard in shards) for shards in (smallest, largest)]
        return stored_bytes(smallest) + max(0, headers[1] - headers[0])

    def _shards_at(self, bits: float) -> list[Shard]:
        """The safetensors files with all row groups at the same bits per weight."""
        row_bits = {
            arm.matrix.key: np.full(arm.matrix.groups, stored_bits(bits), np.uint8) for arm in self.arms
        }
        return shards_of(self.map, blob_sizes(self.map, self.arms, row_bits))
